from __future__ import annotations

import json

import pytest

from simpletuner_gh200.config.blocks import ActivationSettings, CacheSettings
from simpletuner_gh200.config.environment import flag_from_text
from simpletuner_gh200.config.settings import resolve, resolve_dataset, without_effect
from simpletuner_gh200.errors import ConfigError


def problems_of(blocks, environment=None):
    with pytest.raises(ConfigError) as caught:
        resolve(blocks, environment or {})
    return [str(problem) for problem in caught.value.problems]


def test_nothing_given_is_all_defaults():
    settings = resolve({}, {})
    assert not settings.any_given
    assert {origin for _, _, origin in settings.rows()} == {"default"}


def test_all_problems_are_reported_together_and_quote_the_value():
    found = problems_of(
        {
            "gh200_optimizations": {"ramp_curv": "linear", "batch_rampup_steps": "many", "ramp_curve": "cubic"},
            "cache_config": {"vae_cache_type": "unified"},
        }
    )
    text = "\n".join(found)
    assert len(found) == 4
    assert "did you mean 'ramp_curve'?" in text
    assert "'many'" in text
    assert "'cubic'" in text and "'quadratic', 'linear', 'stepwise'" in text
    assert "'unified'" in text and "'unified_memory', 'standard'" in text


@pytest.mark.parametrize("value", ["{", "[1]", 3, "text"])
def test_a_block_that_is_not_a_block(value):
    (found,) = problems_of({"cache_config": value})
    assert found.startswith("cache_config")


def test_a_block_may_be_json_text():
    settings = resolve({"cache_config": json.dumps({"fill": "lazy"})}, {})
    assert settings.part(CacheSettings).fill == "lazy"
    assert settings.given("cache_config.fill")
    assert not settings.given("cache_config.slab")


@pytest.mark.parametrize("bad", [0, -4, 1.5, True, "8"])
def test_nonsense_numbers_are_refused(bad):
    blocks = {"gh200_optimizations": {"enable_batch_size_rampup": True, "initial_effective_batch_size": bad}}
    assert any("initial_effective_batch_size" in found and repr(bad) in found for found in problems_of(blocks))


def test_config_wins_over_environment_and_both_are_named():
    environment = {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "0"}
    from_environment = resolve({}, environment)
    assert from_environment.origins["gh200_optimizations.enable_uvm_hints"].startswith("environment")
    both = resolve({"gh200_optimizations": {"enable_uvm_hints": True}}, environment, source="run.json")
    assert both.origins["gh200_optimizations.enable_uvm_hints"] == "run.json"


def test_a_bad_environment_value_names_the_variable():
    (found,) = problems_of({}, {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "perhaps"})
    assert found.startswith("SIMPLETUNER_GH200_ENABLE_UVM_HINTS") and "'perhaps'" in found
    (found,) = problems_of({}, {"GH200_UVM_ACCESS_PATTERN": "sideways"})
    assert found.startswith("GH200_UVM_ACCESS_PATTERN: 'sideways': accepted: 'gpu_first'")
    settled = resolve({"gh200_optimizations": {"uvm_access_pattern": "balanced"}}, {"GH200_UVM_ACCESS_PATTERN": "x"})
    assert settled.origins["gh200_optimizations.uvm_access_pattern"] == "config"


@pytest.mark.parametrize("depth", ["deep", 1.5, 0])
def test_a_key_with_a_bad_value_is_one_problem_whatever_kinds_it_may_have(depth):
    (found,) = problems_of({"gh200_optimizations": {"prefetch_depth": depth}})
    assert found.startswith("gh200_optimizations.prefetch_depth") and repr(depth) in found


def test_a_dataset_block_has_all_its_problems_reported_together_with_its_entry():
    with pytest.raises(ConfigError) as caught:
        resolve_dataset({"compresion": "lz4", "verify": "twice", "num_workers": 0}, where="dataset 'cats'.in_memory")
    assert len(caught.value.problems) == 3
    assert "dataset 'cats'.in_memory.compresion" in str(caught.value)
    assert "did you mean 'compression'?" in str(caught.value)


def test_switches_in_text():
    assert flag_from_text(" On ") is True
    assert flag_from_text("0") is False
    with pytest.raises(ValueError, match="maybe"):
        flag_from_text("maybe")


def test_activations_have_a_variable_that_the_configuration_overrules():
    environment = {"GH200_ACTIVATIONS": "auto"}
    assert resolve({}, environment).part(ActivationSettings).activations == "auto"
    block = {"gh200_optimizations": {"activations": "off"}}
    assert resolve(block, environment).part(ActivationSettings).activations == "off"


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN"])
def test_a_number_without_end_is_refused_with_what_is_accepted(text):
    (found,) = problems_of({"cache_config": f'{{"memory_limit_gb": {text}}}'})
    assert found.startswith(f"cache_config.memory_limit_gb: {float(text)!r}: ")
    assert "accepted: a finite number" in found and "leave the key out" in found
    with pytest.raises(ConfigError, match="accepted: a finite number"):
        resolve_dataset({"memory_limit_gb": float(text)}, where="photos")


# -- a setting that reaches nothing because another one is off is told, whoever set it ------------------


def notes(cache: dict | None = None, **optimizations: object) -> list[str]:
    return without_effect(resolve({"cache_config": cache or {}, "gh200_optimizations": optimizations}, {}))


def test_a_ratio_without_use_uvm_is_never_silent():
    environment = {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0", "GH200_UVM_ACCESS_PATTERN": "gpu_first"}
    ratio, pattern = without_effect(resolve({}, environment))
    assert "uvm_oversubscription_ratio 5.0 (environment (GH200_UVM_OVERSUBSCRIPTION_RATIO)) has no effect: " in ratio
    assert "GH200_USE_UVM=1" in ratio and "uvm_access_pattern" in pattern
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
