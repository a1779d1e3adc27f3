"""The packs of one cache: loaded newest first, added to, made into one when most of their bytes are dead."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from simpletuner_gh200.cache.disk_room import DiskFull, DiskRoom
from simpletuner_gh200.cache.entries import Found
from simpletuner_gh200.cache.pack import DamagedPack, Item, OutdatedPack, Pack, PackEntry, UntrustedPack, write_pack
from simpletuner_gh200.cache.pack_contents import Contents, Held, Loaded, PackUse, Source
from simpletuner_gh200.cache.pack_place import PackPlace
from simpletuner_gh200.cache.pack_reading import PackIndex, stretches, take_many
from simpletuner_gh200.cache.pack_segment import DamagedEntry
from simpletuner_gh200.cache.slots import FINITE
from simpletuner_gh200.cache.source import Recognizer, Seen, identify
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.pace import AT_ONCE, Pace
from simpletuner_gh200.telemetry.progress import Progress
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

State = Literal["alive", "changed", "damaged", "left out"]
Look = Callable[[Pack, int, Sequence[PackEntry]], list[tuple[State, Source | None]]]
"""What becomes of neighbouring entries of a pack, from that number on."""


class PackFolder:
    """``folder`` holds nothing but packs of one cache. Safe to use from several jobs at once, on several machines.

    ``made_by``: what of the configuration decides what entries hold; None stands for that of the newest pack.
    ``keep_free``: bytes of the disk that packs leave to others, where that is more than a tenth of it.
    """

    def __init__(self, folder: Path, made_by: str | None = "", *, keep_free: int = 0) -> None:
        self.folder = folder
        self.made_by = made_by
        self._keep_free = keep_free
        self._recognizer = Recognizer()
        self._contents = Contents()
        self._damaged: set[tuple[str, str]] = set()
        """(name of the pack, path) of entries that were found damaged."""
        self._said_full = False

    def make(self, cache_folder: str) -> None:
        PackPlace.make(self.folder, cache_folder)

    def packs(self) -> list[Path]:
        """Oldest first."""
        with PackPlace.open(self.folder) as place:
            return [self.folder / name for name in place.packs()]

    @contextmanager
    def locked(self) -> Iterator[bool]:
        with PackPlace.open(self.folder) as place, place.locked() as ours:
            yield ours

    @property
    def held(self) -> Mapping[str, Held]:
        """What is alive in the packs, by path, as of the last look at them."""
        return self._contents.held

    # -- reading ---------------------------------------------------------------------------------------

    def look_over(self, *, closely: bool = False) -> Loaded:
        """See what the packs hold, without taking anything in. ``closely``: every byte of it."""
        done = Loaded()
        with PackPlace.open(self.folder) as place:
            self._contents = self._survey(place, self._look_closely if closely else self._look, done)
        return done

    def open_index(self) -> PackIndex:
        """The packs' indexes, for entries that are asked for before ``load`` got to them; looks at nothing else."""
        with PackPlace.open(self.folder) as place:
            opened = [self._open(place, name, Contents(), Loaded()) for name in reversed(list(place.packs()))]
        ours = [pack for pack in opened if pack is not None and pack.made_by == self.made_by]
        for pack in opened:
            if pack is not None and pack not in ours:
                pack.close()
        return PackIndex(ours, lambda entry: self._recognizer.source(entry.path, entry.identity))

    def load(
        self,
        table: Table,
        *,
        workers: int,
        share: tuple[int, int] = (0, 1),
        pace: Pace = AT_ONCE,
        progress: Progress | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> Loaded:
        """List every entry whose source is as it was. It stays where it is, in the pack: see ``pack_segment``.

        ``share`` (i, n): only the i-th of n parts of the keys. ``pace`` may slow it down, and end it early. ``tick`` is
        called at every entry, in the thread that called this.
        """
        done, started = Loaded(), time.perf_counter()
        part, parts = share

        def wanted(entry: PackEntry) -> bool:
            return parts == 1 or entry.key.low % parts == part

        def take(pack: Pack, first: int, entries: Sequence[PackEntry]) -> list[tuple[State, Source | None]]:
            pace.begin()
            found: list[tuple[State, Source | None]] = [("left out", None) for _ in entries]
            seen: list[Seen] = []
            if not pace.ended:
                seen = self._see(entries)
                found = self._states(pack, entries, seen)
            lacking = table.lacks(np.array([entry.key for entry in entries], np.uint64).reshape(-1, 2)).tolist()
            chosen = [
                at
                for at, (_, source) in enumerate(found)
                if source is not None and lacking[at] and wanted(entries[at]) and entries[at].path not in table.damaged
            ]
            states = take_many(pack, [first + at for at in chosen], [seen[at] for at in chosen], table)
            held = dict(zip(chosen, states, strict=True))
            if progress is not None:
                progress.advance(len(entries), sum(entry.length for entry in entries))
            pace.rest(0)
            return [
                (state, source) if source is None or held.get(at) else ("left out", source)
                for at, (state, source) in enumerate(found)
            ]

        with PackPlace.open(self.folder) as place:
            contents = self._survey(place, take, done, workers, tick)
        if not pace.ended:  # else nobody knows what is in the rest; whoever saves looks again
            self._contents = contents
        done.seconds = time.perf_counter() - started
        return done

    def _look(self, pack: Pack, _first: int, entries: Sequence[PackEntry]) -> list[tuple[State, Source | None]]:
        """Without reading payloads."""
        return self._states(pack, entries, self._see(entries))

    def _see(self, entries: Sequence[PackEntry]) -> list[Seen]:
        return self._recognizer.sources([(entry.path, entry.identity) for entry in entries])

    def _states(
        self, pack: Pack, entries: Sequence[PackEntry], seen: Sequence[Seen]
    ) -> list[tuple[State, Source | None]]:
        name = pack.path.name
        return [
            ("damaged", None)
            if self._damaged and (name, entry.path) in self._damaged
            else ("changed" if one.source is None else "alive", one.source)
            for entry, one in zip(entries, seen, strict=True)
        ]

    def _look_closely(self, pack: Pack, first: int, entries: Sequence[PackEntry]) -> list[tuple[State, Source | None]]:
        found = self._look(pack, first, entries)
        return [
            ("damaged", None) if source is not None and pack.payload(entry) is None else (state, source)
            for entry, (state, source) in zip(entries, found, strict=True)
        ]

    def _survey(
        self,
        place: PackPlace,
        look: Look,
        done: Loaded,
        workers: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> Contents:
        """Go through all packs, newest first, and what ``look`` says of their entries."""
        contents = Contents(names=place.packs())
        for name in reversed(contents.names):
            pack = self._open(place, name, contents, done)
            if pack is None:
                continue
            with pack:
                self.made_by = pack.made_by if self.made_by is None else self.made_by
                ours = pack.made_by == self.made_by
                contents.packs[name] = PackUse(ours)
                if ours:
                    self._survey_pack(pack, look, contents, done, workers, tick)
                else:
                    done.of_others += len(pack)
        return contents

    def _open(self, place: PackPlace, name: str, contents: Contents, done: Loaded) -> Pack | None:
        try:
            return place.pack(name)
        except FileNotFoundError:
            return None
        except DamagedPack as damaged:
            contents.worthless.append(name)
            level = logging.INFO if isinstance(damaged, OutdatedPack) else logging.WARNING
            reason = damaged.message
        except UntrustedPack as refused:  # not ours to remove, and no reason to stop
            level, reason = logging.WARNING, f"a pack can't be read: {refused}"
        except OSError as refused:
            level, reason = logging.WARNING, f"a pack can't be read: {self.folder / name}: {refused.strerror}"
        done.notes.append(reason)
        logger.log(level, "gh200: %s; its entries are made again", reason)
        return None

    def _survey_pack(
        self, pack: Pack, look: Look, contents: Contents, done: Loaded, workers: int, tick: Callable[[], None]
    ) -> None:
        name = pack.path.name

        def many(stretch: tuple[int, int]) -> list[tuple[PackEntry, State, Source | None]]:
            entries = list(pack.entries(*stretch))
            found = look(pack, stretch[0], entries)
            return [(entry, state, source) for entry, (state, source) in zip(entries, found, strict=True)]

        # Neighbours stay together: each thread reads its stretches of the file in order.
        with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="gh200-pack") as pool:
            for entry, state, source in itertools.chain.from_iterable(pool.map(many, stretches(pack))):
                contents.found(name, entry.path, entry.length, source if state != "damaged" else None)
                self._account(name, entry, state, done)
                tick()

    def _account(self, name: str, entry: PackEntry, state: State, done: Loaded) -> None:
        if state == "alive":
            done.entries += 1
            done.bytes += entry.length
        elif state == "damaged":
            done.damaged += 1
            self._damaged.add((name, entry.path))
        elif state == "changed":
            done.changed += 1
        else:
            done.left_out += 1

    # -- writing ---------------------------------------------------------------------------------------

    def save(
        self, table: Table, paths: Iterable[str], *, into_one: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Write what the packs lack, or with ``into_one`` one pack of everything; returns the bytes written.

        Another job at it, or a full disk, is no error: then nothing is written. ``stop`` is asked at every entry.
        """
        with PackPlace.open(self.folder) as place, place.locked() as ours:
            if not ours:
                logger.info("gh200: packs of %s: another job is writing them", table.name)
                return 0
            place.sweep()
            if place.packs() != self._contents.names:  # another job has been at it since
                self._contents = self._survey(place, self._look, Loaded())
            going_on = itertools.takewhile(lambda _: not stop(), paths)
            held = ((path, found) for path in going_on if (found := table.find(path, fetch=False)) is not None)
            lacking = [
                (path, found)
                for path, found in held
                if path in table.damaged or not self._contents.has(path, _source(found))
            ]
            try:
                everything = into_one or self._contents.mostly_dead
                written = self._write(place, table, lacking, stop, everything=everything)
            except PackingStopped:
                logger.info("gh200: packs of %s: stopped with the run; what was there stays", self.folder)
                return 0
            except DiskFull as full:
                self._say_full(full)
                return 0
            self._remove_dead(place)
            return written

    def _write(
        self,
        place: PackPlace,
        table: Table,
        lacking: list[tuple[str, Found]],
        stop: Callable[[], bool],
        *,
        everything: bool,
    ) -> int:
        """One more pack, of what is lacking and, with ``everything``, of what else is alive in ours."""
        contents = self._contents
        kept = dict(contents.held) if everything else {}
        if not lacking and not kept:
            return 0
        needed = sum(found.slot.length for _, found in lacking) + (contents.alive if everything else 0)
        name, room = place.next_name(), DiskRoom(place.fd, self._keep_free)
        written: dict[str, tuple[int, Source]] = {}

        def items() -> Iterator[Item]:
            fresh = (_item(path, found) for path, found in lacking)
            for item, source in itertools.chain(fresh, self._survivors(place, table, kept)):
                if stop():
                    raise PackingStopped("packing was stopped")
                if item is not None and item.path not in written:
                    yield item
                    written[item.path] = (item.payload.nbytes, source)

        try:
            size = write_pack(place.fd, name, room.watched(items(), needed), self.made_by or "")
        except OSError as failed:
            full = room.refused(failed, needed)
            raise full or CacheError(
                f"{self.folder / name} could not be written: {failed}", remedy="check cache_config.cache_dir"
            ) from failed
        contents.packs[name] = PackUse(ours=True)
        for path, (length, source) in written.items():
            contents.written(name, path, length, source)
        if everything:
            for old in contents.mine().keys() - {name}:  # what of them was damaged goes with them
                contents.packs[old] = PackUse(ours=True)
        return size if written else 0

    @staticmethod
    def _survivors(place: PackPlace, table: Table, kept: dict[str, Held]) -> Iterator[tuple[Item | None, Source]]:
        """What is alive in our packs, checked; from memory where a pack turns out damaged."""
        for name in sorted({held.pack for held in kept.values()}):
            with place.pack(name) as pack:
                for entry in pack.entries():
                    held = kept.get(entry.path)
                    if held is None or held.pack != name:
                        continue
                    payload, layout = pack.payload(entry), pack.layout(entry)
                    if payload is not None and layout is not None:
                        yield Item(entry.path, entry.identity, entry.flags, layout, payload), held.source
                    elif (found := table.find(entry.path, fetch=False)) is not None:
                        yield _item(entry.path, found)

    def _remove_dead(self, place: PackPlace) -> None:
        contents = self._contents
        dead = [name for name, use in contents.packs.items() if self._is_dead(place, name, use)]
        for name in [*contents.worthless, *dead]:
            try:
                place.remove(name)
            except OSError as refused:
                logger.warning("gh200: %s holds nothing of use and can't be removed: %s", self.folder / name, refused)
                continue
            contents.packs.pop(name, None)
        contents.worthless = []
        contents.names = place.packs()

    def _is_dead(self, place: PackPlace, name: str, use: PackUse) -> bool:
        if use.ours:
            return use.entries == 0
        try:
            with place.pack(name) as pack:
                return not any(self._recognizer.source(one.path, one.identity) for one in pack.entries())
        except (OSError, CacheError):
            return False

    def _say_full(self, full: DiskFull) -> None:
        if not self._said_full:
            self._said_full = True
            logger.warning(
                "gh200: no pack written to %s: it needs %s, %s are free, of which %s stay free for checkpoints; "
                "the next start reads SimpleTuner's own files",
                self.folder,
                format_bytes(full.needed),
                format_bytes(full.free),
                format_bytes(full.reserve),
            )


class PackingStopped(CacheError):
    """The run is over, so its packs are not worth waiting for."""


def _source(found: Found) -> Source:
    return found.slot.size_and_inode, found.slot.mtime_ns


def _item(path: str, found: Found) -> tuple[Item | None, Source]:
    """None for one whose file has changed since it was found, and for one that is damaged."""
    source = _source(found)
    identity = identify(path, source)
    try:
        payload = found.payload
    except DamagedEntry:
        return None, source
    if identity is None:
        return None, source
    return Item(path, identity, found.slot.flags & FINITE, found.layout.text, payload), source
