"""``from simpletuner.gh200 import ...`` works once the extension is active, and leaves with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
before = sys.modules.get("simpletuner.gh200")
from simpletuner_gh200.seams.bootstrap import activate, deactivate
activate()
import simpletuner
from simpletuner.gh200 import GH200GradientRamp, gh200_uvm_enabled
from simpletuner.gh200.uvm import set_uvm_hint_override
import simpletuner.gh200.in_memory_backend as backend
import simpletuner_gh200.api
assert GH200GradientRamp is simpletuner_gh200.GH200GradientRamp
assert not hasattr(simpletuner.gh200, "no_such_name")
assert not hasattr(simpletuner.gh200.uvm, "GH200GradientRamp")
assert sorted(simpletuner.gh200.__all__) == sorted(simpletuner_gh200.api.PUBLIC_NAMES)
deactivate()
assert not hasattr(simpletuner, "gh200")
assert sys.modules.get("simpletuner.gh200") is before
"""


def test_the_names_of_the_guides(workbench):
    ran = workbench.execute(CODE)
    assert ran.ok, ran.explain()


WEB_UI = "simpletuner.simpletuner_sdk.server.services.field_registry"


BLOCKS = f"""
from {WEB_UI} import field_registry
shown = [field_registry.get_field(name) is not None for name in ("cache_config", "gh200_optimizations")]
"""


def python(code: str, switch: str) -> None:
    environment = {**os.environ, "SIMPLETUNER_GH200": switch}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.one_release("3.")
def test_the_web_ui_shows_our_blocks_when_asked():
    """The Web UI builds its pages from this registry; its process opts in through the environment alone."""
    python(BLOCKS + "assert shown == [True, True]", "1")


def test_the_web_ui_is_upstreams_when_not_asked(workbench):
    """Without us the registry knows no block of ours; and where we are switched off, nothing of ours starts."""
    ran = workbench.execute(BLOCKS + "assert shown == [False, False]")
    assert ran.ok, ran.explain()
    started = "import sys; assert ('simpletuner_gh200.startup' in sys.modules) is {}"
    python(started.format(True), "1")
    python(started.format(False), "0")
