"""What SimpleTuner does with a checkpoint once it is saved: kept in order, and done when the disk has it.

Rotation, scripts, uploads, validation's pictures and the event that it is saved are methods of the trainer, replaced on
the object. Each is called later as if it were called at the step at which it was asked for.

A whole model SimpleTuner drafts in a folder of its own, copies into the checkpoint and removes. Both are in the same
memory here, so a second name for the same bytes does.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from simpletuner_gh200.seams.patch import Patches, put, wrap_method

METHODS = (
    "_run_post_checkpoint_script",
    "_run_post_upload_script",
    "_populate_checkpoint_assets",
    "_write_checkpoint_epoch",
    "_schedule_checkpoint_hub_upload",
    "_schedule_hub_upload",
    "checkpoint_state_cleanup",
)
"""They look for a checkpoint that was saved; older releases have not all of them."""


class Afterwards:
    """Of one trainer."""

    def __init__(self, trainer: Any, landed: Callable[[], bool], wait: Callable[[], object]) -> None:
        """``landed``: is the last checkpoint on the disk? ``wait``: until it is, where this rank is one that waits."""
        self._landed, self._wait = landed, wait
        self._calls: deque[Callable[[], object]] = deque()
        self._catching_up = False
        self._saving: tuple[str, str] | None = None
        """While SimpleTuner writes: (the memory folder, the folder it stands for)."""
        self._patches = Patches()
        own = {"_emit_event": self._event, "_finish_hub_uploads": self._look}
        for name, wrapper in {**dict.fromkeys(METHODS, self._later), **own}.items():
            if hasattr(trainer, name):
                self._patches.install(wrap_method(trainer, name, wrapper))
        manager = getattr(trainer, "checkpoint_manager", None)
        if manager is not None:  # whoever asks for the newest checkpoint makes a manager of his own
            self._patches.install(wrap_method(type(manager), "get_latest_checkpoint", self._look))

        if getattr(trainer.config, "fsdp_enable", False):
            from torch.distributed.checkpoint import FileSystemWriter

            self._patches.install(wrap_method(FileSystemWriter, "storage_meta", self._shards))

    def remove(self) -> None:
        self._patches.remove()

    @contextmanager
    def saving(self, memory: str, output_dir: str) -> Iterator[None]:
        """SimpleTuner writes into ``memory`` in place of ``output_dir``; what is said of it names the latter."""
        from simpletuner.helpers.training import save_hooks

        self._saving = memory, output_dir
        links = put(save_hooks, "shutil", linking(memory))
        links.install()
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            links.uninstall()
            self._saving = None

    def forget(self) -> None:
        """That checkpoint will never be there."""
        self._calls.clear()

    def catch_up(self) -> None:
        if self._catching_up:  # what is done now calls another of them
            return
        self._catching_up = True
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._catching_up = False

    def _later(self, wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
        if self._saving is None and self._landed():
            self.catch_up()
            return wrapped(*args, **kwargs)
        self._calls.append(_as_now(wrapped, trainer, self._in_place(args), self._in_place(kwargs)))
        return None

    def _event(self, wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
        if self._saving is None:
            return wrapped(*args, **kwargs)
        args, kwargs = self._in_place(args), self._in_place(kwargs)
        event = args[0] if args else kwargs.get("event")
        if isinstance(event, dict) and "checkpoint" in event:  # that it is saved
            self._calls.append(lambda: wrapped(*args, **kwargs))
            return None
        return wrapped(*args, **kwargs)

    def _look(self, wrapped: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        """Somebody looks for the newest checkpoint, or ends."""
        if self._saving is None:
            self._wait()
        return wrapped(*args, **kwargs)

    def _shards(self, wrapped: Callable[..., Any], writer: Any, args: Any, kwargs: Any) -> Any:
        """torch writes the folder's name into the list of a model's shards."""
        meta = wrapped(*args, **kwargs)
        meta.checkpoint_id = type(meta.checkpoint_id)(self._in_place(str(meta.checkpoint_id)))
        return meta

    def _in_place(self, value: Any) -> Any:
        """With the checkpoint's place on the disk for that in memory."""
        if self._saving is None:
            return value
        match value:
            case str():
                return value.replace(*self._saving)
            case dict():
                return {key: self._in_place(each) for key, each in value.items()}
            case list() | tuple():
                return type(value)(map(self._in_place, value))
        return value


def linking(memory: str) -> SimpleNamespace:
    """``shutil``, but for copies of what lies in ``memory``."""

    def link(source: str, target: str, **options: Any) -> str:
        if not source.startswith(memory + os.sep):
            return shutil.copy2(source, target, **options)
        with suppress(FileNotFoundError):
            os.unlink(target)
        os.link(source, target)
        return target

    return SimpleNamespace(**{**vars(shutil), "copy2": link, "copytree": partial(shutil.copytree, copy_function=link)})


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
