"""The memory room's features at their moments: when they are asked for, what they refuse, what they account for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.memory import hints
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.seams import bootstrap
from simpletuner_gh200.seams.features.hints import LOOK_AGAIN, TRIES, HintsFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime


def hints_feature() -> HintsFeature:
    feature = HintsFeature()
    feature.runtime = Runtime(Launch())
    return feature


UNIFIED = {"cache_config": {"vae_cache_type": "unified_memory"}}
VARIABLE = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"


@pytest.fixture
def driver() -> Iterator[NullDriver]:
    with detect.using(NullDriver("a test")) as null:
        assert isinstance(null, NullDriver)
        yield null
    hints.set_uvm_hint_override(None)


@pytest.mark.parametrize(
    ("blocks", "environment", "request_"),
    [
        ({}, {}, "off"),
        ({"gh200_optimizations": {"enable_uvm_hints": True}}, {}, "requested"),
        ({}, {VARIABLE: "1"}, "requested"),
        (UNIFIED, {}, "auto"),
        (UNIFIED | {"gh200_optimizations": {"enable_uvm_hints": False}}, {VARIABLE: "1"}, "off"),
    ],
)
def test_hints_by_key_environment_or_unified_caches(
    driver: NullDriver, blocks: dict[str, Any], environment: dict[str, str], request_: str
) -> None:
    assert HintsFeature().request(resolve(blocks, environment), environment) == request_


def test_an_explicit_false_reaches_direct_callers(driver: NullDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    settings = resolve({"gh200_optimizations": {"enable_uvm_hints": False}}, {VARIABLE: "1"})
    feature = HintsFeature()
    assert feature.request(settings, {VARIABLE: "1"}) == "off"
    assert hints.gh200_uvm_enabled(), "asking, as preflight does, changes nothing"
    feature.runtime = Runtime(Launch())
    feature.runtime.features = (feature,)
    feature.runtime.configure(settings)
    assert not hints.gh200_uvm_enabled()


def test_batches_that_cannot_be_helped_are_soon_left_alone(driver: NullDriver) -> None:
    feature = hints_feature()
    feature.start(None)
    batch = {"latents": torch.zeros(4), "prompt_embeds": torch.zeros(4)}
    for _ in range(LOOK_AGAIN):
        assert feature.batch_prepared(None, batch) is batch
    summary = feature.summary()
    assert summary["batches"] == LOOK_AGAIN
    assert summary["looked_at"] == TRIES + 1
    assert summary["tensors_not_helped"] == 2 * (TRIES + 1)
    feature.close()
    assert not hints.gh200_uvm_enabled()


def test_a_rank_keeps_its_memory_on_cpu_nodes_from_the_start(monkeypatch):
    """Before anything of SimpleTuner's or torch's is imported: what is there by then stays where it is."""
    asked = []
    monkeypatch.setattr(bootstrap, "stay_on_cpu_nodes", lambda: asked.append("policy"))
    monkeypatch.setattr(bootstrap.wrapt, "register_post_import_hook", lambda hook, module: asked.append(module))
    bootstrap.activate()
    try:
        assert asked[0] == "policy", "first of all"
        assert len(asked) > 1
    finally:
        bootstrap.deactivate()
