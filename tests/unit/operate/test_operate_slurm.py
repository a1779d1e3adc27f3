"""``gh200 init --slurm``: what the script says. What it does under a real Slurm is asked in tests/cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.choices import Wish
from simpletuner_gh200.operate.models import Model, choose_model
from simpletuner_gh200.operate.slurm import RUNTIMES, train_sbatch
from tests.unit.few_options import TABLE

pytestmark = pytest.mark.usefixtures("few_options")

WISH = Wish(
    Path("/shared/my-run"), choose_model("flux", TABLE.families), Path("/data/pictures"), nodes=2, gpus_per_node=4
)
IMAGES = {"none": None, "enroot": "/shared/gh200.sqsh", "apptainer": "gh200.sif", "podman": "registry/gh200:1"}


def directives(script: str) -> dict[str, str]:
    """sbatch reads them up to the first command."""
    lines = script[: script.index("\nset ")].splitlines()
    words = [line.removeprefix("#SBATCH ").split("=", 1) for line in lines if line.startswith("#SBATCH ")]
    return {name: value[0] if value else "" for name, *value in words}


def values(script: str, name: str) -> str:
    found = re.search(rf"(?m)^{name}=(.*)$", script)
    assert found, name
    return found.group(1)


def test_one_launcher_per_node_with_the_whole_node() -> None:
    asked = directives(train_sbatch(WISH))
    assert (asked["--nodes"], asked["--ntasks-per-node"], asked["--gpus-per-node"]) == ("2", "1", "4")
    assert {"--exclusive", "--requeue"} <= asked.keys()
    assert asked["--mem"] == "0"
    assert asked["--propagate"] == "NONE", "limits of the nodes, not of the login shell"
    assert asked["--open-mode"] == "append", "a requeued job goes on in the same log"
    assert asked["--output"] == "/shared/my-run/logs/%j.log"
    assert re.fullmatch(r"B:USR1@\d+", asked["--signal"]), "the shell alone; it tells the launchers"


def test_without_gpus_none_are_asked_for() -> None:
    assert "--gpus-per-node" not in directives(train_sbatch(replace(WISH, cpu=True)))


def test_the_installation_that_made_the_script_runs_it() -> None:
    import sys

    assert values(train_sbatch(WISH), "gh200") == f"({sys.executable} -m simpletuner_gh200)"
    assert values(train_sbatch(replace(WISH, container="podman", image="x")), "gh200") == "(gh200)", "the image's own"


@pytest.mark.parametrize("container", RUNTIMES)
def test_a_container_sees_project_data_and_model(container: str) -> None:
    model = Path("/models/tiny")
    script = train_sbatch(
        replace(
            WISH, container=container, image=IMAGES[container], model=Model(WISH.model.family, str(model), local=True)
        )
    )
    words = values(script, "step_options") + values(script, "on_node")
    seen = [str(folder) in words for folder in (WISH.folder, WISH.data, model)]
    assert seen == [container != "none"] * 3
    assert (container == "none") == (words == "()()")
    assert ('"$image"' in words) == (container != "none")


@pytest.mark.parametrize("container", [name for name in RUNTIMES if name != "none"])
def test_a_container_finds_models_that_were_downloaded(container: str) -> None:
    """Only some runtimes bring one's home along; without it every start would download the model again."""
    script = train_sbatch(replace(WISH, container=container, image=IMAGES[container]))
    assert "$HF_HOME" in values(script, "step_options") + values(script, "on_node")
    assert script.index("export HF_HOME=") < script.index("step_options=(")


def test_podman_hands_on_what_the_page_tells_sites_to_set() -> None:
    words = values(train_sbatch(replace(WISH, container="podman", image="x")), "on_node")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HF_HOME", "ACCELERATE_EXTRA_ARGS", "SLURM_NODEID"):
        assert f"--env={variable.split('_')[0]}_*" in words, variable


def test_an_image_that_is_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.sif").touch()
    named = {name: replace(WISH, container="apptainer", image=name) for name in ("here.sif", "library://x/y:1")}
    assert [values(train_sbatch(batch), "image") for batch in named.values()] == [
        str(tmp_path / "here.sif"),
        "library://x/y:1",
    ]


@pytest.mark.parametrize("container", RUNTIMES)
@pytest.mark.parametrize("cpu", [False, True], ids=["gpu", "cpu"])
def test_shellcheck_finds_nothing(container: str, cpu: bool, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck")
    script = tmp_path / "train.sbatch"
    script.write_text(train_sbatch(replace(WISH, container=container, image=IMAGES[container], cpu=cpu)))
    checked = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"container": "docker"}, "--container 'docker': use none, enroot, apptainer, podman"),
        ({"container": "podman"}, "--container podman needs --image"),
        ({"image": "x.sif"}, "--image without --container: use --container enroot, apptainer or podman"),
        ({"folder": Path("/shared/my run")}, "'/shared/my run': ' ' in a path"),
        ({"data": Path("/data/50%$(reboot)")}, "'/data/50%$(reboot)': '% $ ( )' in a path"),
    ],
)
def test_what_can_not_be_written_is_refused_with_what_could(changes: dict, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        train_sbatch(replace(WISH, **changes))
    assert expected in str(refused.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"--container 'docker'.*'/a b'"):
        train_sbatch(replace(WISH, container="docker", folder=Path("/a b")))


@pytest.mark.parametrize(
    ("squeue", "requeued", "said"),
    [
        ("echo RUNNING", True, "stopped, to go on; requeued"),
        ("exit 1", True, "stopped, to go on; requeued"),
        ("echo COMPLETING", False, "stopped, to go on; the job is COMPLETING"),
    ],
)
def test_a_job_that_is_to_go_on_is_requeued_unless_slurm_has_decided(
    tmp_path: Path, squeue: str, requeued: bool, said: str
) -> None:
    """With stand-ins for Slurm's commands; the step asks to be tried again, with or without a checkpoint."""
    step = 'for word; do [ "${last:-}" != --again-file ] || touch "$word"; last=$word; done'
    asked = tmp_path / "asked"
    for name, body in {"squeue": squeue, "srun": step, "scontrol": f'echo "$@" | tee -a {asked}'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "train.sbatch"
    script.write_text(train_sbatch(replace(WISH, folder=tmp_path / "run", nodes=1)))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("SLURM_RESTART_COUNT", None)
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 75, done.stdout + done.stderr
    assert said in done.stdout
    assert "after a checkpoint" not in done.stdout
    assert ("requeue 7" in asked.read_text()) is requeued


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x" * 100)
    return tmp_path / "pictures"


def init(data: Path, *words: str) -> tuple[int, str]:
    folder = data.parent / "run"
    done = CliRunner().invoke(build_app(), ["init", str(folder), "--data", str(data), "--model", "sdxl", *words])
    return done.exit_code, done.output + (str(done.exception) if done.exception else "")


def test_init_writes_the_script_and_the_folder_slurm_would_not_make(data: Path) -> None:
    code, said = init(data, "--slurm", "--nodes", "3", "--gpus-per-node", "4")
    assert code == 0, said
    written = (data.parent / "run" / "train.sbatch").read_text()
    assert directives(written)["--nodes"] == "3"
    assert (data.parent / "run" / "logs").is_dir()
    assert f"sbatch {data.parent / 'run' / 'train.sbatch'}" in said


def test_init_without_slurm_writes_none(data: Path) -> None:
    code, said = init(data)
    assert code == 0, said
    assert not (data.parent / "run" / "train.sbatch").exists()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--container", "podman"), "add --slurm"),
        (("--image", "x.sif"), "add --slurm"),
        (("--slurm", "--container", "docker"), "use none, enroot, apptainer, podman"),
    ],
)
def test_init_refuses_before_it_writes(data: Path, words: tuple[str, ...], remedy: str) -> None:
    code, said = init(data, *words)
    assert code != 0 and remedy in said
    assert not (data.parent / "run").exists()
