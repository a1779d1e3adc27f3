"""Break each relied-on fact in a real SimpleTuner's source, in turn: the check says which seam, and which features.

``upstream_mutations.txt`` has an edit for each, and some that change nothing we rely on.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.check import check_spec
from simpletuner_gh200.upstream.patterns import trouble
from simpletuner_gh200.upstream.source import installed_package
from simpletuner_gh200.upstream.spec import SeamSpec, all_specs

pytestmark = pytest.mark.skipif(installed_package("simpletuner") is None, reason="no SimpleTuner to mutate")

BLOCK = re.compile(r"^(\S+): (.+)\n-(.+)\n\+(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """``place``: a seam, or a module where it is harmless; ``what``: the fact that breaks, or what is changed."""

    place: str
    what: str
    pattern: str
    replacement: str

    def apply(self, text: str) -> str:
        edited, count = re.subn(self.pattern, self.replacement, text, flags=re.MULTILINE)
        assert count, f"{self.pattern} is not in the module of {self.place}"
        return edited


_, _BREAKING, _HARMLESS = Path(__file__).with_name("upstream_mutations.txt").read_text().split("\n== ")
MUTATIONS, HARMLESS = ([Edit(*found) for found in BLOCK.findall(part)] for part in (_BREAKING, _HARMLESS))


def here(spec: SeamSpec) -> bool:
    """An optional place that this release does not have can't be broken in it."""
    package = installed_package(spec.module.partition(".")[0])
    text = package(spec.module) if package is not None else None
    return not spec.optional or (text is not None and syntax.find(ast.parse(text), spec.qualname) is not None)


SPECS = {name: spec for name, spec in all_specs().items() if here(spec)}
POSSIBLE = [mutation for mutation in MUTATIONS if here(all_specs()[mutation.place])]
CALLABLE = [spec for spec in SPECS.values() if spec.parameters is not None]


LONG_CLASSES = ("Trainer", "VAECache", "Accelerator")
FACT_METHODS = {
    "encode_images",
    "retrieve_from_cache",
    "generate_vae_cache_filename",
    "read_images_in_batch",
    "_process_images_in_batch",
    "_write_latents_in_batch",
    "accumulate",
    "gradient_accumulation_steps",
    "__init__",
}


@cache
def canonical(module: str) -> str:
    """The module's real source, parsed and written out again; of a very long class only what the contract speaks of."""
    package = installed_package(module.partition(".")[0])
    text = package(module) if package is not None else None
    assert text is not None, f"no {module}"
    tree = ast.parse(text)
    for name in LONG_CLASSES:
        owner = syntax.find(tree, name)
        if isinstance(owner, ast.ClassDef):
            shorten(tree, owner)
    return ast.unparse(tree)


def shorten(tree: ast.Module, owner: ast.ClassDef) -> None:
    """Keep the methods the contract names and, for each, the first one that calls it."""
    named = {spec.qualname.partition(".")[2] for spec in SPECS.values() if spec.qualname.startswith(f"{owner.name}.")}
    callers = {next((id(node) for node in owner.body if trouble(f"self.{name}", node) is None), None) for name in named}
    owner.body = [
        node for node in owner.body if id(node) in callers or getattr(node, "name", None) in named | FACT_METHODS
    ]
    heads = {spec.qualname.partition(".")[0] for spec in SPECS.values()}
    tree.body = [
        node for node in tree.body if not isinstance(node, syntax.Function | ast.ClassDef) or node.name in heads
    ]


def losses(module: str, text: str) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Per broken seam of the module, what was found and which features it costs."""
    tree = ast.parse(text)
    found = {spec.name: check_spec(spec, tree) for spec in SPECS.values() if spec.module == module}
    return {name: troubles for name, troubles in found.items() if troubles}


@pytest.mark.parametrize("mutation", POSSIBLE, ids=lambda mutation: f"{mutation.place}: {mutation.what}")
def test_broken_fact_is_caught_and_attributed(mutation: Edit) -> None:
    spec = SPECS[mutation.place]
    fact = next(fact for fact in spec.facts if fact.name == mutation.what)
    broken = losses(spec.module, mutation.apply(canonical(spec.module)))

    reports = [(found, features) for found, features in broken[spec.name] if f"relied on: {fact.name}" in found]
    assert [features for _found, features in reports] == [fact.features or spec.features]
    lost = {feature for troubles in broken.values() for _found, features in troubles for feature in features}
    assert lost == {*(fact.features or spec.features)}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_vanished_place_is_caught(spec: SeamSpec) -> None:
    last = spec.qualname.rpartition(".")[2]
    tree = ast.parse(canonical(spec.module))
    for node in ast.walk(tree):
        if getattr(node, "name", None) == last:
            node.name = f"{last}_moved"  # type: ignore[attr-defined]
        if isinstance(node, ast.Name) and node.id == last:
            node.id = f"{last}_moved"
    assert check_spec(spec, tree) == [(f"no {spec.qualname} in {spec.module}", spec.features)]


@pytest.mark.parametrize("spec", CALLABLE, ids=[spec.name for spec in CALLABLE])
def test_changed_parameters_are_caught(spec: SeamSpec) -> None:
    tree = ast.parse(canonical(spec.module))
    target = syntax.find(tree, spec.qualname)
    assert isinstance(target, syntax.Function)
    target.args.args.append(ast.arg(arg="surprise"))
    troubles = check_spec(spec, tree)
    assert any("surprise" in found and features == spec.features for found, features in troubles)


@pytest.mark.parametrize("edit", HARMLESS, ids=lambda edit: edit.what)
def test_harmless_change_is_not_flagged(edit: Edit) -> None:
    text = edit.apply(canonical(edit.place))
    assert losses(edit.place, text) == {}


@pytest.mark.parametrize("module", sorted({spec.module for spec in SPECS.values()}))
def test_moved_and_reformatted_code_is_not_flagged(module: str) -> None:
    tree = ast.parse(canonical(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, syntax.Function) and not part.decorator_list]
            others = [part for part in node.body if part not in methods]
            node.body = others + sorted(methods, key=lambda part: part.name, reverse=True)
    assert losses(module, "# moved\n\n\n" + ast.unparse(tree)) == {}


def test_every_fact_has_a_mutation() -> None:
    facts = {(spec.name, fact.name) for spec in SPECS.values() for fact in spec.facts}
    assert facts == {(mutation.place, mutation.what) for mutation in POSSIBLE}
