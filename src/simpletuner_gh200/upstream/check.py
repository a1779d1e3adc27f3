"""The static check: the contract against source text, by syntax alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import lru_cache

from simpletuner_gh200.upstream import syntax, verdict_cache
from simpletuner_gh200.upstream.source import (
    JoinedSource,
    Source,
    declared_version,
    installed_source,
    installed_version,
)
from simpletuner_gh200.upstream.spec import Fact, SeamSpec, all_specs, signature_text
from simpletuner_gh200.upstream.verdict import SeamRow, Verdict, make_verdict

Parsed = ast.Module | str
"""A module's syntax, or why there is none."""

Trouble = tuple[str, tuple[str, ...]]
"""What was found instead, and the features that are lost by it."""


def check(source: JoinedSource, specs: Mapping[str, SeamSpec] | None = None, *, version: str | None = None) -> Verdict:
    """The contract against ``source``, from scratch."""
    specs = all_specs() if specs is None else specs
    rows: dict[str, SeamRow] = {}
    for module, group in _by_module(specs.values()).items():
        found = _rows(module, source.read(module), tuple(group)) if source.has(module) else map(_skipped, group)
        rows.update((row.name, row) for row in found)
    accelerate = installed_version("accelerate") if source.has("accelerate") else None
    return make_verdict(version or _version(source), accelerate, tuple(rows[name] for name in specs))


def check_remembered(source: JoinedSource, *, version: str | None = None) -> Verdict:
    """As ``check``, unless the same contract was checked against the same texts before."""
    specs = all_specs()
    key = verdict_cache.key(source, specs, version)
    known = verdict_cache.load(key)
    if known is None:
        known = check(source, specs, version=version)
        verdict_cache.store(key, known)
    return known


def check_installed() -> Verdict:
    """The SimpleTuner that this interpreter would import. Cheap when nothing changed; imports neither it nor torch."""
    return check_remembered(installed_source(), version=installed_version("simpletuner"))


def check_spec(spec: SeamSpec, tree: Parsed) -> list[Trouble]:
    """Everything wrong at one seam, given its parsed module."""
    if isinstance(tree, str):
        return [(tree, spec.features)]
    target = syntax.find(tree, spec.qualname)
    if target is None:
        return [(f"no {spec.qualname} in {spec.module}", spec.features)]
    troubles = [(found, spec.features) for found in _signature_trouble(spec, target)]
    for fact in spec.facts:
        found = fact.holds(tree)
        if found is not None:
            troubles.append((f"{found} (relied on: {fact.name})", _features(spec, fact)))
    return troubles


def _signature_trouble(spec: SeamSpec, target: ast.AST) -> Iterable[str]:
    if spec.parameters is None:
        return
    if not isinstance(target, syntax.Function):
        yield f"{spec.qualname} that is not a function"
    elif syntax.parameters(target) != spec.parameters:
        yield f"{spec.qualname}{signature_text(syntax.parameters(target))}"


def _features(spec: SeamSpec, fact: Fact) -> tuple[str, ...]:
    return spec.features if fact.features is None else fact.features


def _row(spec: SeamSpec, tree: Parsed) -> SeamRow:
    troubles = check_spec(spec, tree)
    expected = spec.qualname + (signature_text(spec.parameters) if spec.parameters is not None else "")
    if not troubles:
        return SeamRow(spec.name, "ok", expected, expected, ", ".join(spec.features))
    missing = isinstance(tree, str) or syntax.find(tree, spec.qualname) is None
    if spec.optional and missing:
        return SeamRow(spec.name, "absent", troubles[0][0], expected, ", ".join(spec.features))
    lost = dict.fromkeys(feature for _found, features in troubles for feature in features)
    return SeamRow(spec.name, "broken", "; ".join(found for found, _features in troubles), expected, ", ".join(lost))


def _skipped(spec: SeamSpec) -> SeamRow:
    package = spec.module.partition(".")[0]
    return SeamRow(spec.name, "skipped", f"{package} is not here to be read", spec.qualname, ", ".join(spec.features))


def _by_module(specs: Iterable[SeamSpec]) -> dict[str, list[SeamSpec]]:
    groups: dict[str, list[SeamSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.module, []).append(spec)
    return groups


@lru_cache(maxsize=512)
def _rows(module: str, text: bytes | None, specs: tuple[SeamSpec, ...]) -> tuple[SeamRow, ...]:
    """Remembered within a sweep: most modules are the same from one release to the next."""
    tree = _parse(module, text)
    return tuple(_row(spec, tree) for spec in specs)


def _parse(module: str, text: bytes | None) -> Parsed:
    if text is None:
        return f"no module {module}"
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as unreadable:
        return f"module {module} is not readable by this Python: {unreadable}"


def _version(source: Source) -> str:
    return declared_version(source) or "unknown"
