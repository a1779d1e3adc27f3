"""Allocator configuration of the earlier guides: its keys never reach a torch that would crash on them."""

import logging
from pathlib import Path

import pytest

from simpletuner_gh200.config import allocator
from simpletuner_gh200.config.allocator import TorchBuild, find_torch, knows_uvm, translate
from simpletuner_gh200.config.blocks import ActivationSettings, StateSettings
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.memory.alloc_conf import activate

GUIDES = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"


def test_the_guides_own_setting_becomes_ours_and_leaves_nothing() -> None:
    found = translate(GUIDES)
    assert found.kept == ""
    assert found.settings == {"use_uvm": True, "uvm_oversubscription_ratio": 5.0, "uvm_access_pattern": "gpu_first"}
    assert found.problems == ()


def test_torchs_own_keys_stay_in_order_and_as_they_were() -> None:
    text = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8],use_uvm:false,max_split_size_mb:64"
    found = translate(text)
    assert found.kept == ("expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:64")
    assert found.settings == {"use_uvm": False}


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "backend:cudaMallocAsync", "a:[1,2],b"])
def test_without_our_keys_nothing_changes(text: str) -> None:
    assert not translate(text).changed
    assert translate(text).kept == text


@pytest.mark.parametrize(
    "text", ["use_uvm:maybe", "uvm_oversubscription_ratio:big", "uvm_oversubscription_ratio:-1", "uvm_access_pattern:x"]
)
def test_an_unreadable_value_is_dropped_and_named(text: str) -> None:
    found = translate(text)
    assert found.kept == ""
    assert text in found.problems[0]


def test_activation_cleans_passes_on_and_gives_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocator, "find_torch", lambda: None)
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": GUIDES,
        "PYTORCH_ALLOC_CONF": "use_uvm:True,max_split_size_mb:64",
        "GH200_UVM_ACCESS_PATTERN": "cpu_first",
    }
    with caplog.at_level(logging.WARNING, logger="simpletuner_gh200"):
        activate(environment)
    assert environment == {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "GH200_USE_UVM": "True",
        "GH200_ACTIVATIONS": "auto",
        "GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0",
        "GH200_UVM_ACCESS_PATTERN": "cpu_first",
    }
    assert sum("stock PyTorch doesn't know" in record.getMessage() for record in caplog.records) == 2


def test_what_was_passed_on_is_read_by_the_configuration() -> None:
    from simpletuner_gh200.config.settings import resolve

    environment = {"GH200_USE_UVM": "True", "GH200_UVM_OVERSUBSCRIPTION_RATIO": "2.5"}
    settings = resolve({}, environment)
    assert settings.part(StateSettings).use_uvm
    assert settings.part(StateSettings).uvm_oversubscription_ratio == 2.5
    assert settings.origins["gh200_optimizations.use_uvm"] == "environment (GH200_USE_UVM)"


def test_a_run_is_read_with_it_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gh200 config check`, `train --dry-run`, `plan` and the doctor see the settings that the ranks will have."""
    monkeypatch.setattr(allocator, "find_torch", lambda: None)
    training = read_training(Located("cmd", None), {"PYTORCH_CUDA_ALLOC_CONF": GUIDES})
    assert training.settings is not None
    assert training.settings.part(StateSettings).use_uvm
    assert training.settings.part(ActivationSettings).activations == "auto"
    (note,) = training.settings.notes
    assert "optimizer state and EMA live in Grace" in note


def test_a_build_that_knows_the_keys_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    literals = b"\0use_uvm\0uvm_oversubscription_ratio\0uvm_access_pattern\0"
    (tmp_path / "lib" / "libc10_cuda.so").write_bytes(literals)
    monkeypatch.setattr(allocator, "find_torch", lambda: TorchBuild(tmp_path, "2.9.0a0", "13.0", None))
    environment = {"PYTORCH_CUDA_ALLOC_CONF": GUIDES}
    activate(environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": GUIDES}


@pytest.mark.releases
def test_the_installed_torch_is_a_stock_one() -> None:
    assert find_torch() is not None
    assert not knows_uvm(find_torch())
    assert not knows_uvm(None)
