"""What ``gh200 init`` writes, and the examples for one GPU, train the tiny model; for FSDP2: test_fsdp2_training.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner_gh200.operate.choices import Wish
from simpletuner_gh200.operate.models import choose_model
from simpletuner_gh200.operate.project import plan_project, write
from simpletuner_gh200.telemetry.reading import read_run
from tests.integration.workbench import probe
from tests.unit.few_options import TABLE

ROOT = Path(__file__).parents[2]
SLOW_QUEUES = probe("slow_queues")


@pytest.mark.one_release("3.")
def test_a_project_of_init_trains_unchanged(workbench, tmp_path):
    project = workbench.project
    model = choose_model(str(project.model), TABLE.families)
    wish = Wish(tmp_path, model, project.images, steps=3, batch=2, resolution=64, cpu=True, ramp=True)
    write(plan_project(wish))
    run = workbench.train(argv=["--config", str(tmp_path / "config" / "config.json")])
    assert run.ok, run.explain()
    assert run.summaries[0]["global_step"] == 3
    assert {
        name: run.summaries[0]["features"][name] for name in ("store", "caches", "ramp", "telemetry")
    } == dict.fromkeys(("store", "caches", "ramp", "telemetry"), "on")
    assert read_run(tmp_path / "output").steps[0]["effective_batch"] == 2


@pytest.mark.one_release("4.")
def test_the_example_trains_on_the_tiny_model(workbench, tmp_path):
    """Only what a CPU and a tiny model need is overridden; our blocks are the example's. On a machine so busy that
    what is known of new samples comes late.
    """
    project = workbench.project
    example = ROOT / "config" / "gh200_in_memory_example.json"
    datasets = json.loads((ROOT / "config" / "gh200_in_memory_datasets.json").read_text())
    datasets[0].update(instance_data_dir=str(project.images), resolution=64, cache_dir_vae=str(tmp_path / "vae"))
    datasets[1]["cache_dir"] = str(tmp_path / "text")
    (tmp_path / "datasets.json").write_text(json.dumps(datasets))
    config = json.loads(example.read_text())
    config["cache_config"]["cache_dir"] = str(tmp_path / "packs")
    needs = {
        "model_family": "sdxl",
        "pretrained_model_name_or_path": str(project.model),
        "pretrained_vae_model_name_or_path": str(project.model),
        "data_backend_config": str(tmp_path / "datasets.json"),
        "output_dir": str(project.output),
        "optimizer": "optimi-adamw",
        "mixed_precision": "no",
        "resolution": 64,
        "max_train_steps": 3,
        "lr_warmup_steps": 0,
        "gradient_checkpointing": False,
        "disable_bucket_pruning": True,
        "checkpoint_step_interval": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **needs}))
    run = workbench.train(argv=["--config", str(tmp_path / "config.json")], probe=SLOW_QUEUES)
    assert run.ok, run.explain()
    assert run.summaries[0]["global_step"] == 3
    assert run.summaries[0]["features"]["store"] == "on"
