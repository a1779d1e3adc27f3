"""A project as JSON, TOML or ENV is the same project: by the variables and defaults of the installed release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

env_file = pytest.importorskip("simpletuner.helpers.configuration.env_file", reason="needs SimpleTuner")

from simpletuner_gh200.config.files import LAST_RESORT, Located, as_mapping, read_training_config  # noqa: E402
from simpletuner_gh200.config.training import Training, read_training  # noqa: E402
from simpletuner_gh200.plan.machines import MACHINES  # noqa: E402
from simpletuner_gh200.plan.planning import make_plan, quick_plan  # noqa: E402
from simpletuner_gh200.seams.probe import read_options  # noqa: E402
from simpletuner_gh200.upstream.option_table import OptionTable  # noqa: E402

pytestmark = pytest.mark.real

FLUX = {"model_family": "flux", "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev"}
LORA = {**FLUX, "model_type": "lora"}
PROJECTS: dict[str, dict[str, Any]] = {
    "a Flux LoRA": {**LORA, "lora_rank": 16, "train_batch_size": 2},
    "a quantised base": {**LORA, "base_model_precision": "int8-quanto", "optimizer": "torch-adamw"},
    "with EMA": {**LORA, "use_ema": True, "ema_device": "accelerator"},
    "a full fine-tune": {
        **FLUX,
        "model_type": "full",
        "mixed_precision": "bf16",
        "optimizer": "adamw_bf16",
        "resolution": 512,
        "gradient_accumulation_steps": 4,
        "num_processes": 4,
        "checkpoints_total_limit": 2,
        "validation_disable": True,
    },
    "hardly anything": FLUX,
    "with blocks of ours": {**FLUX, "model_type": "full", "gh200_optimizations": {"use_uvm": True}},
}


@pytest.fixture(scope="module")
def table() -> OptionTable:
    return read_options()


@pytest.fixture(autouse=True)
def nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, no trace and no accelerate file of whoever runs this."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for variable in env_file.env_to_args_map:
        monkeypatch.delenv(variable, raising=False)


def as_toml(values: dict[str, Any]) -> str:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    return "\n".join([*lines, *(f"[{key}]\n{as_toml(value)}" for key, value in tables.items())])


def as_env(values: dict[str, Any], table: OptionTable) -> str:
    """In the variables that SimpleTuner has; what has none goes where its template puts it."""
    by_option = {option: variable for variable, option in table.variables.items()}
    lines, extra = [], []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if key in by_option or isinstance(value, dict):
            lines.append(f"export {by_option.get(key, key.upper())}='{text}'")
        else:
            extra.append(f"--{key}={text}")
    return "\n".join([*lines, f"TRAINER_EXTRA_ARGS='{' '.join(extra)}'"])


def written(folder: Path, kind: str, values: dict[str, Any], table: OptionTable) -> Located:
    path = folder / f"config.{kind}"
    texts = {"json": json.dumps, "toml": as_toml, "env": lambda values: as_env(values, table)}
    path.write_text(texts[kind](values))
    return Located.at(path)


def planned(training: Training) -> dict[str, Any]:
    plan = make_plan(training, MACHINES["gh200-96"], trace=False).to_json()
    assert sum(row["bytes"] for row in plan["bytes"]) > 10**9, "the model has a size"
    assert plan.pop("free_disk") > 0, "what others write meanwhile is no matter of the format"
    return plan


@pytest.mark.parametrize("values", PROJECTS.values(), ids=PROJECTS)
def test_the_plan_is_the_same_in_every_format(tmp_path: Path, table: OptionTable, values: dict[str, Any]) -> None:
    values = {**values, "output_dir": str(tmp_path / "output")}
    files = [written(tmp_path, kind, values, table) for kind in ("json", "toml", "env")]
    readings = [read_training(located, {}, options=table) for located in files]
    plans = [planned(training) for training in readings]
    assert plans[0] == plans[1] == plans[2]
    assert len({(training.job.ranks, training.job.nodes) for training in readings}) == 1


def test_a_flux_lora_of_a_config_env_fits_a_gh200(tmp_path: Path, table: OptionTable) -> None:
    """Read as a full fine-tune, a run would be refused."""
    located = written(tmp_path, "env", {**PROJECTS["a Flux LoRA"], "output_dir": "output"}, table)
    for options in (table, None):
        plan = quick_plan(read_training(located, {}, options=options), MACHINES["gh200-96"])
        assert not plan.evaluated.facts.full
        assert plan.fits
        assert any("options can't be read" in note for note in plan.notes) == (options is None)


def test_variables_mean_what_simpletuners_own_loader_makes_of_them(
    tmp_path: Path, table: OptionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = {"dynamo_backend"}
    values = {variable: ("true", "false", "7", "a/b")[n % 4] for n, variable in enumerate(sorted(table.variables))}
    values |= {variable: "true" for variable, option in table.variables.items() if "=" in option}
    (tmp_path / "config.env").write_text("\n".join(f"{name}={value}" for name, value in values.items()))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    theirs = as_mapping(env_file.load_env_config())
    ours = read_training_config(tmp_path / "config.env", {}, table)
    assert {key: value for key, value in ours.items() if key not in launcher} == theirs
    assert len(theirs) > 50


def test_the_last_resort_is_what_the_release_has(table: OptionTable) -> None:
    assert LAST_RESORT.variables.items() <= table.variables.items()
    assert LAST_RESORT.defaults.items() <= table.defaults.items()
