"""How many ranks a run has: the same answer for the launch, the plan, the ramp and a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.job import read_accelerate_file
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.operate.launching import launch_command
from simpletuner_gh200.plan.facts import read_facts
from simpletuner_gh200.ramp.preview import preview

RAMP = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 8, "target_effective_batch_size": 64}
BASE = {"model_family": "flux", "max_train_steps": 9, "train_batch_size": 1, "ramtorch": True}
BASE["gh200_optimizations"] = RAMP


@pytest.mark.parametrize(
    ("flags", "key", "variable", "file", "expected"),
    [
        ([], None, None, None, 1),
        ([], 2, None, None, 2),
        ([], None, "2", None, 2),
        ([], None, None, 2, 2),
        ([], 4, "2", None, 2),
        ([], 4, None, 2, 4),
        ([], None, "4", 2, 2),
        (["--num_processes=8"], 4, "2", 2, 8),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("kind", ["json", "env"])
def test_everybody_has_the_same_number(
    tmp_path: Path, flags: list[str], key: int | None, variable: str | None, file: int | None, expected: int, kind: str
) -> None:
    """A variable stands for the configuration's key; SimpleTuner's launcher prefers accelerate's file to it."""
    if kind == "env" and key is not None:
        key, variable = None, str(variable or key)
        expected = 8 if flags else file or int(variable)
    values = {**BASE, **({"num_processes": key} if key else {})}
    environment = {"HOME": str(tmp_path)}
    if file is not None:
        (tmp_path / "accelerate.yaml").write_text(f"num_machines: 1\nnum_processes: {file}\n")
        values["accelerate_config"] = str(tmp_path / "accelerate.yaml")
    config = tmp_path / f"config.{kind}"
    if kind == "json":
        environment |= {"TRAINING_NUM_PROCESSES": variable} if variable else {}
        config.write_text(json.dumps(values))
    else:
        lines = [f"TRAINING_NUM_PROCESSES={variable}"] if variable else []
        lines += [f"ACCELERATE_CONFIG_PATH={values['accelerate_config']}"] if file else []
        lines += ["MODEL_FAMILY=flux", "MAX_NUM_STEPS=9", "TRAIN_BATCH_SIZE=1", 'TRAINER_EXTRA_ARGS="--ramtorch"']
        config.write_text("\n".join([*lines, f"GH200_OPTIMIZATIONS='{json.dumps(RAMP)}'"]))
    located = Located.at(config)
    training = read_training(located, environment, flags=flags)
    assert training.problems == ()
    assert (training.job.ranks, training.job.nodes) == (expected, 1)
    assert read_facts(training).ranks == expected
    assert preview(training)[0].ramp.world_size == expected
    launch = launch_command(training)
    started = next((word.partition("=")[2] for word in launch.command if "--num_processes=" in word), None)
    torchrun = next((word.partition("=")[2] for word in launch.command if "--nproc_per_node=" in word), None)
    assert int(started or torchrun or (file or 0)) == expected


def test_a_number_that_is_none_is_a_problem_and_one_rank_is_counted(tmp_path: Path) -> None:
    training = read(tmp_path, num_processes="0")
    assert [str(problem) for problem in training.problems] == [
        "num_processes: '0' is not a number of ranks (use a whole number from 1)"
    ]
    assert training.job.ranks == 1


def read(tmp_path: Path, extra: str = "", file: str | None = None, **values: object) -> Training:
    """A reading with ``accelerate_extra_args``, and with what accelerate's file holds."""
    config, accelerate = tmp_path / "config.json", tmp_path / "accelerate.yaml"
    if file is not None:
        accelerate.write_text(file)
        values["accelerate_config"] = str(accelerate)
    config.write_text(json.dumps({**BASE, **values}))
    return read_training(Located.at(config), {"HOME": str(tmp_path), "ACCELERATE_EXTRA_ARGS": extra})


TWO_NODES = {"num_processes": 4, "num_machines": 2}


@pytest.mark.parametrize(
    ("extra", "changes", "expected"),
    [
        ("", {}, "num_machines is 2, and nothing says the machine_rank and the main_process_ip"),
        ("--machine_rank=0", {}, "nothing says the main_process_ip of this launcher"),
        ("--main_process_ip=first", {}, "nothing says the machine_rank of this launcher"),
        ("--machine_rank=1 --main_process_ip=first", {"num_processes": 3}, "num_processes 3 over num_machines 2"),
        ("--machine_rank=1 --main_process_ip=first", {}, None),
        ("", {"file": "machine_rank: 0\nmain_process_ip: 'first.cluster'\n"}, None),
        ("", {"num_machines": 1}, None),
    ],
)
def test_a_launcher_that_does_not_know_its_place_is_not_started(
    tmp_path: Path, extra: str, changes: dict[str, Any], expected: str | None
) -> None:
    training = read(tmp_path, extra, **{**TWO_NODES, **changes})
    unplaced = training.job.unplaced()
    assert training.problems == () and (unplaced is None) == (expected is None)
    assert expected is None or expected in str(unplaced)


@pytest.mark.parametrize(
    ("extra", "changes", "expected"),
    [
        ("--machine_rank=2 --main_process_ip=first", {}, "machine_rank: '2' is not that of one of 2 nodes"),
        ("--machine_rank=one --main_process_ip=first", {}, "machine_rank: 'one' is not"),
        ("--machine_rank='1", {}, "accelerate_extra_args: "),
        ("--machine_rank", {}, "accelerate_extra_args: --machine_rank needs a value"),
        ("", {"num_machines": "two"}, "num_machines: 'two' is not"),
    ],
)
def test_a_place_that_can_not_be_is_a_problem(
    tmp_path: Path, extra: str, changes: dict[str, Any], expected: str
) -> None:
    (problem,) = read(tmp_path, extra, **{**TWO_NODES, **changes}).problems
    assert str(problem).startswith(expected)


def test_accelerates_file_may_be_the_only_one_that_names_the_nodes(tmp_path: Path) -> None:
    """As the comment in the shipped file says it: nothing but the launcher's own place is given."""
    shipped = Path(__file__).parents[3] / "config" / "accelerate_config_gh200_fsdp2_two_nodes.yaml"
    assert read(tmp_path, "--machine_rank=1 --main_process_ip=first", shipped.read_text()).job.unplaced() is None
    assert "nothing says the main_process_ip" in str(read(tmp_path, file=shipped.read_text()).job.unplaced())


def test_one_launcher_of_a_job_on_several_nodes_is_the_first(tmp_path: Path) -> None:
    assert read(tmp_path, num_machines=1).job.first_node
    said = "machine_rank: 0\nnum_machines: 2\n"
    assert read(tmp_path, file=said).job.first_node
    assert not read(tmp_path, "--machine_rank=1", file=said).job.first_node, "a word outranks the file"
    assert not read(tmp_path, "--num_machines=2").job.first_node


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("key: value", "value"),
        ("key: 'no' # why", "no"),
        ('key:  "a: b"  ', "a: b"),
        ("key: 127.0.0.1", "127.0.0.1"),
        ("key: bf16  # why", "bf16"),
        *((f"key:{nothing}", None) for nothing in ("", " ", " null", " ~", " # not said", " ''")),
        ("  key: below another", None),
        ("key:\nother: 1", None),
    ],
)
def test_a_line_of_accelerates_file(tmp_path: Path, line: str, expected: str | None) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"# first\n{line}\nlast: 1\n")
    assert read_accelerate_file(file).get("key") == expected
