"""The versions that each SimpleTuner release is tested with: what `gh200 setup` installs, what CI builds.

``constraints/simpletuner-<release>.txt`` is CI's environment less its test tools; ``-cuda.txt`` what SimpleTuner's
extra for CUDA adds, resolved for x86-64 and aarch64 but not run by us, who have no GPU. Only the standard library is
used here: `scripts/dev/environments.py` asks before there is any environment.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import resources

from simpletuner_gh200.errors import UsageError


@dataclass(frozen=True)
class Tested:
    """A SimpleTuner release with the interpreters it is tested on, best first, and the machines it has wheels for."""

    release: str
    pythons: tuple[str, ...]
    machines: tuple[str, ...]
    cuda_extra: str
    """SimpleTuner's extra for the CUDA that this release's torch is built with."""

    def requirement(self, *, cpu: bool) -> str:
        return f"simpletuner[{'cpu' if cpu else self.cuda_extra}]=={self.release}"


TESTED = (
    Tested("4.10.1", pythons=("3.13", "3.12"), machines=("x86_64", "aarch64"), cuda_extra="cuda13"),
    # torchcodec 0.9.0 has no wheel for aarch64, and torch 2.9.1's there is built without CUDA.
    Tested("3.1.6", pythons=("3.11",), machines=("x86_64",), cuda_extra="cuda"),
)
"""Newest first."""


def tested_releases() -> tuple[str, ...]:
    """Newest first."""
    return tuple(each.release for each in TESTED)


def tested_versions(release: str, *, cpu: bool = False) -> dict[str, str]:  # noqa: PT028 (no test, for all its name)
    """Every pinned package, by its normalized name; without ``cpu``, those that only CUDA needs too."""
    return dict(line.split("==") for line in constraints(release, cpu=cpu).splitlines())


def constraints(release: str, *, cpu: bool = False) -> str:
    """For `pip install -c`: plain ``name==version`` lines, sorted."""
    names = [f"simpletuner-{find(release).release}{part}.txt" for part in (("",) if cpu else ("", "-cuda"))]
    texts = (resources.files(__package__).joinpath("constraints", name).read_text(encoding="utf-8") for name in names)
    return "".join(f"{line}\n" for line in sorted(line for text in texts for line in text.splitlines()))


def find(release: str) -> Tested:
    for each in TESTED:
        if each.release == release:
            return each
    raise UsageError(
        f"SimpleTuner {release!r} is not among the releases that are tested: {', '.join(tested_releases())}",
        remedy="name one of these, or install SimpleTuner yourself",
    )


def choose(python: str, machine: str) -> Tested:
    """The newest release for this interpreter (``3.13``) and machine (``aarch64``)."""
    for each in TESTED:
        if python in each.pythons and machine in each.machines:
            return each
    accepted = "; ".join(
        f"{each.release}: Python {' or '.join(each.pythons)} on {' or '.join(each.machines)}" for each in TESTED
    )
    raise UsageError(
        f"no SimpleTuner is tested with Python {python} on {machine} ({accepted})",
        remedy="make the virtual environment with one of these interpreters",
    )


def held_back(python: str) -> str | None:
    """Where this interpreter keeps pip from the newest release: how, and which one gets it."""
    newest = TESTED[0]
    offered = next((each.release for each in TESTED if python in each.pythons), None)
    if offered in (None, newest.release):
        return None
    wanted = " or ".join(sorted(newest.pythons))
    return f"for Python {python} pip offers nothing newer than SimpleTuner {offered}; {newest.release} needs {wanted}"


# -- what is installed

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
        if (name in FIRST if found is None else found.partition("+")[0] != tested.partition("+")[0])
    }


def versions_in_words(release: str) -> str:
    """How what is here differs from what was tested, in a few words."""
    different = differing(release)
    if different is None:
        return f"not among the tested releases, {', '.join(tested_releases())}"
    if not different:
        return "versions as tested"
    ordered = sorted(different, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    words = [f"{name} {different[name][0] or 'missing'}, tested {different[name][1]}" for name in ordered]
    more = [f"{len(words) - SHOWN} more differ"] if len(words) > SHOWN else []
    return "; ".join([*words[:SHOWN], *more])


def setup_command(release: str | None = None) -> str:
    """What installs a tested SimpleTuner: this release, where it is one."""
    return f"gh200 setup --release {release}" if release in tested_releases() else "gh200 setup"
