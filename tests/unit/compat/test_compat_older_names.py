"""``from simpletuner.gh200 import ...`` without an environment variable: light, honest, and second to a tree's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import simpletuner_gh200
from simpletuner_gh200.bench.suites.hooks import PTH_LINE
from simpletuner_gh200.compat.rebase.tree import ENTRY

OURS = str(Path(simpletuner_gh200.__file__).parents[1])
HEAVY = "raise RuntimeError('imported SimpleTuner itself')\n"


@pytest.fixture
def start(tmp_path):
    """An interpreter with our .pth line, and with a SimpleTuner that must not be imported, or none."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "simpletuner_gh200.pth").write_text(PTH_LINE)

    def run(code: str, *, simpletuner: bool = True, fails: str = "") -> None:
        if simpletuner:
            (site / "simpletuner").mkdir(exist_ok=True)
            (site / "simpletuner" / "__init__.py").write_text(HEAVY)
        # Behind ours there is a real SimpleTuner, too: it belongs to those cases that have one.
        installed = [path for path in sys.path if path.endswith("site-packages")] if simpletuner else []
        begin = f"import site, sys; sys.path[:0] = {[str(site), OURS]!r}; sys.path += {installed!r}\n"
        begin += f"site.addsitedir({str(site)!r})\n"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [sys.executable, "-S", "-c", begin + code]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert fails in ran.stderr if fails else ran.returncode == 0, ran.stderr

    run.site = site
    return run


def test_names_of_the_guides_without_importing_anything_heavy(start):
    start("""
assert 'simpletuner_gh200' not in sys.modules, 'a start imports nothing of ours'
from simpletuner.gh200 import GH200GradientRamp, set_uvm_hint_override
from simpletuner.gh200.uvm import prefer_cpu_residency
import simpletuner_gh200
assert GH200GradientRamp is simpletuner_gh200.GH200GradientRamp
assert not hasattr(sys.modules['simpletuner.gh200.uvm'], 'GH200GradientRamp')
assert not {'torch', 'simpletuner'} & set(sys.modules)
""")


def test_without_simpletuner_there_is_no_such_module(start):
    missing = "ModuleNotFoundError: No module named 'simpletuner'"
    start("from simpletuner.gh200 import gh200_uvm_enabled", simpletuner=False, fails=missing)
    start("from simpletuner.gh200.uvm import prefer_cpu_residency", simpletuner=False, fails="ModuleNotFoundError")


def test_any_other_name_is_absent(start):
    """Those who look through all modules, for any name, find nothing and import nothing."""
    start("assert not hasattr(sys.modules['simpletuner.gh200'], '__file__')", simpletuner=False)
    start("from simpletuner.gh200 import no_such_name", fails="ImportError: cannot import name 'no_such_name'")


def test_a_trees_own_package_wins(start):
    own = start.site / "simpletuner" / "gh200"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("prefetch_to_device = 'the tree'\n\ndef activate_unless_disabled(): pass\n")
    start(f"""
from simpletuner.gh200 import activate_unless_disabled, prefetch_to_device
assert prefetch_to_device == 'the tree', prefetch_to_device
assert sys.modules['simpletuner.gh200'].__file__.startswith({str(start.site)!r})
""")


def test_what_a_rebase_puts_into_a_tree_is_found_first(start):
    own = start.site / "simpletuner" / "gh200"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text(ENTRY)
    start("from simpletuner.gh200 import activate_unless_disabled as found; assert found.__code__.co_filename")
