"""Long work shows how far it is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest

from simpletuner_gh200.telemetry import progress as module
from simpletuner_gh200.telemetry.progress import progress

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(label: str) -> None:
    with progress(label, items=4, size=4 * MIB) as shown:
        for _ in range(4):
            shown.advance(1, MIB)


@pytest.mark.parametrize("label", ["staging photos", "staging [/x] [bold]"])
def test_a_terminal_gets_a_bar_with_files_bytes_and_time_left(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    work(label)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert label in shown, "a name is a name, not markup"
    assert "4/4, 4 MiB" in shown or "done in" in shown


def test_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        work("staging photos")
    assert "gh200: staging photos: 4/4, 4 MiB of 4 MiB" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(" remaining")


@pytest.mark.parametrize(
    ("size", "remaining"), [(8 * MIB, "7.0 s remaining"), (None, "3.0 s remaining")], ids=["by bytes", "by entries"]
)
def test_what_remains_is_told_by_bytes_where_they_are_known(size: int | None, remaining: str) -> None:
    said = module.describe(10, MIB, 1.0, items=40, size=size)
    assert said.startswith("10/40, 1 MiB")
    assert "10/s, 1 MiB/s" in said
    assert said.endswith(remaining)


def test_in_the_background_a_terminal_gets_lines_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training has a bar of its own there."""
    monkeypatch.setattr(module, "LINE_EVERY_SECONDS", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level("INFO"), progress("filling", items=1, quiet=True) as shown:
        shown.advance(1, MIB)
    assert "filling: 1/1" in caplog.text
    assert not terminal.getvalue()


def test_short_work_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        work("staging photos")
    assert caplog.messages == []
