"""The project that trials do harm to: tiny, with filled caches and packs, put back before each trial."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.held.pack_place import SUFFIX, PackPlace
from simpletuner_gh200.held.packs import Item, put
from simpletuner_gh200.held.segment import SegmentWriter
from tests.chaos.commands import Ended
from tests.integration.workbench import Forge, JobResult, Workbench

STEPS = 12
"""An epoch: every image and caption is used, so whatever happens to its pack or cache file counts."""

FEATURES: dict[str, Any] = {"cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}}
IN_MEMORY: dict[str, Any] = {"type": "in_memory"}
PHASES = {
    "reading data": "Loading data backend config",
    "loading the model": "Loading diffusion model",
    "training": "Steps:",
}
"""Each, and the words of SimpleTuner's that say it has begun; "Steps:" is of its progress bar."""


class Laboratory:
    """One project at a fixed path. ``reference`` is what an undisturbed run of it gives."""

    def __init__(self, forge: Forge, folder: Path) -> None:
        self._bench = Workbench(forge, folder, steps=STEPS)
        self._bench.prepare()
        self.project = self._bench.project
        self.folder = folder
        self._kept = folder / "kept"
        self._packed = False
        self.reference: JobResult | None = None

    @property
    def packs(self) -> Path:
        return self.project.output / "gh200" / "cache"

    def put_back(self) -> None:
        """As before any run with the extension: filled caches of SimpleTuner's, no packs, no output."""
        self._bench.restore()
        self.configure()
        self._packed = False

    def _pack(self) -> None:
        """Make packs with an undisturbed run, and keep them; the files they were made of stay in place."""
        self.put_back()
        self.reference = self._bench.train()
        assert self.reference.ok, self.reference.explain()
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self.packs, self._kept)
        self.reference.output = self.project.output.rename(self.reference.results / "output")
        self._packed = True

    def put_packs_back(self) -> None:
        """The packs of an undisturbed run, no checkpoints, SimpleTuner's index of images as it was before that run."""
        if not self._packed:
            self._pack()
        shutil.rmtree(self.project.output, ignore_errors=True)
        shutil.copytree(self._kept, self.packs)
        self.index_again()
        self.configure()

    def spread_packs(self, count: int) -> Iterator[tuple[int, Path]]:
        """The pack of each cache as ``count`` packs of some entries each; (number, pack), numbers beginning at 0."""
        for whole in sorted(self.packs.glob(f"*/*{SUFFIX}")):
            with PackPlace.open(whole.parent) as place:
                pack = place.pack(whole.name)
                whole.unlink()
                for number in range(count):
                    name = f"{number + 1:08d}{SUFFIX}"
                    with place.new_file(name) as fd:
                        writer = SegmentWriter(fd)
                        for row in range(number, len(pack), count):
                            put(writer, Item(pack, row, pack.path(row), None))
                        writer.finish(pack.made_by)
                    yield number, whole.parent / name

    def forget_training(self) -> None:
        """No checkpoints, the index as it was: the next run begins as the undisturbed one did. Packs stay."""
        for path in self.project.output.iterdir():
            if path.name.startswith("checkpoint-"):
                shutil.rmtree(path)
        self.index_again()

    def index_again(self) -> None:
        """Every run shuffles SimpleTuner's index and writes it; from the same index, runs are the same to the bit."""
        for path in self._bench.kept(self.project.images).glob("*.json"):
            shutil.copy2(path, self.project.images / path.name)

    def configure(self, blocks: Mapping[str, Any] | None = None, **overrides: Any) -> None:
        given = {"checkpoint_step_interval": STEPS // 2, **overrides}
        self._bench.configure(blocks=dict(FEATURES if blocks is None else blocks), dataset=IN_MEMORY, **given)

    def bits(self) -> dict[str, bytes]:
        """The trained tensors of the last run."""
        return tensors(self.project.output / "pytorch_lora_weights.safetensors")

    def assert_trained_the_same(self, ended: Ended) -> None:
        """All of it, and what an undisturbed run trains, to the bit."""
        assert ended.code == 0, ended.explain()
        assert f"trained: {STEPS} of {STEPS} optimizer steps" in ended.err, ended.explain()
        assert self.bits() == self.reference_bits(), ended.explain()

    def reference_bits(self) -> dict[str, bytes]:
        assert self.reference is not None
        return tensors(self.reference.output / "pytorch_lora_weights.safetensors")


def tensors(path: Path) -> dict[str, bytes]:
    """Name to bytes of a safetensors file, without torch."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
    }
