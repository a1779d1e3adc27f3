"""SimpleTuner's data factory traces every allocation for a line in its log; our data side spares a run that."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

factory = pytest.importorskip("simpletuner.helpers.data_backend.factory", reason="needs SimpleTuner")

from simpletuner_gh200.seams.patch import Patches  # noqa: E402
from simpletuner_gh200.seams.points.data_backends import SEAMS  # noqa: E402

pytestmark = pytest.mark.real

SEAM = next(seam for seam in SEAMS if seam.name == "datasets.memory_usage")


@pytest.fixture
def untraced():
    assert not tracemalloc.is_tracing()
    yield
    tracemalloc.stop()


def made(on: tuple[str, ...]) -> Any:
    """A factory as a run makes it, with these features on."""
    runtime: Any = SimpleNamespace(feature_on=lambda name: name in on)
    patches = Patches()
    patches.install(*SEAM.patches(factory, runtime))
    try:
        args = SimpleNamespace(output_dir="", model_family="sdxl")
        registry = factory.FactoryRegistry(args, SimpleNamespace(), [], [], SimpleNamespace())
        registry.usage = registry._get_memory_usage()
        return registry
    finally:
        patches.uninstall()
        assert factory.tracemalloc is tracemalloc


@pytest.mark.parametrize("on", [("store",), ("caches",), ("store", "caches", "ramp")])
def test_nothing_is_traced_and_the_memory_is_that_of_the_process(untraced, on):
    registry = made(on)
    assert not tracemalloc.is_tracing()
    assert registry.usage > 20, "MB; a Python with torch in it has more"
    assert registry.metrics["memory_usage"]["start"] > 20


@pytest.mark.parametrize("on", [(), ("ramp",)])
def test_off_means_off(untraced, on):
    made(on)
    assert tracemalloc.is_tracing()


def test_who_traces_himself_goes_on(untraced):
    tracemalloc.start()
    kept = bytearray(4 << 20)
    registry = made(("store",))
    assert tracemalloc.is_tracing()
    assert registry.usage < 4 + len(kept) / (1 << 20) * 4, "what was traced, not the process"


def test_all_else_of_the_module_is_there(untraced):
    from simpletuner_gh200.seams.points.data_backends import Untraced

    assert Untraced(lambda: True).is_tracing() is False
    assert Untraced(lambda: True).Filter is tracemalloc.Filter
