"""Every check, made to fail by showing it a machine, an environment or a configuration that is wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.diagnostics.check import CheckResult, all_checks
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import examine
from simpletuner_gh200.errors import ConfigError, Problem, UsageError
from simpletuner_gh200.upstream.importing import ImportVerdict
from tests.unit.diagnostics.machine import Machine

ON_EMULATED_LIBRARIES = {"GH213", "GH214", "GH216", "GH217", "GH501", "GH502", "GH503", "GH504"}
"""Made to fail in tests/emulator/emulated/test_emu_doctor.py, and GH217 in tests/emulator/test_nvml_emulated.py."""

BLOCKS = {"cache_config": {"vae_cache_type": "unified_memory"}}


SHM = "shm /dev/shm tmpfs rw,size=65536k 0 0\n"
QUOTA = {"dataset": {"in_memory": {"num_workers": 64}}}


def uvm_keys(machine: Machine) -> None:
    machine.environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True,use_uvm:True"


def balancing(machine: Machine) -> None:
    machine.node(1, "72-143", total=480, free=400)
    machine.put("proc/sys/kernel/numa_balancing", "1\n")


def memory_cgroup(machine: Machine) -> None:
    machine.put("proc/self/cgroup", "0::/job\n")
    machine.put("sys/fs/cgroup/job/memory.max", str(64 << 30))
    machine.put("sys/fs/cgroup/job/memory.current", str(4 << 30))


def no_huge_pages(machine: Machine) -> None:
    machine.page_size = 4096
    machine.put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")


def cpu_quota(cgroup: str, files: dict[str, str]) -> Callable[[Machine], None]:
    def limit(machine: Machine) -> None:
        machine.put("proc/self/cgroup", cgroup)
        for path, content in files.items():
            machine.put(f"sys/fs/cgroup/{path}", content)
        machine.configure(**QUOTA)

    return limit


def refused(machine: Machine) -> None:
    machine.configure()

    def check(_config: Path) -> Sequence[str]:
        raise ConfigError([Problem("max_train_steps", "0, and so is num_train_epochs")])

    machine.check_configuration = check


def ramp(initial: int, target: int, **values: Any) -> dict[str, Any]:
    sizes = {"initial_effective_batch_size": initial, "target_effective_batch_size": target, "batch_rampup_steps": 40}
    return {"gh200_optimizations": {"enable_batch_size_rampup": True, **sizes}, "max_train_steps": 100, **values}


def docker_filter(machine: Machine) -> None:
    machine.node(1, "", total=96, free=90)
    machine.refused_placement = {"mbind": "Operation not permitted"}


def training(**values: object) -> Callable[[Machine], None]:
    return lambda machine: machine.configure(**values)


def environment(**variables: str) -> Callable[[Machine], None]:
    return lambda machine: machine.environment.update(variables)


def importing(*verdict: Any) -> Callable[[Machine], None]:
    return lambda machine: setattr(machine, "imported", ImportVerdict(*verdict, "4.10.1"))


OLDER = {f"cpu/docker/x/cpu.cfs_{name}_us": value for name, value in (("quota", "800000"), ("period", "100000"))}

CASES = [
    ("GH312", docker_filter, "warn", "--cap-add SYS_NICE"),
    ("GH407", training(ramtorch=True, gradient_accumulation_steps=4), "warn", "gradient_accumulation_steps is 4"),
    ("GH407", training(ramtorch="true", **ramp(4, 8)), "warn", "the batch ramp accumulates"),
    ("GH101", lambda m: m.torch("2.9.0", cuda=None), "fail", "CPU build on a machine with an NVIDIA GPU"),
    ("GH102", uvm_keys, "warn", "use_uvm"),
    ("GH103", lambda m: m.without("pynvml"), "fail", "nvidia-ml-py"),
    ("GH104", lambda m: m.simpletuner("2.4.0"), "fail", "2.4.0 is older than 3.1.0"),
    (
        "GH104",
        lambda m: setattr(m, "python", "3.11.9"),
        "warn",
        "newer than SimpleTuner 3.1.6; 4.10.1 needs 3.12",
    ),
    ("GH105", lambda m: m.package("simpletuner"), "fail", "Off because of it: core"),
    ("GH107", environment(GH200_UVM_ACCESS_PATTERN="gpu_first; touch x"), "fail", "touch x"),
    ("GH107", environment(SIMPLETUNER_GH200="0"), "warn", "switched off"),
    ("GH109", importing(False, "ModuleNotFoundError: No module named 'x'"), "fail", "No module named 'x'; "),
    ("GH109", importing(None, "importing it was not done after 300 s"), "fail", "not done after 300 s"),
    ("GH201", lambda m: (m.root / "proc/driver/nvidia/version").unlink(), "fail", "no driver is loaded"),
    ("GH301", balancing, "warn", "balancing is on"),
    ("GH301", lambda m: m.node(0, "", total=480, free=400), "fail", "no node has CPUs"),
    ("GH302", lambda m: m.node(1, "", total=96, free=90), "warn", "HBM is NUMA node 1"),
    ("GH303", lambda m: m.node(1, "", total=96, free=40, cached=50), "warn", "node 1: 50 GiB"),
    ("GH304", lambda m: setattr(m, "page_size", 4096), "warn", "never migrate"),
    ("GH305", lambda m: m.meminfo(total=480, free=1, available=1), "fail", "1 GiB can be taken"),
    ("GH305", lambda m: m.meminfo(total=480, free=10, available=60), "warn", "60 GiB can be taken"),
    ("GH306", memory_cgroup, "warn", "cgroup job allows 64 GiB"),
    ("GH307", lambda m: m.limits(locked="65536"), "fail", "64 KiB"),
    ("GH307", lambda m: m.limits(locked=str(64 << 30)), "warn", "64 GiB"),
    ("GH308", lambda m: m.limits(files="256"), "fail", "256"),
    ("GH308", lambda m: m.limits(files="1024"), "warn", "1024"),
    ("GH309", lambda m: m.put("proc/mounts", SHM), "warn", "64 MiB"),
    ("GH309", lambda m: m.put("proc/mounts", "proc /proc proc rw 0 0\n"), "warn", "not mounted"),
    ("GH310", no_huge_pages, "warn", "never"),
    ("GH311", cpu_quota("0::/\n", {"cpu.max": "800000 100000\n"}), "warn", "8 cores"),
    ("GH311", cpu_quota("0::/slurm/job\n", {"slurm/cpu.max": "800000 100000\n"}), "warn", "8 cores"),
    ("GH311", cpu_quota("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n", OLDER), "warn", "8 cores"),
    ("GH401", refused, "fail", "max_train_steps: 0"),
]


def look(code: str, context: Context) -> CheckResult:
    """What the check of this code finds."""
    (check,) = [check for check in all_checks() if check.code == code]
    ((_, finding),) = examine(context, [check]).rows
    return finding


@pytest.fixture(autouse=True)
def _verdicts_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("code", "spoil", "status", "says"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_check_notices(machine: Machine, code: str, spoil: Callable[[Machine], None], status: str, says: str) -> None:
    spoil(machine)
    finding = look(code, machine.context())
    assert finding.status == status, finding
    assert says in finding.found + finding.fix
    assert finding.fix


def test_a_healthy_machine_has_nothing_wrong(machine: Machine) -> None:
    machine.configure(train_batch_size=4, **BLOCKS)
    rows = examine(machine.context()).rows
    wrong = [(check.code, finding) for check, finding in rows if finding.status in {"warn", "fail"}]
    # No library of the driver's is on the testing machine, beside the kernel driver of the shown one.
    assert [code for code, _finding in wrong] == ["GH201", "GH217"], wrong
    assert {check.code for check, finding in rows if finding.status == "pass"} >= {"GH101", "GH305", "GH401"}


def test_what_the_check_before_a_run_tells_is_told(machine: Machine) -> None:
    machine.configure()
    finding = look("GH401", machine.context(check_configuration=lambda _config: ("ramp: it shrinks",)))
    assert (finding.status, finding.found) == (
        "pass",
        f"{machine.config}: nothing that would stop a run; ramp: it shrinks",
    )


def test_without_simpletuner_a_configuration_is_not_judged(machine: Machine) -> None:
    machine.configure()

    def nothing_here(_config: object) -> tuple[str, ...]:
        raise UsageError("SimpleTuner is not installed here")

    finding = look("GH401", machine.context(check_configuration=nothing_here))
    assert (finding.status, finding.found) == ("skip", "SimpleTuner is not installed here")


def test_every_check_is_made_to_fail_somewhere() -> None:
    codes = {check.code for check in all_checks()}
    assert codes == {case[0] for case in CASES} | ON_EMULATED_LIBRARIES


def test_codes_are_unique_and_explained() -> None:
    checks = all_checks()
    assert len({check.code for check in checks}) == len(checks)
    for check in checks:
        assert check.what
        assert check.why.endswith("."), check.code


@pytest.mark.parametrize(
    ("code", "spoil", "says"),
    [
        ("GH407", training(ramtorch=True), "without accumulation"),
        ("GH310", lambda machine: machine.put("sys/kernel/mm/transparent_hugepage/enabled", "[never]"), "none wanted"),
        ("GH312", lambda machine: machine.refused_placement.update(mbind="no"), "not needed with one memory node"),
    ],
)
def test_what_does_no_harm_passes(machine: Machine, code: str, spoil: Callable[[Machine], None], says: str) -> None:
    spoil(machine)
    finding = look(code, machine.context())
    assert finding.status == "pass" and says in finding.found, finding


def test_the_report_says_what_was_examined_as_fields(machine: Machine) -> None:
    machine.put("proc/sys/kernel/hostname", "node-7\n")
    machine.put("proc/sys/kernel/osrelease", "6.8.0-1013-nvidia-64k\n")
    machine.simpletuner("4.10.1")
    found = examine(machine.context(), []).to_json()["machine"]
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    assert (found["host"], found["architecture"], found["kernel"]) == ("node-7", "aarch64", "6.8.0-1013-nvidia-64k")
    assert found["driver"], "the kernel's driver is told without CUDA, too"
    (gpu,) = found["gpus"]
    assert set(gpu) == {"name", "memory_bytes", "pci_device"}, "no serial number, no UUID"
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0
    assert found["versions"]["simpletuner"] == "4.10.1"
    assert found["versions"]["diffusers"] is None
