"""In which order the stages of SimpleTuner's pass run that it starts together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

STAGES = ("_write_latents_in_batch", "_encode_images_in_batch", "_process_images_in_batch", "read_images_in_batch")
"""The last first."""

PATIENCE = 5.0
"""Seconds until SimpleTuner waits for the stages that it has started: else it was interrupted, and they just end. While
it waits they have their turn, however long the one before takes: a video's encoding can be longer."""


class Turns:
    """SimpleTuner's stages, which it starts together and then waits for, one after the other, the last stage first.

    So each finds in its queue what earlier rounds have left there, and nothing of this one. In stock that is so because
    a stage looks at once, and has something for the next one only after a while; what workers have done ahead of it is
    there at once.
    """

    def __init__(self, threads: int) -> None:
        """``threads``: how many stages can run at once."""
        self._threads = threads
        self._arrived: list[tuple[int, threading.Event, threading.Event]] = []
        self._changed = threading.Condition()
        self._giving = False
        self._thread = threading.local()

    def taken_by(self, place: int) -> Callable[..., Any]:
        def stage(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
            if getattr(self._thread, "has_turn", False):
                return wrapped(*args, **kwargs)  # a part of the stage that called it
            turn, done = threading.Event(), threading.Event()
            with self._changed:
                self._arrived.append((place, turn, done))
                self._changed.notify_all()
            while not turn.wait(PATIENCE) and self._giving:
                pass
            self._thread.has_turn = True
            try:
                return wrapped(*args, **kwargs)
            finally:
                self._thread.has_turn = False
                done.set()

        return stage

    def _has(self, arrived: int) -> bool:
        return len(self._arrived) >= arrived

    def given(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        """In place of ``_process_futures``: whatever was submitted arrives, has its turn, and is waited for."""
        left = len(args[0] if args else kwargs["futures"])
        self._giving = True
        try:
            while left > 0:
                with self._changed:
                    self._changed.wait_for(partial(self._has, min(left, self._threads)), PATIENCE)
                    arrived, self._arrived = sorted(self._arrived, key=lambda one: one[0]), []
                for _place, turn, done in arrived:
                    turn.set()
                    done.wait()
                left -= len(arrived) or left
        finally:
            self._giving = False
        return wrapped(*args, **kwargs)
