"""Runs in a process of its own, under the sanitizers: damaged files through the C code that takes them apart.

    python fuzz_tensor_files.py LIBRARY FOLDER ROUNDS SEED

FOLDER holds whole files to begin with. Imports neither torch nor numpy: the sanitizer watches every allocation.
"""

from __future__ import annotations

import ctypes
import gzip
import random
import re
import sys
import zlib
from pathlib import Path

STATUS_BYTES, MOST_STORAGES, STATUSES = 8, 64, 8
FILE_BYTES = 8 * (11 + MOST_STORAGES + 1)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Bits flipped, bytes cut out, repeated or replaced by the numbers that lengths and places go wrong with."""
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(made)) if made else 0
        kind = chance.randrange(7)
        if kind == 0 and made:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at : at + chance.choice((1, 2, 8, 64, len(made)))]
        elif kind == 2:
            made[at:at] = made[at : at + chance.choice((1, 8, 300))]
        elif kind == 3:
            made[at : at + 4] = chance.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)).to_bytes(4, "little")
        elif kind == 4:
            made[at : at + 8] = chance.choice((0, 1 << 63, (1 << 64) - 1, len(made))).to_bytes(8, "little")
        elif kind == 5 and b"PK\x01\x02" in made:  # a member's size, both times alike, or its place
            entry = chance.choice([found.start() for found in re.finditer(rb"PK\x01\x02", bytes(made))])
            number = chance.choice((len(made), 0x7FFFFFFF, 0xFFFFFFFE)).to_bytes(4, "little")
            made[entry + 20 : entry + 28] = number * 2
            if chance.random() < 0.2:
                made[entry + 42 : entry + 46] = number
        else:  # the ends, where directories and sizes stand
            tail = max(len(made) - 1 - chance.randrange(120), 0)
            made[tail : tail + 1] = bytes([chance.randrange(256)])
    return bytes(made)


def inflate(library: ctypes.CDLL, packed: bytes, room: int) -> bytes | None:
    """Input and output in allocations of exactly their size, so that one byte beyond either is seen."""
    source = ctypes.create_string_buffer(packed, len(packed)) if packed else ctypes.create_string_buffer(1)
    target = ctypes.create_string_buffer(max(room, 1))
    got = library.gh200_inflate(source, ctypes.c_size_t(len(packed)), target, ctypes.c_size_t(room))
    return None if got < 0 else target.raw[:got]


def streams(chance: random.Random) -> bytes:
    """A DEFLATE stream of any kind of block, of data that is noise, text or long repeats."""
    size = chance.choice((0, 1, 7, 300, 2000, 70_000))
    data = chance.choice(
        (chance.randbytes(size), b"ab" * (size // 2), bytes(size), chance.randbytes(97) * (size // 97))
    )
    strategy = chance.choice((zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE))
    maker = zlib.compressobj(chance.choice((0, 1, 6, 9)), zlib.DEFLATED, -15, 8, strategy)
    return maker.compress(data) + maker.flush()


def agree(library: ctypes.CDLL, packed: bytes) -> None:
    """What comes out is what zlib says, or nothing."""
    known = zlib.decompressobj(-15)
    try:
        expected = known.decompress(packed)
        whole = known.eof
    except zlib.error:
        expected, whole = b"", False
    room = len(expected)
    got = inflate(library, packed, room)
    assert got is None or not whole or got == expected, (packed, got, expected)
    if whole:
        assert got == expected, "a whole stream was refused"
        assert room == 0 or inflate(library, packed, room - 1) is None, "room for one byte less is no room"


def take(library: ctypes.CDLL, paths: list[Path], room: int) -> list[int]:
    named = b"".join(bytes(path) + b"\0" for path in paths)
    files, counts = ctypes.create_string_buffer(FILE_BYTES * len(paths)), (ctypes.c_uint64 * STATUSES)()
    buffer, scratch = ctypes.create_string_buffer(room), ctypes.create_string_buffer(room)
    size = ctypes.c_size_t(room)
    looked = library.gh200_take_files(
        named, len(paths), buffer, size, scratch, size, None, ctypes.c_uint64(0), 1, files, counts
    )
    return [int.from_bytes(files.raw[at * FILE_BYTES :][:8], "little") for at in range(looked)]


def main(library_path: str, folder: str, rounds: int, seed: int) -> None:
    library = ctypes.CDLL(library_path)
    library.gh200_inflate.restype = ctypes.c_int64
    chance = random.Random(seed)
    originals = [path.read_bytes() for path in sorted(Path(folder).glob("*.pt"))]
    inner = [gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content for content in originals]
    work = Path(folder) / "damaged"
    work.mkdir()
    seen: set[int] = set()
    for _ in range(rounds):
        packed = streams(chance)
        agree(library, packed)
        agree(library, damaged(packed, chance))
        several = []
        for number in range(4):
            content = damaged(chance.choice(originals), chance)
            if chance.random() < 0.4:  # broken before it was gzipped: its checksum fits
                content = gzip.compress(damaged(chance.choice(inner), chance), chance.choice((0, 1, 6)))
            several.append(work / f"{number}.pt")
            several[-1].write_bytes(content)
        seen.update(take(library, several, chance.choice((512, 4096, 1 << 20))))
    print("statuses", *sorted(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
