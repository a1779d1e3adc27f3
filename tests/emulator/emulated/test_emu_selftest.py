"""The selftest finds what is wrong: a driver that lies, one that fails, flags that promise too much."""

from __future__ import annotations

import gc

import pytest

from simpletuner_gh200.diagnostics.check import Bench, Check, CheckResult, failed
from simpletuner_gh200.diagnostics.selftest.bench import measure_machine
from simpletuner_gh200.diagnostics.selftest.run import CHECKS as ALL
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from tests.emulator.emulation import Emulator

CHECKS = {check.code: check for check in ALL}


def run(driver: CudaDriver, check: Check) -> CheckResult:
    row = check.result(Bench(driver, emulated=True), lambda what: failed(what, ""))
    gc.collect()
    return row


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_check_passes_or_is_skipped_on_a_healthy_machine(driver: CudaDriver, name: str) -> None:
    row = run(driver, CHECKS[name])
    assert row.status in {"pass", "skip"}, row
    assert row.found


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("capability.host_register", "cuMemHostRegister"),
        ("slab.registered", "cuMemHostRegister"),
        ("failure.pool_limit", "cuMemHostAlloc"),
    ],
)
def test_a_failing_call_fails_its_check(driver: CudaDriver, emulator: Emulator, name: str, call: str) -> None:
    driver.capabilities(0)
    emulator.fail(call, 1, 999)
    assert run(driver, CHECKS[name]).status == "fail"
    emulator.heal()


def test_a_flag_that_promises_too_much_is_found_out(driver: CudaDriver, emulator: Emulator) -> None:
    driver.capabilities(0)
    emulator.become("legacy")
    assert run(driver, CHECKS["capability.host_page_tables"]).status == "fail"


def test_the_questions_get_their_answers(
    driver: CudaDriver, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that need no kernel; the numbers are the emulated machine's, so only its own rates are looked at."""
    monkeypatch.setenv("GH200_EMU_HBM", str(1 << 30))
    monkeypatch.setenv("GH200_EMU_GRACE", str(1 << 30))
    emulator.set_hbm(1 << 30)
    found = measure_machine(driver)
    assert found["link"]["h2d"] > 0 and found["link"]["d2h"] > 0
    assert found["pool"]["host"] == {"read": pytest.approx(340, rel=0.01), "write": pytest.approx(306, rel=0.01)}
    assert found["pool"]["managed"] == {"read": None, "write": None}
    assert found["pool"]["vmm"]["read"] == pytest.approx(330, rel=0.01)
    answers = found["questions"]
    assert answers.keys() == {str(number) for number in range(1, 11)}
    assert answers["1"]["vmm"]["location"] == "node 0"
    assert answers["1"]["host"]["memory_type"] == "host"
    assert [answers[number] for number in "2345"] == [None] * 4, "kernels don't run here"
    assert answers["6"] == {name: {"refused": True, "error": 2} for name in ("host", "vmm")}
    assert answers["7"]["mechanism"] == "host"
