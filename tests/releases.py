"""Which tests run in every environment: those whose outcome can depend on SimpleTuner's release or its torch.

`make test` runs everything in the first environment and `-m releases` in the others. A test carries the marker if it
stands in tests/integration, or if its file or a conftest.py of its folders imports or names one of ``DEPENDS``. One
that depends on the release in another way, through a command it starts for instance, says so itself:
``pytestmark = pytest.mark.releases``. One that is the first to bring SimpleTuner into the process without the marker
fails.

Real runs are expensive. ``@pytest.mark.one_release("4.")``: this release stands for all; on the others the test
belongs to `make test-matrix`, as every test with the marker ``matrix`` does; in tests/chaos, to `make chaos`, as every
trial with the marker ``chaos`` does. ``@pytest.mark.only_release("4.")`` goes further: on others it is not run at all,
since they differ in nothing that it asks. Where that release is not among those that are tested (scripts/dev/test.py
names them in ``GH200_RELEASES``), the one that is there stands for it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
APART = ("chaos", "cluster")
"""Folders whose further tests have a `make` target, and a marker, of their own."""
DEPENDS = frozenset({"simpletuner", "torch", "accelerate", "diffusers", "transformers", "peft", "safetensors"})


LIGHT = importlib.util.find_spec("torch") is None
"""The environment of `make check`: what depends on torch or SimpleTuner is left to `make test`."""

THROUGH_US = frozenset(
    f"test_{name}.py"
    for name in ("bench_prove", "bench_suites", "cli_printable", "cli_selftest", "plan_command", "seams_preemption")
)
"""Tests that reach torch or SimpleTuner through our own code, or through a process that they start."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not LIGHT or not collection_path.is_relative_to(TESTS):
        return None
    conftest = collection_path / "conftest.py"
    if conftest.is_file():
        return depends(conftest) or None
    test = collection_path.match("test_*.py")
    return (test and (collection_path.name in THROUGH_US or needs_torch(collection_path))) or None


def needs_torch(test: Path) -> bool:
    return any(map(depends, with_helpers(files_of(test))))


def pytest_report_header() -> str | None:
    return "no torch here: tests that depend on it, or on SimpleTuner, are left to `make test`" if LIGHT else None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(depends, files_of(item.path))):
            item.add_marker(pytest.mark.releases)
        if of_another_release(item, "one_release"):
            item.add_marker(next((name for name in APART if item.path.is_relative_to(TESTS / name)), "matrix"))
    left_out = [item for item in items if of_another_release(item, "only_release") or (LIGHT and starts(item))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def starts(item: pytest.Item) -> bool:
    """Does it come as far as to ask whether SimpleTuner is installed?"""
    return "few_options" in getattr(item, "fixturenames", ())


def of_another_release(item: pytest.Item, marker: str) -> bool:
    """Does the marker name a release that is tested, and that is not the one here?"""
    chosen = item.get_closest_marker(marker)
    return chosen is not None and not installed().startswith(chosen.args[0]) and tested(chosen.args[0])


def tested(release: str) -> bool:
    """Is a release that begins so tested beside this one? Taken for granted where nobody says."""
    named = os.environ.get("GH200_RELEASES")
    return named is None or any(name.startswith(release) for name in named.split(","))


@cache
def installed() -> str:
    """SimpleTuner's version; where there is none, that of no release."""
    try:
        return version("simpletuner")
    except PackageNotFoundError:
        return ""


@pytest.fixture(autouse=True)
def simpletuner_comes_with_the_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    before = "simpletuner" in sys.modules
    yield
    if "simpletuner" in sys.modules and not before and not request.node.get_closest_marker("releases"):
        pytest.fail("this test imports SimpleTuner, so it needs `pytestmark = pytest.mark.releases`")


def files_of(path: Path) -> Iterator[Path]:
    """The test's own file and the conftest.py of each of its folders below tests/."""
    yield path
    for folder in path.parents:
        if folder == TESTS:
            return
        if (folder / "conftest.py").is_file():
            yield folder / "conftest.py"


def with_helpers(files: Iterable[Path]) -> set[Path]:
    """And the modules of tests that they import, however far."""
    found, rest = set(), list(files)
    while rest:
        file = rest.pop()
        if file not in found and file.is_file():
            found.add(file)
            tree = ast.parse(file.read_text(encoding="utf-8"))
            modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
            rest += [TESTS.parent / (name.replace(".", "/") + ".py") for name in modules if name.startswith("tests.")]
    return found


@cache
def depends(path: Path) -> bool:
    return not DEPENDS.isdisjoint(named(path.read_text(encoding="utf-8")))


def named(source: str) -> Iterator[str]:
    """The top-level packages that ``source`` imports anywhere, or names in a string such as "simpletuner.helpers"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.split(".")[0]
