"""Checkpoints behind a real run: the disk has what stock would have written, and a resume goes on from it."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.held.saved import memory_folders
from simpletuner_gh200.telemetry.reading import FILE, Recorded
from simpletuner_gh200.telemetry.view import RunView
from simpletuner_gh200.upstream.checkpoints import newest_whole
from tests.integration.flux_project import FSDP2, SWITCH, FluxWorkbench, launcher_environment
from tests.integration.workbench import JobResult, probe

STEPS, EVERY = 6, 2
BEHIND = {"gh200_optimizations": {"checkpoints": "behind"}}
WORLDS = [
    (1, 1),
    pytest.param((2, 1), marks=pytest.mark.one_release("4.")),
    pytest.param((2, 2), marks=pytest.mark.one_release("4.")),
    pytest.param((2, 2), marks=[pytest.mark.matrix, pytest.mark.only_release("3.")], id="2 of an older release"),
]
"""Of ranks and of nodes. Only the newer release has every rank write; of the older one the first writes all."""
TOLD = "{local_checkpoint_path} {global_step}"


def configure(workbench: Any, blocks: dict[str, Any] | None = None, steps: int = STEPS, **keys: Any) -> None:
    script = f"sh -c 'ls -d $0 && echo {TOLD} >> {workbench.project.folder}/script.txt' {{local_checkpoint_path}}"
    given = {"checkpoint_step_interval": EVERY, "checkpoints_total_limit": 2, "post_checkpoint_script": script}
    workbench.configure(blocks=blocks, max_train_steps=steps, **{**given, **keys})


def files(output: Path) -> dict[str, bytes]:
    """Of all checkpoints, and what else begins like one."""
    found = (path for folder in output.glob("checkpoint-*") for path in folder.rglob("*"))
    return {path.relative_to(output).as_posix(): in_order(path) for path in found if path.is_file()}


def in_order(path: Path) -> bytes:
    """safetensors writes the two lines of its metadata in any order, which no two processes need to agree on."""
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        return content
    header = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:header]), sort_keys=True).encode() + content[header:]


def same(ours: JobResult, stock: JobResult) -> list[str]:
    """The names of what differs; SimpleTuner's own record of our option is not there in either."""
    mine, theirs = files(ours.output), files(stock.output)
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def assert_behind(run: JobResult, count: int) -> None:
    assert run.ok, run.explain()
    told = run.summaries[0]["details"]["checkpoints"]
    assert told["behind"] == count, run.explain()
    assert told["safe"] == str(run.output / f"checkpoint-{run.summaries[0]['global_step']}"), run.explain()
    assert "is on disk: " in run.log()
    assert not [path for path in run.output.iterdir() if path.name.startswith(".gh200")]
    assert not [folder for folder in memory_folders() if not folder.locked("owner") and folder.order() is None]


def assert_told(run: JobResult) -> None:
    """Monitor and report: what is safe on the disk, and what it cost."""
    view = RunView.read(run.output / FILE)
    first = RunView(Recorded(view.run.path, start=view.run.start, steps=view.run.steps[:1]))
    assert dict(first.progress())["safe on disk"] == "no checkpoint yet"
    assert dict(view.progress())["safe on disk"] in ("checkpoint-2", "checkpoint-4"), "the last step is before its own"
    numbers = dict(view.latest())
    assert {"lost to checkpoints", "drained to disk behind", "age of the last checkpoint on disk"} <= numbers.keys()


@pytest.mark.parametrize("places", WORLDS)
def test_the_disk_has_stocks_checkpoints_file_by_file_and_a_resume_trains_the_same(workbench, places):
    world, nodes = places
    configure(workbench)
    stock = workbench.known(stock=True, world=world)
    assert stock.ok, stock.explain()
    configure(workbench, BEHIND)
    ours = workbench.train(world=world, nodes=nodes)
    assert_behind(ours, STEPS // EVERY)
    assert_told(ours)
    assert same(ours, stock) == []
    assert ours.losses == stock.losses and ours.same_lora(stock)
    told = (workbench.project.folder / "script.txt").read_text().split()
    assert told[1::2] == [str(step) for step in range(EVERY, STEPS + 1, EVERY)], "each once, at its step"

    workbench.set_aside(ours)
    resumed = []
    for run, blocks in ((stock, None), (ours, BEHIND)):
        workbench.go_on_from(run)
        configure(workbench, blocks, STEPS + EVERY)
        resumed.append(workbench.train(stock=blocks is None, world=world, nodes=nodes))
        assert resumed[-1].ok, resumed[-1].explain()
        workbench.set_aside(resumed[-1])
    again, ours_again = resumed
    assert same(ours_again, again) == []
    assert ours_again.losses == again.losses and ours_again.same_lora(again)


@pytest.mark.one_release("4.")
def test_a_whole_model_with_ema_and_a_folder_for_drafts_is_the_same_too(workbench):
    keys = {"model_type": "full", "use_ema": True, "ema_device": "cpu", "checkpointing_use_tempdir": True}
    configure(workbench, steps=EVERY, **keys)
    stock = workbench.known(stock=True)
    assert stock.ok, stock.explain()
    configure(workbench, BEHIND, steps=EVERY, **keys)
    ours = workbench.train()
    assert_behind(ours, 1)
    assert same(ours, stock) == []


@pytest.mark.one_release("4.")
@pytest.mark.skipif(version("simpletuner").startswith("3."), reason="SimpleTuner 3 trains no tiny Flux under FSDP2")
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_a_model_in_shards_is_the_same_but_for_the_name_that_torch_gives_each_save(forge, tmp_path_factory, nodes):
    flux = FluxWorkbench(forge, tmp_path_factory.mktemp("flux"))
    flux.prepare()
    keys = {**FSDP2, "max_train_steps": 1, "checkpoint_step_interval": 1, "checkpointing_use_tempdir": True}
    runs = []
    for blocks in (None, BEHIND):
        flux.configure(blocks=blocks, **keys)
        stock = blocks is None
        run = flux.train(stock=stock, world=2, nodes=nodes, probe=SWITCH, env=launcher_environment())
        flux.set_aside(run)
        assert run.ok, run.explain()
        runs.append(run)
    stock, ours = runs
    assert ours.summaries[0]["details"]["checkpoints"]["behind"] == 1
    shards = [name for name in files(ours.output) if name.endswith(".distcp")]
    assert len(shards) == 4, "of weights and optimizer, each rank's"
    lists = same(ours, stock)
    assert lists == [f"checkpoint-1/{what}/.metadata" for what in ("optimizer_0", "pytorch_model_fsdp_0")]
    for name in lists:
        mine, theirs = (pickle.loads(files(run.output)[name]) for run in (ours, stock))
        mine.storage_meta.save_id = theirs.storage_meta.save_id
        assert mine == theirs


@pytest.mark.one_release("4.")
def test_a_signal_ends_the_run_with_75_when_the_disk_has_the_checkpoint(workbench):
    configure(workbench, BEHIND, steps=40, checkpoint_step_interval=100)
    signalled = workbench.train(probe=probe("preempted"))
    assert signalled.exit_codes == [75], signalled.explain()
    step = signalled.summaries[0]["global_step"]
    assert signalled.summaries[0]["details"]["checkpoints"]["safe"] == str(signalled.output / f"checkpoint-{step}")
    assert newest_whole(signalled.output) == signalled.output / f"checkpoint-{step}"
