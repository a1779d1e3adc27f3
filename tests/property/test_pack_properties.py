"""Any entries come back from a pack as they went in; a changed byte is noticed; any bytes are refused in words."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.cache.pack import Item, Pack, write_pack
from simpletuner_gh200.cache.pack_contents import Contents, PackUse
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.source import Identity
from simpletuner_gh200.errors import CacheError

words = st.integers(0, 2**64 - 1)
times = st.integers(-(2**63), 2**63 - 1)
names = st.binary(min_size=1, max_size=20).map(lambda raw: "/" + raw.decode("utf-8", "surrogateescape"))
identities = st.builds(Identity, words, times, times, words, words)
items = st.builds(
    Item,
    names,
    identities,
    st.integers(0, 3),
    st.binary(max_size=40),
    st.binary(max_size=300).map(lambda raw: np.frombuffer(raw, np.uint8)),
)
makers = st.text(max_size=20)


@contextmanager
def written(some, made_by):
    with tempfile.TemporaryDirectory() as name:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with patch("os.fsync"):  # that it is on disk is not asked here, and takes long
                write_pack(fd, "1.pack", some, made_by)
        finally:
            os.close(fd)
        yield Path(name) / "1.pack"


@settings(max_examples=20, deadline=None)
@given(st.lists(items, max_size=6), makers)
def test_any_entries_come_back(some, made_by):
    with written(some, made_by) as path, Pack(path) as pack:
        assert pack.made_by == made_by
        entries = list(pack.entries())
        assert [(entry.path, entry.key, entry.identity, entry.flags) for entry in entries] == [
            (item.path, key_of(item.path), item.identity, item.flags) for item in some
        ]
        for entry, item in zip(entries, some, strict=True):
            assert pack.layout(entry) == item.layout
            assert copied(pack, entry) == item.payload.tobytes()


def copied(pack, entry):
    payload = pack.payload(entry)
    return None if payload is None else payload.tobytes()


@settings(max_examples=20, deadline=None)
@given(st.lists(items, min_size=1, max_size=4), st.data())
def test_a_changed_byte_is_refused_or_noticed_or_means_nothing(some, data):
    with written(some, "m") as path:
        path.chmod(0o600)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            with Pack(path) as pack:
                found = [(one.path, one.identity, pack.layout(one), copied(pack, one)) for one in pack.entries()]
        except CacheError:
            return
        for (name, identity, layout, payload), item in zip(found, some, strict=True):
            assert (name, identity) == (item.path, item.identity)
            assert layout is None or layout == item.layout
            assert payload is None or payload == item.payload.tobytes()


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_pack_or_an_error_of_ours(raw, looks_right):
    with tempfile.NamedTemporaryFile() as file:
        file.write((b"GH200PCK\x02\0\0\0" if looks_right else b"") + raw)
        file.flush()
        try:
            Pack(Path(file.name)).close()
            refusal = file.name
        except CacheError as refused:
            refusal = str(refused)
        assert file.name in refusal


seen = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100), st.booleans()), max_size=12)


@given(seen, seen)
def test_the_account_of_what_is_alive_is_that_of_a_dict(older, newer):
    """Packs are gone through newest first, then one is added: a path is alive once, in its newest pack."""
    contents = Contents(packs={name: PackUse(ours=True) for name in ("1", "2", "3")})
    expected = {}
    for pack, entries in (("2", newer), ("1", older)):
        for path, length, alive in entries:
            contents.found(pack, path, length, (1, 1) if alive else None)
            if alive:
                expected.setdefault(path, (pack, length))
    for path, length, _ in newer[:3]:
        contents.written("3", path, length, (2, 2))
        expected[path] = ("3", length)
    assert {path: (held.pack, held.length) for path, held in contents.held.items()} == expected
    for name, use in contents.packs.items():
        mine = [length for pack, length in expected.values() if pack == name]
        assert (use.alive, use.entries) == (sum(mine), len(mine))
    assert contents.alive == sum(length for _, length in expected.values())
