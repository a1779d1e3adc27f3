"""``gh200 selftest``: one JSON object on standard output, a report on disk, an exit code that tells."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from simpletuner_gh200.cli.commands.selftest import selftest
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    with detect.using(NullDriver("a test")):
        yield


def test_json_is_all_there_is_on_standard_output_measurements_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    selftest(as_json=True, output=tmp_path / "report.json", bench=True, device=0)
    printed = json.loads(capsys.readouterr().out)
    assert printed["summary"]["fail"] == 0
    assert {"link", "pool", "questions", "checks"} <= printed.keys()
    assert printed == json.loads((tmp_path / "report.json").read_text())


def test_the_verdict_comes_first_skips_are_one_line_and_the_last_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    selftest(as_json=False, output=tmp_path / "report.json", device=0)
    first, *rest = capsys.readouterr().out.strip().splitlines()
    assert first == "gh200 selftest: nothing failed, but there is no GPU to test"
    (skips,) = [line for line in rest if line.startswith("➖")]
    assert "skipped: no CUDA device: a test (" in skips and "capability.host_register" in skips
    assert len(rest) < 12
    assert rest[-1].endswith("skipped")
    assert " 0 failed, " in rest[-1]


class Broken(NullDriver):
    """Says that it is a device, and then can't do anything."""

    def alloc_device(self, size: int, ordinal: int) -> int:
        raise DriverError("cuMemAlloc", 999, "UNKNOWN")

    def capabilities(self, ordinal: int):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return replace(super().capabilities(ordinal), mode="discrete", managed=True, host_register=True)


def test_what_failed_stands_before_what_held_and_is_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with detect.using(Broken("a test")), pytest.raises(typer.Exit) as left:
        selftest(as_json=False, output=tmp_path / "report.json", device=0)
    assert left.value.exit_code == 1
    first, _counts, second, *rest = filter(None, capsys.readouterr().out.splitlines())
    assert first.endswith("failed") and second.startswith("❌")
    marks = [line[0] for line in rest if line[0] in "❌✅"]
    assert marks == sorted(marks, key="❌✅".index)
