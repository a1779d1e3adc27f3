"""The selftest without a device: what needs one is skipped with the reason, and the report gives nothing away."""

import json
from pathlib import Path

import pytest

from simpletuner_gh200.diagnostics.check import Bench, Failed, expect, failed, self_check
from simpletuner_gh200.diagnostics.selftest.bench import measure_machine
from simpletuner_gh200.diagnostics.selftest.run import CHECKS, SelfTest, selftest, without_paths
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import NullDriver

GROUPS = {"capability", "slab", "copy", "failure"}


@pytest.fixture(scope="module")
def result() -> SelfTest:
    return selftest(NullDriver("a test without a GPU"))


def test_every_group_has_checks_with_names_of_their_own() -> None:
    names = [check.code for check in CHECKS]
    assert len(names) == len(set(names))
    assert {name.split(".")[0] for name in names} == GROUPS


def test_without_a_device_nothing_fails_and_skips_say_why(result: SelfTest) -> None:
    assert result.ok, result.having("fail")
    passed, skips = result.counts["pass"], result.counts["skip"]
    assert passed == 3, "slabs and copies in host memory need no device"
    assert skips and all("no CUDA device" in found.found for _check, found in result.having("skip"))
    assert result.closing_line == f"{passed} passed, 0 failed, {skips} skipped"


def test_report_is_json_without_paths_and_secrets(result: SelfTest, tmp_path: Path) -> None:
    report = json.loads(json.dumps(result.to_json()))
    assert report["summary"] == result.counts
    assert {"version", "machine", "libraries", "device", "checks"} <= report.keys()
    assert str(tmp_path) not in json.dumps(report)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("failed in /home/someone/project/train.py: no", "failed in <path>: no"),
        ("100 GB/s to device, and/or", "100 GB/s to device, and/or"),
        ('"found": "/data/sets/secret"', '"found": "<path>"'),
        ("/dev/shm holds 23 GiB", "/dev/shm holds 23 GiB"),
        ("left /dev/shm/someones-project behind", "left <path> behind"),
    ],
)
def test_paths_are_taken_out(text: str, cleaned: str) -> None:
    assert without_paths(text) == cleaned


def broken(_bench: Bench) -> str:
    raise DriverError("cuMemAlloc", 2, "OUT_OF_MEMORY")


def unequal(_bench: Bench) -> str:
    expect(False, "found 3")
    return "unreachable"


def absent(bench: Bench) -> str:
    bench.need(False, "not here")
    return "unreachable"


@pytest.mark.parametrize(
    ("check", "status", "found"),
    [(broken, "fail", "cuMemAlloc failed"), (unequal, "fail", "found 3"), (absent, "skip", "not here")],
)
def test_what_a_check_raises_becomes_its_row(check: object, status: str, found: str) -> None:
    result = self_check("a.b", "what", check).result(Bench(NullDriver()), lambda what: failed(what, ""))  # type: ignore[arg-type]
    assert result.status == status
    assert found in result.found


def test_expectations_are_exceptions_of_their_own() -> None:
    assert not issubclass(Failed, AssertionError), "python -O must not switch them off"


def test_without_a_device_every_question_stays_open() -> None:
    found = measure_machine(NullDriver("a test"))
    assert found["link"] == {"h2d": None, "d2h": None}
    assert found["pool"] == {name: {"read": None, "write": None} for name in ("host", "vmm", "managed")}
    assert found["questions"] == {str(number): None for number in range(1, 11)}
