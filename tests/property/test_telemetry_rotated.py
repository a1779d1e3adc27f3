"""Lines of a rotated file, read while they are written: whatever comes between two lines of code, each comes once."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.telemetry import reading, sink
from simpletuner_gh200.telemetry.reading import Recorded, RotatedLines, read_run
from simpletuner_gh200.telemetry.sink import JsonLines

SMALL = 70
"""Bytes of a file: some three lines."""
MANY = 99
"""Older files that are kept: none is removed before it is read."""


@contextmanager
def interrupted(source: str, others: Iterator[int], act: Callable[[int], None]) -> Iterator[None]:
    """Before each line of ``source`` that is run in here, ``act`` as the next of ``others`` says."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != source:
            return None
        if event == "line":
            act(next(others, 0))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Writer:
    def __init__(self, folder: Path, *, kept: int = MANY) -> None:
        self.sink = JsonLines(folder / "telemetry.jsonl", max_bytes=SMALL, kept=kept)
        self.count = 0

    def write(self, lines: int = 1) -> None:
        for _line in range(lines):
            self.count += 1
            self.sink.write({"kind": "step", "step": self.count})


def numbers(lines: list[bytes]) -> list[int]:
    return [json.loads(line)["step"] for line in lines]


BETWEEN = st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 2, 3, 5, 9])), min_size=1, max_size=20).map(
    lambda drawn: [how for pause, many in drawn for how in (*[0] * pause, many)]
)
"""How much the other one does before each line of code: mostly nothing."""


@given(BETWEEN, st.integers(1, 8))
def test_written_and_rotated_between_any_two_lines_of_the_reader(between: list[int], before: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, others, found = Writer(Path(folder)), iter(between), []
        writer.write(before)
        with interrupted(reading.__file__, others, writer.write):
            reader = RotatedLines(writer.sink.path)
            for _look in range(3):
                found += numbers(reader.new())
        found += numbers(reader.new())
        reader.close()
        writer.sink.close()
        assert found == list(range(1, writer.count + 1))


@given(BETWEEN, st.integers(1, 12))
def test_read_between_any_two_lines_of_the_writer(between: list[int], lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, found = Writer(Path(folder)), []
        writer.write(3)
        reader = RotatedLines(writer.sink.path)
        with interrupted(sink.__file__, iter(between), lambda how: found.extend(numbers(reader.new() if how else []))):
            writer.write(lines)
        found += numbers(reader.new())
        reader.close()
        writer.sink.close()
        assert found == list(range(1, writer.count + 1))


@given(BETWEEN, st.integers(1, 30))
def test_of_files_that_were_removed_the_rest_is_read_in_order_and_once(between: list[int], before: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, found = Writer(Path(folder), kept=2), []
        writer.write(before)
        with interrupted(reading.__file__, iter(between), writer.write):
            reader = RotatedLines(writer.sink.path)
            for _look in range(3):
                found += numbers(reader.new())
        found += numbers(reader.new())
        reader.close()
        writer.sink.close()
        kept = numbers([line for path in sorted(Path(folder).iterdir()) for line in path.read_bytes().splitlines()])
        assert found == sorted(set(found)) and set(kept) <= set(found)


@given(st.lists(st.sampled_from(["step", "rotate", "resume", "tear", "poll", "reopen"]), max_size=60))
def test_a_followed_run_is_the_run_that_is_read_afterwards(doings: list[str]) -> None:
    """The start is repeated in every file; steps after a resume are done again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "telemetry.jsonl")
        writer = JsonLines(path, max_bytes=200, kept=MANY)
        step, stretch = 0, 0
        writer.write({"kind": "start", "step": 0, "time": stretch})
        follower = Recorded.follow(path)
        for doing in doings:
            if doing == "step":
                step += 1
                writer.write({"kind": "step", "step": step, "loss": stretch})
            elif doing == "rotate":
                writer._rotate()
            elif doing == "resume":
                step, stretch = step // 2, stretch + 1
                writer.write({"kind": "start", "step": step, "time": stretch})
            elif doing == "tear":
                writer.close()
                with path.open("ab") as torn:
                    torn.write(b'{"kind":"st')
            elif doing == "poll":
                follower.poll()
                follower.series("loss")
            else:
                follower.close()
                follower = Recorded.follow(path)
        follower.poll()
        seen, afterwards = follower, read_run(Path(folder))
        assert [record["step"] for record in seen.steps] == list(range(1, step + 1))
        assert (seen.start, seen.steps) == (afterwards.start, afterwards.steps)
        assert seen.series("loss") == afterwards.series("loss")
        follower.close()
        writer.close()
