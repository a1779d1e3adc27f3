"""Run what is under ``emulated/`` on the emulated driver, with NVIDIA's bindings of both majors."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulation import cuda12_site, environment

EMULATED = Path(__file__).parent / "emulated"

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the emulated driver with")


def run(*, cuda12: bool) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(EMULATED)]
    done = subprocess.run(command, env=environment(cuda12=cuda12), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@needs_gcc
@pytest.mark.parametrize("cuda12", [False, True], ids=["bindings13", "bindings12"])
def test_room_on_the_emulated_driver(cuda12: bool) -> None:
    if cuda12 and not cuda12_site().exists():
        pytest.skip("bindings 12 are not there: scripts/dev/setup_cuda12_bindings.sh")
    passed = re.search(r"(\d+) passed", run(cuda12=cuda12))
    assert passed is not None
    assert int(passed.group(1)) > 40
