"""The doctor's device checks, made to fail by the emulated driver."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simpletuner_gh200.diagnostics.check import CheckResult, all_checks
from simpletuner_gh200.diagnostics.checks import link
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import examine
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import MIB
from tests.emulator.emulation import Emulator

OUT_OF_MEMORY = 2
ATTRIBUTES_ASKED = 14
"""More than the driver asks for when it probes a device."""


def finding(code: str, *, root: Path = Path("/"), **changes: object) -> CheckResult:
    context = Context(root=root, environment={}, **changes)  # type: ignore[arg-type]
    context.driver = CudaDriver()
    ((_, found),) = examine(context, [check for check in all_checks() if check.code == code]).rows
    return found


@pytest.mark.parametrize(
    ("code", "lacking"),
    [("GH213", "pcie"), ("GH214", "pcie")],
)
def test_a_capability_that_is_lacking_is_told(emulator: Emulator, code: str, lacking: str) -> None:
    assert finding(code).status == "pass"
    emulator.become(lacking)
    found = finding(code)
    assert found.status == "warn"
    assert found.found.startswith("no, on device 0")


def test_a_capability_that_no_emulated_machine_lacks(emulator: Emulator) -> None:
    """The driver refuses one attribute after the other; for one of them exactly this check must notice."""
    seen = set()
    for nth in range(1, ATTRIBUTES_ASKED):
        emulator.fail("cuDeviceGetAttribute", nth, 1)
        seen.add(finding("GH216").status)
        emulator.heal()
    assert "warn" in seen
    assert finding("GH216").status == "pass"


@pytest.mark.parametrize("code", ["GH501", "GH502"])
def test_a_slow_coherent_link_is_noticed(emulator: Emulator, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDriver, "copy_seconds", lambda _driver, copy, _ordinal: copy[2] / 20e9)
    found = finding(code)
    assert found.status == "warn"
    assert "a healthy GH200" in found.found
    emulator.become("pcie")
    assert finding(code).status == "pass", "where nobody expects more"


def test_both_directions_and_the_remote_node_are_told_apart(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "to device" in finding("GH501").found
    assert "to host" in finding("GH502").found
    assert finding("GH503", root=tmp_path).status == "skip"
    for index in (0, 2):
        folder = tmp_path / f"sys/devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text("0-3\n")
        (folder / "meminfo").write_text(f"Node {index} MemFree: 1000000 kB\n")
    assert finding("GH503", root=tmp_path).status == "skip", "the kernel says that the memory is on node 0"
    monkeypatch.setattr(link, "nodes_of_pages", lambda *_: Counter({2: 1}))
    assert finding("GH503", root=tmp_path).found.count("GB/s") == 2


def locked(root: Path, limit: str) -> CheckResult:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/limits").write_text(f"Max locked memory         {limit}    {limit}    bytes\n")
    return finding("GH307", root=root)


def test_a_limit_on_locked_memory_fails_only_where_registering_pins(emulator: Emulator, tmp_path: Path) -> None:
    assert locked(tmp_path, "65536").status == "warn"
    assert "pins none" in locked(tmp_path, "65536").found
    for machine in ("pcie", "hmm"):
        emulator.become(machine)
        assert locked(tmp_path, "65536").status == "fail"
    assert locked(tmp_path, "unlimited").status == "pass"


def test_bandwidth_is_measured_on_memory_as_training_has_it(emulator: Emulator, tmp_path: Path) -> None:
    """Shared between processes, registered, larger than the CPU's cache where the device allows that."""
    made: list[tuple[int, bool, str]] = []
    ordinary = Slab.close

    def closing(slab: Slab) -> None:
        made.append((slab.size, slab.fd is not None, slab.kind))
        ordinary(slab)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slab, "close", closing)
        assert "to device" in finding("GH501").found
    assert made == [(16 * MIB, True, "registered")], "a quarter of what is free on this little device"


def test_measuring_and_allocating_can_be_declined(emulator: Emulator) -> None:
    before = emulator.calls("cuMemAllocManaged")
    for code in ("GH501", "GH502", "GH503", "GH504"):
        assert finding(code, allocate=False).found == "--skip-allocation"
    assert emulator.calls("cuMemAllocManaged") == before


def test_an_allocation_beyond_hbm_is_written_and_read_back(emulator: Emulator) -> None:
    found = finding("GH504", oversubscription_scale=1.5)
    assert found.status == "pass"
    assert "96 MiB, 1.5 times HBM" in found.found


def test_an_allocation_that_is_refused_fails(emulator: Emulator) -> None:
    emulator.fail("cuMemAllocManaged", 1, OUT_OF_MEMORY)
    found = finding("GH504")
    assert found.status == "fail"
    assert "OUT_OF_MEMORY" in found.found


def test_a_driver_too_old_is_refused(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("GH201").status == "pass"
    monkeypatch.setenv("GH200_EMU_VERSION", "11080")
    assert "older than CUDA 12.2" in finding("GH201").found


def test_a_torch_for_a_newer_cuda_is_noticed(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.14'\ncuda = '13.0'\n")
    monkeypatch.setenv("GH200_EMU_VERSION", "12080")
    assert "torch is built for CUDA 13.0" in finding("GH201", search_path=(str(tmp_path),)).found


def test_cdmm_is_recognised_by_the_driver_alone(emulator: Emulator, tmp_path: Path) -> None:
    emulator.become("cdmm")
    assert "CDMM" in finding("GH302", root=tmp_path).found
