"""The static check: the contract against source text, by syntax alone, and what that means for each feature.

A verdict is remembered by a digest of all that was read, so there is nothing to invalidate; an entry that can't be read
is made again.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from simpletuner_gh200.upstream import syntax, user_cache
from simpletuner_gh200.upstream.features import Status, consequences
from simpletuner_gh200.upstream.source import JoinedSource, installed_source, installed_version
from simpletuner_gh200.upstream.spec import SeamSpec, all_specs, signature_text

SCHEMA = "2"
KIND = "verdicts"

Parsed = ast.Module | str
"""A module's syntax, or why there is none."""

Trouble = tuple[str, tuple[str, ...]]
"""What was found instead, and the features that are lost by it."""


@dataclass(frozen=True)
class SeamRow:
    """One seam on one release. ``status``: ok, broken, absent (and optional), skipped (its package is not there)."""

    name: str
    status: str
    found: str
    expected: str
    feature: str
    """The features it carries, or if it is broken those that are lost, separated by commas."""


@dataclass(frozen=True)
class Verdict:
    """A release against the contract."""

    version: str
    accelerate: str | None
    seams: tuple[SeamRow, ...]
    features: dict[str, Status]

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> tuple[SeamRow, ...]:
        return tuple(row for row in self.seams if row.status == "broken")

    def against(self, feature: str) -> list[str]:
        """What speaks against a feature on this release."""
        reason = self.features[feature].reason
        return [] if reason is None else [reason]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "accelerate": self.accelerate,
            "ok": self.ok,
            "seams": [asdict(row) for row in self.seams],
            "features": {name: str(status) for name, status in self.features.items()},
        }


VERDICTS = TypeAdapter(Verdict)
"""To JSON and back, for what is remembered."""


def check(source: JoinedSource, specs: Mapping[str, SeamSpec] | None = None) -> Verdict:
    """The contract against ``source``, from scratch."""
    specs = all_specs() if specs is None else specs
    texts = _texts(source, specs)
    rows = tuple(_row(spec, texts[spec.module], source.has(spec.module)) for spec in specs.values())
    accelerate = installed_version("accelerate") if source.has("accelerate") else None
    lost: dict[str, str] = {}
    for row in rows:
        if row.status == "broken":
            for feature in row.feature.split(", "):
                lost.setdefault(feature, f"seam {row.name}: {row.found}")
    return Verdict(source.version, accelerate, rows, consequences(lost))


def check_remembered(source: JoinedSource) -> Verdict:
    """As ``check``, unless the same contract was checked against the same texts before."""
    entry = _key(_texts(source, all_specs()), source.known_version)
    try:
        return VERDICTS.validate_python(user_cache.load(KIND, entry))
    except ValueError:
        found = check(source)
        user_cache.store(KIND, entry, VERDICTS.dump_python(found, mode="json"))
        return found


def check_installed() -> Verdict:
    """The SimpleTuner that this interpreter would import. Cheap when nothing changed; imports neither it nor torch."""
    return check_remembered(installed_source())


def check_spec(spec: SeamSpec, tree: Parsed) -> list[Trouble]:
    """Everything wrong at one seam, given its parsed module."""
    if isinstance(tree, str):
        return [(tree, spec.features)]
    target = syntax.find(tree, spec.qualname)
    if target is None:
        return [(f"no {spec.qualname} in {spec.module}", spec.features)]
    troubles: list[Trouble] = []
    if spec.parameters is not None:
        found = signature_text(syntax.parameters(target)) if isinstance(target, syntax.Function) else " is no function"
        troubles += [(spec.qualname + found, spec.features)] if spec.qualname + found != spec.expected else []
    for fact in spec.facts:
        if (trouble := fact.trouble(tree, spec.qualname)) is not None:
            troubles.append((f"{trouble} (relied on: {fact.name})", fact.features or spec.features))
    return troubles


def _texts(source: JoinedSource, specs: Mapping[str, SeamSpec]) -> dict[str, bytes | None]:
    return {module: source.read(module) for module in dict.fromkeys(spec.module for spec in specs.values())}


@lru_cache(maxsize=2048)
def _row(spec: SeamSpec, text: bytes | None, here: bool) -> SeamRow:
    """Remembered within a sweep: most modules are the same from one release to the next."""

    def row(status: str, found: str, features: Iterable[str] = spec.features) -> SeamRow:
        return SeamRow(spec.name, status, found, spec.expected, ", ".join(features))

    if not here:
        return row("skipped", f"{spec.module.partition('.')[0]} is not here to be read")
    tree = _parsed(spec.module, text)
    troubles = check_spec(spec, tree)
    if not troubles:
        return row("ok", spec.expected)
    if spec.optional and (isinstance(tree, str) or syntax.find(tree, spec.qualname) is None):
        return row("absent", troubles[0][0])
    lost = dict.fromkeys(feature for _found, features in troubles for feature in features)
    return row("broken", "; ".join(found for found, _features in troubles), lost)


@lru_cache(maxsize=4)
def _parsed(module: str, text: bytes | None) -> Parsed:
    if text is None:
        return f"no module {module}"
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as unreadable:
        return f"module {module} is not readable by this Python: {unreadable}"


def _key(texts: Mapping[str, bytes | None], version: str | None) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for part in (SCHEMA, _contract_digest(), version or "", installed_version("accelerate") or ""):
        digest.update(part.encode() + b"\0")
    for module, text in texts.items():
        digest.update(f"{module} {-1 if text is None else len(text)}\0".encode())
        digest.update(text or b"")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _contract_digest() -> str:
    """Our own side of the comparison: the contract, and the text of this room's modules."""
    digest = hashlib.blake2b(digest_size=20)
    room = Path(__file__).parent
    for path in sorted((*room.glob("*.py"), *room.glob("contract/*.toml"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
