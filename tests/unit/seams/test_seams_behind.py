"""Checkpoints behind the run, on an imitation of the trainer and with the real drainer: what goes to memory and what
does not, and that whatever looks for a checkpoint finds it on the disk."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.held import saved
from simpletuner_gh200.seams.features.behind import feature as behind
from simpletuner_gh200.seams.features.behind.afterwards import linking
from simpletuner_gh200.seams.features.behind.draining import Draining
from simpletuner_gh200.seams.features.behind.feature import BehindFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime


class Manager:
    """SimpleTuner's, as far as it looks for checkpoints."""

    def __init__(self, output):
        self.output = output

    def get_latest_checkpoint(self):
        return max((path.name for path in self.output.glob("checkpoint-*")), default=None)


class Trainer:
    """Saves as SimpleTuner does, and tells what happened in what order, and what was on the disk then."""

    def __init__(self, output):
        self.output = output
        self.state = {"global_step": 0, "current_epoch": 1}
        self.config = SimpleNamespace(
            output_dir=str(output), model_type="lora", fsdp_enable=False, post_checkpoint_script="x", use_ema=False
        )
        self.accelerator = SimpleNamespace(
            num_processes=1,
            process_index=0,
            local_process_index=0,
            _models=[],
            _optimizers=[],
            is_main_process=True,
            is_local_main_process=True,
        )
        self.checkpoint_manager = Manager(output)
        self.happened = []
        self.fail_in = None

    def save(self, output_dir, suffix=None):
        path = Path(output_dir) / f"checkpoint-{self.state['global_step']}"
        path.mkdir()
        (path / "weights.safetensors").write_bytes(os.urandom(200_000))
        if self.fail_in is not None and output_dir.startswith(self.fail_in):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        (path / ".guard").write_text("complete\n")
        self._emit_event({"type": "lifecycle", "message": f"Saved checkpoint to {path}"})
        self._emit_event({"type": "training.checkpoint", "checkpoint": {"path": str(path)}})
        self._run_post_checkpoint_script(local_path=str(path))
        return str(path)

    def note(self, what, *values):
        there = sorted(path.name for path in self.output.glob("checkpoint-*"))
        self.happened.append((what, *values, self.state["global_step"], there))

    def _emit_event(self, event, message_level="info"):
        self.note(event["type"], event.get("message") or event["checkpoint"]["path"])

    def _run_post_checkpoint_script(self, *, local_path=None):
        self.note("script", local_path)

    def checkpoint_state_cleanup(self, output_dir, limit, suffix=None, protected_checkpoint=None):
        self.note("rotation", limit)

    def _drain_hub_upload_futures(self, wait=False):
        pass

    def _schedule_hub_upload(self, description, upload):
        self.note("upload", description)

    def _schedule_checkpoint_hub_upload(self, path):
        self._schedule_hub_upload(path, None)

    def _finish_hub_uploads(self):
        self.note("uploads finished")


@pytest.fixture
def output(tmp_path):
    place = tmp_path / "output"
    place.mkdir()
    return place


@pytest.fixture
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    found = lambda: [(place, 1 << 40)]  # noqa: E731
    monkeypatch.setattr(saved, "memory_file_systems", found)
    monkeypatch.setattr(behind, "memory_file_systems", found)
    tracker = ModuleType("simpletuner.helpers.training.state_tracker")
    tracker.StateTracker = SimpleNamespace(get_global_step=lambda: 0, set_global_step=lambda step: None)
    for name in ("", ".helpers", ".helpers.training", ".helpers.training.save_hooks"):
        monkeypatch.setitem(sys.modules, f"simpletuner{name}", ModuleType(f"simpletuner{name}"))
    sys.modules["simpletuner.helpers.training"].save_hooks = sys.modules["simpletuner.helpers.training.save_hooks"]
    monkeypatch.setitem(sys.modules, tracker.__name__, tracker)
    return place


@pytest.fixture
def run(output, memory):
    """A feature before its first step, and its trainer."""
    feature = BehindFeature()
    feature.runtime = Runtime(Launch())
    feature.runtime.settings = resolve({"gh200_optimizations": {"checkpoints": "behind"}}, {})
    trainer = Trainer(output)
    feature.before_train(trainer)
    yield feature, trainer
    feature.runtime.outcome.status = "interrupted"  # nobody waits
    feature.runtime.outcome.exit_code = 1
    feature.after_train(trainer)
    feature.close()


def save(feature, trainer, step):
    trainer.state["global_step"] = step
    return feature.save_checkpoint(trainer, trainer.save, str(trainer.output), None)


def until_it_is_safe(feature, trainer, step):
    deadline = time.monotonic() + 60
    while feature.telemetry()["safe"] != f"checkpoint-{step}":
        assert time.monotonic() < deadline
        feature.batch_prepared(trainer, {})
        time.sleep(0.01)


def test_off_unless_it_is_asked_for():
    feature = BehindFeature()
    assert feature.request(resolve({}, {}), {}) == "off"
    asked = resolve({"gh200_optimizations": {"checkpoints": "behind"}}, {})
    assert feature.request(asked, {}) == "requested"


def test_what_looks_for_the_checkpoint_waits_and_is_told_its_step_and_place(run, output):
    feature, trainer = run
    place = str(output / "checkpoint-3")
    assert save(feature, trainer, 3) == place
    trainer.checkpoint_state_cleanup(str(output), 2)
    trainer._schedule_checkpoint_hub_upload("checkpoint step 3")
    trainer._schedule_hub_upload("another", None)
    assert trainer.happened == [("lifecycle", f"Saved checkpoint to {place}", 3, [])], "only what needs no files"
    trainer.state["global_step"] = 5
    until_it_is_safe(feature, trainer, 3)
    there = ["checkpoint-3"]
    assert trainer.happened[1:] == [
        ("training.checkpoint", place, 5, there),
        ("script", place, 3, there),
        ("rotation", 2, 3, there),
        ("upload", "checkpoint step 3", 3, there),
        ("upload", "another", 3, there),
    ]
    assert trainer.state["global_step"] == 5
    trainer.checkpoint_state_cleanup(str(output), 2)
    assert trainer.happened[-1] == ("rotation", 2, 5, there), "nothing is on its way: at once"


def test_the_newest_is_there_for_whoever_asks_and_at_the_end(run, output):
    feature, trainer = run
    save(feature, trainer, 3)
    assert Manager(output).get_latest_checkpoint() == "checkpoint-3"
    save(feature, trainer, 6)
    trainer._finish_hub_uploads()
    assert trainer.happened[-1] == ("uploads finished", 6, ["checkpoint-3", "checkpoint-6"])
    save(feature, trainer, 9)
    feature.runtime.outcome.status = "completed"
    feature.after_train(trainer)
    assert trainer.happened[-1][:2] == ("script", str(output / "checkpoint-9"))
    assert feature.summary()["behind"] == 3
    assert feature.summary()["safe"] == str(output / "checkpoint-9") and feature.summary()["pending"] is None


def test_one_is_on_its_way_at_most_and_the_wait_for_a_slow_disk_is_said(run, output, monkeypatch, caplog):
    feature, trainer = run
    monkeypatch.setattr(behind, "Order", partial(saved.Order, rate=400_000.0))
    save(feature, trainer, 3)
    assert feature.telemetry()["safe"] is None, "until then no checkpoint is safe"
    save(feature, trainer, 6)
    assert (output / "checkpoint-3").is_dir() and not (output / "checkpoint-6").exists()
    assert "too slow for checkpoints this often: checkpoint-6 waited" in caplog.text
    assert 0 < feature.summary()["waited_s"] <= feature.summary()["stall_s"]
    assert feature.telemetry()["safe"] == "checkpoint-3" and feature.telemetry()["safe_age"] > 0


def test_where_memory_has_no_room_the_checkpoint_is_stocks_and_that_is_said_once(run, output, memory, caplog):
    feature, trainer = run
    feature._size = 1 << 60
    for step in (3, 6):
        assert save(feature, trainer, step) == str(output / f"checkpoint-{step}")
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "checkpoints are saved as stock" in said and "checkpoint-3 needs" in said
    assert feature.summary()["behind"] == 0
    assert [what for what, *_ in trainer.happened] == ["lifecycle", "training.checkpoint", "script"] * 2


def test_no_memory_file_system_at_all_leaves_the_run_as_it_is(output, memory, monkeypatch, caplog):
    monkeypatch.setattr(behind, "memory_file_systems", list)
    feature, trainer = BehindFeature(), Trainer(output)
    feature.runtime = Runtime(Launch())
    feature.before_train(trainer)
    assert save(feature, trainer, 3) == str(output / "checkpoint-3")
    assert "no memory file system (tmpfs) on" in caplog.text


def test_memory_that_is_full_in_the_middle_is_given_back_and_the_disk_gets_the_checkpoint(run, output, memory, caplog):
    feature, trainer = run
    trainer.fail_in = str(memory)
    assert save(feature, trainer, 3) == str(output / "checkpoint-3")
    assert "is full at checkpoint-3" in caplog.text
    (folder,) = memory.iterdir()
    assert [path for path in folder.iterdir() if path.is_dir()] == []
    trainer.config.use_ema = True
    with pytest.raises(OSError, match="No space left"):  # EMA's weights may still be in the model's place
        save(feature, trainer, 6)


def test_a_drainer_that_is_killed_is_started_again(run, output, monkeypatch):
    feature, trainer = run
    monkeypatch.setattr(behind, "Order", partial(saved.Order, rate=400_000.0))
    save(feature, trainer, 3)
    feature.draining._drainer.kill()
    until_it_is_safe(feature, trainer, 3)
    assert (output / "checkpoint-3" / ".guard").is_file()


def test_a_disk_that_refuses_for_too_long_ends_the_run_with_the_reason(run, output, monkeypatch, caplog):
    feature, trainer = run
    monkeypatch.setattr(behind, "Order", partial(saved.Order, patience=0.3))
    shutil.rmtree(output)
    save(feature, trainer, 3)
    with pytest.raises(RunFailed, match=r"checkpoint-3 could not be written: .* is no longer the folder"):
        feature.draining.wait()
    assert "can't be written, and is tried again" in caplog.text


def test_a_preempted_run_waits_for_the_disk_but_not_beyond_its_time(run, output, monkeypatch, caplog):
    feature, trainer = run
    monkeypatch.setattr(behind, "Order", partial(saved.Order, rate=100_000.0))
    save(feature, trainer, 3)
    feature.runtime.outcome.interrupt("a signal asked for a checkpoint, and it is written", 75)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + int(behind.LAST_WORDS)))
    monkeypatch.setenv("PATH", str(output))  # no Slurm that could be asked
    feature.after_train(trainer)
    assert "the job's time runs out before checkpoint-3 is on disk" in caplog.text
    assert feature.summary()["pending"] == str(output / "checkpoint-3")
    feature.close()
    assert not feature.draining.folder.locked(saved.OWNER), "the drainer clears the memory when it is done"
    deadline = time.monotonic() + 60
    while feature.draining.folder.path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (output / "checkpoint-3" / ".guard").is_file()


def test_another_rank_of_the_node_waits_for_nobody_and_sees_when_the_disk_has_it(run, output):
    feature, trainer = run
    other = Draining(saved.MemoryFolder(feature.draining.folder.path), leads=False)

    def both_write(output_dir, suffix=None):
        other.hand_over(saved.Order("checkpoint-3", str(output / "checkpoint-3"), 0.0))
        assert not other.landed(), "the first rank has not handed it over yet"
        return Trainer.save(trainer, output_dir, suffix)

    trainer.state["global_step"] = 3
    feature.save_checkpoint(trainer, both_write, str(output), None)
    until_it_is_safe(feature, trainer, 3)
    assert other.landed()


def test_what_is_drafted_in_memory_is_linked_into_the_checkpoint_and_the_rest_is_copied(tmp_path):
    memory, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    for folder in (memory / "temporary-3" / "ema", memory / "checkpoint-3" / "ema", elsewhere):
        folder.mkdir(parents=True)
    (memory / "temporary-3" / "ema" / "ema.pt").write_bytes(b"new")
    (memory / "checkpoint-3" / "ema" / "ema.pt").write_bytes(b"there before")
    (elsewhere / "config.json").write_bytes(b"{}")
    links = linking(str(memory))
    links.copytree(str(memory / "temporary-3"), str(memory / "checkpoint-3"), dirs_exist_ok=True)
    links.copy2(str(elsewhere / "config.json"), str(memory / "checkpoint-3" / "config.json"))
    assert (memory / "checkpoint-3" / "ema" / "ema.pt").samefile(memory / "temporary-3" / "ema" / "ema.pt")
    assert not (memory / "checkpoint-3" / "config.json").samefile(elsewhere / "config.json")
    links.rmtree(str(memory / "temporary-3"))
    assert (memory / "checkpoint-3" / "ema" / "ema.pt").read_bytes() == b"new"


def test_an_output_folder_that_can_not_be_settled_is_an_answer_to_the_ranks_that_wait(output, monkeypatch):
    def refuse(*_arguments, **_options):
        raise PermissionError(errno.EACCES, "Permission denied", "draft")

    monkeypatch.setattr(behind, "settle", refuse)
    assert "Permission denied" in BehindFeature()._make_folder(Trainer(output)).refused
