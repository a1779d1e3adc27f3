"""NVML through NVIDIA's own Python package, over a stand-in library; each machine in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.memory.driver.nvml import visible

HERE = Path(__file__).parent
SOURCE = HERE / "nvml" / "libnvidia_ml.c"

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in with")

ASK = """
import json, os
from simpletuner_gh200.memory.driver.nvml import NvmlDevice
device = NvmlDevice(0, os.environ)
memory = device.memory()
traffic = [device.link_traffic() for _ in range(3)]
device.close()
print(json.dumps({"memory": memory and [memory.total, memory.used, memory.free], "traffic": traffic}))
"""

EXAMINE = """
import json
from simpletuner_gh200.diagnostics.check import all_checks
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import examine
((_, found),) = examine(Context(), [check for check in all_checks() if check.code == "GH217"]).rows
print(json.dumps([found.status, found.found]))
"""


def library() -> Path:
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = HERE.parent.parent / ".cache" / "emulator" / f"nvml-{digest}"
    made = folder / "libnvidia-ml.so.1"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"fresh-{os.getpid()}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(fresh), str(SOURCE)], check=True)
        fresh.replace(made)
    return made


def run(script: str, machine: str) -> object:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library().parent), "GH200_EMU_NVML": machine}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_and_link_of_a_gh200() -> None:
    found = run(ASK, "gh200")
    assert found["memory"] == [96 << 30, 1 << 30, 95 << 30]
    assert found["traffic"] == [None, [100 << 20, 200 << 20], [100 << 20, 200 << 20]]


@pytest.mark.parametrize(("machine", "memory"), [("gb10", None), ("old", [96 << 30, 1 << 30, 95 << 30])])
def test_what_a_device_has_no_answer_to_is_none(machine: str, memory: list[int] | None) -> None:
    assert run(ASK, machine) == {"memory": memory, "traffic": [None, None, None]}


@pytest.mark.parametrize(
    ("machine", "status", "says"),
    [("gh200", "pass", "1 GiB of 96 GiB"), ("gb10", "pass", "not supported"), ("busy", "warn", "60 GiB of 96 GiB")],
)
def test_the_doctor_says_what_nvml_says(machine: str, status: str, says: str) -> None:
    found, text = run(EXAMINE, machine)
    assert found == status
    assert says in text


def test_a_driver_that_is_not_loaded_is_told() -> None:
    status, text = run(EXAMINE, "none")
    assert status == "skip"
    assert "Driver Not Loaded" in text


def test_visible_devices_are_translated() -> None:
    assert visible(1, {"CUDA_VISIBLE_DEVICES": "3,1"}) == 1
    assert visible(0, {"CUDA_VISIBLE_DEVICES": "GPU-abc"}) == "GPU-abc"
    assert visible(1, {}) == 1
