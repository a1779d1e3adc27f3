from __future__ import annotations

import json

import pytest

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.legacy import modernise
from simpletuner_gh200.config.settings import resolve


def test_ramp_keys_at_top_level_enable_the_ramp():
    modern = modernise({"--initial_effective_batch_size": 4, "batch_rampup_steps": 10, "use_gh200_trainer": True})
    assert modern.blocks["gh200_optimizations"]["enable_batch_size_rampup"] is True
    assert resolve(modern.blocks, {}).part(RampSettings).initial_effective_batch_size == 4
    assert any("top level" in note for note in modern.notes)
    assert any("use_gh200_trainer" in note for note in modern.notes)


def test_a_block_wins_over_its_older_spelling():
    modern = modernise({"target_effective_batch_size": 8, "gh200_optimizations": {"target_effective_batch_size": 16}})
    assert modern.blocks["gh200_optimizations"]["target_effective_batch_size"] == 16


def test_older_spellings_join_a_block_that_travelled_as_text():
    """In a rank, a block arrives as the text of a flag."""
    keys = {"initial_effective_batch_size": 4, "batch_rampup_steps": 10}
    modern = modernise({**keys, "gh200_optimizations": json.dumps({"ramp_curve": "linear"})})
    ramp = resolve(modern.blocks, {}).part(RampSettings)
    assert (ramp.enable_batch_size_rampup, ramp.initial_effective_batch_size, ramp.ramp_curve) == (True, 4, "linear")


@pytest.mark.parametrize("value", [{"type": "in_memroy"}, "in_memory", {"type": "in_memory", "config": [1]}])
def test_a_data_backend_that_is_not_understood_is_refused(value):
    modern = modernise({"data_backend": value})
    assert [problem.where.partition(".")[0] for problem in modern.problems] == ["data_backend"]
    assert modern.in_memory_for_all is None


def test_data_backend_of_type_in_memory():
    modern = modernise(
        {
            "data_backend": {
                "type": "in_memory",
                "config": {"in_memory_limit_gb": 12, "in_memory_compression_lib": "lz4", "in_memory_chunk_size": 4},
            }
        }
    )
    assert modern.in_memory_for_all == {"memory_limit_gb": 12, "compression": "lz4"}
    assert any("in_memory_chunk_size" in note for note in modern.notes)


def test_keys_beside_the_type_are_read_or_named():
    modern = modernise({"data_backend": {"type": "in_memory", "in_memory_limit_gb": 200, "chunk": 4}})
    assert modern.in_memory_for_all == {"memory_limit_gb": 200}
    (problem,) = modern.problems
    assert problem.where == "data_backend.chunk = 4"
    assert "memory_limit_gb" in problem.remedy
    (problem,) = modernise({"data_backend": {"type": "in_memory", "config": {"chunk": 4}}}).problems
    assert problem.where == "data_backend.config.chunk = 4"
