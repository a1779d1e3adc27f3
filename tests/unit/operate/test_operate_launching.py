from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate import launching
from simpletuner_gh200.operate.run_lock import locks_for_its_job


def make(flags=(), environment=None, **changes):
    located = Located("json", Path("config/config.json"))
    values = {"explicit": True, "env_name": None, "config": {}, **changes}
    return launching.launch_command(located, list(flags), {"HOME": "/nowhere", **(environment or {})}, **values)


def test_flags_reach_the_rank_and_accelerate_settings_do_not():
    planned = make(["--max_train_steps=5", "--num_machines=2", "--accelerate_extra_args=--foo --bar"])
    command = list(planned.command)
    entry = command.index("simpletuner_gh200.launch")
    assert command[entry + 1 :] == ["--config", "config/config.json", "--max_train_steps=5"]
    assert "--num_machines=2" in command[:entry]
    assert command[entry - 3 : entry - 1] == ["--foo", "--bar"]


def test_several_ranks_without_a_gpu_use_torchrun(monkeypatch):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): False)
    planned = make(["--num_processes", "2"])
    assert "torch.distributed.run" in planned.command
    assert planned.environment["ACCELERATE_USE_CPU"] == "true"
    assert planned.notices
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    assert "accelerate.commands.launch" in make(["--num_processes", "2"]).command


TWO_NODES = {"num_processes": 4, "num_machines": 2}


def on_cpu(monkeypatch, extra, **changes):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): False)
    return make(environment={"ACCELERATE_EXTRA_ARGS": extra}, config={**TWO_NODES, **changes})


def test_a_node_without_a_gpu_says_its_place_to_torchrun_in_torchruns_words(monkeypatch):
    words = "--machine_rank=1 --main_process_ip first --main_process_port=4711 --enable_cpu_affinity --tee=3"
    planned = on_cpu(monkeypatch, words)
    entry = planned.command.index("torch.distributed.run")
    assert planned.command[entry + 1 : -4] == (
        *("--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--master_addr=first", "--master_port=4711", "--tee=3"),
    )
    assert planned.problem is None
    assert not locks_for_its_job(planned.command, {})
    assert locks_for_its_job(on_cpu(monkeypatch, words.replace("=1", "=0")).command, {})


@pytest.mark.parametrize(
    ("extra", "changes", "expected"),
    [
        ("", {}, "num_machines is 2, and nothing says the machine_rank and the main_process_ip"),
        ("--machine_rank=0", {}, "nothing says the main_process_ip of this launcher"),
        ("--main_process_ip=first", {}, "nothing says the machine_rank of this launcher"),
        ("--machine_rank=1 --main_process_ip=first", {"num_processes": 3}, "num_processes 3 over num_machines 2"),
    ],
)
def test_a_launcher_that_does_not_know_its_place_is_not_started(monkeypatch, extra, changes, expected):
    problem = on_cpu(monkeypatch, extra, **changes).problem
    assert problem is not None
    assert expected in str(problem)


@pytest.mark.parametrize(
    ("extra", "changes", "expected"),
    [
        ("--machine_rank=2 --main_process_ip=first", {}, "machine_rank: '2' is not that of one of 2 nodes"),
        ("--machine_rank=one --main_process_ip=first", {}, "machine_rank: 'one' is not"),
        ("", {"num_machines": "two"}, "num_machines: 'two' is not"),
    ],
)
def test_a_place_that_can_not_be_is_refused(monkeypatch, extra, changes, expected):
    with pytest.raises(UsageError, match=expected):
        on_cpu(monkeypatch, extra, **changes)


def test_accelerates_file_may_name_the_first_node(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    file = tmp_path / "accelerate.yaml"
    file.write_text("machine_rank: 0\nmain_process_ip: 'first.cluster'\n")
    assert make(config={"accelerate_config": str(file), **TWO_NODES}).problem is None
    file.write_text("machine_rank: 0\n")
    assert make(config={"accelerate_config": str(file), **TWO_NODES}).problem is not None


def test_accelerates_file_may_be_the_only_one_that_names_the_nodes(monkeypatch):
    """As the comment in the shipped file says it: nothing but the launcher's own place is given."""
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    file = Path(__file__).parents[3] / "config" / "accelerate_config_gh200_fsdp2_two_nodes.yaml"
    extra = {"ACCELERATE_EXTRA_ARGS": "--machine_rank=1 --main_process_ip=first"}
    assert make(environment=extra, config={"accelerate_config": str(file)}).problem is None
    unsaid = make(config={"accelerate_config": str(file)}).problem
    assert "num_machines is 2, and nothing says the main_process_ip" in str(unsaid)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("true", 1), ("True", 1), ("true # as the doctor says", 1), ("false", 0), ("\ntrue: 1", 0), ("trueish", 0)],
)
def test_affinity_in_accelerates_file_becomes_the_flag_that_accelerate_reads(tmp_path, monkeypatch, written, expected):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"enable_cpu_affinity: {written}\n")
    assert make(config={"accelerate_config": str(file)}).command.count("--enable_cpu_affinity") == expected
    asked = make(
        environment={"ACCELERATE_EXTRA_ARGS": "--enable_cpu_affinity"}, config={"accelerate_config": str(file)}
    )
    assert asked.command.count("--enable_cpu_affinity") == 1


def test_settings_of_the_configuration_reach_accelerate_unless_the_environment_has_them(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("")
    planned = make(config={"accelerate_config": str(file)})
    assert f"--config_file={file}" in planned.command
    assert "--mixed_precision=fp8" in make(environment={"MIXED_PRECISION": "fp8"}).command


def test_asking_for_ranks_outranks_an_accelerate_file(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    file = tmp_path / "accelerate.yaml"
    file.write_text("")
    environment = {"ACCELERATE_CONFIG_PATH": str(file)}
    assert "--num_processes=4" in make(["--num_processes=4"], environment).command
    assert not any(word.startswith("--num_processes") for word in make([], environment).command)


def test_asking_for_nodes_outranks_an_accelerate_file(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    file = tmp_path / "accelerate.yaml"
    file.write_text("num_machines: 1\n")
    environment = {"ACCELERATE_CONFIG_PATH": str(file)}
    assert "--num_machines=2" in make(["--num_machines=2"], environment).command
    assert "--num_machines=2" in make([], {**environment, "TRAINING_NUM_MACHINES": "2"}).command
    assert not any(word.startswith("--num_machines") for word in make([], environment).command)


@pytest.mark.parametrize("nothing", ["", " ", " null", " ~", " # not said"])
def test_what_accelerates_file_leaves_empty_is_not_said(tmp_path, monkeypatch, nothing):
    monkeypatch.setattr(launching, "accelerator_present", lambda root=Path("/"): True)
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"machine_rank: 0\nmain_process_ip:{nothing}\nmain_process_port: 29500\n")
    problem = make(config={"accelerate_config": str(file), **TWO_NODES}).problem
    assert "nothing says the main_process_ip" in str(problem)


def test_what_simpletuner_would_source_decides_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / "mine").mkdir(parents=True)
    (tmp_path / "config" / "mine" / "config.env").write_text("MIXED_PRECISION=no\n")
    assert "--mixed_precision=no" in make(env_name="mine").command
    assert "--mixed_precision=bf16" in make().command


def test_our_blocks_may_be_spelt_with_dashes():
    assert make(["--gh200-optimizations={}", "--keep-this=1"]).command[-2:] == (
        "--gh200_optimizations={}",
        "--keep-this=1",
    )


def test_device_nodes_decide_whether_there_is_a_gpu(tmp_path):
    assert not launching.accelerator_present(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert launching.accelerator_present(tmp_path)


def test_dry_run_hides_secrets():
    planned = make(["--hub_token", "hf_abcdefghijklmnop", '--webhook_config={"webhook_url": "https://x/y"}'])
    shown = launching.LaunchCommand(planned.command, {"WANDB_API_KEY": "0123456789"}).shown()
    for secret in ("hf_abcdefghijklmnop", "https://x/y", "0123456789"):
        assert secret not in shown
    assert "--config config/config.json" in shown


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
    summaries = [{"status": status, "exit_code": {"checkpointed": 75}.get(status, 1)} for status in statuses]
    assert launching._exit_code(returned, interrupted, summaries) == expected


def test_a_run_has_completed_when_every_rank_that_was_heard_says_so():
    told = [{"status": "completed", "exit_code": 0}]
    assert launching._exit_code(-9, 10, told, heard=2) == 75
    assert launching._exit_code(-9, 15, told, heard=2) == 143
    assert launching._exit_code(-9, 15, told * 2, heard=2) == 0


@pytest.mark.parametrize(("code", "expected", "made"), [(75, 0, True), (0, 0, False), (1, 1, False), (143, 143, False)])
def test_trying_again_is_said_through_a_file_and_nothing_else_is(tmp_path, code, expected, made):
    assert launching.said_through(tmp_path / "again", code) == expected
    assert (tmp_path / "again").exists() is made


def test_a_file_that_can_not_be_made_is_no_success(tmp_path):
    with pytest.raises(UsageError, match="--again-file"):
        launching.said_through(tmp_path / "nowhere" / "again", 75)
