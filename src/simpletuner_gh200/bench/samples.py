"""What is measured: files and latents made on the spot, and the way into the page cache and out of it."""

from __future__ import annotations

import io
import os
from pathlib import Path

EXTENSIONS = (
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    *("txt", "json", "pt", "safetensors", "wav", "mp4"),
)
"""What the reference discovery looks for, one ``rglob`` each: the kinds of file that a dataset folder holds."""

SIZES = {"400B": 400, "100KB": 100_000, "2MB": 2_000_000}
FOLDER_FILES = 500
JPEG_SIDE = 320


def jpeg_head() -> bytes:
    """A real JPEG up to its pixel data: opens, whatever follows."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (512, 512)).save(out, "JPEG")
    content = out.getvalue()
    return content[: content.index(b"\xff\xda") + 14]


def make_files(folder: Path, size: int, count: int) -> list[str]:
    """``count`` files of ``size`` bytes in folders of ``FOLDER_FILES``; images, or captions where they are tiny.

    JPEG-like, so that no codec gains and every image opens.
    """
    head, ending = (b"", "txt") if size < 4096 else (jpeg_head(), "jpg")
    noise = os.urandom(size + 4096)
    paths = []
    for number in range(count):
        path = folder / f"{number // FOLDER_FILES:04d}" / f"image_{number:07d}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = number * 61 % 4096
        path.write_bytes(head + noise[start : start + size - len(head)])
        paths.append(str(path))
    return paths


def make_jpegs(folder: Path, count: int) -> list[str]:
    """``count`` images with real pictures in them, which take their time to decode."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    coarse = random.integers(0, 255, (16, JPEG_SIDE // 8, JPEG_SIDE // 8, 3), np.uint8)
    pictures = [Image.fromarray(one).resize((JPEG_SIDE, JPEG_SIDE)) for one in coarse]
    paths = []
    for number in range(count):
        path = folder / f"image_{number:05d}.jpg"
        pictures[number % 16].save(path, quality=90 + number % 5)
        paths.append(str(path))
    return paths


def make_latents(folder: Path, shape: tuple[int, ...], count: int) -> list[str]:
    """Cache files as SimpleTuner writes them, in one folder."""
    import torch

    folder.mkdir(parents=True)
    noise = torch.randn(count + 64, *shape[1:]).to(torch.bfloat16)
    paths = []
    for number in range(count):
        path = folder / f"latent_{number:05d}.pt"
        torch.save(noise[number : number + shape[0]].clone(), path)
        paths.append(str(path))
    return paths


def warm(paths: list[str]) -> None:
    """Into the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            while file.read(1 << 20):
                pass


def chill(paths: list[str]) -> None:
    """Out of the page cache, as far as the kernel obliges."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
