"""How many ranks a run has: the same answer for the launch, the plan, the ramp, the doctor and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.job import Job
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.diagnostics.checks.offload import copies_per_rank
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.operate.launching import launch_command
from simpletuner_gh200.plan.facts import read_facts
from simpletuner_gh200.ramp.preview import preview
from simpletuner_gh200.upstream.importing import ImportVerdict

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
    tmp_path: Path,
    flags: list[str],
    key: int | None,
    variable: str | None,
    file: int | None,
    expected: int,
    kind: str,
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
    launch = launch_command(located, flags, environment, explicit=True, env_name=None, config=training.values)
    started = next((word.partition("=")[2] for word in launch.command if "--num_processes=" in word), None)
    torchrun = next((word.partition("=")[2] for word in launch.command if "--nproc_per_node=" in word), None)
    assert int(started or torchrun or (file or 0)) == expected
    context = Context(environment=environment, config=config, check_import=lambda: ImportVerdict(None))
    if not flags:
        found = copies_per_rank(context)
        assert (f"with {expected} ranks" in found.found) == (expected > 1)


def test_a_number_that_is_none_is_a_problem_and_one_rank_is_counted(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**BASE, "num_processes": "0"}))
    training = read_training(Located.at(config), {"HOME": str(tmp_path)})
    assert [str(problem) for problem in training.problems] == [
        "num_processes: '0' is not a number of ranks (use a whole number from 1)"
    ]
    assert training.job == Job()
