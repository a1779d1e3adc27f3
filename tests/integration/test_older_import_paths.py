"""``from simpletuner.gh200 import ...`` works once the extension is active, and leaves with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
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
assert not any(name.startswith("simpletuner.gh200") for name in sys.modules)
"""


def test_the_names_of_the_guides(workbench):
    ran = workbench.execute(CODE)
    assert ran.ok, ran.explain()


WEB_UI = "simpletuner.simpletuner_sdk.server.services.field_registry"


@pytest.mark.parametrize(
    ("switch", "expected"),
    [("1", "True True"), pytest.param("0", "False False", marks=pytest.mark.one_release("4."))],
)
def test_the_web_ui_shows_our_blocks_when_asked(switch, expected):
    """The Web UI builds its pages from this registry; its process opts in through the environment alone."""
    code = f"from {WEB_UI} import field_registry as r;"
    code += "print(r.get_field('cache_config') is not None, r.get_field('gh200_optimizations') is not None)"
    environment = {**os.environ, "SIMPLETUNER_GH200": switch}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().splitlines()[-1] == expected
