"""A feature's side of the seams: the moments of a training run at which it may act.

Each feature is one subclass in one file under ``seams/features``. It overrides only the moments it needs; the
others cost nothing, because a moment calls only those features that override it. Upstream's own exceptions are
never caught here. What a feature raises stops the run, so anything that must not stop training catches its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from simpletuner_gh200.config.settings import Settings
    from simpletuner_gh200.memory.allocate import SlabRecord
    from simpletuner_gh200.seams.runtime import Runtime

Request = Literal["off", "auto", "asked"]
"""Not wanted; wanted if it can be had; asked for explicitly, so that the run stops if it can't."""


class Feature:
    """Base of every feature. One instance lives per process, made when the extension is activated."""

    name: ClassVar[str]
    """As in ``SeamSpec.features`` and in the summary."""

    seams: ClassVar[tuple[str, ...]] = ()
    """Names of the seams without which it can't work."""

    runtime: Runtime
    """Set before any moment is called."""

    def request(self, settings: Settings) -> Request:
        """What the settings ask of this feature. Called once, right after the configuration was read."""
        raise NotImplementedError

    def demo_config(self) -> dict[str, Any]:
        """Blocks that the demo's training configuration carries because of this feature."""
        return {}

    def summary(self) -> dict[str, Any]:
        """JSON-ready facts about what it did, for the run's summary. Called at the end of the run."""
        return {}

    def slab_records(self) -> Iterable[SlabRecord]:
        """The slabs it made, and why they are as they are."""
        return ()

    # -- moments, in the order of a run ----------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        """The feature is on: configuration and accelerator exist, nothing else does yet (seam 5)."""

    def dataset_entries(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The dataset list as it was read (seam 3); return what upstream is to see."""
        return entries

    def create_backend(self, builder: Any, config: Any) -> Any | None:
        """``builder`` is about to make a local data backend for ``config`` (seam 4); return one instead, or None."""
        return None

    def data_ready(self, trainer: Any) -> None:
        """Datasets, caches and samplers exist and are filled (after seam 6)."""

    def before_data(self, trainer: Any) -> None:
        """Right before datasets and caches are made (before seam 6)."""

    def hooks_ready(self, trainer: Any) -> None:
        """The accelerator takes save/load hooks now (seam 9)."""

    def before_train(self, trainer: Any) -> None:
        """Everything is prepared and resumed; the loop starts now."""

    def rebuild_cache(self, cache: Any) -> None:
        """A VAE cache is about to be rebuilt (seam 7)."""

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch is ready for the model (seam 8); also called on evaluation batches."""
        return batch

    def status_event(self, trainer: Any, event: dict[str, Any]) -> None:
        """A training status event with progress is about to be sent (seam 10); add to it in place."""

    def log_values(self, values: dict[str, Any], step: int | None) -> None:
        """Values are about to go to the trackers (``accelerator.log``); add to them in place."""

    def after_train(self, trainer: Any) -> None:
        """The loop ended, normally or not."""

    def close(self) -> None:
        """The process is done with training: release what is held. Called once, always."""
