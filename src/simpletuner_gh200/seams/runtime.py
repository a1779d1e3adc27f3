"""The extension in one process: seams and their state, features and whether they are on, the run's outcome."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.seams import run_summary
from simpletuner_gh200.seams.decide import all_features, decide, losses
from simpletuner_gh200.seams.disk_full import disk_full
from simpletuner_gh200.seams.feature import Feature
from simpletuner_gh200.seams.lifeline import Lifeline
from simpletuner_gh200.seams.patch import Patches
from simpletuner_gh200.seams.seam import WAITING, InstalledSeam, all_seams
from simpletuner_gh200.seams.whose import mark
from simpletuner_gh200.upstream.features import ON, Status, builds_on

if TYPE_CHECKING:
    from simpletuner_gh200.seams.features.caches.batch_path import BatchPath

logger = logging.getLogger("simpletuner_gh200")


@dataclass(frozen=True)
class Launch:
    """How this process was started, as far as the extension cares."""

    config_path: str | None = None
    """An explicit ``--config PATH``."""
    flags: tuple[str, ...] = ()
    """Command-line flags that override the configuration file."""


@dataclass
class RunOutcome:
    """What became of the run, as the summary and the exit code report it."""

    status: str = "not started"
    """``not started``, ``training``, ``completed``, ``interrupted`` or ``failed``."""
    reason: str | None = None
    global_step: int = 0
    max_train_steps: int | None = None
    output_dir: str | None = None
    exit_code: int = 1
    """What the process returns unless the run completed."""
    ended_by_us: bool = False
    """We interrupt the main thread ourselves where a run must end: that is no word of the user's."""

    def fail(self, failure: BaseException) -> None:
        """The reason is the failure's own words; where a full disk is behind it, that comes last."""
        self.status, self.reason = "failed", f"{type(failure).__name__}: {failure}"
        if isinstance(failure, GH200Error):
            self.reason, self.exit_code = str(failure), failure.exit_code
        cause = disk_full(failure, [self.output_dir] if self.output_dir else [])
        if cause is not None:
            self.reason = f"{self.reason}\n  cause: {cause}"

    def end(self, failure: BaseException) -> None:
        """Fail, for a reason that no interrupt which follows from it may replace."""
        self.fail(failure)
        self.ended_by_us = True

    def interrupt_by_user(self) -> None:
        if not self.ended_by_us:
            self.interrupt("interrupted by the user")

    def interrupt(self, reason: str, exit_code: int = 128 + signal.SIGINT) -> None:
        self.status, self.reason, self.exit_code = "interrupted", reason, exit_code


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
        self.features = all_features()
        for feature in self.features:
            feature.runtime = self
        self.settings: Settings | None = None
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

    def configure(self, settings: Settings, verdict: Callable[[], Mapping[str, Status]] = dict) -> None:
        """Decide which features are on. Raises FeatureUnavailable for one that was asked for and can't be had.

        ``verdict`` is what the contract's check of SimpleTuner's source says; asked only where a feature is wanted.
        """
        self.settings = settings
        source = cache(verdict)

        def against(name: str) -> list[str]:
            self.verdict = source()
            status = self.verdict.get(name, ON)
            return self._missing_seams(name) + ([] if status.reason is None else [status.reason])

        self.statuses = decide(self.features, settings, os.environ, against)
        self._on = tuple(feature for feature in self.features if self.statuses[feature.name].on)
        self._moments = {}
        for feature in self.features:
            feature.configured()
        for name, status in losses(self.statuses).items():
            logger.warning("gh200: feature %s is %s", name, status)

    def _missing_seams(self, name: str) -> list[str]:
        """Places of its own that are not wrapped, and those of features it builds on that can't be."""
        wanted = {name, *builds_on(name)}
        missing = []
        for seam in self.seams.values():
            own = name in seam.spec.features
            if seam.ok or seam.spec.optional or not wanted & set(seam.spec.features):
                continue
            if own or seam.status != WAITING:
                missing.append(f"{seam.spec.name}: {seam.status}")
        return missing

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
        failures: list[BaseException] = []
        for method in (*reversed(self.moment("close")), self.patches.remove, lambda: run_summary.leave(self)):
            try:
                method()
            except Exception as failure:  # noqa: BLE001 - every feature must get its turn; reported right below
                failures.append(failure)
        for failed in failures:
            logger.error("gh200: while closing: %s", failed, exc_info=failed)

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
            "details": {feature.name: feature.summary() for feature in self._on},
            "notes": list(self.settings.notes) if self.settings else [],
        }

    def state(self) -> dict[str, dict[str, str]]:
        """JSON-ready: every seam and every feature, in words."""
        return {
            "seams": {name: seam.status.text("ok") for name, seam in self.seams.items()},
            "features": {name: str(status) for name, status in self.statuses.items()},
        }
