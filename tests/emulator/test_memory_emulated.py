"""Run the emulated tests: NVIDIA's bindings of both majors on our driver, stock CUDA torch on our runtime over it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.emulation import cuda12_site, environment, installed_runtime

HERE = Path(__file__).parent

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the emulated driver with")


def passed(folder: Path, surroundings: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(folder)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None, done.stdout
    return int(counted.group(1))


@needs_gcc
def test_room_on_the_emulated_driver() -> None:
    assert passed(HERE / "emulated", environment()) > 100


@needs_gcc
@pytest.mark.releases  # another version of the bindings in each environment
@pytest.mark.parametrize(
    ("files", "least"),
    [
        pytest.param("test_emu_driver.py", 15, marks=pytest.mark.one_release("3."), id="driver"),
        pytest.param("", 100, marks=pytest.mark.matrix, id="all"),
    ],
)
def test_room_with_the_bindings_before(files: str, least: int) -> None:
    """Of CUDA 12."""
    if not cuda12_site().exists():
        pytest.skip("no bindings of CUDA 12; `python3 scripts/dev/environments.py test` installs them")
    assert passed(HERE / "emulated" / files, environment(cuda12=True)) > least


@needs_gcc
@pytest.mark.releases
@pytest.mark.one_release("4.")
def test_stock_cuda_torch_over_an_emulated_runtime() -> None:
    runtime = installed_runtime()
    if runtime is None:
        pytest.skip("this torch is a CPU build")
    assert passed(HERE / "with_torch", environment(torch_runtime=runtime)) > 10


@needs_gcc
def test_bindings_newer_than_the_driver() -> None:
    """A driver of CUDA 12.2, the oldest we support, has no batched prefetch and tells locations by number only."""
    folder = HERE / "emulated"
    assert passed(folder / "test_emu_driver.py", environment(version="12020")) > 15
    assert passed(folder / "test_emu_slabs.py", environment(version="12020")) > 20
