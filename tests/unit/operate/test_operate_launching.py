"""The command of a launch, and what is made of how it ended."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate import launching
from simpletuner_gh200.operate.ending import Outcome, code_with_again_file, outcome_of

Make = Callable[..., launching.LaunchCommand]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The launch of ``config/config.json``, where there is a GPU unless ``gpu`` says otherwise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()

    def launch(flags=(), environment=None, *, gpu=True, env_name=None, **config):
        monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): gpu)
        file = Path("config", "config.json")
        file.write_text(json.dumps(config))
        located = Located.at(file) if env_name is None else Located("json", file, env_name=env_name)
        return launching.launch_command(
            read_training(located, {"HOME": "/nowhere", **(environment or {})}, flags=flags)
        )

    return launch


def test_flags_reach_the_rank_and_accelerate_settings_do_not(make):
    planned = make(["--max_train_steps=5", "--num_machines=2", "--accelerate_extra_args=--foo --bar"])
    command = list(planned.command)
    entry = command.index("simpletuner_gh200.launch")
    assert command[entry + 1 :] == ["--config", "config/config.json", "--max_train_steps=5"]
    assert "--num_machines=2" in command[:entry]
    assert command[entry - 3 : entry - 1] == ["--foo", "--bar"]


def test_several_ranks_without_a_gpu_use_torchrun(make):
    planned = make(["--num_processes", "2"], gpu=False)
    assert "torch.distributed.run" in planned.command
    assert planned.environment["ACCELERATE_USE_CPU"] == "true"
    assert planned.notices
    assert "accelerate.commands.launch" in make(["--num_processes", "2"]).command


def test_a_node_without_a_gpu_says_its_place_to_torchrun_in_torchruns_words(make):
    words = "--machine_rank=1 --main_process_ip first --main_process_port=4711 --enable_cpu_affinity --tee=3"
    nodes = {"num_processes": 4, "num_machines": 2, "gpu": False}
    planned = make(environment={"ACCELERATE_EXTRA_ARGS": words}, **nodes)
    entry = planned.command.index("torch.distributed.run")
    assert planned.command[entry + 1 : -4] == (
        *("--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--master_addr=first", "--master_port=4711", "--tee=3"),
    )
    assert not planned.locks, "of the launchers of one job the first node's keeps others out"
    assert make(environment={"ACCELERATE_EXTRA_ARGS": words.replace("=1", "=0")}, **nodes).locks
    assert make().locks


@pytest.mark.parametrize(
    ("written", "expected"),
    [("true", 1), ("True", 1), ("true # as the doctor says", 1), ("false", 0), ("\ntrue: 1", 0), ("trueish", 0)],
)
def test_affinity_in_accelerates_file_becomes_the_flag_that_accelerate_reads(tmp_path, make, written, expected):
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"enable_cpu_affinity: {written}\n")
    assert make(accelerate_config=str(file)).command.count("--enable_cpu_affinity") == expected
    asked = make(environment={"ACCELERATE_EXTRA_ARGS": "--enable_cpu_affinity"}, accelerate_config=str(file))
    assert asked.command.count("--enable_cpu_affinity") == 1


def test_what_is_asked_for_by_name_outranks_an_accelerate_file(tmp_path, make):
    file = tmp_path / "accelerate.yaml"
    file.write_text("num_machines: 1\n")
    named = {"ACCELERATE_CONFIG_PATH": str(file)}
    assert f"--config_file={file}" in make(accelerate_config=str(file)).command
    assert "--num_processes=4" in make(["--num_processes=4"], named).command
    assert "--num_machines=2" in make(["--num_machines=2"], named).command
    assert "--num_machines=2" in make([], {**named, "TRAINING_NUM_MACHINES": "2"}).command
    assert not any(word.startswith(("--num_processes", "--num_machines")) for word in make([], named).command)


def test_what_simpletuner_would_source_decides_the_launch(tmp_path, make):
    assert "--mixed_precision=fp8" in make(environment={"MIXED_PRECISION": "fp8"}).command
    (tmp_path / "config" / "mine").mkdir()
    (tmp_path / "config" / "mine" / "config.env").write_text("MIXED_PRECISION=no\nTRAINING_NUM_PROCESSES=3\n")
    for environment in ({}, {"MIXED_PRECISION": "fp8", "TRAINING_NUM_PROCESSES": "8"}):
        command = make(environment=environment, env_name="mine", num_processes=2).command
        assert {"--mixed_precision=no", "--num_processes=3"} <= set(command), (
            "as the check, the plan and the ramp count"
        )
    assert {"--mixed_precision=bf16", "--num_processes=2"} <= set(make(num_processes=2).command)


def test_our_blocks_may_be_spelt_with_dashes(make):
    assert make(["--gh200-optimizations={}", "--keep-this=1"]).command[-2:] == (
        "--gh200_optimizations={}",
        "--keep-this=1",
    )


def test_device_nodes_decide_whether_there_is_a_gpu(tmp_path):
    assert not launching.accelerator_present(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert launching.accelerator_present(tmp_path)


def test_dry_run_hides_secrets(make):
    planned = make(["--hub_token", "hf_abcdefghijklmnop", '--webhook_config={"webhook_url": "https://x/y"}'])
    shown = launching.LaunchCommand(planned.command, {"WANDB_API_KEY": "0123456789"}).shown()
    for secret in ("hf_abcdefghijklmnop", "https://x/y", "0123456789"):
        assert secret not in shown
    assert "--config config/config.json" in shown


def ended(returned, interrupted, statuses, heard=0):
    """What comes of ranks that reported ``statuses``, of ``heard`` that said anything at all."""
    summaries = {str(n): {"status": s, "exit_code": 75 if s == "checkpointed" else 1} for n, s in enumerate(statuses)}
    return outcome_of(returned, interrupted, {str(rank): "training" for rank in range(heard)}, summaries)


@pytest.mark.parametrize(
    ("returned", "interrupted", "statuses", "expected"),
    [
        (0, None, ["completed", "completed"], 0),
        (0, None, ["completed", "failed"], 1),
        (0, None, [], 1),
        (1, None, ["failed"], 1),
        (-9, None, [], 137),
        (0, 2, ["interrupted"], 130),
        (1, 15, [], 143),
        (-9, 15, ["checkpointed", "checkpointed"], 75),
        (1, None, ["checkpointed"], 75),
        (-9, 10, [], 75),
        (-9, 10, ["interrupted"], 75),
        (-9, 10, ["completed", "completed"], 0),
        (-9, 15, ["completed"], 0),
        (-9, 2, ["completed"], 130),
        (-9, 10, ["failed"], 1),
        (-9, 10, ["interrupted", "failed"], 1),
        (-9, 15, ["failed"], 143),
    ],
)
def test_exit_codes_tell_the_truth(returned, interrupted, statuses, expected, monkeypatch):
    monkeypatch.delenv("SIMPLETUNER_GH200", raising=False)
    assert ended(returned, interrupted, statuses).exit_code == expected


def test_a_run_has_completed_when_every_rank_that_was_heard_says_so():
    assert ended(-9, 10, ["completed"], heard=2).exit_code == 75
    assert ended(-9, 15, ["completed"], heard=2).exit_code == 143
    assert ended(-9, 15, ["completed", "completed"], heard=2).exit_code == 0


@pytest.mark.parametrize(("code", "expected", "made"), [(75, 0, True), (0, 0, False), (1, 1, False), (143, 143, False)])
def test_trying_again_is_said_through_a_file_and_nothing_else_is(tmp_path, code, expected, made):
    assert code_with_again_file(Outcome(code), tmp_path / "again") == expected
    assert (tmp_path / "again").exists() is made


def test_a_file_that_can_not_be_made_is_no_success(tmp_path):
    with pytest.raises(UsageError, match="--again-file"):
        code_with_again_file(Outcome(75), tmp_path / "nowhere" / "again")


# -- `gh200 server`: SimpleTuner's own, started for us --------------------------------------------------

PYTHON = Path("/opt/venv/bin/python")


def test_the_extension_is_on_and_accelerate_is_found():
    found = launching.environment_of_server({"PATH": "/usr/bin", "HOME": "/root"}, PYTHON)
    assert found == {"PATH": "/opt/venv/bin:/usr/bin", "HOME": "/root", "SIMPLETUNER_GH200": "1"}
    again = launching.environment_of_server(found, PYTHON)
    assert again == found


def test_the_kill_switch_holds():
    assert launching.environment_of_server({"SIMPLETUNER_GH200": "0"}, PYTHON)["SIMPLETUNER_GH200"] == "0"


def test_everything_is_passed_on(monkeypatch):
    called = []
    monkeypatch.setattr(os, "execve", lambda *given: called.append(given))
    launching.serve(["--port", "8080", "--ssl"])
    ((program, arguments, environment),) = called
    assert program == sys.executable
    assert arguments == [sys.executable, "-m", "simpletuner", "server", "--port", "8080", "--ssl"]
    assert environment["SIMPLETUNER_GH200"] == "1"
