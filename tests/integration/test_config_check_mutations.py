"""``gh200 config check`` keeps its word: a sound configuration with one thing changed is refused, or it trains.

Hundreds of changes, so `make test-matrix` runs them. ``ESCAPES`` are those that pass the check and die before the first
step all the same, each with the reason; one that is refused one day fails here, so that it leaves the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.matrix

Changes = dict[str, list[Any]]
UNSET = object()

OPTIONS: Changes = {
    "train_batch_size": [0, -1, 1000],
    "gradient_accumulation_steps": [0, -2, 64],
    "max_train_steps": [0, UNSET],
    "num_train_epochs": [3, UNSET],
    "learning_rate": [0, -1, "fast", "1e-4"],
    "lora_rank": [0, -4, UNSET],
    "lora_alpha": [0],
    "lora_dropout": [5],
    "resolution": [64, "big", UNSET],
    "resolution_type": ["area", "px", UNSET],
    "seed": [-1, 0, -7],
    "checkpoint_step_interval": [0, -1],
    "checkpoints_total_limit": [0, -1],
    "caption_dropout_probability": [-0.5, 2],
    "lr_warmup_steps": [-1, 500],
    "lr_scheduler": ["sine", "polynomial", "cosine_with_restarts", "linear", "foo"],
    "maximum_image_size": [100, 2048],
    "vae_batch_size": [0, -1, 3],
    "max_workers": [0, -3],
    "metadata_update_interval": [1],
    "optimizer": ["adamw_bf16", "adam", "torch-adamw", "bnb-adamw8bit", "soap", "muon", "torch-sgd", UNSET],
    "optimizer_beta1": [0.5],
    "optimizer_config": ["fused=true", "foo=1", "betas=x"],
    "mixed_precision": ["bf16", "fp8"],
    "model_type": ["controlnet", "Lora", UNSET],
    "model_family": ["flux", "sd3", "sdx", "wan", UNSET],
    "lora_type": ["lycoris", "Standard", UNSET],
    "model_flavour": ["nonsense"],
    "loss_type": ["huber", "abs"],
    "timestep_bias_strategy": ["later", "sometimes"],
    "timestep_bias_portion": [3],
    "pretrained_model_name_or_path": ["/nowhere/model"],
    "pretrained_vae_model_name_or_path": ["/nowhere"],
    "resume_from_checkpoint": ["checkpoint-7", "latest", "/nowhere/checkpoint-3"],
    "init_lora": ["/nowhere.safetensors"],
    "webhook_config": ["/nowhere.json"],
    "deepspeed_config": ["/nowhere.json"],
    "lycoris_config": ["/nowhere.json"],
    "use_ema": [True],
    "gradient_checkpointing": [True, "yes"],
    "caption_strategy": ["filename", "parquet"],
    "quantization_config": ['{"a": 1}', "nofile.json"],
    "attention_mechanism": ["xformers"],
    "lora_init_type": ["loftq", "gaussian"],
    "tread_config": ['{"routes": 3}', "{broken"],
    "distillation_method": ["dcm", "foo"],
}
DATASET: Changes = {
    "id": ["", None, "tiny-text-embeds", 5, UNSET],
    "type": ["s3", "aws", "csv", "memory", None, UNSET],
    "dataset_type": ["images", "eval", "text_embeds", None, UNSET],
    "instance_data_dir": ["/nowhere", "", None, UNSET],
    "caption_strategy": ["parquet", "filename", "instanceprompt", "nope", UNSET],
    "resolution": [0, -1, "big", 65, 0.25, UNSET],
    "resolution_type": ["area", "megapixel"],
    "crop": ["yes", False, UNSET],
    "crop_aspect": ["closest", "random", "preserve", "sq", UNSET],
    "crop_style": ["middle", "random", UNSET],
    "minimum_image_size": [100, 5000, UNSET],
    "maximum_image_size": [64, 1024],
    "metadata_backend": ["json", "parquet", "sqlite", UNSET],
    "repeats": [-1, "3", 1.5, UNSET],
    "probability": [0, -1, 5, "x"],
    "cache_dir_vae": ["/dev/null/x", UNSET],
    "conditioning_type": ["mask", "foo"],
    "conditioning_data": ["nothing"],
    "text_embeds": ["nothing"],
    "image_embeds": ["nothing"],
    "disabled": [True],
    "train_batch_size": [0, 100, "x"],
    "only_instance_prompt": [True],
    "prepend_instance_prompt": [True],
    "caption_shuffle": [{"enable": True, "count": 0}, {"enable": True, "count": 2, "seed": 1}],
    "minimum_aspect_ratio": [2.0],
}
EMBEDS: Changes = {
    "id": ["", "tiny-images", UNSET],
    "type": ["csv", "aws", UNSET],
    "dataset_type": ["text_embed", UNSET],
    "cache_dir": ["/dev/null/x"],
    "default": [False, UNSET],
    "disabled": [True],
}
ESCAPES: dict[str, str] = {}


def mutations() -> Iterator[Any]:
    for place, changes in (("option", OPTIONS), ("dataset", DATASET), ("embeds", EMBEDS)):
        for key, values in changes.items():
            for value in values:
                name = f"{place}:{key}={'(unset)' if value is UNSET else value}"
                marks = [pytest.mark.xfail(strict=True, reason=ESCAPES[name])] if name in ESCAPES else []
                yield pytest.param(place, key, value, id=name, marks=marks)


def write(workbench: Any, place: str, key: str, value: Any) -> None:
    workbench.configure(max_train_steps=1, resume_from_checkpoint="")
    project = workbench.project
    config, datasets = json.loads(project.config.read_text()), json.loads(project.datasets.read_text())
    changed = config if place == "option" else datasets[0 if place == "dataset" else 1]
    if value is UNSET:
        changed.pop(key, None)
    else:
        changed[key] = value
    project.config.write_text(json.dumps(config))
    project.datasets.write_text(json.dumps(datasets))


def refused(workbench: Any) -> list[str]:
    """As the command does, but for the process that asks SimpleTuner: this one has imported it already."""
    code = (
        "import json; from pathlib import Path\n"
        "from simpletuner_gh200.errors import GH200Error\n"
        "from simpletuner_gh200.operate import preflight\n"
        "from simpletuner_gh200.seams.rules.configuration import refusals\n"
        "from simpletuner_gh200.upstream.rules import problem\n"
        "def asked(values, datasets, ranks, options, say):\n"
        "    found = list(refusals(values, datasets, ranks))\n"
        "    return [problem(one['where'], one['what'], frozenset(options)) for one in found], []\n"
        "preflight.broken_rules = asked\n"
        "said = []\n"
        "try:\n"
        f"    preflight.check_run(explicit={str(workbench.project.config)!r}, env_name=None, flags=(),\n"
        "        say=lambda words: None, starting=False)\n"
        "except GH200Error as refusal:\n"
        "    said = [str(refusal)]\n"
        "Path('answer.json').write_text(json.dumps(said))\n"
    )
    run = workbench.execute(code)
    assert run.ok, run.explain()
    answer: list[str] = json.loads(Path(workbench.project.folder, "answer.json").read_text())
    return answer


@pytest.mark.parametrize(("place", "key", "value"), list(mutations()))
def test_a_changed_configuration_is_refused_or_trains(workbench: Any, place: str, key: str, value: Any) -> None:
    write(workbench, place, key, value)
    if not refused(workbench):
        run = workbench.train(stock=True, timeout=120)
        assert run.losses[0], run.explain()
