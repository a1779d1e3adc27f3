"""``gh200 prove`` to its end on emulated machines; its runs train nothing here, see tests/integration for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.bench.prove.proof import calibrate, prove
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.selftest.run import selftest
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.plan.machines import this_machine
from simpletuner_gh200.upstream.importing import ImportVerdict
from tests.emulator.emulation import Emulator
from tests.unit.bench.prove_runs import subject, training


def proof(driver: CudaDriver, folder: Path) -> dict[str, Any]:
    context = Context(root=folder, allocate=False, check_import=lambda: ImportVerdict(None))
    context.__dict__["driver"] = driver
    return prove(subject, folder, minutes=60, train=training(), context=context)


def test_prove_ends_with_rates(
    driver: CudaDriver, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HBM", "GRACE"):
        monkeypatch.setenv(f"GH200_EMU_{name}", str(1 << 30))  # for the children that try each way to Grace
    emulator.set_hbm(1 << 30)
    found = proof(driver, tmp_path)
    assert found["ok"], [row for row in found["selftest"]["checks"] if row["status"] == "fail"]
    assert found["emulated"]
    assert found["link"]["h2d"] > 0 < found["link"]["d2h"]
    assert {"1", "2", "3", "4", "5", "6", "7"} <= found["questions"].keys()
    assert found["pool"]["host"]["read"] is not None
    assert calibrate(found, this_machine(driver=driver)) == [], "made-up rates teach a plan nothing"


def test_a_full_device_leaves_the_rates_out_and_says_so(
    driver: CudaDriver, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = selftest(NullDriver())  # not of what this test is about
    monkeypatch.setattr("simpletuner_gh200.bench.prove.proof.selftest", lambda _driver: tested)
    emulator.set_hbm(8 << 20)
    found = proof(driver, tmp_path)
    assert found["link"] == {"h2d": None, "d2h": None}
    assert any("rates could not be measured" in note for note in found["notes"])
    assert {row["status"] for row in found["ab"]} == {"ok", "skip"}, "the runs are compared all the same"
