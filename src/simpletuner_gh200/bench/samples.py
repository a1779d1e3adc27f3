"""What is measured: files and steps made on the spot, and the way into the page cache."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path

EXTENSIONS = (
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    *("txt", "json", "pt", "safetensors", "wav", "mp4"),
)
"""What the reference discovery looks for, one ``rglob`` each: the kinds of file that a dataset folder holds."""

SIZES = {"400B": 400, "100KB": 100_000, "2MB": 2_000_000}
FOLDER_FILES = 500


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


def make_photographs(folder: Path, count: int, edge: int, *, captions: bool = False) -> list[str]:
    """JPEGs of ``edge`` to four thirds of it, with as much in them as a photograph has."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    contents = []
    for height in (edge, edge * 4 // 3):
        coarse = Image.fromarray(random.integers(0, 255, (height // 24, edge // 24, 3), np.uint8))
        out = io.BytesIO()
        coarse.resize((edge, height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=92)
        contents.append(out.getvalue())
    paths = [folder / f"photograph_{number:05d}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(contents[number % 2])
        if captions:
            path.with_suffix(".txt").write_text(f"a photograph, number {number}", encoding="utf-8")
    return list(map(str, paths))


def make_cache_files(folder: Path, shape: tuple[int, ...], count: int, *, gzipped: bool = False) -> list[str]:
    """As SimpleTuner writes them: one pickle of a bfloat16 tensor each, no two alike."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.randn(count + shape[0], *shape[1:]).to(torch.bfloat16)
    paths = []
    for number in range(count):
        out = io.BytesIO()
        torch.save(noise[number : number + shape[0]].clone(), out)
        path = folder / f"{number:05d}.pt"
        path.write_bytes(gzip.compress(out.getvalue()) if gzipped else out.getvalue())
        paths.append(str(path))
    return paths


def training_step(side: int) -> Callable[[], None]:
    """Forward and backward of the demo's UNet over two latents of ``side`` times ``side``, done once already."""
    import torch

    from simpletuner_gh200.demo.project import tiny_unet

    unet = tiny_unet()
    latents, text = torch.randn(2, 4, side, side), torch.randn(2, 77, 64)
    added = {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)}

    def step() -> None:
        unet(latents, 500, text, added_cond_kwargs=added).sample.square().mean().backward()

    step()
    return step


def read_all(paths: Iterable[str | Path], size: int = 4 << 20) -> None:
    """The ``read_limit``: every file into one hot buffer, which no file of ``size`` fills. It warms the page cache."""
    hot = memoryview(bytearray(size + 1))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [hot]) == len(hot):
            pass
        os.close(fd)
