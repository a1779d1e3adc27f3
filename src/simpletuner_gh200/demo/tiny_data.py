"""A small captioned image set, the same bytes every time."""

from __future__ import annotations

from pathlib import Path

_COLOURS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (40, 80, 220), "yellow": (230, 210, 50)}
_SHAPES = ("circle", "square", "stripe")


def write_tiny_images(folder: Path, *, count: int = 24, size: int = 96) -> None:
    """Write ``count`` PNG images with ``.txt`` captions to ``folder``; files that exist are left alone."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    names = list(_COLOURS)
    for number in range(count):
        path = folder / f"image_{number:03d}.png"
        if path.is_file():
            continue
        colour, shape = names[number % len(names)], _SHAPES[number % len(_SHAPES)]
        image = Image.new("RGB", (size, size), (250 - 5 * number, 245, 240))
        draw = ImageDraw.Draw(image)
        edge = 12 + number
        if shape == "circle":
            draw.ellipse((edge, edge, size - edge, size - edge), fill=_COLOURS[colour])
        elif shape == "square":
            draw.rectangle((edge, edge, size - edge, size - edge), fill=_COLOURS[colour])
        else:
            draw.rectangle((0, size // 2 - 8, size, size // 2 + 8), fill=_COLOURS[colour])
        # The image last: a caption without an image is harmless, an image without a caption is not.
        path.with_suffix(".txt").write_text(f"a {colour} {shape}, number {number}", encoding="utf-8")
        image.save(path)
