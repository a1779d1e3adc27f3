"""A setting that reaches nothing because another one is off is told, whoever set it."""

from __future__ import annotations

import pytest

from simpletuner_gh200.config.settings import resolve, without_effect


def notes(cache: dict | None = None, **optimizations: object) -> list[str]:
    return without_effect(resolve({"cache_config": cache or {}, "gh200_optimizations": optimizations}, {}))


def test_a_ratio_without_use_uvm_is_never_silent():
    environment = {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0", "GH200_UVM_ACCESS_PATTERN": "gpu_first"}
    (note,) = without_effect(resolve({}, environment))
    assert "uvm_oversubscription_ratio 5.0 (environment (GH200_UVM_OVERSUBSCRIPTION_RATIO))" in note
    assert "GH200_USE_UVM=1" in note
    assert without_effect(resolve({}, {**environment, "GH200_USE_UVM": "1"})) == []
    assert without_effect(resolve({}, {})) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"initial_effective_batch_size": 4}, "initial_effective_batch_size 4 (config) has no effect: enable_batch_"),
        ({"activation_limit_gb": 8}, "activation_limit_gb 8.0 (config) has no effect: activations is not set"),
        ({"uvm_streaming": "on"}, 'uvm_streaming "on" (config) has no effect: use_uvm is not set'),
    ],
)
def test_keys_without_their_switch_are_told(given, told):
    (note,) = notes(**given)
    assert note.startswith(f"gh200_optimizations.{told}")


def test_what_is_switched_off_by_name_may_wait_there():
    assert notes(enable_batch_size_rampup=False, initial_effective_batch_size=4) == []
    assert notes(cache={"vae_cache_type": "standard", "cache_dir": "cache/gh200"}) == []


def test_what_is_as_it_would_be_anyway_is_not_told():
    assert notes(ramp_curve="quadratic", cache={"persistent_cache": True}) == []


def test_a_key_that_needs_another_value():
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4, "ramp_increment": 2}
    (note,) = notes(**ramp)
    assert note.endswith('has no effect: ramp_curve is not "stepwise"')
    assert notes(**ramp, ramp_curve="stepwise") == []


def test_settings_of_caches_that_are_not_served_are_told():
    (note,) = notes(cache={"cache_dir": "cache/gh200"})
    assert 'cache_config.cache_dir "cache/gh200"' in note and "vae_cache_type" in note
    assert notes(cache={"cache_dir": "cache/gh200", "text_cache_type": "unified_memory"}) == []
    (note,) = notes(cache={"vae_cache_type": "unified_memory"}, enable_uvm_hints=False)
    assert "enable_uvm_hints is false" in note
