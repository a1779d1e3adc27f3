"""The ramp in one run with everything else: no number changes when data, caches and activations move into memory."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from typing import Any

import pytest

from simpletuner_gh200.demo.project import dataset_list
from simpletuner_gh200.ramp.schedule import GH200GradientRamp
from tests.integration.workbench import UNIFIED, probe, ramp

PROBE = probe("ramp")
STEPS = 6
RAMP = ramp(2, 8, 8, ramp_curve="linear")
COMPANIONS = {
    "attention_mechanism": "native-math",
    "gradient_checkpointing": True,
    "use_ema": True,
    "validation_disable": False,
    "validation_prompt": "a red circle",
    "validation_step_interval": 3,
    "validation_num_inference_steps": 1,
    "validation_resolution": "64x64",
    "validation_guidance": 1.0,
}


def datasets(workbench: Any, **image: Any) -> list[dict[str, Any]]:
    """The tiny images twice; in 4.x the second time with a batch size of their own."""
    first, embeds = dataset_list(workbench.project, image)
    again = workbench.project.folder / "images-again"
    if not again.exists():
        shutil.copytree(workbench.project.images, again)
    cache = str(workbench.project.folder / "cache" / "vae-again")
    second = {**first, "id": "images-again", "instance_data_dir": str(again), "cache_dir_vae": cache}
    if int(version("simpletuner").split(".")[0]) >= 4:
        second["train_batch_size"] = 1
    return [first, second, embeds]


@pytest.mark.one_release("4.")
def test_everything_at_once_changes_no_number(workbench, tmp_path):
    folder = workbench.project.folder
    workbench.configure(datasets=datasets(workbench), max_train_steps=1)
    assert workbench.train(stock=True).ok
    shutil.rmtree(workbench.project.output)
    shutil.copytree(folder, tmp_path / "filled")

    ramp = {"gh200_optimizations": RAMP}
    workbench.configure(blocks=ramp, datasets=datasets(workbench), max_train_steps=STEPS, **COMPANIONS)
    plain = workbench.train(probe=PROBE)
    assert plain.ok, plain.explain()

    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "filled", folder)
    everything = {
        "gh200_optimizations": {**RAMP, "activations": "grace", "activation_min_tensor_kb": 0},
        "cache_config": {**UNIFIED, "cache_dir": str(tmp_path / "packs")},
    }
    in_memory = datasets(workbench, type="in_memory")
    workbench.configure(blocks=everything, datasets=in_memory, max_train_steps=STEPS, **COMPANIONS)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()

    features = run.summaries[0]["features"]
    assert {features[name] for name in ("ramp", "store", "caches", "activations")} == {"on"}
    assert run.summaries[0]["details"]["activations"]["moved"] > 0
    record = run.records[0]
    windows = GH200GradientRamp(2, 8, 8, train_batch_size=2, curve="linear").windows(STEPS)
    assert record["windows"] == [window.accumulation for window in windows]
    assert max(abs(weight - 1) for weight in record["weights"]) <= 4 * 2**-53
    assert run.losses == plain.losses
    assert record["logged"][-1]["train_loss"] == plain.records[0]["logged"][-1]["train_loss"]
    # Once per optimizer step, with no micro-batch pending; phases change only there, and come back to training.
    assert record["ema"] == [0] * STEPS
    assert all(pending == 0 for _, pending in record["phases"])
    assert {"eval", "train"} <= {phase for phase, _ in record["phases"]}
    assert [fired["step"] for fired in record["fired"] if fired["what"] == "intermediary validation"] == [3, 6]
