"""A feature's side of the seams: what it is asked before a run, what it offers others, and the moments it may act at.

Each feature is one subclass in ``seams/features``, a module or a package. It overrides only the moments it needs; the
others cost nothing, because a moment calls only those features that override it. Upstream's own exceptions are
never caught here. What a feature raises stops the run, so anything that must not stop training catches its own.

Which places of SimpleTuner a feature needs is not said here but there: in the contract, by the feature's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.registry import contributions
from simpletuner_gh200.upstream.features import FEATURES, ON, Status

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.config.settings import Settings
    from simpletuner_gh200.seams.features.caches.batch_path import BatchPath
    from simpletuner_gh200.seams.runtime import Runtime

Request = Literal["off", "auto", "requested"]
"""Not wanted; wanted if it can be had; asked for explicitly, so that the run stops if it can't."""


class Feature:
    """Base of every feature. One instance lives per process, made when the extension is activated."""

    name: ClassVar[str]
    """As in ``upstream.features.FEATURES``, in ``SeamSpec.features`` and in the summary."""

    detail: ClassVar[str] = ""
    """Its key among the summary's details, where that is not its name."""

    runtime: Runtime
    """Set in a process that trains; ``request``, which is asked before a run, does without."""

    @property
    def settings(self) -> Settings:
        """What is in force, once the run was configured."""
        assert self.runtime.settings is not None
        return self.runtime.settings

    # -- asked before a run, and in it -----------------------------------------------------------------

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        """What the settings ask of this feature. Pure: preflight asks it too, for a run that is yet to start."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """JSON-ready facts about what it did, for the run's summary. Called at the end of the run."""
        return {}

    # -- what it offers to others ----------------------------------------------------------------------

    batch_path: BatchPath | None = None
    """Assembles batches in SimpleTuner's place, once there is something to assemble them from."""

    def telemetry(self) -> Mapping[str, Any]:
        """Numbers for the record of every step."""
        return {}

    def memory_to_come(self) -> int:
        """Host bytes that it was promised and has not taken yet."""
        return 0

    def came_to_grace(self) -> int:
        """Of what is in Grace now, bytes that were on the device when the first step was at its peak."""
        return 0

    weights_in_slots: Callable[[torch.Tensor], object | None] | None = None
    """Tells weights that are on the device for a while from other tensors; what a node is to hold of them instead."""

    def configured(self) -> None:
        """The settings are in force: called once, for every feature, on or off."""

    # -- moments, in the order of a run ----------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        """The feature is on: configuration and accelerator exist, nothing else does yet."""

    def dataset_entries(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The dataset list as it was read; return what upstream is to see."""
        return entries

    def create_backend(self, builder: Any, config: Any) -> Any | None:
        """``builder`` is about to make a local data backend for ``config``; return one instead, or None."""
        return None

    def samples_dealt(self, metadata: Any) -> None:
        """The samples of the dataset behind ``metadata`` were dealt to the ranks."""

    def data_ready(self, trainer: Any) -> None:
        """Datasets, caches and samplers exist and are filled."""

    def block_loaded(self, trainer: Any, weights: Sequence[torch.nn.Parameter]) -> None:
        """SimpleTuner has moved the weights of one of the denoiser's blocks, and none of the next yet."""

    def hooks_ready(self, trainer: Any) -> None:
        """The accelerator takes save/load hooks now."""

    def making_ema(self, trainer: Any) -> AbstractContextManager[None]:
        """Around the making of EMA, if there is to be one: early on some releases, after the optimizer on others."""
        return nullcontext()

    def before_train(self, trainer: Any) -> None:
        """Everything is prepared and resumed; the loop starts now."""

    def caching_pass(self, cache: Any) -> Callable[[Callable[[], Any]], Any] | None:
        """A VAE cache is about to encode what is missing; return what runs that, or None where it just runs."""

    def caching_told(self, told: Mapping[str, Any]) -> None:
        """How far a caching pass is, now and then while it runs."""

    def rebuild_cache(self, cache: Any) -> None:
        """A VAE cache is about to be rebuilt."""

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch is ready for the model; also called on evaluation batches."""
        return batch

    def predicting(self, trainer: Any, batch: Mapping[str, Any]) -> AbstractContextManager[object]:
        """The model is about to predict with gradients on, for a backward pass to come; what to do it in."""
        return nullcontext()

    def turn_began(self) -> None:
        """The loop turned: the next batch is fetched from now on."""

    def micro_batch_done(self) -> None:
        """Forward, backward and, at the end of a window, the optimizer are through."""

    def metrics(self, values: dict[str, Any]) -> None:
        """Values are on their way to the trackers, or into a status event; add to them in place."""

    def step_logged(self, values: dict[str, Any], step: int | None) -> None:
        """Values with everybody's metrics in them go to the trackers now; add to them in place."""

    def save_checkpoint(self, trainer: Any, save: Callable[..., Any], output_dir: str, suffix: str | None) -> Any:
        """A checkpoint is to be written: do so with ``save``, SimpleTuner's own method, and return its path."""
        return save(output_dir, suffix)

    def checkpoint_saved(self, seconds: float) -> None:
        """A checkpoint was written, or could not be, and took so long."""

    def event_sent(self, values: dict[str, Any]) -> None:
        """The metrics of a status event, everybody's in them, go out now; add to them in place."""

    def after_train(self, trainer: Any) -> None:
        """The loop ended, normally or not."""

    def close(self) -> None:
        """The process is done with training: release what is held. Called once, always."""


# -- which are on: decided before the run from the contract alone, in the rank from what is there ------------------

NOT_ASKED = Status("not asked for")

REMEDY = "remove its keys from the configuration, or use a release that `gh200 upstream check` passes"


def decide(
    features: Iterable[Feature],
    settings: Settings,
    environment: Mapping[str, str],
    against: Callable[[str], Sequence[str]],
    *,
    release: str = "this SimpleTuner",
) -> dict[str, Status]:
    """The status of every feature. Raises FeatureUnavailable for one that was asked for and can't be had.

    ``against`` tells, for a feature that is wanted, what speaks against it; it is asked for no other.
    """
    found: dict[str, Status] = {}
    for feature in features:
        request = feature.request(settings, environment)
        reasons = [] if request == "off" else list(against(feature.name))
        if request == "requested" and reasons:
            raise FeatureUnavailable(
                f"feature '{feature.name}' was asked for and cannot work with {release}: {'; '.join(reasons)}",
                remedy=REMEDY,
            )
        found[feature.name] = NOT_ASKED if request == "off" else Status(reasons[0]) if reasons else ON
    return found


def losses(statuses: Mapping[str, Status]) -> dict[str, Status]:
    """Those that were wanted and are off all the same: what users must be told."""
    return {name: status for name, status in statuses.items() if not status.on and status != NOT_ASKED}


def all_features() -> tuple[Feature, ...]:
    """One of each kind, in the order in which their moments are called."""
    found: list[Feature] = []
    for kind in contributions("simpletuner_gh200.seams.features", "FEATURE", type):
        if not issubclass(kind, Feature) or kind.name not in FEATURES:
            raise TypeError(f"{kind!r} is not a Feature with a line in upstream.features.FEATURES")
        found.append(kind())
    return tuple(found)
