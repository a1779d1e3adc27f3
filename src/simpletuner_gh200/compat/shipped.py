"""Files beside the package that a user needs: scripts, example configurations, launch files, pages.

In a checkout they lie around the package; a wheel carries them inside it (``force-include`` in ``pyproject.toml``); in
a tree that has the package in it (``gh200 rebase``) they are the tree's own. They are found here wherever they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import simpletuner_gh200
from simpletuner_gh200.errors import FeatureUnavailable, UsageError

FOLDER = "shipped"
"""Inside the package of a wheel."""

PATTERNS = (
    "accelerate_config_gh200.yaml",
    "config/*gh200*",
    "execute_gh200_rebase.sh",
    "gh200_diagnostic.py",
    "scripts/__init__.py",
    "scripts/feature_matrix/**/*",
    "scripts/setup_gh200_env.sh",
    "scripts/test_*_features.sh",
    "train.py",
    "validate_uvm.py",
)
"""What a run needs, by the names of the earlier guides. A test holds them against what the wheel carries."""

PAGES = ("docs/**/*.md", "docs/pictures/*")


def root() -> Path:
    """The folder that the paths of shipped files start from."""
    package = Path(simpletuner_gh200.__file__).parent
    for candidate in (package / FOLDER, package.parents[1], *package.parents[3:4]):
        if (candidate / "scripts" / "setup_gh200_env.sh").is_file():
            return candidate
    raise FeatureUnavailable(
        f"the scripts and examples of {package} are not there", remedy="install the package from its wheel"
    )


def names(patterns: tuple[str, ...] = PATTERNS) -> list[Path]:
    """Relative paths of what is there, sorted."""
    place = root()
    found = (path for pattern in patterns for path in place.glob(pattern))
    return sorted(path.relative_to(place) for path in found if path.is_file() and "__pycache__" not in path.parts)


def write(folder: Path, patterns: tuple[str, ...] = PATTERNS, *, force: bool = False) -> list[Path]:
    """Copy them below ``folder``; refuses, before anything is written, where one is there and differs."""
    place = root()
    wanted = {folder / name: place / name for name in names(patterns)}
    differing = [str(path) for path, source in wanted.items() if path.exists() and not _same(path, source)]
    if differing and not force:
        shown = ", ".join(differing[:5]) + (" ..." if len(differing) > 5 else "")
        raise UsageError(f"already there, and not the same: {shown}", remedy="name another folder, or add --force")
    for path, source in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        path.chmod(0o755 if runs(path) else 0o644)
    return list(wanted)


def runs(path: Path) -> bool:
    """Is it a program? A wheel forgets which files are; a ``#!`` does not."""
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _same(path: Path, source: Path) -> bool:
    return path.is_file() and path.read_bytes() == source.read_bytes()
