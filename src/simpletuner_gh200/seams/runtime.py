"""The extension in one process: seams and their state, features and whether they are on, the run's outcome."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import MemorySettings
from simpletuner_gh200.config.environment import rank
from simpletuner_gh200.config.legacy import LEGACY_FLAG
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.config.training import training_from
from simpletuner_gh200.errors import FeatureUnavailable, GH200Error
from simpletuner_gh200.seams.decided import ORIGIN, read_decision
from simpletuner_gh200.seams.feature import Feature, all_features, decide, losses
from simpletuner_gh200.seams.grace import Grace
from simpletuner_gh200.seams.lifeline import Lifeline
from simpletuner_gh200.seams.outcome import RunOutcome, mark
from simpletuner_gh200.seams.patch import Patches
from simpletuner_gh200.seams.seam import WAITING, InstalledSeam, all_seams
from simpletuner_gh200.telemetry.reading import FILE as TELEMETRY
from simpletuner_gh200.telemetry.redact import redact
from simpletuner_gh200.telemetry.sink import write_whole
from simpletuner_gh200.upstream.check import check_installed
from simpletuner_gh200.upstream.features import ON, Status, builds_on

if TYPE_CHECKING:
    from simpletuner_gh200.seams.features.caches.batch_path import BatchPath

logger = logging.getLogger("simpletuner_gh200")

SUMMARY = TELEMETRY.with_name("summary.json")
"""Below the output folder: there once the run has ended, and always whole."""


@dataclass(frozen=True)
class Launch:
    """How this process was started, as far as the extension cares."""

    config_path: str | None = None
    """An explicit ``--config PATH``."""
    flags: tuple[str, ...] = ()
    """Command-line flags that override the configuration file."""


@dataclass
class Phases:
    """Wall seconds of each phase of a run, in order."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def end(self, name: str, at: float | None = None) -> float:
        """The time since the last call, up to now or to ``at``, belongs to ``name``; returns how long that was."""
        now = time.perf_counter() if at is None else max(at, self._since)
        length, self._since = now - self._since, now
        self.seconds[name] = self.seconds.get(name, 0.0) + length
        return length


class Runtime:
    """Made by ``bootstrap.activate``; handed to every seam and feature."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.seams = {seam.name: InstalledSeam(seam) for seam in all_seams()}
        self.grace = Grace(self)
        self.features = all_features()
        for feature in self.features:
            feature.runtime = self
        self.settings: Settings | None = None
        self.decision: Mapping[str, Any] = {}
        """Of ``memory: "auto"``, the same in every rank."""
        self.trainer: Any = None
        self.raw_config: Mapping[str, Any] | None = None
        self.in_memory_for_all: dict[str, Any] | None = None
        """The older training-wide spelling of ``in_memory``, applied to every image dataset."""
        self.statuses: dict[str, Status] = {}
        self.verdict: Mapping[str, Status] = {}
        """What the check of SimpleTuner's source says of each feature; empty where nothing was wanted."""
        self.patches = Patches()
        """On objects of this run; removed at its end."""
        self.outcome = RunOutcome()
        self.phases = Phases()
        self.lifeline: Lifeline | None = None
        """To ``gh200 train``, where that started this process."""
        self._moments: dict[str, tuple[Callable[..., Any], ...]] = {}
        self._on: tuple[Feature, ...] = ()
        self._closed = False
        self._pid = os.getpid()

    def enters(self, phase: str, *, checkpoints: bool = False) -> None:
        """What the run is at from now on, as the end of "interrupted while"; would a signal get a checkpoint?"""
        if self.lifeline is not None:
            self.lifeline.tell(phase=phase, checkpoints=checkpoints)

    # -- features --------------------------------------------------------------------------------------

    def configure_from(self, trainer: Any) -> None:
        """Read our blocks off ``trainer.config``, take them off it again, and decide which features are on.

        Taking them off leaves SimpleTuner's own configuration object as it would be without us, down to the values it
        hashes and writes into trackers.
        """
        self.trainer = trainer
        given = _take_blocks(trainer.config)
        training = training_from(vars(trainer.config), given, os.environ)
        self.in_memory_for_all = training.modern.in_memory_for_all
        self.raw_config = training.values
        settings = training.raise_if_bad()
        for note in settings.notes:
            logger.info("gh200: %s", note)
        if settings.part(MemorySettings).memory == "auto":
            self.decision = read_decision()
            settings = settings.placed(self.decision.get("settings", {}), ORIGIN)
        self.configure(settings, verdict=lambda: check_installed().features)

    def configure(self, settings: Settings, verdict: Callable[[], Mapping[str, Status]] = dict) -> None:
        """Decide which features are on. Raises FeatureUnavailable for one that was asked for and can't be had.

        ``verdict`` is what the contract's check of SimpleTuner's source says; asked only where a feature is wanted.
        """
        self.settings = settings
        source = cache(verdict)

        def against(name: str) -> list[str]:
            self.verdict = source()
            return self._speaks_against(name)

        self.statuses = decide(self.features, settings, os.environ, against)
        self._on = tuple(feature for feature in self.features if self.statuses[feature.name].on)
        self._moments = {}
        for feature in self.features:
            feature.configured()
        for name, status in losses(self.statuses).items():
            logger.warning("gh200: feature %s is %s", name, status)

    def _speaks_against(self, name: str) -> list[str]:
        status = self.verdict.get(name, ON)
        return self._missing_seams(name) + ([] if status.reason is None else [status.reason])

    def _missing_seams(self, name: str) -> list[str]:
        """Places of its own that are not wrapped, and those of features it builds on that can't be."""
        wanted = {name, *builds_on(name)}
        off = (seam for seam in self.seams.values() if not seam.ok and not seam.spec.optional)
        concerned = (seam for seam in off if wanted & set(seam.spec.features))
        lost = (seam for seam in concerned if name in seam.spec.features or seam.status != WAITING)
        return [f"{seam.spec.name}: {seam.status}" for seam in lost]

    def feature_on(self, name: str) -> bool:
        return self.statuses.get(name) == ON

    @property
    def features_on(self) -> tuple[Feature, ...]:
        return self._on

    def switch_off(self, feature: Feature, reason: str) -> None:
        """A feature on auto found that it can't work here; it says so and is called no more."""
        self.statuses[feature.name] = Status(reason)
        logger.warning("gh200: feature %s is off: %s", feature.name, reason)
        self._on = tuple(other for other in self._on if other is not feature)
        self._moments = {}

    def switch_on(self, name: str, values: Mapping[str, Any], origin: str) -> bool:
        """Between two steps, with these settings; False where something speaks against it, which is then said."""
        assert self.settings is not None
        self.settings = self.settings.placed(values, origin)
        feature = next(feature for feature in self.features if feature.name == name)
        try:
            self.statuses |= decide((feature,), self.settings, os.environ, self._speaks_against)
            for moment in ("start", "hooks_ready", "before_train"):
                self._on = tuple(one for one in self.features if self.feature_on(one.name))
                self._moments = {}
                if self.feature_on(name):
                    getattr(feature, moment)(self.trainer)
        except FeatureUnavailable as refused:
            self.switch_off(feature, str(refused))
        return self.feature_on(name)

    @property
    def batch_path(self) -> BatchPath | None:
        """Who assembles batches in SimpleTuner's place; None until somebody can."""
        return next((feature.batch_path for feature in self._on if feature.batch_path is not None), None)

    def moment(self, name: str) -> tuple[Callable[..., Any], ...]:
        """The bound methods of those features that are on and override this moment."""
        found = self._moments.get(name)
        if found is None:
            base = getattr(Feature, name)
            overriding = (feature for feature in self._on if getattr(type(feature), name) is not base)
            found = tuple(self._recording(getattr(feature, name)) for feature in overriding)
            self._moments[name] = found
        return found

    def _recording(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Remember what a feature raised: older releases of SimpleTuner swallow it and exit 0."""

        def recorded(*args: Any) -> Any:
            try:
                return method(*args)
            except GH200Error as failure:
                self.outcome.fail(failure)
                raise

        return recorded

    def call(self, name: str, *args: Any) -> None:
        for method in self.moment(name):
            method(*args)

    def unwind(self, name: str, *args: Any) -> None:
        """As ``call``, last feature first: what was wrapped on the same object comes off in the reverse order."""
        for method in reversed(self.moment(name)):
            method(*args)

    # -- the end ---------------------------------------------------------------------------------------

    def failed(self, failure: BaseException) -> None:
        """Record why the run fails, and mark SimpleTuner's traceback with what of ours is in place."""
        self.outcome.fail(failure)
        mark(failure, self.seams_in_place)

    @property
    def seams_in_place(self) -> list[str]:
        return [name for name, seam in self.seams.items() if seam.ok]

    def close(self) -> None:
        """Let every feature release what it holds, whatever the others do. A forked child holds nothing of ours."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self.outcome.status == "completed":
            self.enters("writing packs for the next start")
        for method in (*reversed(self.moment("close")), self.patches.remove, self.leave_summary):
            try:
                method()
            except Exception as failure:
                logger.error("gh200: while closing: %s", failure, exc_info=failure)

    @property
    def _summary_file(self) -> Path | None:
        """None where there is nothing to write, or where it is not this rank's to write."""
        output = self.outcome.output_dir
        return Path(output) / SUMMARY if output and rank() == 0 and self._on else None

    def leave_summary(self) -> None:
        path = self._summary_file
        try:
            if path is not None:
                write_whole(path, redact(self.summary()))
        except OSError as refused:
            logger.warning("gh200: the run's summary could not be written to %s: %s", path, refused)

    def forget_earlier_summary(self) -> None:
        """What an earlier run in the same folder left must not be taken for this one's, should this one be killed."""
        path = self._summary_file
        try:
            if path is not None:
                path.unlink(missing_ok=True)
        except OSError as refused:
            logger.warning("gh200: the summary of an earlier run stays in %s: %s", path, refused)

    def summary(self) -> dict[str, Any]:
        """JSON-ready: outcome, seams, features, phases, and what each feature has to say."""
        return {
            "status": self.outcome.status,
            "reason": self.outcome.reason,
            "exit_code": 0 if self.outcome.status == "completed" else self.outcome.exit_code,
            "global_step": self.outcome.global_step,
            "max_train_steps": self.outcome.max_train_steps,
            "output_dir": self.outcome.output_dir,
            "seconds": {name: round(seconds, 3) for name, seconds in self.phases.seconds.items()},
            **self.state(),
            "details": {feature.detail or feature.name: feature.summary() for feature in self._on},
            "notes": list(self.settings.notes) if self.settings else [],
        }

    def state(self) -> dict[str, dict[str, str]]:
        """JSON-ready: every seam and every feature, in words."""
        return {
            "seams": {name: seam.status.text("ok") for name, seam in self.seams.items()},
            "features": {name: str(status) for name, status in self.statuses.items()},
        }


def _take_blocks(config: Any) -> dict[str, Any]:
    """Our flags, as they came through SimpleTuner's parser; the attributes are removed."""
    given: dict[str, Any] = {}
    older = vars(config).pop(LEGACY_FLAG, None)
    if older:
        given.update(json.loads(older) if isinstance(older, str) else older)
    for block in TRAINING_BLOCKS:
        value = vars(config).pop(block, None)
        if value not in (None, ""):
            given[block] = value
    return given
