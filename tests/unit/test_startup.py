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


def test_without_wrapt_no_second_attempt_goes_without_us(start):
    twice = """
sys.modules["wrapt"] = None
for _ in range(2):
    try:
        import simpletuner
    except ImportError as refused:
        print(refused.name)
"""
    assert start(twice).stdout.split() == ["wrapt", "wrapt"]


def test_looking_for_simpletuner_is_not_importing_it(start):
    ran = start("import importlib.util; assert importlib.util.find_spec('simpletuner')" + ACTIVE)
    assert ran.stdout.strip() == "False", ran.stderr
    ran = start("import importlib.util; importlib.util.find_spec('simpletuner'); import simpletuner" + ACTIVE)
    assert ran.stdout.strip() == "True", ran.stderr


def test_a_start_imports_nothing_and_off_is_off(start):
    light = "assert not {'wrapt', 'simpletuner_gh200.errors', 'logging'} & set(sys.modules), sys.modules.keys()"
    assert start(light).stderr == ""
    assert start("import simpletuner; assert 'simpletuner_gh200' not in sys.modules", "0").stderr == ""


@pytest.fixture
def launched(tmp_path):
    """SimpleTuner's train.py, started as the guides start it, with our .pth line run first."""
    script = tmp_path / "simpletuner" / "train.py"
    script.parent.mkdir()
    script.write_text(f"import sys; sys.path[:0] = {[OURS]!r}\nexec({PTH_LINE!r})\nprint('trained')\n")

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SIMPLETUNER"))}
        command = [sys.executable, "simpletuner/train.py", *words]
        return subprocess.run(command, cwd=tmp_path, env={**kept, **variables}, capture_output=True, text=True)

    return run


def test_a_file_that_simpletuner_alone_would_not_read_is_told(launched, tmp_path):
    for words in (("--config", "config/mine.json"), ("--config=config/mine.json",)):
        told = launched(*words)
        assert told.stdout == "trained\n"
        assert told.stderr.startswith("gh200: the extension is off, and SimpleTuner alone takes no notice of --config")
    assert launched("--config", "config/mine.json", LOCAL_RANK="1").stderr == "", "one rank speaks for all"
    assert launched("--config", "config/mine.json", SIMPLETUNER_GH200="0").stderr == "", "off by name"
    assert launched("--config_path", "elsewhere").stderr == ""
    (tmp_path / "simpletuner" / "gh200").mkdir()
    assert launched("--config", "config/mine.json").stderr == "", "a tree with the package in it reads it"


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_guides_script_that_is_not_in_this_folder_is_told_with_what_to_type(switch, tmp_path):
    """As Python starts it: the installed .pth line comes first, then Python finds no such file."""
    environment = {**os.environ, "PYTHONPATH": OURS, "SIMPLETUNER_GH200": switch}
    for rank in ("0", "1"):
        command = [sys.executable, "simpletuner/train.py", "--config", "config/mine.json"]
        told = subprocess.run(
            command, cwd=tmp_path, env={**environment, "LOCAL_RANK": rank}, capture_output=True, text=True
        )
        assert told.returncode == 2
        assert ("gh200: no simpletuner/train.py here: that file is in a clone of SimpleTuner" in told.stderr) == (
            rank == "0"
        )
