"""Checkpoints that cost no training time: SimpleTuner saves to memory, a process of its own copies that to the disk.

SimpleTuner's own saving is called with a folder in memory for its output folder, so the files are its own. Whatever
it does with the checkpoint afterwards (rotation, scripts, uploads, validation's pictures, its event) is kept, in order,
and done when the checkpoint is on the disk, as at the step at which it was saved. At most one is on its way.

The first rank of the node owns the folder and starts the process; where other ranks write too, it tells them where.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from simpletuner_gh200.config.blocks import CheckpointSettings
from simpletuner_gh200.config.environment import job_end, node_count
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.held.saved import MOST_STARTS, MemoryFolder, Order, memory_file_systems, place_for, settle
from simpletuner_gh200.memory.ceilings import checkpoint_allowance
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.seams.checkpoints import from_main_process
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.outcome import disk_full
from simpletuner_gh200.seams.patch import Patches, wrap_method
from simpletuner_gh200.seams.preemption import TRY_AGAIN
from simpletuner_gh200.units import format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

AFTERWARDS = (
    "_run_post_checkpoint_script",
    "_run_post_upload_script",
    "_populate_checkpoint_assets",
    "_write_checkpoint_epoch",
    "_schedule_checkpoint_hub_upload",
    "_schedule_hub_upload",
    "checkpoint_state_cleanup",
)
"""SimpleTuner's methods that look for a checkpoint that was saved; older releases have not all of them."""

LAST_WORDS = 20.0
"""Seconds before the end of a job's time at which a rank stops waiting for the disk, and says what is there."""

MARGIN = 1.05
"""Of what a checkpoint is taken to need."""


class BehindFeature(Feature):
    name: ClassVar[str] = "behind"
    detail: ClassVar[str] = "checkpoints"

    def __init__(self) -> None:
        self._trainer: Any = None
        self._folder: MemoryFolder | None = None
        self._order: Order | None = None
        self._drainer: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._saving: tuple[str, str] | None = None
        """While SimpleTuner writes: (the memory folder, the folder it stands for)."""
        self._afterwards: deque[Callable[[], object]] = deque()
        self._catching_up = False
        self._patches = Patches()
        self._size = 0
        self._failing: str | None = None
        self._said: set[str] = set()
        self.behind, self.stall, self.waited, self.drained = 0, 0.0, 0.0, 0.0
        self.safe: Order | None = None

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "requested" if settings.part(CheckpointSettings).checkpoints == "behind" else "off"

    # -- moments ---------------------------------------------------------------------------------------

    def before_train(self, trainer: Any) -> None:
        self._trainer = trainer
        place = from_main_process(trainer.accelerator, lambda: self._make_folder(trainer))
        if place is None:
            return
        self._folder = self._folder or MemoryFolder(Path(place))
        for name in (*AFTERWARDS, "_emit_event", "_finish_hub_uploads"):
            if hasattr(trainer, name):
                wrapper = {"_emit_event": self._event, "_finish_hub_uploads": self._finish}.get(name, self._later)
                self._patches.install(wrap_method(trainer, name, wrapper))
        manager = getattr(trainer, "checkpoint_manager", None)
        if manager is not None:  # whoever asks for the newest checkpoint makes one of his own
            self._patches.install(wrap_method(type(manager), "get_latest_checkpoint", self._finish))

    def save_checkpoint(self, trainer: Any, save: Callable[..., Any], output_dir: str, suffix: str | None) -> Any:
        began = time.perf_counter()
        try:
            return self._save(trainer, save, output_dir, suffix) if self._folder else save(output_dir, suffix)
        finally:
            self.stall += time.perf_counter() - began

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        if self._order is not None and self._landed():
            self._catch_up()
        return batch

    def after_train(self, trainer: Any) -> None:
        """The drainer outlives a run that is in a hurry; others end when the disk has the checkpoint."""
        outcome = self.runtime.outcome
        asked = outcome.exit_code == TRY_AGAIN
        end = job_end() if asked else None  # a scheduler's signal comes some minutes before
        if self._main and (outcome.status != "interrupted" or asked) and not self._wait(until=end) and self._order:
            logger.warning("gh200: the job's time runs out before %s is on disk", self._order.source)
            self._patches.remove()

    def close(self) -> None:
        if self._folder is not None and self._main:
            (self._folder.remove if self._order is None else self._folder.leave)()

    def summary(self) -> dict[str, Any]:
        safe, pending = (None if order is None else order.target for order in (self.safe, self._order))
        seconds = {"stall_s": self.stall, "waited_s": self.waited, "drain_s": self.drained}
        pending = None if self._order is None else self._order.target
        return {
            "behind": self.behind,
            **{name: round(s, 3) for name, s in seconds.items()},
            "safe": safe,
            "pending": pending,
        }

    def telemetry(self) -> dict[str, Any]:
        told: dict[str, Any] = {"stall_seconds": self.stall, "drain_seconds": self.drained, "safe": None}
        if self.safe is not None:
            told.update(safe=Path(self.safe.target).name, safe_age=time.time() - self.safe.saved_at)
        return told

    # -- saving ----------------------------------------------------------------------------------------

    @property
    def _main(self) -> bool:
        return bool(self._trainer is not None and self._trainer.accelerator.is_main_process)

    def _make_folder(self, trainer: Any) -> str | None:
        """In the main process: where checkpoints are saved to; None where they are stock's, which is said here."""
        said = settle(Path(trainer.config.output_dir), lambda words: logger.info("gh200: %s", words), until=0.0)
        for words in said:  # of the dead, whose memory is free first of all
            logger.warning("gh200: %s", words)
        self._size = checkpoint_bytes(trainer)
        systems = memory_file_systems()
        place = place_for(self._size, systems)
        if node_count() > 1:
            self._say_stock(f"the ranks are on {node_count()} nodes, and each has its own memory")
        elif place is None:
            self._say_stock("no memory file system (tmpfs) can be written to")
        else:
            self._folder = MemoryFolder.make(place[0])
            return str(self._folder.path)
        return None

    def _save(self, trainer: Any, save: Callable[..., Any], output_dir: str, suffix: str | None) -> Any:
        assert self._folder is not None
        name = f"checkpoint-{trainer.state['global_step']}" + (f"-{suffix}" if suffix else "")
        if self._main:
            self._wait(name)
        if not self._to_memory(trainer, name):
            return save(output_dir, suffix)
        self._catch_up()
        saved_at = time.time()
        try:
            with self._in_memory(output_dir):
                save(str(self._folder.path), suffix)
                if any(getattr(trainer.config, name, False) for name in ("fsdp_enable", "use_deepspeed_optimizer")):
                    trainer.accelerator.wait_for_everyone()  # all of them write, and some releases wait for none
        except Exception as failure:
            if not self._may_repeat(trainer, failure):
                raise
            self._afterwards.clear()
            self._folder.clear()
            self._say_stock(f"{self._folder.path} is full at {name}")
            return save(output_dir, suffix)
        finally:
            if self._main:
                self._folder.withdraw()
        order = Order(name, os.path.join(os.path.abspath(output_dir), name), saved_at)
        self._hand_over(order)
        return os.path.join(output_dir, name)

    def _to_memory(self, trainer: Any, name: str) -> bool:
        """Decided by the main process for all that write; the others hear it through the folder."""
        assert self._folder is not None
        if not self._main:
            memory = self._folder.hear(name)
            self._landed()  # the main process has waited for it
            return memory
        needed = int(MARGIN * max(self._size, checkpoint_bytes(trainer)))
        room = os.statvfs(self._folder.path)
        allowed = checkpoint_allowance(room.f_bavail * room.f_frsize, host_memory())
        if needed > allowed.size:
            self._say_stock(f"{name} needs {format_bytes(needed)} of memory, and there is {allowed.why}")
        if trainer.accelerator.num_processes > 1:
            self._folder.announce(name, memory=needed <= allowed.size)
        return needed <= allowed.size

    @contextmanager
    def _in_memory(self, output_dir: str) -> Iterator[None]:
        self._saving = str(self._folder.path), output_dir  # type: ignore[union-attr]
        try:
            yield
        finally:
            self._saving = None

    def _may_repeat(self, trainer: Any, failure: Exception) -> bool:
        """Is it memory that was full, and nothing of the run's state half swapped, as EMA does to save?"""
        alone = trainer.accelerator.num_processes == 1 and not getattr(trainer.config, "use_ema", False)
        return alone and disk_full(failure, [str(self._folder.path)]) is not None  # type: ignore[union-attr]

    def _say_stock(self, why: str) -> None:
        words = f"gh200: checkpoints are saved as stock, and training waits for the disk: {why}"
        logger.log(logging.DEBUG if "stock" in self._said else logging.WARNING, words)
        self._said.add("stock")

    # -- draining --------------------------------------------------------------------------------------

    def _hand_over(self, order: Order) -> None:
        assert self._folder is not None
        self._order, self._starts = order, 0
        self.behind += 1
        if self._main:
            self._size = max(self._size, self._folder.size(order))
            self._folder.give(order)
            self._drainer = self._folder.start_drainer()

    def _landed(self) -> bool:
        """Is the last checkpoint on the disk? Raises RunFailed where it never will be."""
        folder, order = self._folder, self._order
        if folder is None or order is None:
            return True
        if not self._main:
            return folder.order() != order and self._forget(order)
        assert self._drainer is not None
        told = folder.told()
        if told is not None and told.failing not in (None, self._failing):
            self._failing = told.failing
            logger.warning("gh200: %s can't be written, and is tried again: %s", order.target, told.failing)
        if self._drainer.poll() is None:
            return False
        if folder.order() is not None:  # somebody has killed it
            self._starts += 1
            if self._starts > MOST_STARTS:
                raise RunFailed(f"{order.source} can't be copied to disk: the process that does it ends at once")
            self._drainer = folder.start_drainer()
            return False
        told = folder.told()
        if told is not None and told.given_up:
            self._order = None
            self._afterwards.clear()
            remedy = "make room or mend the disk; the checkpoints before it are as they were"
            raise RunFailed(f"{order.target} could not be written: {told.failing}", remedy=remedy)
        if told is not None:
            self.drained += told.seconds
            size, took = format_bytes(told.bytes), format_seconds(told.seconds)
            logger.info("gh200: %s is on disk: %s in %s behind the run", order.source, size, took)
        return self._forget(order)

    def _forget(self, order: Order) -> bool:
        self.safe, self._order, self._failing = order, None, None
        return True

    def _wait(self, successor: str | None = None, *, until: float | None = None) -> bool:
        """Until the last one is on the disk, and what waits for it is done; False where time ran out before."""
        order, began = self._order, time.perf_counter()
        while not self._landed():
            if until is not None and time.time() > until - LAST_WORDS:
                return False
            time.sleep(0.01)
        waited = time.perf_counter() - began
        if order is not None and successor is not None and waited > 0.1:
            self.waited += waited
            words = "gh200: the disk is too slow for checkpoints this often: %s waited %s for %s to be written"
            logger.warning(words, successor, format_seconds(waited), order.source)
        self._catch_up()
        return True

    # -- what looks for the checkpoint -----------------------------------------------------------------

    def _catch_up(self) -> None:
        if self._catching_up:  # what is done now calls another of them
            return
        self._catching_up = True
        try:
            while self._afterwards:
                self._afterwards.popleft()()
        finally:
            self._catching_up = False

    def _later(self, wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
        if self._saving is None:
            if self._landed():
                self._catch_up()
                return wrapped(*args, **kwargs)
        else:
            args, kwargs = self._in_place(args), self._in_place(kwargs)
        self._afterwards.append(self._as_now(wrapped, trainer, args, kwargs))
        return None

    @staticmethod
    def _as_now(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Callable[[], None]:
        """A call as if it were made at this step: scripts, uploads and model cards are told the number."""
        from simpletuner.helpers.training.state_tracker import StateTracker

        step = StateTracker.get_global_step()
        then = {name: trainer.state[name] for name in ("global_step", "current_epoch") if name in trainer.state}

        def call() -> None:
            later, now = StateTracker.get_global_step(), {name: trainer.state[name] for name in then}
            StateTracker.set_global_step(step)
            trainer.state.update(then)
            try:
                if wrapped.__name__ == "checkpoint_state_cleanup":
                    trainer._drain_hub_upload_futures(wait=True)  # of what may go now
                wrapped(*args, **kwargs)
            finally:
                trainer.state.update(now)
                StateTracker.set_global_step(later)

        return call

    def _event(self, wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
        if self._saving is None:
            return wrapped(*args, **kwargs)
        args, kwargs = self._in_place(args), self._in_place(kwargs)
        event = args[0] if args else kwargs.get("event")
        if isinstance(event, dict) and "checkpoint" in event:  # that it is saved
            self._afterwards.append(lambda: wrapped(*args, **kwargs))
            return None
        return wrapped(*args, **kwargs)

    def _finish(self, wrapped: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        """Somebody looks for the newest checkpoint, or ends."""
        if self._saving is None and self._main and self.runtime.outcome.status != "interrupted":
            self._wait()
        return wrapped(*args, **kwargs)

    def _in_place(self, value: Any) -> Any:
        """With the checkpoint's place on the disk for that in memory."""
        assert self._saving is not None
        match value:
            case str():
                return value.replace(*self._saving)
            case dict():
                return {key: self._in_place(each) for key, each in value.items()}
            case list() | tuple():
                return type(value)(map(self._in_place, value))
        return value


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
