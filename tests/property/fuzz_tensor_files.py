"""Runs in a process of its own, under the sanitizers: damaged files through the C code that takes them apart.

    python fuzz_tensor_files.py LIBRARY ISAL FOLDER ROUNDS SEED

ISAL is the library that inflates. FOLDER holds whole files to begin with. Imports neither torch nor numpy: the
sanitizer watches every allocation.
"""

from __future__ import annotations

import ctypes
import gzip
import random
import re
import sys
from pathlib import Path

MOST_STORAGES, STATUSES = 64, 8
FILE_BYTES, TENSOR_FILE_BYTES = 8 * 8, 8 * (8 + 4 + MOST_STORAGES)
SCRATCH_BYTES = (256 << 10) + (64 << 10)


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


def take(library: ctypes.CDLL, paths: list[Path], room: int) -> list[int]:
    """Buffers of exactly their size, so that one byte beyond is seen."""
    named = b"".join(bytes(path) + b"\0" for path in paths)
    files, counts = ctypes.create_string_buffer(TENSOR_FILE_BYTES * len(paths)), (ctypes.c_uint64 * STATUSES)()
    buffer, scratch = ctypes.create_string_buffer(room), ctypes.create_string_buffer(SCRATCH_BYTES)
    sizes = ctypes.c_size_t(room), ctypes.c_size_t(SCRATCH_BYTES)
    looked = library.gh200_take_files(
        named, len(paths), buffer, sizes[0], scratch, sizes[1], None, ctypes.c_uint64(0), 1, files, counts
    )
    return [int.from_bytes(files.raw[at * TENSOR_FILE_BYTES :][:8], "little") for at in range(looked)]


def read(library: ctypes.CDLL, folder: Path, names: list[str], room: int) -> None:
    """What was read together lies where its row says."""
    files, buffer = ctypes.create_string_buffer(FILE_BYTES * len(names)), ctypes.create_string_buffer(room)
    named = b"".join(name.encode() + b"\0" for name in names)
    library.gh200_read_files(bytes(folder), named, len(names), buffer, ctypes.c_size_t(room), 0, files)
    for at, name in enumerate(names):
        row = [int.from_bytes(files.raw[at * FILE_BYTES + 8 * word :][:8], "little") for word in range(8)]
        if row[0] == 0:
            assert buffer.raw[row[6] : row[6] + row[7]] == (folder / name).read_bytes()


def main(library_path: str, isal_path: str, folder: str, rounds: int, seed: int) -> None:
    library, isal = ctypes.CDLL(library_path), ctypes.CDLL(isal_path)
    names = ("isal_inflate_init", "isal_inflate_stateless", "crc32_gzip_refl")
    library.gh200_use_isal((ctypes.c_void_p * 3)(*(ctypes.cast(isal[name], ctypes.c_void_p).value for name in names)))
    chance = random.Random(seed)
    originals = [path.read_bytes() for path in sorted(Path(folder).glob("*.pt"))]
    inner = [gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content for content in originals]
    work = Path(folder) / "damaged"
    work.mkdir()
    seen: set[int] = set()
    for _ in range(rounds):
        several = []
        for number in range(4):
            content = damaged(chance.choice(originals), chance)
            if chance.random() < 0.4:  # broken before it was gzipped: its checksum fits
                content = gzip.compress(damaged(chance.choice(inner), chance), chance.choice((0, 1, 6)))
            several.append(work / f"{number}.pt")
            several[-1].write_bytes(content)
        seen.update(take(library, several, chance.choice((512, 4096, 1 << 20))))
        read(library, work, [path.name for path in several], chance.choice((512, 4096, 1 << 20)))
    print("statuses", *sorted(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
