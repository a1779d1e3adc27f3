"""Blocks as fields of a form, and back: exact, whoever wrote them."""

from __future__ import annotations

import pytest

from simpletuner_gh200.config.blocks import PARTS
from simpletuner_gh200.config.form import field_problem, folded, form_fields, form_problems, shown_values
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError

CACHES = "gh200_cache_config_"
OURS = "gh200_gh200_optimizations_"
BY_HAND = {
    "output_dir": "out",
    "cache_config": {"vae_cache_type": "unified_memory", "memory_limit_gb": 5, "of_tomorrow": [1]},
    "gh200_optimizations": {"enable_uvm_hints": True, "prefetch_depth": 3, "uvm_oversubscription_ratio": 5.0},
    "ramp_curve": "linear",
    "use_gh200_trainer": True,
}
KEPT = {key: value for key, value in BY_HAND.items() if key != "output_dir"}


def test_every_key_of_the_training_blocks_is_a_field_with_words():
    keys = [(part.block, key) for part in PARTS if part.block in TRAINING_BLOCKS for key in part.names()]
    fields = form_fields()
    assert [(field.part.block, field.key) for field in fields] == keys
    assert [field.name for field in fields] == [f"gh200_{block}_{key}" for block, key in keys]
    for field in fields:
        assert field.label and field.help.strip().endswith("."), field.name
        assert field.kind != "choice" or len(field.choices) > 1, field.name


def test_what_is_shown_and_sent_back_changes_nothing():
    shown = shown_values(BY_HAND)
    assert shown[CACHES + "memory_limit_gb"] == "5"
    assert shown[OURS + "ramp_curve"] == "linear", "an older spelling is shown in the field it means"
    assert folded(BY_HAND, shown) == KEPT
    assert folded(BY_HAND, {}) == KEPT, "a page that never opened the tab sends none of them"


def test_nothing_of_ours_stays_nothing():
    assert folded({"output_dir": "out"}, shown_values({})) == {}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (CACHES + "memory_limit_gb", "2.5", {"memory_limit_gb": 2.5}),
        (CACHES + "cache_dir", "packs", {"cache_dir": "packs"}),
        (CACHES + "persistent_cache", "false", {"persistent_cache": False}),
        (OURS + "enable_uvm_hints", "false", {"enable_uvm_hints": False}),
        (OURS + "prefetch_depth", "4", {"prefetch_depth": 4}),
        (OURS + "uvm_streaming", "off", {"uvm_streaming": "off"}),
        (OURS + "activation_min_tensor_kb", "0", {"activation_min_tensor_kb": 0}),
    ],
)
def test_what_is_typed_has_the_type_that_a_hand_would_have_written(name, text, expected):
    (block,) = folded({}, {**shown_values({}), name: text}).values()
    assert block == expected
    assert all(type(block[key]) is type(value) for key, value in expected.items())


def test_an_emptied_field_takes_its_key_out_and_the_block_with_the_last_one():
    config = {"cache_config": {"memory_limit_gb": 5}, "initial_effective_batch_size": 4}
    emptied = {**shown_values(config), CACHES + "memory_limit_gb": "", OURS + "initial_effective_batch_size": " "}
    assert folded(config, emptied) == {}


def test_a_number_spelt_otherwise_is_no_change():
    config = {"cache_config": {"memory_limit_gb": 5}}
    assert folded(config, {CACHES + "memory_limit_gb": "5.0"}) == config


def test_a_block_that_is_no_block_is_left_alone_and_reported():
    config = {"cache_config": "{oops"}
    assert folded(config, {**shown_values(config), CACHES + "slab": "host"}) == config
    (problem,) = form_problems(config)
    assert "'{oops' is not" in str(problem)


def test_a_field_says_what_config_check_says():
    with pytest.raises(ConfigError) as caught:
        resolve({"gh200_optimizations": {"batch_rampup_steps": 0}}, {})
    assert field_problem(OURS + "batch_rampup_steps", "0", {}) == str(caught.value.problems[0])
    assert "'many'" in str(field_problem(OURS + "prefetch_depth", "many", {}))
    assert field_problem(OURS + "prefetch_depth", "7", {}) is None
    assert field_problem("learning_rate", "much", {}) is None, "not ours"


def test_a_field_is_judged_beside_the_others():
    on = {OURS + "enable_batch_size_rampup": "true"}
    assert "not set" in str(field_problem(OURS + "initial_effective_batch_size", "", on))
    assert field_problem(OURS + "initial_effective_batch_size", "4", on) is None


def test_an_unknown_key_does_not_keep_a_form_from_being_saved():
    assert form_problems({"cache_config": {"of_tomorrow": 1}}) == []


@pytest.mark.parametrize("unsound", ["maybe", None, [1]])
def test_a_switch_that_is_neither_on_nor_off_stays_until_somebody_turns_it_on(unsound):
    """The page can show it only as not checked, and sends that with every save."""
    config = {"cache_config": {"persistent_cache": unsound, "slab": "host"}}
    sent = {**shown_values(config), CACHES + "persistent_cache": "false"}
    assert folded(config, sent) == config
    assert "persistent_cache" in str(form_problems(folded(config, sent))[0])
    turned_on = folded(config, {**sent, CACHES + "persistent_cache": "true"})
    assert turned_on == {"cache_config": {"persistent_cache": True, "slab": "host"}}


def test_a_switch_that_was_written_as_text_can_be_turned_off():
    config = {"cache_config": {"persistent_cache": "yes"}}
    assert folded(config, {CACHES + "persistent_cache": "false"}) == {"cache_config": {"persistent_cache": False}}
