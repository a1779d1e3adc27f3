"""A signal asks for a checkpoint and an end: preemption, a requeue, the end of a time limit.

The request goes through SimpleTuner's own trigger for manual checkpoints, which it looks at after every optimizer
step, so a window is finished first. The ranks agree each time: a checkpoint is written by all of them or by none, and
the signal may have reached only one. The loop is left at the top of its next turn.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from types import FrameType
from typing import Any

from simpletuner_gh200.config.environment import for_child, slurm_job
from simpletuner_gh200.seams.patch import Patches, wrap_method

ASKING = (signal.SIGTERM, signal.SIGUSR1)

TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits: nothing is wrong, start it again. Slurm's requeue can be told to read it so."""


def job_end() -> float | None:
    """When Slurm ends the job, by the clock; None where nobody says so.

    Slurm is asked, for a preemption brings the end forward to its grace time, and an operator may move it. Where it
    does not answer, what it said as the job began has to do.
    """
    number, as_it_began = slurm_job()
    if not number:
        return None
    command = ["squeue", "--noheader", f"--jobs={number}", "--format=%e"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=5, env=for_child({"SLURM_TIME_FORMAT": "standard"})
        )
        return datetime.fromisoformat(asked.stdout.strip()).timestamp()
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return as_it_began


class CheckpointWritten(KeyboardInterrupt):
    """Leaves SimpleTuner's loop as Ctrl-C would, which it reports as an interrupt and not as a failure."""


class Preemption:
    """Between ``install`` and ``uninstall`` a signal means: checkpoint, then end.

    Whether a second one ends at once is for ``gh200 train`` to say, whose ranks alone have this: some schedulers signal
    every process of a job, so that a rank hears the first one from them and from its launcher.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._requested = False
        self._written = False
        self._other_consumer: Callable[[], bool] | None = None
        self._undo = ExitStack()

    def install(self) -> bool:
        """False where this SimpleTuner has no such trigger or others have the signals, which then mean what they did.

        Even so this rank takes part where the others agree, whose signals may be theirs.
        """
        trainer = self._trainer
        if not (hasattr(trainer, "register_manual_checkpoint_trigger") and hasattr(trainer, "_exit_on_signal")):
            return False
        self._other_consumer = getattr(trainer, "_manual_checkpoint_consumer", None)
        trainer.register_manual_checkpoint_trigger(self._consume)
        self._undo.callback(trainer.register_manual_checkpoint_trigger, self._other_consumer or (lambda: False))
        patches = Patches()
        patches.install(wrap_method(trainer, "_exit_on_signal", self._turn_begins))
        self._undo.callback(patches.remove)
        free = [number for number in ASKING if signal.getsignal(number) is signal.SIG_DFL]
        for number in free:
            self._undo.callback(signal.signal, number, signal.signal(number, self._request))
        return bool(free)

    def uninstall(self) -> None:
        self._undo.close()

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True

    def _consume(self) -> bool:
        """SimpleTuner asks after an optimizer step, in every rank: is a checkpoint wanted?"""
        others = bool(self._other_consumer()) if self._other_consumer is not None else False
        if not self._written and self._any_rank_requested():
            self._written = True
        return others or self._written

    def _any_rank_requested(self) -> bool:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return self._requested
        import torch

        flag = torch.tensor([float(self._requested)], device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item())

    def _turn_begins(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if self._written:
            raise CheckpointWritten("a signal asked for a checkpoint, and it is written")
        return wrapped(*args, **kwargs)
