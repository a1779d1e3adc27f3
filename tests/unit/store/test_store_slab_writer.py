"""The slab grows to its ceiling, writes every byte, and is bound to CPU nodes where there is a choice."""

from __future__ import annotations

import errno
import os

import pytest

from simpletuner_gh200.memory.numa import Binding, Node
from simpletuner_gh200.store import slab_writer
from simpletuner_gh200.store.slab_writer import ALIGNMENT, SlabFull, SlabWriter


def test_pieces_lie_one_after_the_other_and_groups_are_aligned() -> None:
    slab = SlabWriter(10_000)
    first = slab.append([b"abc", b"", b"defg"])
    second = slab.append([b"hij"])
    fd = slab.finish()
    assert (first, second) == (0, ALIGNMENT)
    assert os.pread(fd, 7, 0) == b"abcdefg"
    assert os.fstat(fd).st_size == ALIGNMENT + 3
    os.close(fd)


def test_more_pieces_than_one_call_takes() -> None:
    slab = SlabWriter(100_000)
    slab.append([b"%04d" % number for number in range(2000)])
    fd = slab.finish()
    assert os.pread(fd, 8000, 0) == b"".join(b"%04d" % number for number in range(2000))
    os.close(fd)


def test_short_writes_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: original(fd, bytes(pieces[0])[:1], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, at: original(fd, bytes(piece)[:2], at))
    slab = SlabWriter(1000)
    slab.append([b"hello", b"world"])
    fd = slab.finish()
    assert os.pread(fd, 10, 0) == b"helloworld"
    os.close(fd)


def test_the_ceiling_holds_to_the_byte() -> None:
    slab = SlabWriter(100)
    slab.claim(100)
    with pytest.raises(SlabFull) as full:
        slab.claim(1)
    assert full.value.needed == ALIGNMENT * 2 + 1
    slab.discard()
    slab.discard()


@pytest.mark.parametrize("call", ["pwrite", "pwritev"])
def test_memory_that_is_refused_is_the_ceiling(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, call, refuse)
    slab = SlabWriter(1000)
    with pytest.raises(SlabFull):
        slab.write(0, b"x") if call == "pwrite" else slab.append([b"x"])
    slab.discard()


def test_beside_a_node_without_cpus_the_memory_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[int] = []
    monkeypatch.setattr(slab_writer, "read_nodes", lambda: (Node(0, True, 1 << 40), Node(1, False, 1 << 40)))
    monkeypatch.setattr(slab_writer, "bind", lambda _address, size: bound.append(size) or Binding((0,), True, "bound"))
    slab = SlabWriter(1 << 20)
    assert slab.keep_on_cpu_nodes(50_000) == "bound"
    slab.append([b"abc"])
    fd = slab.finish()
    assert bound == [50_000]
    assert os.fstat(fd).st_size == 3
    os.close(fd)
