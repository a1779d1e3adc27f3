"""Datasets of other kinds than images with text files beside them, from memory: captions in JSON lines, masks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simpletuner_gh200.demo.project import dataset_list


def in_memory(datasets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**entry, "type": "in_memory", "in_memory": {"wait": True}} for entry in datasets]


def compare(workbench, datasets: list[dict[str, Any]], **overrides: Any):
    """The run from memory, after its losses were found to be those of stock SimpleTuner with the same local files."""
    workbench.configure(datasets=datasets, max_train_steps=4, **overrides)
    stock = workbench.train(stock=True)
    assert stock.ok, stock.explain()
    workbench.restore()
    workbench.configure(datasets=in_memory(datasets), max_train_steps=4, **overrides)
    ours = workbench.train()
    assert ours.ok, ours.explain()
    assert len(ours.losses[0]) == 4
    assert ours.losses == stock.losses
    return ours


@pytest.fixture
def with_files(workbench):
    """Files that the test adds to the project survive ``restore`` if they are written again: ``add`` remembers them."""
    written: dict[str, bytes] = {}
    original = workbench.restore

    def write() -> None:
        for name, content in written.items():
            path = workbench.project.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def restore() -> None:
        original()
        write()

    def add(files: dict[str, bytes]) -> None:
        written.update(files)
        write()

    workbench.restore = restore
    yield add
    workbench.restore = original


@pytest.mark.one_release("4.")
def test_captions_in_json_lines(workbench, with_files):
    """SimpleTuner's parquet strategy takes a ``.jsonl`` table too; it is read through the backend, thus from memory."""
    images = sorted(workbench.project.images.glob("*.png"))
    rows = [
        {"id": path.name, "caption": f"drawing number {number}", "width": 64, "height": 64}
        for number, path in enumerate(images)
    ]
    table = workbench.project.images / "captions.jsonl"
    name = str(table.relative_to(workbench.project.folder))
    with_files({name: "\n".join(map(json.dumps, rows)).encode()})
    columns = {"filename_column": "id", "caption_column": "caption", "width_column": "width", "height_column": "height"}
    entry = {
        "caption_strategy": "parquet",
        "metadata_backend": "parquet",
        "parquet": {"path": str(table), "identifier_includes_extension": True, **columns},
        "cache_dir_vae": str(workbench.project.folder / "cache" / "vae-json"),
    }
    ours = compare(workbench, dataset_list(workbench.project, entry))
    held = ours.summaries[0]["details"]["store"]["tiny-images"]
    assert held["staged"] == 49, "images, text files and the table"
    embeds = list((workbench.project.folder / "cache" / "text").glob("*.pt"))
    assert len(embeds) >= len(rows), "each caption of the table was encoded"


@pytest.mark.one_release("3.")
def test_masks_of_a_conditioning_dataset(workbench, with_files):
    from PIL import Image

    images = sorted(workbench.project.images.glob("*.png"))
    masks = workbench.project.folder / "masks"
    masks.mkdir()
    for number, path in enumerate(images):
        size = Image.open(path).size
        Image.new("RGB", size, (255 * (number % 2), 128, 0)).save(masks / path.name)
    with_files({f"masks/{path.name}": path.read_bytes() for path in masks.iterdir()})
    pictures, embeds = dataset_list(workbench.project, {"conditioning_data": "tiny-masks"})
    conditioning = {
        **{key: value for key, value in pictures.items() if key not in ("conditioning_data", "caption_strategy")},
        "id": "tiny-masks",
        "dataset_type": "conditioning",
        "conditioning_type": "mask",
        "instance_data_dir": str(masks),
        "cache_dir_vae": str(workbench.project.folder / "cache" / "vae-masks"),
    }
    ours = compare(workbench, [pictures, conditioning, embeds])
    held = ours.summaries[0]["details"]["store"]
    assert held["tiny-masks"]["staged"] == len(images)
    assert held["tiny-masks"]["served"] > 0
