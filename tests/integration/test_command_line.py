"""The commands people type, as real processes: gh200 train, accelerate launch, plain simpletuner train."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from simpletuner_gh200.demo.run import MARKER
from tests.integration.workbench import clean_environment

BIN = Path(sys.executable).parent
RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 4,
    "target_effective_batch_size": 8,
    "batch_rampup_steps": 2,
}


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))
    return {**clean_environment(), "PATH": path, "MIXED_PRECISION": "no", **more}


def run(workbench, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=workbench.project.folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )


def test_two_ranks_through_gh200_train(workbench, tmp_path):
    workbench.configure(blocks={"gh200_optimizations": RAMP}, dataset={"type": "in_memory"}, max_train_steps=3)
    config = str(workbench.project.config)
    ended = run(
        workbench,
        "gh200",
        "train",
        "--config",
        config,
        "--num_processes",
        "2",
        SIMPLETUNER_GH200_KEEP_SUMMARY=str(tmp_path),
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    summaries = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert [summary["global_step"] for summary in summaries] == [3, 3]
    assert {summary["features"]["ramp"] for summary in summaries} == {"on"}
    datasets = [summary["details"]["store"]["tiny-images"] for summary in summaries]
    assert [("staged" in found, found["files"]) for found in datasets] == [(True, 48), (False, 48)], "one copy for both"
    for line in ("trained: 3 of 3 optimizer steps", "weights: ", "batch ramp: effective batch 4"):
        assert ended.stdout.count(f"gh200: {line}") == 1, ended.stdout[-4000:]


def test_slips_in_simpletuners_own_options_stop_before_it_is_imported(workbench):
    """With the options of the installed release, and its own examples of a sound run: this project."""
    workbench.configure(max_train_steps=2)
    config = str(workbench.project.config)
    sound = run(workbench, "gh200", "train", "--config", config, "--dry-run", "--max_train_steps", "3")
    assert sound.returncode == 0 and "not checked" not in sound.stdout, sound.stdout
    workbench.configure(lerning_rate=1e-4, mixed_precision="fp17", pretrained_model_name_or_path="/no/model")
    ways = (("config", "check", config), ("train", "--config", config), ("train", "--config", config, "--dry-run"))
    answers = {(way.returncode, way.stdout) for way in (run(workbench, "gh200", *w, "--sed=1") for w in ways)}
    ((code, shown),) = answers
    assert code == 2
    for meant in (
        "'--seed'?",
        "'learning_rate'?",
        "'no', 'fp16', 'bf16', 'fp8'",
        "'/no/model': no such file or folder",
    ):
        assert meant in shown, shown


@pytest.mark.one_release("4.")
def test_accelerate_launch_with_our_module(workbench):
    workbench.configure(max_train_steps=2)
    words = ("accelerate", "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no")
    words += ("--dynamo_backend=no", "-m", "simpletuner_gh200.launch", "--config", str(workbench.project.config))
    ended = run(workbench, *words)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert (workbench.project.output / "pytorch_lora_weights.safetensors").is_file()


def test_plain_simpletuner_opts_in_by_a_variable(workbench):
    workbench.configure(blocks={"gh200_optimizations": RAMP}, max_train_steps=2)
    ended = run(workbench, "simpletuner", "train", SIMPLETUNER_GH200="1")
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "GH200 gradient accumulation ramp enabled (initial=4, target=8, ramp_steps=2)" in ended.stdout
    assert (workbench.project.output / "pytorch_lora_weights.safetensors").is_file()


def test_a_signal_ends_every_process(workbench):
    command = [str(BIN / "gh200"), "train", "--config", str(workbench.project.config)]
    process = subprocess.Popen(command, cwd=workbench.project.folder, env=environment(), stdout=subprocess.DEVNULL)
    family: list[psutil.Process] = []
    while not any("simpletuner_gh200.launch" in " ".join(member.cmdline()) for member in family):
        assert process.poll() is None
        time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


@pytest.mark.one_release("3.")
def test_a_demo_that_fails_says_so(workbench, tmp_path):
    """The model's weights are gone: SimpleTuner 3.x prints the reason and exits 0, the demo exits 1."""
    folder = tmp_path / "demo"
    shutil.copytree(workbench.project.model, folder / "model")
    (folder / MARKER).touch()
    shutil.rmtree(folder / "model" / "unet")
    ended = run(workbench, "gh200", "demo", "--folder", str(folder), "--steps", "2", "--json")
    assert ended.returncode == 1
    assert "the demo reached step 0 of 2" in ended.stdout
    assert "Traceback" not in ended.stdout
