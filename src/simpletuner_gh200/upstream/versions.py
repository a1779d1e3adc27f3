"""The versions that are installed, beside those that a SimpleTuner release was tested with."""

from __future__ import annotations

import os
import re
import sys

from simpletuner_gh200.upstream.tested import tested_releases, tested_versions

FIRST = ("torch", "torchvision", "torchaudio", "transformers", "diffusers", "accelerate", "peft", "numpy")
"""Named first where versions differ: what SimpleTuner's import fails over."""

SHOWN = 6


def installed_distributions() -> dict[str, str]:
    """Version by normalized name, as imports would find them; from the names of folders, so in milliseconds."""
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            names = sorted(os.listdir(place or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").partition("-")
                found.setdefault(re.sub(r"[-_.]+", "-", package).lower(), version)
    return found


def differing(release: str) -> dict[str, tuple[str | None, str]] | None:
    """Name -> (here, tested) of what differs; None for a release that is not tested.

    Which build it is, ``+cu130`` say, is left out. Of what is not here only ``FIRST`` counts: extras and tools are
    pinned too.
    """
    if release not in tested_releases():
        return None
    here = installed_distributions()
    pairs = {name: (here.get(name), version) for name, version in tested_versions(release).items()}
    return {
        name: (found, tested)
        for name, (found, tested) in pairs.items()
        if (name in FIRST if found is None else _public(found) != _public(tested))
    }


def versions_in_words(release: str) -> str:
    """What is here beside what was tested, in a few words."""
    different = differing(release)
    if different is None:
        return f"not among the tested releases, {', '.join(tested_releases())}"
    if not different:
        return "versions as tested"
    ordered = sorted(different, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    told = [f"{name} {different[name][0] or 'missing'}, tested {different[name][1]}" for name in ordered[:SHOWN]]
    more = [f"{len(ordered) - SHOWN} more differ"] if len(ordered) > SHOWN else []
    return "; ".join([*told, *more])


def setup_command(release: str | None = None) -> str:
    """What installs a tested SimpleTuner: this release, where it is one."""
    return f"gh200 setup --release {release}" if release in tested_releases() else "gh200 setup"


def _public(version: str) -> str:
    return version.partition("+")[0]
