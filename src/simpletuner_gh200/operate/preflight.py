"""Before a run: everything that can be known to be wrong without starting it, all of it in one message."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.files import Located, locate_training_config
from simpletuner_gh200.config.packages import find_package
from simpletuner_gh200.config.settings import Settings, resolve
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.errors import FeatureUnavailable, UsageError
from simpletuner_gh200.seams.decide import all_features, decide, losses
from simpletuner_gh200.upstream.check import check_installed

OLDEST = Version("3.1.0")
"""The first SimpleTuner whose seams we know."""


@dataclass(frozen=True)
class Checked:
    """A configuration that passed."""

    located: Located
    config: Mapping[str, Any]
    """The file with the command line's flags on top."""
    settings: Settings


def check_configuration(*, explicit: str | None, env_name: str | None, flags: Sequence[str]) -> Checked:
    """Find, read and validate the configuration and the dataset list; raise one error with every problem."""
    located = _locate(explicit, env_name)
    training = read_training(located, os.environ, flags=flags)
    return Checked(located, training.values, training.raise_if_bad(here=True))


def check_stock(*, explicit: str | None, env_name: str | None) -> Checked:
    """With the kill switch on nothing of ours is looked at; the file must only be one SimpleTuner itself would read."""
    located = _locate(explicit, env_name)
    if explicit is not None and located.backend != "json":
        raise UsageError(
            f"{explicit}: with SIMPLETUNER_GH200=0 SimpleTuner reads a .{located.backend} only from its own places",
            remedy="move it to config/, and leave --config out",
        )
    return Checked(located, {}, resolve({}, {}))


def _locate(explicit: str | None, env_name: str | None) -> Located:
    return locate_training_config(
        os.environ, explicit=explicit, env_name=env_name, examples=find_package("simpletuner")
    )


def check_installation() -> str:
    """SimpleTuner and what it needs are here; returns its version."""
    try:
        found = importlib.metadata.version("simpletuner")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "SimpleTuner is not installed in this environment", remedy="pip install simpletuner (see its own guide)"
        ) from None
    try:
        supported = Version(found) >= OLDEST
    except InvalidVersion:
        supported = True  # a checkout's own version text; the seams decide
    if not supported:
        raise UsageError(
            f"SimpleTuner {found} is older than {OLDEST}, the first release with the seams we need",
            remedy="pip install --upgrade simpletuner",
        )
    for package in ("accelerate", "torch"):
        if not _installed(package):
            raise UsageError(f"{package} is not installed in this environment", remedy=f"pip install {package}")
    return found


def check_seams(settings: Settings) -> list[str]:
    """Stop if a feature that was asked for can't work on this SimpleTuner; returns notices about the others."""
    verdict = check_installed()
    if not verdict.features["core"].on:
        raise FeatureUnavailable(
            f"SimpleTuner {verdict.version}: {verdict.features['core']}",
            remedy="use a release that `gh200 upstream check` passes",
        )
    if settings.any_given and not verdict.features["config"].on:
        raise FeatureUnavailable(
            f"SimpleTuner {verdict.version} would not pass our blocks on: {verdict.features['config']}",
            remedy="use a release that `gh200 upstream check` passes",
        )
    statuses = decide(all_features(), settings, os.environ, verdict.against, release=f"SimpleTuner {verdict.version}")
    return [f"feature '{name}' is {status}" for name, status in losses(statuses).items()]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
