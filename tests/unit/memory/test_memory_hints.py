"""The hints of the guides: who decides whether they are on, honest results, and which tensors of a batch go where."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from simpletuner_gh200.memory import hints
from simpletuner_gh200.memory.advice import Side
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.hints import side_of
from simpletuner_gh200.memory.nested import tensors_in

VARIABLE = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(hints, "_reported", set())
    with detect.using(NullDriver("a test without a GPU")):
        yield
    hints.set_uvm_hint_override(None)


@pytest.mark.parametrize(
    ("override", "variable", "expected"),
    [
        (None, None, False),
        (None, "1", True),
        (None, "0", False),
        (True, "0", True),
        (False, "1", False),
        (True, None, True),
    ],
)
def test_override_over_environment(
    monkeypatch: pytest.MonkeyPatch, override: bool | None, variable: str | None, expected: bool
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    hints.set_uvm_hint_override(override)
    assert hints.gh200_uvm_enabled() is expected


def test_override_takes_only_a_switch() -> None:
    with pytest.raises(TypeError, match="'yes'"):
        hints.set_uvm_hint_override("yes")  # type: ignore[arg-type]


ALL = [hints.prefer_cpu_residency, hints.prefer_gpu_residency, hints.prefetch_to_device]


@pytest.mark.parametrize("hint", ALL)
def test_a_hint_that_did_nothing_says_why_and_is_logged_once(hint: Any, caplog: Any) -> None:
    hints.set_uvm_hint_override(True)
    with caplog.at_level(logging.INFO, logger="simpletuner_gh200"):
        results = [hint(torch.zeros(4096)) for _ in range(3)]
    assert not any(results)
    assert results[0] == False  # noqa: E712 - equal to a plain False is the promise
    assert "a test without a GPU" in results[0].reason
    assert sum(hint.__name__ in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("hint", ALL)
def test_switched_off_hints_do_not_even_open_the_driver(hint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "current", lambda: pytest.fail("the driver was opened"))
    assert "hints are off" in hint(torch.zeros(8)).reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(4, 4).t()[1:], "not contiguous"),
        ([1, 2], "not a tensor but list"),
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)
def test_what_has_no_plain_memory_is_explained(value: Any, reason: str) -> None:
    hints.set_uvm_hint_override(True)
    assert reason in hints.prefer_cpu_residency(value).reason


@pytest.mark.parametrize(
    ("key", "parent", "side"),
    [
        ("latents", "", "cpu"),
        ("audio_latents", "", "cpu"),
        ("audio_samples", "", "cpu"),
        ("waveform", "audio", "cpu"),
        ("samples", "audio", "cpu"),
        ("samples", "", None),
        ("prompt_embeds", "", "gpu"),
        ("negative_prompt_embeds", "", "gpu"),
        ("add_text_embeds", "", "gpu"),
        ("pooled_prompt_embeds", "text_encoder_output", "gpu"),
        ("encoder_attention_mask", "", "gpu"),
        ("noisy_latents", "", None),
        ("noise", "", None),
        ("timesteps", "", None),
    ],
)
def test_sides(key: str, parent: str, side: Side | None) -> None:
    assert side_of(key, parent) == side


@dataclass
class Audio:
    waveform: torch.Tensor
    rate: int = 48_000


def test_walk_finds_tensors_in_dicts_lists_tuples_and_dataclasses() -> None:
    batch: dict[str, Any] = {
        "latents": torch.zeros(1),
        "conditioning_latents": [torch.zeros(2), (torch.zeros(3),)],
        "audio": Audio(torch.zeros(4)),
        "text_encoder_output": {"prompt_embeds": torch.zeros(5), "unknown": torch.zeros(6)},
        "prompts": ["a cat"],
        "timesteps": torch.zeros(7),
    }
    batch["itself"] = batch["prompts"]
    found = {tensor.numel(): side_of(*keys[:-3:-1]) for keys, tensor in tensors_in(batch)}
    assert found == {1: "cpu", 2: "cpu", 3: "cpu", 4: "cpu", 5: "gpu", 6: None, 7: None}


def test_a_batch_that_contains_itself_ends() -> None:
    batch: dict[str, Any] = {"latents": torch.zeros(1)}
    batch["again"] = batch
    assert 1 <= len(list(tensors_in(batch))) <= 9


def test_batch_report_counts_and_leaves_the_batch_alone() -> None:
    hints.set_uvm_hint_override(True)
    batch = {"latents": torch.ones(2), "prompt_embeds": torch.ones(3), "noise": torch.ones(4), "step": 3}
    before = dict(batch)
    report = hints.optimize_batch_for_gh200(batch)
    assert not report
    assert (report.helped, report.not_helped, report.untouched) == (0, 2, 1)
    assert sum(report.reasons.values()) == 2
    assert batch == before or all(batch[key] is before[key] for key in before)


def test_off_means_the_batch_is_not_even_walked() -> None:
    report = hints.optimize_batch_for_gh200({"latents": torch.ones(2)})
    assert (report.helped, report.not_helped, report.untouched) == (0, 0, 0)


@pytest.mark.parametrize(
    ("pattern", "given"),
    [
        ("gpu_first", ["prefer_cpu_residency", "prefer_gpu_residency", "prefetch_to_device"]),
        ("balanced", ["prefer_cpu_residency", "prefetch_to_device"]),
        ("cpu_first", ["prefer_cpu_residency", "prefer_cpu_residency"]),
    ],
)
def test_the_access_pattern_guides_the_hints(pattern: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("prefer_cpu_residency", "prefer_gpu_residency", "prefetch_to_device"):
        monkeypatch.setattr(hints, name, lambda _tensor, name=name: asked.append(name) or hints.HintResult(True, ""))
    monkeypatch.setenv("GH200_UVM_ACCESS_PATTERN", pattern)
    hints.set_uvm_hint_override(True)
    hints.optimize_batch_for_gh200({"latents": torch.zeros(2), "prompt_embeds": torch.zeros(2)})
    assert asked == given
    asked.clear()
    hints.optimize_batch_for_gh200({"latents": torch.zeros(2), "prompt_embeds": torch.zeros(2)}, "cpu_first")
    assert set(asked) == {"prefer_cpu_residency"}, "what is asked for rules over the environment"
