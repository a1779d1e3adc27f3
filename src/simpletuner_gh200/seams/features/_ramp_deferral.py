"""Nothing fires in mid-window: what upstream would do there waits for the window's last micro-batch.

Three things are not tied to optimizer steps upstream: a manual validation, which is polled at every micro-batch, and
the validation and the checkpoint at an epoch's end, which may fall anywhere in a window. The requests themselves are
left with upstream; only the moment at which it looks at them is moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpletuner_gh200.seams.features._ramp_wraps import Wraps

Predicate = Callable[[], bool]


class Deferral:
    """Wraps methods of one trainer, on the instance."""

    def __init__(self, trainer: Any, mid_window: Predicate) -> None:
        self._mid_window = mid_window
        self._checkpoint_due = False
        self._validation_due = False
        self._wraps = Wraps()
        self._trainer = trainer

    def install(self) -> None:
        trainer = self._trainer
        self._wrap(trainer, "_consume_manual_validation_request", self._manual_validation)
        self._wrap(trainer, "_should_checkpoint_epoch", self._epoch_checkpoint)
        self._wrap(trainer, "_consume_manual_checkpoint_request", self._manual_checkpoint)
        if getattr(trainer, "validation", None) is not None:
            self._wrap(trainer.validation, "should_perform_intermediary_validation", self._validation)

    def uninstall(self) -> None:
        self._wraps.remove()

    def window_opened(self, _window: object) -> None:
        """What was due at the window before has had its chance."""
        self._validation_due = False

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:  # an older release, which never does this
            return
        self._wraps.put(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _manual_validation(self, original: Predicate) -> bool:
        # Not asking leaves the request where it is, so that it is found at the window's end.
        return not self._mid_window() and bool(original())

    def _epoch_checkpoint(self, original: Callable[[int], bool], epoch: int) -> bool:
        wanted = bool(original(epoch))
        if wanted and self._mid_window():
            self._checkpoint_due = True
            return False
        return wanted

    def _manual_checkpoint(self, original: Predicate) -> bool:
        # Upstream asks only after an optimizer step; both are asked, so that a request isn't left over.
        requested = bool(original())
        due, self._checkpoint_due = self._checkpoint_due, False
        return requested or due

    def _validation(self, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        wanted = bool(original(*args, **kwargs))
        if self._mid_window():
            self._validation_due = self._validation_due or wanted
            return False
        return wanted or self._validation_due
