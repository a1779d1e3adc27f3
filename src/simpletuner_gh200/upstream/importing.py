"""Does the installed SimpleTuner import, and what are its options? Found out in a child process, once for what is here.

One child for both, since nearly all that either costs is the import. Options are kept in the user's cache by everything
they depend on, the versions of all installed packages above all. That it does not import is never kept: what mends it
may lie outside of Python, a system library say, and the cache may be that of another machine, too. ``gh200 doctor`` and
``gh200 setup`` import anew even where it did; not the doctor at the start of a cluster's job (``--skip-allocation``).

A start is never slower for it: ``train`` and ``config check`` need the options anyway. The commands that don't
(``trusting``) ask the child only where versions are not those that were tested.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import text
from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import user_cache
from simpletuner_gh200.upstream.child import NoAnswer, ask
from simpletuner_gh200.upstream.option_table import TABLES, OptionTable
from simpletuner_gh200.upstream.source import installed_version
from simpletuner_gh200.upstream.tested import differing, installed_distributions, setup_command, versions_in_words

SCHEMA = "7"
KIND = "imports"
PROBE = (sys.executable, "-m", "simpletuner_gh200.seams.probe")

NOT_INSTALLED = "SimpleTuner is not installed"

FOLDERS = (
    *("data_backend", "metadata", "multiaspect", "caching"),
    *("image_manipulation", "distillation", "data_transforms", "data_generation"),
)
"""Below SimpleTuner's ``helpers``: whoever looks into a dataset's entry; a release may lack some."""

_KEY = re.compile(r"[a-z][a-z0-9_]*")

_SOURCES = (
    "helpers/configuration/*.py",
    "helpers/models/*/model.py",
    "helpers/models/registry.py",
    "helpers/training/optimizer_param.py",
    *(f"helpers/{folder}/**/*.py" for folder in FOLDERS),
    "simpletuner_sdk/server/services/field_registry/**/*.py",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class ImportVerdict:
    """``imports`` is None where that is not decided; ``cause`` says why it is not True."""

    imports: bool | None
    cause: str | None = None
    version: str | None = None
    """Of SimpleTuner; None where it is not installed."""
    seconds: float = 0.0
    table: OptionTable | None = field(default=None, repr=False)
    """Its options, where they could be read."""
    notes: tuple[str, ...] = ()
    """What users should know about the options."""

    def in_a_line(self) -> str:
        """Why it does not import, what is here beside what was tested, and the command that mends it."""
        if self.version is None:
            return f"{NOT_INSTALLED} in this environment: `{setup_command()}` installs it"
        mend = f"`{setup_command(self.version)}` installs what was tested"
        versions = versions_in_words(self.version)
        return f"SimpleTuner {self.version} does not import here: {self.cause} ({versions}): {mend}"

    def stop_unless_it_imports(self) -> None:
        """Raises UsageError, one line. An import that nobody could decide stops nothing."""
        if self.imports is False:
            raise UsageError(self.in_a_line())


def check_import(say: Say = lambda _words: None, *, refresh: bool = False, trusting: bool = False) -> ImportVerdict:
    """What is known of the SimpleTuner an import would find; ``say`` hears of it before it takes long.

    ``trusting`` is whoever has no other need of an import: versions that were tested are trusted, and the
    verdict may be open. That the import fails even so is found by the doctor, or at the start of a run.
    """
    package, version = find_package("simpletuner"), installed_version("simpletuner")
    if package is None or version is None:
        note = "SimpleTuner is not installed here, so its own options were not checked"
        return ImportVerdict(False, NOT_INSTALLED, notes=(note,))
    entry = _key(package, version)
    kept = None if refresh else _kept(entry, version)
    if kept is None and trusting and differing(version) == {}:
        return ImportVerdict(None, "versions as tested", version)
    if kept is not None:
        return kept
    say(f"importing SimpleTuner {version} in a process of its own, {'again' if refresh else 'once'} ...")
    answer = _ask()
    verdict = _verdict(answer, version)
    refused = user_cache.store(KIND, entry, answer) if verdict.table is not None else None
    if refused is None:
        return verdict
    note = f"SimpleTuner's options are read again at every start, since they can't be kept: {refused}"
    return replace(verdict, notes=(f"{note} (name a folder you may write to in XDG_CACHE_HOME)",))


def _ask() -> dict[str, Any]:
    """The child's answer, see ``seams/probe.py``; ``undecided`` where it gave none."""
    started = time.monotonic()
    try:
        answer = ask(PROBE, "cause")
    except NoAnswer as none:
        answer = {"cause": str(none)} if none.killed else {"undecided": f"asking failed: {none}"}
    return {**answer, "seconds": time.monotonic() - started}


def _verdict(answer: Mapping[str, Any], version: str) -> ImportVerdict:
    try:
        table = TABLES.validate_python(answer.get("options"))
    except ValueError:
        table = None
    reason = answer.get("undecided") or answer.get("cause")
    imports = None if "undecided" in answer else answer.get("cause") is None
    unread = f"SimpleTuner's own options were not checked: {reason or answer.get('unread') or 'it is no table'}"
    notes = () if table is not None else (unread,)
    return ImportVerdict(imports, reason, version, float(answer.get("seconds") or 0), table, notes)


def _kept(entry: str, version: str) -> ImportVerdict | None:
    """None also for an entry that is torn, or another version's."""
    answer = user_cache.load(KIND, entry)
    verdict = _verdict(answer if isinstance(answer, Mapping) else {}, version)
    return verdict if verdict.table is not None else None


def _key(package: Path, version: str) -> str:
    """What the answer depends on: the release and where it is, its sources, what is installed, the kind of machine."""
    digest = hashlib.blake2b(digest_size=20)
    libraries = text("LD_LIBRARY_PATH")
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))  # some values are offered only where there is one
    here = (SCHEMA, version, package.absolute(), sys.version, platform.machine(), has_gpu, libraries)
    for part in (*here, *sorted(installed_distributions().items()), *_states(package)):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()


def _states(package: Path) -> Iterator[tuple[str, int, int]]:
    """Sources by time and size, for checkouts whose version stays; the folder of packages, for what is added to it."""
    files = sorted(path for pattern in _SOURCES for path in package.glob(pattern))
    for path in (package.parent, *files):
        state = path.stat()
        yield path.name, state.st_mtime_ns, state.st_size if path.is_file() else 0


def dataset_words(package: Path) -> frozenset[str]:
    """Every word in the code for datasets that could be a key: texts, and fields of data classes. Some are none."""
    sources = (path for folder in FOLDERS for path in sorted((package / "helpers" / folder).rglob("*.py")))
    words = {word for path in sources for word in words_in(path.read_text(encoding="utf-8"))}
    return frozenset(word for word in words if _KEY.fullmatch(word))


def words_in(source: str) -> Iterator[str]:
    """What the source spells as a text, or names as a field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
