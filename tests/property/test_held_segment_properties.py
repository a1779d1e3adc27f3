"""Any entries come back from a segment as they went in; a changed byte is noticed; any bytes are refused in words."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held.segment import DamagedEntry, Segment, SegmentWriter, key_of
from simpletuner_gh200.held.shelf import Board, Shelf
from simpletuner_gh200.held.source import Identity, identities
from simpletuner_gh200.memory.mapping import create_memfd

QUICK = settings(max_examples=20, deadline=None)
words = st.integers(0, 2**64 - 1)
times = st.integers(-(2**63), 2**63 - 1)
names = st.binary(min_size=1, max_size=20).map(lambda raw: "/" + raw.decode("utf-8", "surrogateescape"))
identified = st.builds(Identity, words, times, times, words, words)
items = st.tuples(names, identified, st.integers(0, 1), st.binary(max_size=40), st.binary(max_size=300))
makers = st.text(max_size=20)


def write(fd, some, made_by):
    writer = SegmentWriter(fd)
    for path, identity, flags, layout, payload in some:
        named = {"path": os.fsencode(path), "layout": layout, "flags": flags, **identity._asdict()}
        writer.put(key_of(path), payload, **named)
    with patch("os.fsync"):  # that it is on disk is not asked here, and takes long
        writer.finish(made_by)


@contextmanager
def written(some, made_by):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "1.pack"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        write(fd, some, made_by)
        os.close(fd)
        yield path


def opened(path):
    return Segment.on_disk(path, os.open(path, os.O_RDONLY))


@QUICK
@given(st.lists(items, max_size=6), makers)
def test_any_entries_come_back(some, made_by):
    memory = create_memfd("test")
    write(memory, some, made_by)
    with written(some, made_by) as path:
        for segment in (opened(path), Segment.in_memory(memory)):
            rows = range(len(segment))
            assert segment.made_by == made_by
            assert segment.keys() == [key_of(one[0]) for one in some]
            found = [(segment.path(row), int(segment.rows["flags"][row]), segment.layout(row)) for row in rows]
            assert found == [(name, flags, layout) for name, _, flags, layout, _ in some]
            assert identities(segment, rows) == [one[1] for one in some]
            assert [segment.payload(row).tobytes() for row in rows] == [one[4] for one in some]


@QUICK
@given(st.lists(items, min_size=1, max_size=4), st.data())
def test_a_changed_byte_is_refused_or_noticed_or_means_nothing(some, data):
    with written(some, "m") as path:
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            segment = opened(path)
        except CacheError:
            return
        for row, (name, identity, _, layout, payload) in enumerate(some):
            assert (segment.path(row), identities(segment, [row])) == (name, [identity])
            for part, expected in ((segment.layout, layout), (segment.payload, payload)):
                try:
                    assert bytes(part(row)) == expected
                except DamagedEntry:
                    continue


@QUICK
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_pack_or_an_error_of_ours(raw, looks_right):
    with tempfile.NamedTemporaryFile() as file:
        file.write((b"GH200PCK\x02\0\0\0" if looks_right else b"") + raw)
        file.flush()
        try:
            refusal = opened(Path(file.name)).name
        except CacheError as refused:
            refusal = str(refused)
        assert file.name in refusal


steps = st.lists(st.tuples(st.sampled_from(["one", "other", "forget", "clear"]), st.integers(0, 5)), max_size=30)


@QUICK
@given(steps)
def test_shelves_agree_with_a_dict(actions):
    """Whatever two ranks publish, forget and clear, and in whatever order: the later entry counts, for each rank."""
    board = Board.create(2)
    shelves = [Shelf(board, rank=rank, attach=Segment.in_memory) for rank in (0, 1)]
    known: list[dict[bytes, bytes]] = [{}, {}]
    for number, (action, name) in enumerate(actions):
        key, payload = key_of(f"/{name}"), str(number).encode()
        if action in ("one", "other"):
            writer = SegmentWriter(create_memfd("test"))
            writer.put(key, payload)
            writer.finish()
            shelves[action == "other"].publish(Segment.in_memory(writer.fd))
            for mine in known:
                mine[key] = payload
            for shelf in shelves:
                shelf.refresh()
        elif action == "forget":
            shelves[0].forget(key)
            known[0].pop(key, None)
        else:
            shelves[1].clear()
            known[1].clear()
        for shelf, mine in zip(shelves, known, strict=True):
            assert {key: segment.payload(row).tobytes() for key, segment, row in shelf.current()} == mine
