"""Shelves: each rank's own dict over what the ranks of its node have published."""

from __future__ import annotations

import os

from simpletuner_gh200.held.segment import Segment, SegmentWriter, key_of
from simpletuner_gh200.held.shelf import Board, Shelf
from simpletuner_gh200.memory.mapping import create_memfd


def segment_of(**entries: bytes) -> Segment:
    writer = SegmentWriter(create_memfd("test"))
    for name, payload in entries.items():
        writer.put(key_of(name), payload)
    writer.finish()
    return Segment.in_memory(writer.fd)


def payload(shelf: Shelf, name: str) -> bytes | None:
    found = shelf.get(key_of(name))
    return None if found is None else found[0].payload(found[1]).tobytes()


def two_ranks() -> tuple[Shelf, Shelf]:
    board = Board.create(2)
    return Shelf(board, rank=0, attach=Segment.in_memory), Shelf(
        Board.attach(os.dup(board.fd)), rank=1, attach=Segment.in_memory
    )


def test_what_a_rank_publishes_the_others_find_after_a_look() -> None:
    one, other = two_ranks()
    one.publish(segment_of(a=b"1", b=b"2"))
    assert payload(one, "a") == b"1" and payload(other, "a") is None
    assert other.refresh() and not other.refresh()
    assert payload(other, "a") == b"1" and payload(other, "b") == b"2"
    other.publish(segment_of(c=b"3"))
    assert one.refresh() and payload(one, "c") == b"3"


def test_a_later_segment_takes_the_place_of_an_earlier_one() -> None:
    one, other = two_ranks()
    one.publish(segment_of(a=b"old", b=b"kept"))
    other.refresh()
    other.publish(segment_of(a=b"new"))
    one.refresh()
    assert payload(one, "a") == payload(other, "a") == b"new"
    assert payload(one, "b") == b"kept" and len(one) == 2


def test_forgetting_is_each_ranks_own_and_stays() -> None:
    one, other = two_ranks()
    one.publish(segment_of(a=b"1"))
    other.refresh()
    one.forget(key_of("a"))
    one.publish(segment_of(b=b"2"))
    assert payload(one, "a") is None and payload(other, "a") == b"1"


def test_a_pack_is_added_for_one_rank_alone() -> None:
    one, other = two_ranks()
    one.add(segment_of(a=b"1"))
    assert payload(one, "a") == b"1" and not other.refresh()


def test_another_process_attaches_by_the_board_and_reads_on_when_its_maker_has_gone() -> None:
    board = Board.create(2)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        its = Shelf(board, rank=1, attach=Segment.in_memory)
        its.publish(segment_of(a=b"from the child"))
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    mine = Shelf(board, rank=0, attach=Segment.in_memory)
    assert mine.refresh()
    os.write(go[1], b"1")
    os.waitpid(child, 0)
    assert payload(mine, "a") == b"from the child"


def test_what_a_rank_took_with_it_is_passed_over() -> None:
    board = Board.create(2)
    mine = Shelf(board, rank=0, attach=Segment.in_memory)
    child = os.fork()
    if child == 0:
        Shelf(board, rank=1, attach=Segment.in_memory).publish(segment_of(a=b"1"))
        os._exit(0)
    os.waitpid(child, 0)
    assert mine.refresh() and not mine.refresh()
    assert payload(mine, "a") is None


def test_a_row_that_is_not_all_there_is_looked_at_again() -> None:
    one, other = two_ranks()
    segment = segment_of(a=b"1")
    one.publish(segment)
    right = one.board._rows[0, 0].copy()
    one.board._rows[0, 0]["inode"] = 1
    assert other.refresh() and payload(other, "a") is None
    one.board._rows[0, 0] = right
    assert other.refresh() and payload(other, "a") == b"1"
