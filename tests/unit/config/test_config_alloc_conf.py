"""Allocator configuration of the earlier guides: its keys never reach a torch that would crash on them."""

import logging

import pytest

from simpletuner_gh200.config import allocator
from simpletuner_gh200.config.allocator import activate
from simpletuner_gh200.config.blocks import ActivationSettings, StateSettings
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training

TORCHS = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8]"
GUIDES = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"


@pytest.mark.parametrize(
    ("text", "kept", "taken", "said"),
    [
        (GUIDES, "", {"USE_UVM": "True", "UVM_OVERSUBSCRIPTION_RATIO": "5.0", "UVM_ACCESS_PATTERN": "gpu_first"}, ""),
        (f"{TORCHS},use_uvm:false,max_split_size_mb:64", f"{TORCHS},max_split_size_mb:64", {"USE_UVM": "False"}, ""),
        *((text, text, {}, None) for text in ("", "expandable_segments:True", "a:[1,2],b")),
        *((text, "", {}, text) for text in ("use_uvm:maybe", "uvm_oversubscription_ratio:-1", "uvm_access_pattern:x")),
    ],
)
def test_our_keys_become_our_variables_and_torchs_own_stay_as_they_were(
    text: str, kept: str, taken: dict[str, str], said: str | None
) -> None:
    settled, notes = allocator.carried_over({"PYTORCH_CUDA_ALLOC_CONF": text})
    assert settled.pop("PYTORCH_CUDA_ALLOC_CONF", "") == kept
    settled.pop("GH200_ACTIVATIONS", None)
    assert settled == {f"GH200_{name}": value for name, value in taken.items()}
    assert notes == [] if said is None else said in notes[0], "what could not be read is named"


def test_activation_cleans_passes_on_and_gives_notice(caplog: pytest.LogCaptureFixture) -> None:
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
    assert sum("PyTorch doesn't know" in record.getMessage() for record in caplog.records) == 2


def test_a_run_is_read_with_it_before_it_starts() -> None:
    """`gh200 config check`, `train --dry-run`, `plan` and the doctor see the settings that the ranks will have."""
    training = read_training(Located("cmd", None), {"PYTORCH_CUDA_ALLOC_CONF": GUIDES})
    assert training.settings is not None
    assert training.settings.part(StateSettings).use_uvm
    assert training.settings.origins["gh200_optimizations.use_uvm"] == "environment (GH200_USE_UVM)"
    assert training.settings.part(ActivationSettings).activations == "auto"
    (note,) = training.settings.notes
    assert "optimizer state and EMA live in Grace" in note
