"""``gh200 prove`` to its end on emulated machines; its runs train nothing here, see tests/integration for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.bench.prove.page import as_html
from simpletuner_gh200.bench.prove.proof import calibrate, prove
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.plan.machines import this_machine
from simpletuner_gh200.upstream.importing import ImportVerdict
from tests.emulator.emulation import Emulator
from tests.unit.bench.prove_runs import subject, training


@pytest.mark.parametrize("machine", ["gh200", "gb10"])
def test_prove_ends_with_rates(
    driver: CudaDriver, emulator: Emulator, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HBM": str(1 << 30), "GRACE": str(1 << 30), "PERSONALITY": machine}.items():
        monkeypatch.setenv(f"GH200_EMU_{name}", value)  # for the children that try each way to Grace
    emulator.become(machine)
    emulator.set_hbm(1 << 30)
    context = Context(root=tmp_path, allocate=False, check_import=lambda: ImportVerdict(None))
    context.__dict__["driver"] = driver
    told = prove(subject, tmp_path, minutes=60, train=training(), context=context)
    assert told["ok"], [row for row in told["selftest"]["checks"] if row["status"] == "fail"]
    assert told["emulated"]
    assert told["link"]["h2d"] > 0 < told["link"]["d2h"]
    assert {"1", "2", "3", "4", "5", "6", "7"} == told["questions"].keys()
    assert told["pool"]["host"]["read"] is not None
    assert "emulated" in as_html(told)
    assert calibrate(told, this_machine(driver=driver)) == [], "made-up rates teach a plan nothing"


def test_a_full_device_leaves_the_rates_out_and_says_so(driver: CudaDriver, emulator: Emulator, tmp_path: Path) -> None:
    emulator.set_hbm(8 << 20)
    context = Context(root=tmp_path, allocate=False, check_import=lambda: ImportVerdict(None))
    context.__dict__["driver"] = driver
    told = prove(subject, tmp_path, minutes=60, train=training(), context=context)
    assert told["link"] == {"h2d": None, "d2h": None}
    assert any("rates could not be measured" in note for note in told["notes"])
    assert {row["status"] for row in told["ab"]} == {"ok", "skip"}, "the runs are compared all the same"
