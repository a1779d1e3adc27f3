"""Which checkpoints are whole, as both generations of SimpleTuner leave them."""

from __future__ import annotations

import json
import os
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.upstream.checkpoints import checkpoints, flaw, guarded, missing_from, newest_whole
from tests.unit.nobody import as_nobody

OLD, NEW = "3.1.6", "4.10.1"


def write(folder: Path, *, guarded: bool, ranks: int = 1) -> Path:
    """The files of a real one, in the order in which they are written."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        write_rank(folder, rank)
    if guarded:
        seal(folder)
    return folder


def write_rank(folder: Path, rank: int) -> None:
    state = "training_state" + (f"-rank{rank}" if rank else "")
    (folder / f"{state}.json").write_text(json.dumps({"global_step": 2}))
    if not rank:
        save_file({"lora.weight": torch.ones(4)}, str(folder / "pytorch_lora_weights.safetensors"))
        torch.save({"state": torch.ones(8)}, folder / "optimizer.bin")
        torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    torch.save({"step": 2}, folder / f"random_states_{rank}.pkl")
    (folder / f"{state}-images.json").write_text("{}")


def seal(folder: Path) -> None:
    files = sorted(path.name for path in folder.iterdir())
    (folder / "checkpoint_manifest.json").write_text(json.dumps({"version": 1, "files": files}))
    (folder / ".guard").write_text("complete\n")


@pytest.fixture(params=[True, False], ids=["guarded", "unguarded"])
def newest(request, tmp_path) -> Path:
    """The second of two whole checkpoints, of a release that guards and of one that does not."""
    for step in (2, 10):
        write(tmp_path / f"checkpoint-{step}", guarded=request.param)
    return tmp_path / "checkpoint-10"


def release_of(checkpoint: Path) -> str:
    return NEW if (checkpoint.parent / "checkpoint-2" / ".guard").exists() else OLD


def test_whole_checkpoints_are_whole(newest):
    found = checkpoints(newest.parent)
    assert [path.name for path in found] == ["checkpoint-2", "checkpoint-10"]
    assert [flaw(path, release_of(newest)) for path in found] == [None, None]


def cut(name: str):
    def damage(checkpoint: Path) -> None:
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def lose(name: str):
    return lambda checkpoint: (checkpoint / name).unlink()


def weights(header: bytes):
    """A file of weights that is as long as its header asks for, and whose header is nobody's."""

    def damage(checkpoint: Path) -> None:
        content = len(header).to_bytes(8, "little") + header
        (checkpoint / "pytorch_lora_weights.safetensors").write_bytes(content)

    return damage


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES = {
    "empty": (empty, "it is empty"),
    "no end": (lose("random_states_0.pkl"), "no random_states_0.pkl"),
    "no state": (lose("training_state.json"), "no training_state.json"),
    "no place": (lose("training_state-images.json"), "training_state-"),
    "no weights": (lose("pytorch_lora_weights.safetensors"), "weights"),
    "empty file": (lambda checkpoint: (checkpoint / "optimizer.bin").write_bytes(b""), "optimizer.bin is not whole"),
    "cut optimizer": (cut("optimizer.bin"), "optimizer.bin is not whole"),
    "cut weights": (cut("pytorch_lora_weights.safetensors"), "pytorch_lora_weights.safetensors is not whole"),
    "cut state": (cut("training_state.json"), "training_state.json is not whole"),
    "a deep header": (weights(b"[" * 100_000), "invalid JSON in header"),
    "a deep state": (
        lambda checkpoint: (checkpoint / "training_state.json").write_text("[" * 100_000),
        "training_state.json is not whole",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_missing_is_named(newest, kind):
    damage, words = DAMAGES[kind]
    release = release_of(newest)
    damage(newest)
    found = flaw(newest, release)
    assert found is not None and words in found


def test_every_rank_that_wrote_anything_must_have_written_all(tmp_path):
    whole = write(tmp_path / "checkpoint-4", guarded=False, ranks=3)
    assert flaw(whole, OLD) is None
    for name in ("random_states_1.pkl", "training_state-rank2.json", "training_state-rank1-images.json"):
        content = (whole / name).read_bytes()
        (whole / name).unlink()
        assert flaw(whole, OLD) is not None, name
        (whole / name).write_bytes(content)


def test_what_the_manifest_names_must_be_there(tmp_path):
    whole = write(tmp_path / "checkpoint-4", guarded=True, ranks=2)
    assert flaw(whole, NEW) is None
    (whole / "random_states_1.pkl").unlink()
    assert flaw(whole, NEW) == "it has no random_states_1.pkl, which its manifest names"


@pytest.mark.parametrize(
    ("release", "guards"), [("3.1.6", False), ("4.3.1", False), ("4.3.2", True), ("4.10.1", True), ("main", True)]
)
def test_a_release_that_guards_is_known_by_its_version(tmp_path, release, guards):
    only = write(tmp_path / "checkpoint-4", guarded=False)
    assert guarded(release) == guards
    assert (flaw(only, release) is not None) == guards


def test_what_is_older_than_the_installed_release_was_written_by_another(tmp_path):
    package = find_package("simpletuner")
    assert package is not None
    before = write(tmp_path / "checkpoint-4", guarded=False)
    earlier = package.stat().st_mtime - 10
    os.utime(before, (earlier, earlier))
    assert flaw(before) is None
    (before / "random_states_0.pkl").unlink()
    os.utime(before, (earlier, earlier))
    assert flaw(before) is not None


def test_what_comes_after_a_whole_one_without_a_guard_was_written_by_another_release(tmp_path):
    """The environment may be older than the run, or its files have no true times."""
    first, second = (write(tmp_path / f"checkpoint-{step}", guarded=False) for step in (4, 8))
    later = time.time() + 10
    for path in (first, second):
        os.utime(path, (later, later))
    assert flaw(second) is None
    assert (flaw(first) is not None) == guarded(version("simpletuner")), "it may be a first save that was cut off"
    (first / "random_states_0.pkl").unlink()
    os.utime(second, (later, later))
    assert (flaw(second) is not None) == guarded(version("simpletuner"))


FULL = {"training_state.json": 9, "random_states_0.pkl": 9, "training_state-images.json": 9, "scheduler.bin": 9}
LAYOUTS = {
    "full fine-tune": ["optimizer.bin", "unet/diffusion_pytorch_model.safetensors", "unet/config.json"],
    "controlnet": ["optimizer.bin", "controlnet/diffusion_pytorch_model.safetensors"],
    "LyCORIS with EMA": ["optimizer.bin", "pytorch_lora_weights.safetensors", "ema/ema_model.safetensors"],
    "accelerate's own": ["optimizer.bin", "model.safetensors", "custom_checkpoint_0.pkl"],
    "FSDP, whole": ["optimizer.bin", "pytorch_model_fsdp.bin"],
    "FSDP, sharded": [
        "pytorch_model_fsdp_0/__0_0.distcp",
        "pytorch_model_fsdp_0/.metadata",
        "optimizer_0/__0_0.distcp",
    ],
    "DeepSpeed": ["pytorch_model/mp_rank_00_model_states.pt", "zero_to_fp32.py", "latest"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_of_training_has_its_own_weights(layout):
    sizes = FULL | dict.fromkeys(LAYOUTS[layout], 9)
    assert missing_from(sizes, guards=False, listed=None) is None


def test_neither_ema_nor_the_optimizer_are_weights():
    for name in ("ema/ema_model.safetensors", "optimizer.bin", "optimizer_0/__0_0.distcp", "dl_state_dict.bin"):
        assert missing_from(FULL | {name: 9}, guards=False, listed=None) == "it has no weights"
    assert missing_from(FULL | {"model.safetensors": 0}, guards=False, listed=None) == "it has no weights"


def test_a_dataset_may_be_named_like_the_state_that_it_is_kept_in(tmp_path):
    """SimpleTuner then writes its place over the training state, where both releases look for it."""
    odd = write(tmp_path / "checkpoint-4", guarded=False)
    (odd / "training_state-images.json").unlink()
    (odd / "training_state.json").write_text('{"current_epoch": 1}')
    assert flaw(odd, OLD) is None


def test_a_checkpoint_that_can_not_be_read_is_not_whole(tmp_path):
    for step in (2, 4):
        for path in write(tmp_path / f"checkpoint-{step}", guarded=True).iterdir():
            path.chmod(0o644)
    (tmp_path / "checkpoint-4").chmod(0)

    def work() -> None:
        assert "Permission denied" in str(flaw(tmp_path / "checkpoint-4"))
        assert newest_whole(tmp_path) == tmp_path / "checkpoint-2"

    assert as_nobody(work, tmp_path) == 0
