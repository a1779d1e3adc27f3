"""SIMPLETUNER_GH200=1 and plain SimpleTuner: active once SimpleTuner is imported, wherever our dependencies are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import simpletuner_gh200
from simpletuner_gh200.bench.suites.hooks import PTH_LINE

OURS = str(Path(simpletuner_gh200.__file__).parents[1])
DEPENDENCIES = [path for path in sys.path if path.endswith("site-packages")]


@pytest.fixture
def start(tmp_path):
    """An interpreter that runs our .pth line before the folder of our dependencies is on its path."""
    site = tmp_path / "site"
    (site / "simpletuner").mkdir(parents=True)
    (site / "simpletuner" / "__init__.py").write_text("")
    (site / "simpletuner_gh200.pth").write_text(PTH_LINE)

    def run(code: str, switch: str = "1") -> subprocess.CompletedProcess[str]:
        begin = f"import site, sys; sys.path[:0] = {[OURS]!r}; site.addsitedir({str(site)!r})\n"
        begin += f"sys.path += {DEPENDENCIES!r}\n"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["SIMPLETUNER_GH200"] = switch
        command = [sys.executable, "-S", "-c", begin + code]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


ACTIVE = """
from simpletuner_gh200.seams.bootstrap import active
print(active() is not None)
"""


def test_it_is_active_with_simpletuner_although_dependencies_come_later_on_the_path(start):
    ran = start("import simpletuner" + ACTIVE)
    assert (ran.stdout.strip(), ran.stderr) == ("True", "")


def test_looking_for_simpletuner_is_not_importing_it(start):
    ran = start("import importlib.util; assert importlib.util.find_spec('simpletuner')" + ACTIVE)
    assert ran.stdout.strip() == "False", ran.stderr
    ran = start("import importlib.util; importlib.util.find_spec('simpletuner'); import simpletuner" + ACTIVE)
    assert ran.stdout.strip() == "True", ran.stderr


def test_a_start_imports_nothing_and_off_is_off(start):
    light = "assert not {'wrapt', 'simpletuner_gh200.errors', 'logging'} & set(sys.modules), sys.modules.keys()"
    assert start(light).stderr == ""
    assert start("import simpletuner; assert 'simpletuner_gh200' not in sys.modules", "0").stderr == ""
