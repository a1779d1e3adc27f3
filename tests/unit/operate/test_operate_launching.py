from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.operate import launching


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
    ],
)
def test_exit_codes_tell_the_truth(returned, interrupted, statuses, expected, monkeypatch):
    monkeypatch.delenv("SIMPLETUNER_GH200", raising=False)
    summaries = [{"status": status, "exit_code": {"checkpointed": 75}.get(status, 1)} for status in statuses]
    assert launching._exit_code(returned, interrupted, summaries) == expected
