"""Which features are on: one decision, before the run from the contract alone, in the rank from what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.registry import contributions
from simpletuner_gh200.upstream.features import FEATURES, ON, Status

if TYPE_CHECKING:
    from simpletuner_gh200.config.settings import Settings
    from simpletuner_gh200.seams.feature import Feature

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
        if request == "asked" and reasons:
            raise FeatureUnavailable(
                f"feature '{feature.name}' was asked for and cannot work with {release}: {'; '.join(reasons)}",
                remedy=REMEDY,
            )
        found[feature.name] = NOT_ASKED if request == "off" else Status(reasons[0]) if reasons else ON
    return found


def losses(statuses: Mapping[str, Status]) -> dict[str, Status]:
    """Those that were wanted and are off all the same: what a person must be told."""
    return {name: status for name, status in statuses.items() if not status.on and status != NOT_ASKED}


def all_features() -> tuple[Feature, ...]:
    """One of each kind, in the order in which their moments are called."""
    from simpletuner_gh200.seams.feature import Feature

    found: list[Feature] = []
    for kind in contributions("simpletuner_gh200.seams.features", "FEATURE", type):
        if not issubclass(kind, Feature) or kind.name not in FEATURES:
            raise TypeError(f"{kind!r} is not a Feature with a line in upstream.features.FEATURES")
        found.append(kind())
    return tuple(found)
