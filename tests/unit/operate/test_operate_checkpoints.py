"""Which checkpoints are whole, as both generations of SimpleTuner leave them, and where a run goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.checkpoints import checkpoints, flaw, forgotten_positions, newest_whole, resumption
from tests.unit.nobody import as_nobody


def write(folder: Path, *, guarded: bool) -> Path:
    """The files of a real one, in the order in which they are written."""
    folder.mkdir(parents=True)
    save_file({"lora.weight": torch.ones(4)}, str(folder / "pytorch_lora_weights.safetensors"))
    (folder / "training_state.json").write_text(json.dumps({"global_step": 2}))
    torch.save({"state": torch.ones(8)}, folder / "optimizer.bin")
    torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    torch.save({"step": 2}, folder / "random_states_0.pkl")
    (folder / "training_state-images.json").write_text("{}")
    if guarded:
        (folder / "checkpoint_manifest.json").write_text("{}")
        (folder / ".guard").write_text("complete\n")
    return folder


@pytest.fixture(params=[True, False], ids=["guarded", "unguarded"])
def output(request, tmp_path) -> Path:
    """Two whole checkpoints."""
    for step in (2, 10):
        write(tmp_path / f"checkpoint-{step}", guarded=request.param)
    return tmp_path


def config(output: Path, asked: str | None = "latest", **more: object) -> dict[str, object]:
    return {"output_dir": str(output), "resume_from_checkpoint": asked, **more}


def test_whole_checkpoints_are_left_to_simpletuner(output):
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2", "checkpoint-10"]
    assert [flaw(path) for path in checkpoints(output)] == [None, None]
    assert resumption(config(output)).flags == ()
    assert resumption(config(output, "checkpoint-2")).flags == ()
    assert resumption(config(output, None)).flags == ()


def cut(name: str):
    def damage(checkpoint: Path) -> None:
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def weights(header: bytes):
    """A file of weights that is as long as its header asks for, and whose header is nobody's."""

    def damage(checkpoint: Path) -> None:
        content = len(header).to_bytes(8, "little") + header
        (checkpoint / "pytorch_lora_weights.safetensors").write_bytes(content)

    return damage


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        lambda checkpoint: (checkpoint / "random_states_0.pkl").unlink(),
        lambda checkpoint: (checkpoint / "training_state.json").unlink(),
        lambda checkpoint: (checkpoint / "optimizer.bin").write_bytes(b""),
        cut("optimizer.bin"),
        cut("pytorch_lora_weights.safetensors"),
        cut("training_state.json"),
        weights(b"[1, 2]"),
        weights(b'{"lora.weight": {"data_offsets": "none"}}'),
        weights(b'{"lora.weight": 5}'),
        weights(b"[" * 100_000),
        lambda checkpoint: (checkpoint / "training_state.json").write_text("[" * 100_000),
    ],
    ids=[
        *("empty", "no end", "no state", "empty file", "cut optimizer", "cut weights", "cut state"),
        *("a list for a header", "no offsets", "no entry", "a deep header", "a deep state"),
    ],
)
def test_an_incomplete_newest_one_is_said_and_passed_over_and_stays(output, damage):
    newest = output / "checkpoint-10"
    damage(newest)
    before = sorted(newest.rglob("*"))
    found = resumption(config(output))
    assert found.flags == ("--resume_from_checkpoint=checkpoint-2",)
    assert "checkpoint-10 is incomplete" in found.notice
    assert "resumes from checkpoint-2" in found.notice
    assert newest_whole(output) == output / "checkpoint-2"
    assert sorted(newest.rglob("*")) == before
    with pytest.raises(UsageError, match="checkpoint-10 is incomplete") as refused:
        resumption(config(output, "checkpoint-10"))
    assert "checkpoint-2" in str(refused.value.remedy)


def test_the_guard_is_what_counts_where_the_release_writes_one(tmp_path):
    write(tmp_path / "checkpoint-2", guarded=True)
    (write(tmp_path / "checkpoint-4", guarded=True) / ".guard").unlink()
    assert "no .guard" in str(flaw(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4" / "checkpoint_manifest.json").unlink()
    assert "no .guard" in str(flaw(tmp_path / "checkpoint-4")), "the one before has it"


def test_checkpoints_from_before_an_update_of_simpletuner_stay_whole(tmp_path):
    write(tmp_path / "checkpoint-2", guarded=False)
    write(tmp_path / "checkpoint-4", guarded=True)
    assert flaw(tmp_path / "checkpoint-2") is None


def test_without_a_whole_one_the_run_starts_anew(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-4-tmp").mkdir()
    found = resumption(config(tmp_path))
    assert found.flags == ("--resume_from_checkpoint=",)
    assert "starts anew" in found.notice


def test_who_asked_simpletuner_to_delete_them_gets_that(output):
    empty(output / "checkpoint-10")
    assert resumption(config(output, delete_invalid_checkpoints=True)).flags == ()


@pytest.mark.parametrize(
    ("release", "more", "mended"),
    [
        ("3.1.6", {"num_processes": 4}, "4.9.3"),
        ("4.9.2", {"num_processes": "2"}, "4.9.3"),
        ("4.9.3", {"num_processes": 4}, None),
        ("4.10.1", {"num_processes": 4}, None),
        ("4.5.1", {"num_processes": 4, "fsdp_enable": True}, "4.5.2"),
        ("4.5.2", {"num_processes": 4, "fsdp_enable": True}, None),
        ("3.1.6", {"num_processes": 1}, None),
        ("3.1.6", {}, None),
        ("3.1.6", {"num_processes": 4, "ignore_final_epochs": True}, None),
        ("3.1.6", {"num_processes": 4, "resume_from_checkpoint": ""}, None),
        ("main-branch", {"num_processes": 4}, None),
    ],
)
def test_several_ranks_that_resume_with_an_old_release_are_warned(output, release, more, mended):
    words = forgotten_positions({**config(output), **more}, release)
    assert (words is None) == (mended is None)
    assert words is None or f"Use {mended} or later, or set ignore_final_epochs" in words


def test_nothing_to_resume_is_nothing_to_warn_of(tmp_path):
    assert forgotten_positions({**config(tmp_path), "num_processes": 4}, "3.1.6") is None


def test_a_new_output_folder_has_nothing_to_resume(tmp_path):
    assert resumption(config(tmp_path / "new")).notice is None


def test_a_checkpoint_that_can_not_be_read_is_not_whole(tmp_path):
    for step in (2, 4):
        for path in write(tmp_path / f"checkpoint-{step}", guarded=False).iterdir():
            path.chmod(0o644)
    (tmp_path / "checkpoint-4").chmod(0)

    def work() -> None:
        assert "Permission denied" in str(flaw(tmp_path / "checkpoint-4"))
        assert newest_whole(tmp_path) == tmp_path / "checkpoint-2"

    assert as_nobody(work, tmp_path) == 0
