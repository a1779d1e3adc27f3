"""Checkpoints that cost no training time: SimpleTuner saves to memory, a process of its own copies that to the disk.

SimpleTuner's own saving is called with a folder in memory for its output folder, so the files are its own. Whatever
it does with the checkpoint afterwards waits for the disk. At most one checkpoint is on its way.

The first rank of the node owns the folder and starts the process; where other ranks write too, it tells them where.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from simpletuner_gh200.config.blocks import CheckpointSettings
from simpletuner_gh200.config.environment import job_end, node_count
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.held.saved import MemoryFolder, Order, memory_file_systems, place_for, settle
from simpletuner_gh200.memory.ceilings import checkpoint_allowance
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.seams.checkpoints import from_main_process
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.behind.afterwards import Afterwards
from simpletuner_gh200.seams.features.behind.draining import Draining
from simpletuner_gh200.seams.outcome import disk_full
from simpletuner_gh200.seams.preemption import TRY_AGAIN
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

LAST_WORDS = 20.0
"""Seconds before the end of a job's time at which a rank stops waiting for the disk, and says what is there."""

MARGIN = 1.05
"""Of what a checkpoint is taken to need."""

SHARDED = ("fsdp_enable", "use_deepspeed_optimizer")
"""Settings with which every rank writes in every release, and some releases wait for none of them."""


class BehindFeature(Feature):
    name: ClassVar[str] = "behind"
    detail: ClassVar[str] = "checkpoints"

    def __init__(self) -> None:
        self.stall = 0.0
        self.draining: Draining | None = None
        """None where checkpoints are stock's, from the start."""
        self._afterwards: Afterwards | None = None
        self._main = False
        self._size = 0
        self._said = False

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "requested" if settings.part(CheckpointSettings).checkpoints == "behind" else "off"

    # -- moments ---------------------------------------------------------------------------------------

    def before_train(self, trainer: Any) -> None:
        self._main = bool(trainer.accelerator.is_main_process)
        place = from_main_process(trainer.accelerator, lambda: self._make_folder(trainer))
        if place is None:
            return
        if self.draining is None:
            self.draining = Draining(MemoryFolder(Path(place)), main=False)
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
        if self.draining is not None and self._main:
            folder = self.draining.folder
            (folder.remove if self.draining.order is None else folder.leave)()

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
        if not self._main or hurried or self.draining is None:
            return True
        there = self.draining.wait(until=until)
        if there:
            self._catch_up()
        return there

    def _catch_up(self) -> None:
        if self._afterwards is not None and self.draining is not None:
            (self._afterwards.forget if self.draining.lost else self._afterwards.catch_up)()

    # -- saving ----------------------------------------------------------------------------------------

    def _make_folder(self, trainer: Any) -> str | None:
        """In the main process: where checkpoints are saved to; None where they are stock's, which is said here."""
        lost = settle(Path(trainer.config.output_dir), lambda words: logger.info("gh200: %s", words), until=0.0)
        for words in lost:  # of the dead, whose memory is free first of all
            logger.warning("gh200: %s", words)
        self._size = checkpoint_bytes(trainer)
        place = place_for(self._size, memory_file_systems())
        if node_count() > 1:
            self._say_stock(f"the ranks are on {node_count()} nodes, and each has its own memory")
        elif place is None:
            self._say_stock("no memory file system (tmpfs) can be written to")
        else:
            self.draining = Draining(MemoryFolder.make(place[0]), main=True)
            return str(self.draining.folder.path)
        return None

    def _save(
        self,
        draining: Draining,
        afterwards: Afterwards,
        trainer: Any,
        save: Callable[..., Any],
        output_dir: str,
        suffix: str | None,
    ) -> Any:
        folder = draining.folder
        name = f"checkpoint-{trainer.state['global_step']}" + (f"-{suffix}" if suffix else "")
        if self._main:
            draining.wait(successor=name)
        to_memory = self._has_room(folder, trainer, name) if self._main else folder.hear(name)
        draining.landed()  # another rank has seen the main process wait for it
        self._catch_up()
        if not to_memory:
            return save(output_dir, suffix)
        saved_at = time.time()
        try:
            with afterwards.saving(str(folder.path), output_dir):
                save(str(folder.path), suffix)
                if any(getattr(trainer.config, setting, False) for setting in SHARDED):
                    trainer.accelerator.wait_for_everyone()
        except Exception as failure:
            if not self._may_repeat(folder, trainer, failure):
                raise
            folder.clear()
            self._say_stock(f"{folder.path} is full at {name}")
            return save(output_dir, suffix)
        finally:
            if self._main:
                folder.withdraw()
        order = Order(name, os.path.join(os.path.abspath(output_dir), name), saved_at)
        if self._main:
            self._size = max(self._size, folder.size(order))
        draining.hand_over(order)
        return os.path.join(output_dir, name)

    def _has_room(self, folder: MemoryFolder, trainer: Any, name: str) -> bool:
        """Decided by the main process for all that write; the others hear it through the folder."""
        needed = int(MARGIN * max(self._size, checkpoint_bytes(trainer)))
        room = os.statvfs(folder.path)
        allowed = checkpoint_allowance(room.f_bavail * room.f_frsize, host_memory())
        if needed > allowed.size:
            self._say_stock(f"{name} needs {format_bytes(needed)} of memory, and there is {allowed.why}")
        if trainer.accelerator.num_processes > 1:
            folder.announce(name, memory=needed <= allowed.size)
        return needed <= allowed.size

    @staticmethod
    def _may_repeat(folder: MemoryFolder, trainer: Any, failure: Exception) -> bool:
        """Is it memory that was full, and nothing of the run's state half swapped, as EMA does to save?"""
        alone = trainer.accelerator.num_processes == 1 and not getattr(trainer.config, "use_ema", False)
        return alone and disk_full(failure, [str(folder.path)]) is not None

    def _say_stock(self, why: str) -> None:
        words = f"gh200: checkpoints are saved as stock, and training waits for the disk: {why}"
        logger.log(logging.DEBUG if self._said else logging.WARNING, words)
        self._said = True


def checkpoint_bytes(trainer: Any) -> int:
    """What a checkpoint needs while it is saved, from above: a whole model's weights are drafted and then copied."""
    full = "lora" not in str(trainer.config.model_type)
    weights: list[Any] = [weight for model in trainer.accelerator._models for weight in model.parameters()]
    saved: int = sum(each.numel() * each.element_size() for each in weights if full or each.requires_grad)
    ema = 2 if getattr(trainer, "ema_model", None) is not None else 0
    states = [state for optimizer in trainer.accelerator._optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if hasattr(value, "element_size")]
    optimizer: int = sum(each.numel() * each.element_size() for each in tensors)
    trained: int = sum(each.numel() for each in weights if each.requires_grad)
    return saved * (2 if full else 1) * (1 + ema) + (optimizer or 8 * trained)


FEATURE = BehindFeature
