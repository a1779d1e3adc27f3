"""Which tests run in every environment: those whose outcome can depend on SimpleTuner's release or its torch.

`make test` runs everything in the first environment and `-m releases` in the others. A test carries the marker if it
stands in tests/integration, or if its file or a conftest.py of its folders imports or names one of ``DEPENDS``. One
that depends on the release in another way, through a command it starts for instance, says so itself:
``pytestmark = pytest.mark.releases``. One that is the first to bring SimpleTuner into the process without the marker
fails.

Real runs are expensive. ``@pytest.mark.one_release("4.")``: this release stands for all; on the others the test belongs
to `make test-matrix`, as every test with the marker ``matrix`` does; in tests/chaos, to `make chaos`, as every trial
with the marker ``chaos`` does. ``@pytest.mark.only_release("4.")`` goes further: on others it is not run at all, since they
differ in nothing that it asks. Where that release is not among those that are tested (scripts/dev/test.py names them in
``GH200_RELEASES``), the one that is there stands for it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
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


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    test = collection_path.match("test_*.py") and collection_path.is_relative_to(TESTS)
    return True if LIGHT and test and any(map(depends, files_of(collection_path))) else None


def pytest_report_header() -> str | None:
    return "no torch here: tests that depend on it, or on SimpleTuner, are left to `make test`" if LIGHT else None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(depends, files_of(item.path))):
            item.add_marker(pytest.mark.releases)
        if of_another_release(item, "one_release"):
            item.add_marker(next((name for name in APART if item.path.is_relative_to(TESTS / name)), "matrix"))
    left_out = [item for item in items if of_another_release(item, "only_release")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
