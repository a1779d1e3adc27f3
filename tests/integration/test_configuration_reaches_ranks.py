"""Our blocks reach every rank from JSON, TOML, ENV and flags, and leave SimpleTuner's own configuration as it was."""

from __future__ import annotations

import json

import pytest

from simpletuner_gh200.telemetry.ranks import rank_table, read_ranks
from simpletuner_gh200.telemetry.reading import read_run
from tests.integration.workbench import probe, ramp

PROBE = probe("runtime")
RAMP = ramp(2, 4, 2)


def as_toml(config):
    def text(value):
        return str(value).lower() if isinstance(value, bool) else json.dumps(value)

    plain = [f"{key} = {text(value)}" for key, value in config.items() if not isinstance(value, dict)]
    for key, block in config.items():
        if isinstance(block, dict):
            plain += [f"[{key}]", *(f"{inner} = {text(value)}" for inner, value in block.items())]
    return "\n".join(plain)


def arguments(workbench, form):
    """Write the configuration in ``form``; returns what to pass to launch."""
    config = json.loads(workbench.project.config.read_text())
    folder = workbench.project.config.parent
    if form == "json":
        return ["--config", str(workbench.project.config)]
    if form == "toml":
        (folder / "run.toml").write_text(as_toml(config))
        return ["--config", str(folder / "run.toml")]
    block = config.pop("gh200_optimizations")
    workbench.project.config.write_text(json.dumps(config))
    return ["--config", str(workbench.project.config), f"--gh200_optimizations={json.dumps(block)}"]


@pytest.mark.parametrize(
    "form",
    [
        "json",
        pytest.param("toml", marks=pytest.mark.one_release("4.")),
        pytest.param("flags", marks=pytest.mark.one_release("3.")),
    ],
)
def test_blocks_arrive(workbench, form):
    workbench.configure(blocks={"gh200_optimizations": RAMP}, max_train_steps=2)
    run = workbench.train(argv=arguments(workbench, form), probe=PROBE)
    assert run.ok, run.explain()
    record = run.records[0]
    for key, value in RAMP.items():
        assert record["settings"][f"gh200_optimizations.{key}"] == [value, "config"]
        assert record["runtime_config"][f"gh200_optimizations.{key}"] == value
    assert record["raw"] == ["gh200_optimizations"]
    assert record["left_on_config"] == []


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("config/config.env", marks=pytest.mark.one_release("3.")),
        pytest.param("elsewhere.env", marks=pytest.mark.one_release("4.")),
    ],
)
def test_blocks_arrive_from_an_env_file(workbench, place):
    """From where SimpleTuner looks by itself, and from a file named with --config."""
    workbench.configure(max_train_steps=2)
    config = json.loads(workbench.project.config.read_text())
    spelling = {
        "data_backend_config": "DATALOADER_CONFIG",
        "max_train_steps": "MAX_NUM_STEPS",
        "pretrained_model_name_or_path": "MODEL_NAME",
        "checkpoint_step_interval": "CHECKPOINTING_STEPS",
        "seed": "TRAINING_SEED",
        "num_train_epochs": "NUM_EPOCHS",
    }
    mapped = ("model_family", "model_type", "lora_type", "output_dir", "train_batch_size")
    lines = [f"{spelling[key]}={config[key]}" for key in spelling]
    lines += [f"{key.upper()}={config[key]}" for key in mapped]
    extra = {key: value for key, value in config.items() if key not in spelling and key not in mapped}
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in extra.items()]
    lines += [f"TRAINER_EXTRA_ARGS='{' '.join(words)}'", f"GH200_OPTIMIZATIONS='{json.dumps(RAMP)}'"]
    (workbench.project.folder / place).write_text("\n".join(lines))
    workbench.project.config.unlink()
    run = workbench.train(argv=[] if place.startswith("config/") else ["--config", place], probe=PROBE)
    assert run.ok, run.explain()
    assert run.records[0]["settings"]["gh200_optimizations.batch_rampup_steps"][0] == 2


@pytest.mark.one_release("4.")
def test_both_ranks_get_them(workbench):
    workbench.configure(blocks={"gh200_optimizations": {**RAMP, "target_effective_batch_size": 8}}, max_train_steps=2)
    run = workbench.train(world=2, probe=PROBE)
    assert run.ok, run.explain()
    assert run.records[0]["settings"] == run.records[1]["settings"]
    ranks = read_ranks(read_run(run.output))
    assert [(rank.rank, rank.start["rank"], len(rank.steps)) for rank in ranks] == [(0, 0, 2), (1, 1, 2)]
    table = rank_table(ranks)
    assert table is not None and table.missing == () and len(table.rows) == 2, "and one report shows both"


@pytest.mark.one_release("3.")
def test_flags_override_the_file(workbench):
    run = workbench.train(argv=["--config", str(workbench.project.config), "--max_train_steps=3"])
    assert run.ok, run.explain()
    assert run.summaries[0]["global_step"] == 3


@pytest.mark.one_release("3.")
def test_older_spellings_are_taken_and_reported(workbench):
    keys = {"initial_effective_batch_size": 2, "batch_rampup_steps": 2, "use_gh200_trainer": True}
    workbench.configure(max_train_steps=2, target_effective_batch_size=4, **keys)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    assert run.records[0]["settings"]["gh200_optimizations.enable_batch_size_rampup"][0] is True
    assert any("use_gh200_trainer" in note for note in run.records[0]["notes"])


@pytest.mark.one_release("4.")
def test_inline_datasets_need_no_file(workbench):
    entries = json.loads(workbench.project.datasets.read_text())
    workbench.configure(data_backend_config=None, max_train_steps=2)
    config = json.loads(workbench.project.config.read_text())
    workbench.project.config.write_text(json.dumps({**config, "datasets": entries}))
    workbench.project.datasets.unlink()
    run = workbench.train()
    assert run.ok, run.explain()
    assert run.summaries[0]["global_step"] == 2


def test_a_bad_block_stops_the_rank_with_code_2(workbench):
    workbench.configure(blocks={"gh200_optimizations": {"ramp_curve": "cubic"}})
    run = workbench.train()
    assert run.exit_codes == [2]
    assert "'cubic'" in run.log()
    assert not (run.output / "checkpoint-4").exists()
