"""The extension in one process: seams and their state, features and whether they are on, the run's outcome."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import FeatureUnavailable, GH200Error
from simpletuner_gh200.registry import contributions
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.seam import InstalledSeam, all_seams

logger = logging.getLogger("simpletuner_gh200")


@dataclass(frozen=True)
class Launch:
    """How this process was started, as far as the extension cares."""

    config_path: str | None = None
    """An explicit ``--config PATH``."""
    flags: tuple[str, ...] = ()
    """Command-line flags that override the configuration file."""


@dataclass
class Outcome:
    """What became of the run, as the summary and the exit code report it."""

    status: str = "not started"
    """``not started``, ``training``, ``completed``, ``interrupted`` or ``failed``."""
    reason: str | None = None
    global_step: int = 0
    max_train_steps: int | None = None
    output_dir: str | None = None
    exit_code: int = 1
    """What the process returns unless the run completed."""

    def fail(self, failure: GH200Error) -> None:
        self.status, self.reason, self.exit_code = "failed", str(failure), failure.exit_code


@dataclass
class Phases:
    """Wall seconds of each phase of a run, in order."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def end(self, name: str) -> None:
        """The time since the last call belongs to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Runtime:
    """Made by ``bootstrap.activate``; handed to every seam and feature."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.seams = {seam.name: InstalledSeam(seam) for seam in all_seams()}
        self.features = tuple(kind() for kind in _feature_classes())
        for feature in self.features:
            feature.runtime = self
        self.settings: Settings | None = None
        self.trainer: Any = None
        self.raw_config: Mapping[str, Any] | None = None
        self.in_memory_for_all: dict[str, Any] | None = None
        """The older training-wide spelling of ``in_memory``, applied to every image dataset."""
        self.statuses: dict[str, str] = {}
        self.facts: Mapping[str, str] = {}
        self.outcome = Outcome()
        self.phases = Phases()
        self._moments: dict[str, tuple[Callable[..., Any], ...]] = {}
        self._on: tuple[Feature, ...] = ()
        self._closed = False
        self._pid = os.getpid()

    # -- features --------------------------------------------------------------------------------------

    def configure(self, settings: Settings, facts: Callable[[], Mapping[str, str]] = dict) -> None:
        """Decide which features are on. Raises FeatureUnavailable for one that was asked for and can't be had.

        ``facts`` tells, feature by feature, what the contract's check of SimpleTuner's source says: ``on``, or
        ``off: reason``. It is asked only where a feature is wanted.
        """
        self.settings = settings
        requests = {feature: feature.request(settings) for feature in self.features}
        if any(request != "off" for request in requests.values()):
            self.facts = facts()
        self._on = tuple(feature for feature, request in requests.items() if self._decide(feature, request))
        self._moments = {}
        for name, status in self.statuses.items():
            if status.startswith("off: ") and status != "off: not asked for":
                logger.warning("gh200: feature %s is %s", name, status)

    def _decide(self, feature: Feature, request: Request) -> bool:
        reasons = self._reasons_against(feature)
        if request == "off":
            self.statuses[feature.name] = "off: not asked for"
        elif not reasons:
            self.statuses[feature.name] = "on"
        elif request == "asked":
            raise FeatureUnavailable(
                f"feature '{feature.name}' was asked for and cannot work with this SimpleTuner: {'; '.join(reasons)}",
                remedy="remove its keys from the configuration, or use a release that `gh200 upstream check` passes",
            )
        else:
            self.statuses[feature.name] = f"off: {reasons[0]}"
        return self.statuses[feature.name] == "on"

    def _reasons_against(self, feature: Feature) -> list[str]:
        """Seams of its own that are not in place, and what the source check says of it."""
        missing = [f"{name}: {self.seams[name].status}" for name in feature.seams if not self.seams[name].ok]
        source = self.facts.get(feature.name, "on")
        return missing if source == "on" else [*missing, source.removeprefix("off: ")]

    def feature_on(self, name: str) -> bool:
        return self.statuses.get(name) == "on"

    def switch_off(self, feature: Feature, reason: str) -> None:
        """A feature on auto found that it can't work here; it says so and is called no more."""
        self.statuses[feature.name] = f"off: {reason}"
        logger.warning("gh200: feature %s is off: %s", feature.name, reason)
        self._on = tuple(other for other in self._on if other is not feature)
        self._moments = {}

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

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let every feature release what it holds, whatever the others do. A forked child holds nothing of ours."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        failures: list[BaseException] = []
        for method in self.moment("close"):
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
            "seams": {name: seam.status for name, seam in self.seams.items()},
            "features": dict(self.statuses),
            "details": {feature.name: feature.summary() for feature in self._on},
            "notes": list(self.settings.notes) if self.settings else [],
        }


def _feature_classes() -> list[type[Feature]]:
    found: list[type[Feature]] = []
    for kind in contributions("simpletuner_gh200.seams.features", "FEATURE", type):
        if not issubclass(kind, Feature):
            raise TypeError(f"{kind!r} is not a Feature")
        found.append(kind)
    return found
