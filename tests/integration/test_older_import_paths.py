"""``from simpletuner.gh200 import ...`` works once the extension is active, and leaves with it."""

from __future__ import annotations

import subprocess
import sys

from simpletuner_gh200.api import PUBLIC_NAMES

CODE = """
import sys
from simpletuner_gh200.seams.bootstrap import activate, deactivate
activate()
import simpletuner
from simpletuner.gh200 import GH200GradientRamp, gh200_uvm_enabled
from simpletuner.gh200.uvm import set_uvm_hint_override
import simpletuner.gh200.in_memory_backend as backend
import simpletuner_gh200
assert GH200GradientRamp is simpletuner_gh200.GH200GradientRamp
assert not hasattr(simpletuner.gh200, "no_such_name")
assert not hasattr(simpletuner.gh200.uvm, "GH200GradientRamp")
print(sorted(simpletuner.gh200.__all__))
deactivate()
assert not hasattr(simpletuner, "gh200")
assert not any(name.startswith("simpletuner.gh200") for name in sys.modules)
"""


def test_the_names_of_the_guides():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().splitlines()[-1] == str(sorted(PUBLIC_NAMES))
