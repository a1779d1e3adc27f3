"""The commands people type, as real processes: gh200 train, accelerate launch, plain simpletuner train."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from simpletuner_gh200.demo.run import MARKER
from simpletuner_gh200.upstream.checkpoints import newest_whole
from tests.integration.workbench import clean_environment, ramp

BIN = Path(sys.executable).parent
RAMP = ramp(4, 8, 2)


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


@pytest.mark.one_release("3.")
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
        SIMPLETUNER_GH200_SUMMARY_DIR=str(tmp_path),
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


GUIDES = (
    "accelerate launch --config_file accelerate_config_gh200.yaml train.py --config config/gh200_in_memory_example.json"
)
"""As the earlier guides print it, in a folder that ``gh200 examples`` made."""


def in_bash(line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )


@pytest.mark.one_release("4.")
def test_the_guides_launch_line_trains_as_it_stands(workbench, tmp_path):
    blocks = {"gh200_optimizations": RAMP, "cache_config": {"vae_cache_type": "unified_memory"}}
    workbench.configure(blocks=blocks, dataset={"type": "in_memory"}, max_train_steps=2)
    folder = workbench.project.folder / "guides"
    made = in_bash(f"gh200 examples {folder}", tmp_path)
    assert made.returncode == 0, made.stdout
    example = folder / "config" / "gh200_in_memory_example.json"
    shutil.copy(workbench.project.config, example)
    left = {"SIMPLETUNER_GH200_SUMMARY_DIR": str(tmp_path)}
    ended = in_bash(f"source scripts/setup_gh200_env.sh\n{GUIDES}", folder, **left)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert (workbench.project.output / "pytorch_lora_weights.safetensors").is_file()
    summary = json.loads((tmp_path / "rank-0.json").read_text())
    assert summary["global_step"] == 2
    assert {name: summary["features"][name] for name in ("store", "caches", "ramp")} == dict.fromkeys(
        ("store", "caches", "ramp"), "on"
    )

    example.write_text(json.dumps({**json.loads(example.read_text()), "lerning_rate": 1}))
    refused = in_bash(GUIDES, folder)
    assert refused.returncode != 0
    assert "'learning_rate'?" in refused.stdout, refused.stdout[-4000:]
    alone = in_bash("python train.py --config config/gh200_in_memory_example.json", folder, PYTHONPROFILEIMPORTTIME="1")
    assert alone.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in alone.stdout.splitlines() if "import time:" in line}
    assert "simpletuner_gh200.operate.preflight" in imported
    assert not {"simpletuner", "simpletuner.train", "torch", "accelerate"} & imported, "refused before any of them"


@pytest.mark.matrix  # test_older_import_paths.py has a plain process that opts in
@pytest.mark.one_release("4.")
def test_plain_simpletuner_opts_in_by_a_variable(workbench):
    workbench.configure(blocks={"gh200_optimizations": RAMP}, max_train_steps=2)
    ended = run(workbench, "simpletuner", "train", SIMPLETUNER_GH200="1")
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "GH200 gradient accumulation ramp enabled (initial=4, target=8, ramp_steps=2)" in ended.stdout
    assert (workbench.project.output / "pytorch_lora_weights.safetensors").is_file()


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """Also by a test that failed: its job would train beside those that come after."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def start(workbench, *flags: str, output: Path) -> subprocess.Popen[bytes]:
    command = [str(BIN / "gh200"), "train", "--config", str(workbench.project.config), *flags]
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=workbench.project.folder, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
    STARTED.append(process)
    return process


def ranks_of(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """All of the process's family, once so many ranks are in it."""
    while True:
        assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            words = [member.cmdline() for member in family]
            if (
                sum("simpletuner_gh200.launch" in line and "torch.distributed.run" not in line for line in words)
                >= count
            ):
                return family
        time.sleep(0.1)


@pytest.mark.one_release("4.")
@pytest.mark.parametrize("ranks", [1, 2], ids=["accelerate", "torchrun"])
def test_a_launcher_that_is_killed_takes_all_with_it(workbench, tmp_path, ranks):
    process = start(workbench, f"--num_processes={ranks}", output=tmp_path / "log")
    family = ranks_of(process, 2 if ranks == 1 else ranks)  # accelerate's own command names the module too
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


@pytest.mark.one_release("4.")
def test_one_job_at_a_time_and_an_interrupt_is_one_line(workbench, tmp_path):
    """In training, after a checkpoint: a second job is refused; Ctrl-C leaves a line, a checkpoint and nothing else."""
    workbench.configure(max_train_steps=500, checkpoint_step_interval=1, checkpoints_total_limit=2)
    output = workbench.project.output
    process = start(workbench, output=tmp_path / "log")
    while newest_whole(output) is None:
        assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
        time.sleep(0.1)
    second = run(workbench, "gh200", "train", "--config", str(workbench.project.config))
    assert second.returncode == 2
    assert f"output_dir {str(output)!r} is in use: process " in second.stdout
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=1800) == 130
    assert [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE] == []
    reported = (tmp_path / "log").read_text(errors="replace")
    last = reported.splitlines()[-1]
    assert "Traceback" not in reported
    assert f"the last checkpoint is {newest_whole(output)}; resume with: gh200 train --config" in last
    assert last.startswith("gh200: interrupted while training at step ")
    assert "failed" not in reported
    assert "interrupted here" in (workbench.project.folder / "debug.log").read_text(errors="replace")

    broken = output / "checkpoint-999"
    broken.mkdir()
    again = run(workbench, "gh200", "train", "--config", str(workbench.project.config), "--dry-run")
    assert f"{broken} is incomplete: it is empty" in again.stdout
    assert f"this run resumes from {newest_whole(output).name}" in again.stdout
    assert broken.is_dir()


@pytest.mark.matrix  # tests/unit/demo has what the demo makes of a run that failed, test_truthful_end.py such a run
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
