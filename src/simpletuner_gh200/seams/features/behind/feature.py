"""Checkpoints that cost no training time: SimpleTuner saves to memory, a process of its own copies that to the disk.

SimpleTuner's own saving is called with a folder in memory for its output folder, so the files are its own. Whatever
it does with the checkpoint afterwards waits for the disk. At most one checkpoint is on its way.

The first rank of each node owns a folder in its memory and starts the process that copies. Where ranks write on several
nodes, each node's process copies its own files, and the first one's gives the checkpoint its name when all are there.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from simpletuner_gh200.config.blocks import CheckpointSettings
from simpletuner_gh200.config.environment import local_size
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.held.saved import MemoryFolder, Order, claim, claimed, memory_file_systems, place_for
from simpletuner_gh200.held.settling import settle
from simpletuner_gh200.memory.ceilings import checkpoint_allowance
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.seams.checkpoints import from_every_rank, from_main_process
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.behind.afterwards import Afterwards
from simpletuner_gh200.seams.features.behind.draining import Draining
from simpletuner_gh200.seams.outcome import disk_full
from simpletuner_gh200.seams.preemption import TRY_AGAIN, job_end
from simpletuner_gh200.units import MIB, format_bytes
from simpletuner_gh200.upstream.checkpoints import GUARD, MANIFEST

logger = logging.getLogger("simpletuner_gh200")

LAST_WORDS = 20.0
"""Seconds before the end of a job's time at which a rank stops waiting for the disk, and says what is there."""

MARGIN = 1.05
"""Of what a checkpoint is taken to need."""

SHARDED = ("fsdp_enable", "use_deepspeed_optimizer")
"""Settings with which every rank writes in every release, and some releases wait for none of them."""


@dataclass(frozen=True)
class Place:
    """A node's memory folder, or why it has none."""

    path: str = ""
    run: str = ""
    """Of the first node's: the run's own name."""
    refused: str = ""


class BehindFeature(Feature):
    name: ClassVar[str] = "behind"
    detail: ClassVar[str] = "checkpoints"

    def __init__(self) -> None:
        self.stall = 0.0
        self.draining: Draining | None = None
        """None where checkpoints are stock's, from the start."""
        self._afterwards: Afterwards | None = None
        self._main = self._leads = False
        """Is this the first rank of the run, and of its node?"""
        self._run = ""
        self._disk = 0
        """The device that the output folder is on."""
        self._part, self._parts = 0, 1
        """Of nodes."""
        self._size = 0
        self._said = False

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "requested" if settings.part(CheckpointSettings).checkpoints == "behind" else "off"

    # -- moments ---------------------------------------------------------------------------------------

    def before_train(self, trainer: Any) -> None:
        accelerator = trainer.accelerator
        self._main, self._leads = bool(accelerator.is_main_process), bool(accelerator.is_local_main_process)
        first = from_main_process(accelerator, lambda: self._make_folder(trainer))
        ours = None if not self._leads else first if self._main else self._make_folder(trainer, first)
        node = accelerator.process_index - accelerator.local_process_index
        nodes = {number: place for number, place in from_every_rank(accelerator, (node, ours)) if place is not None}
        refused = [place.refused for place in nodes.values() if place.refused]
        if refused:
            self.close()
            self.draining = None
            if self._main:
                self._say_stock(refused[0])
            return
        if self.draining is None:
            self.draining = Draining(MemoryFolder(Path(nodes[node].path)), leads=False)
        self._run, self._part, self._parts = first.run, sorted(nodes).index(node), len(nodes)
        self._afterwards = Afterwards(trainer, self.draining.landed, self._look)

    def save_checkpoint(self, trainer: Any, save: Callable[..., Any], output_dir: str, suffix: str | None) -> Any:
        began = time.perf_counter()
        try:
            if self.draining is None or self._afterwards is None:
                return save(output_dir, suffix)
            return self._save(self.draining, self._afterwards, trainer, save, output_dir, suffix)
        finally:
            self.stall += time.perf_counter() - began

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        if self.draining is not None and self.draining.order is not None and self.draining.landed():
            self._catch_up()
        return batch

    def after_train(self, trainer: Any) -> None:
        """The drainer outlives a run that is in a hurry; others end when the disk has the checkpoint."""
        if self._afterwards is None or self.draining is None:
            return
        end = job_end() if self._preempted else None  # a scheduler's signal comes some minutes before
        try:
            if not self._look(until=None if end is None else end - LAST_WORDS) and self.draining.order is not None:
                logger.warning("gh200: the job's time runs out before %s is on disk", self.draining.order.source)
        finally:
            self._afterwards.remove()

    def close(self) -> None:
        if self.draining is not None and self._leads:
            folder = self.draining.folder
            folder.leave()
            if folder.order() is None:  # else the drainer, which sees that its owner has left
                folder.remove()

    def summary(self) -> dict[str, Any]:
        if self.draining is None:
            return {"behind": 0, "stall_s": round(self.stall, 3), "drain_s": 0.0}
        safe, pending = (None if it is None else it.target for it in (self.draining.safe, self.draining.order))
        return {
            "behind": self.draining.handed_over,
            "stall_s": round(self.stall, 3),
            "waited_s": round(self.draining.waited, 3),
            "drain_s": round(self.draining.seconds, 3),
            "safe": safe,
            "pending": pending,
        }

    def telemetry(self) -> dict[str, Any]:
        return {"stall_seconds": self.stall, **({} if self.draining is None else self.draining.told())}

    # -- waiting ---------------------------------------------------------------------------------------

    @property
    def _preempted(self) -> bool:
        return self.runtime.outcome.exit_code == TRY_AGAIN

    def _look(self, *, until: float | None = None) -> bool:
        """Somebody looks for the last checkpoint: False where it can't be waited for."""
        hurried = self.runtime.outcome.status == "interrupted" and not self._preempted
        if not self._leads or hurried or self.draining is None:
            return True
        there = self.draining.wait(until=until)
        if there:
            self._catch_up()
        return there

    def _catch_up(self) -> None:
        if self._afterwards is not None and self.draining is not None:
            (self._afterwards.forget if self.draining.lost else self._afterwards.catch_up)()

    # -- saving ----------------------------------------------------------------------------------------

    def _make_folder(self, trainer: Any, first: Place | None = None) -> Place:
        """This node's, once the memory that the dead have left there is free; ``first`` is the first node's."""
        output = Path(trainer.config.output_dir)
        until = None if first is None else 0.0  # what an earlier run has saved gets there before this one claims it
        try:
            for words in settle(output, lambda words: logger.info("gh200: %s", words), until=until):
                logger.warning("gh200: %s", words)
        except OSError as refused:  # the other ranks wait for an answer
            return Place(refused=str(refused))
        self._size = checkpoint_bytes(trainer)
        place = place_for(self._size, memory_file_systems())
        if place is None:
            return Place(refused=f"no memory file system (tmpfs) on {platform.node()} can be written to")
        if first is not None and first.run and claimed(output) != first.run:
            return Place(refused=f"{output} on {platform.node()} is not the folder that the first node writes to")
        try:
            folder = MemoryFolder.make(place[0])
            self.draining = Draining(folder, leads=True)
            if first is None:
                claim(output, folder.run)
            self._disk = output.stat().st_dev
        except OSError as refused:
            return Place(refused=str(refused))
        return Place(str(folder.path), folder.run)

    def _save(
        self,
        draining: Draining,
        afterwards: Afterwards,
        trainer: Any,
        save: Callable[..., Any],
        output_dir: str,
        suffix: str | None,
    ) -> Any:
        folder, accelerator = draining.folder, trainer.accelerator
        name = f"checkpoint-{trainer.state['global_step']}" + (f"-{suffix}" if suffix else "")
        together = accelerator.num_processes > 1 and _every_rank_saves(trainer, save)
        if self._leads:
            draining.wait(successor=name if self._main else None)
        refused = self._has_no_room(folder, trainer, name) if self._leads else None
        if together:
            refused = next(filter(None, from_every_rank(accelerator, refused)), None)
        draining.landed()  # the one that leads has waited for it
        self._catch_up()
        if refused is not None:
            if self._main:
                self._say_stock(refused)
            return save(output_dir, suffix)
        saved_at = time.time()
        try:
            with afterwards.saving(str(folder.path), output_dir):
                save(str(folder.path), suffix)
                if together:
                    accelerator.wait_for_everyone()
        except Exception as failure:
            if not self._may_repeat(folder, trainer, failure):
                raise
            folder.clear()
            self._say_stock(f"{folder.path} is full at {name}")
            return save(output_dir, suffix)
        files = self._share(folder, accelerator, name) if together else folder.files(name)
        self._size = max(self._size, sum(files.values()))
        target = os.path.join(os.path.abspath(output_dir), name)
        order = Order(name, target, saved_at, files=files, run=self._run, disk=self._disk)
        draining.hand_over(replace(order, part=self._part, parts=self._parts) if together else order)
        return os.path.join(output_dir, name)

    def _share(self, folder: MemoryFolder, accelerator: Any, name: str) -> dict[str, int]:
        """Which files this node copies: those it has, but for what an earlier node has, too."""
        unfinished = folder.path / f"{name}-tmp"
        if self._leads and unfinished.is_dir():  # of a temporary folder SimpleTuner renames the first node's alone
            unfinished.rename(folder.path / name)
        nodes = [
            files
            for files in from_every_rank(accelerator, folder.files(name) if self._leads else None)
            if files is not None
        ]
        if self._main and self._parts > 1:
            _complete(folder.path / name / MANIFEST, set().union(*nodes))
        earlier = set().union(*nodes[: self._part])
        return {name: size for name, size in folder.files(name).items() if name not in earlier}

    def _has_no_room(self, folder: MemoryFolder, trainer: Any, name: str) -> str | None:
        """Asked on each node, in words; decided for all that write."""
        needed = int(MARGIN * max(self._size, checkpoint_bytes(trainer)))
        room = os.statvfs(folder.path)
        allowed = checkpoint_allowance(room.f_bavail * room.f_frsize, host_memory())
        if needed <= allowed.size:
            return None
        return f"{name} needs {format_bytes(needed)} of memory on {platform.node()}, and there is {allowed.why}"

    @staticmethod
    def _may_repeat(folder: MemoryFolder, trainer: Any, failure: Exception) -> bool:
        """Is it memory that was full, and nothing of the run's state half swapped, as EMA does to save?"""
        alone = trainer.accelerator.num_processes == 1 and not getattr(trainer.config, "use_ema", False)
        return alone and disk_full(failure, [str(folder.path)]) is not None

    def _say_stock(self, why: str) -> None:
        words = f"gh200: checkpoints are saved as stock, and training waits for the disk: {why}"
        logger.log(logging.DEBUG if self._said else logging.WARNING, words)
        self._said = True


def _every_rank_saves(trainer: Any, save: Callable[..., Any]) -> bool:
    """In newer releases all do, and wait for each other meanwhile; in older ones those that have a shard."""
    waits = "wait_for_everyone" in save.__code__.co_names
    return waits or _sharded(trainer)


def _sharded(trainer: Any) -> bool:
    return any(getattr(trainer.config, setting, False) for setting in SHARDED)


def _complete(manifest: Path, names: set[str]) -> None:
    """SimpleTuner lists the files that it finds in this memory; the checkpoint has those of other nodes as well."""
    if manifest.exists():  # older releases write none
        content = json.loads(manifest.read_text(encoding="utf-8"))
        content["files"] = sorted(names - {MANIFEST, GUARD})
        manifest.write_text(json.dumps(content, indent=2), encoding="utf-8")


def checkpoint_bytes(trainer: Any) -> int:
    """What this node needs while one is saved, from above: a whole model's weights are drafted and then copied.

    Of a model in shards each rank writes its own; of another one the first rank writes all.
    """
    sharded = _sharded(trainer)
    if not sharded and not trainer.accelerator.is_main_process:
        return MIB
    full = "lora" not in str(trainer.config.model_type)
    weights = [_of_this_rank(weight) for model in trainer.accelerator._models for weight in model.parameters()]
    saved: int = sum(each.numel() * each.element_size() for each in weights if full or each.requires_grad)
    ema = 2 if getattr(trainer, "ema_model", None) is not None else 0
    states = [state for optimizer in trainer.accelerator._optimizers for state in optimizer.state.values()]
    tensors = [_of_this_rank(value) for state in states for value in state.values() if hasattr(value, "element_size")]
    optimizer: int = sum(each.numel() * each.element_size() for each in tensors)
    trained: int = sum(each.numel() for each in weights if each.requires_grad)
    needed = saved * (2 if full else 1) * (1 + ema) + (optimizer or 8 * trained)
    return needed * (local_size() if sharded else 1)


def _of_this_rank(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


FEATURE = BehindFeature
