"""Its trainer, made without an accelerator as its own debugging does: arguments, weights, model, optimizer."""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simpletuner_gh200.seams.rules.datasets import of_datasets
from simpletuner_gh200.seams.rules.judging import Refusal, judged, named

logger = logging.getLogger("simpletuner_gh200")

SOME_STEPS = 1000
"""Of a run whose length is given by epochs: a schedule is made once its data have been counted."""

OUTWARD = ("webhook_config", "publishing_config", "push_to_hub", "report_to", "post_checkpoint_script")
"""Options that would tell somebody, or ask for an account."""

OF_THE_MODEL = {
    "init_tread_model": "tread_config",
    "init_freeze_models": "",
    "init_distillation_adapter_modules": "distillation_method",
    "init_trainable_peft_adapter": "the adapter",
    "move_models": "attention_mechanism",
    "init_distillation": "distillation_method",
}
"""What its start does with a model that has been loaded, in its order, and the option that it is about."""


def refusals(values: Mapping[str, Any], datasets: list[dict[str, Any]], ranks: int) -> Iterator[Refusal]:
    """Everything that SimpleTuner refuses: the first of its arguments, else each dataset's and the model's."""
    with tempfile.TemporaryDirectory(prefix="gh200-rules-") as folder:
        listed, configuration = Path(folder, "datasets.json"), Path(folder, "config.json")
        listed.write_text(json.dumps(datasets), encoding="utf-8")
        told = {key: value for key, value in values.items() if key not in OUTWARD}
        told |= {"data_backend_config": str(listed), "report_to": "none"}
        configuration.write_text(json.dumps(told), encoding="utf-8")
        os.environ.update(CONFIG_BACKEND="json", CONFIG_PATH=str(configuration.with_suffix("")))
        module = importlib.import_module("simpletuner.helpers.training.trainer")
        try:
            trainer = module.Trainer(disable_accelerator=True, exit_on_error=True)
        except (Exception, SystemExit) as refused:  # noqa: BLE001 - its words are the answer
            yield from named("", refused)
            return
        trainer.accelerator = trainer.model.accelerator = process(ranks)
        yield from _of_the_weights(trainer)
        yield from of_datasets(trainer)
        yield from _of_the_model(trainer)
        yield from _of_the_optimizer(trainer)


def process(ranks: int) -> SimpleNamespace:
    """For the accelerator of the first of so many ranks, which keeps everything where nothing has bytes."""
    return SimpleNamespace(
        is_main_process=True,
        is_local_main_process=True,
        num_processes=ranks,
        process_index=0,
        device="meta",
        state=SimpleNamespace(fsdp_plugin=None),
        wait_for_everyone=lambda: None,
        unwrap_model=lambda model, *_args, **_kwargs: model,
    )


def _of_the_weights(trainer: Any) -> Iterator[Refusal]:
    """A folder of this machine has the parts that the family reads from it."""
    config, family = trainer.config, trainer.model
    named_apart = ("pretrained_transformer_model_name_or_path", "pretrained_unet_model_name_or_path")
    folder = Path(str(config.pretrained_model_name_or_path))
    parts = {str(getattr(family, "MODEL_SUBFOLDER", None) or ""), "vae"}
    if getattr(config, "pretrained_vae_model_name_or_path", None) or not getattr(family, "AUTOENCODER_CLASS", None):
        parts.discard("vae")
    if not folder.is_dir() or any(getattr(config, name, None) for name in named_apart):
        return
    for part in sorted(filter(None, parts)):
        if not (folder / part).is_dir():
            what = f"{str(folder)!r} has no {part!r}, which {config.model_family} reads"
            yield {"where": "pretrained_model_name_or_path", "what": what}


def _of_the_model(trainer: Any) -> Iterator[Refusal]:
    """Made of its class without weights: where its configuration is not on this machine, of the class's own."""
    from simpletuner_gh200.seams.trace import build

    family, config = trainer.model, trainer.config
    vars(family).pop("load_model", None)  # its own again, which the datasets were not to use
    try:
        with build.schedulers_by_default():
            trainer.init_noise_schedule()
        made = build.on_meta(family.MODEL_CLASS, _described(family, config), config.weight_dtype)
        with build.loading_nothing(family, made):
            trainer.init_load_base_model()
    except Exception as unable:  # noqa: BLE001 - a class that takes more than its configuration
        logger.info("the model is not judged: %r", unable)
        return
    for name, option in OF_THE_MODEL.items():
        if hasattr(trainer, name):
            yield from judged(option, getattr(trainer, name))


def _described(family: Any, config: Any) -> dict[str, Any]:
    apart = config.pretrained_transformer_model_name_or_path or config.pretrained_unet_model_name_or_path
    try:
        found: dict[str, Any] = family.MODEL_CLASS.load_config(
            apart or config.pretrained_model_name_or_path, subfolder=family.MODEL_SUBFOLDER, local_files_only=True
        )
    except (OSError, ValueError):
        return {}
    return found


def _of_the_optimizer(trainer: Any) -> Iterator[Refusal]:
    """Made for a layer that stands for the model, and its schedule. What a GPU is needed for is not judged here."""
    torch = importlib.import_module("torch")
    layer = torch.nn.Linear(2, 2)
    trainer.model.get_trained_component = lambda *_args, **_kwargs: layer
    trainer.lycoris_wrapped_network = layer
    trainer.accelerator = SimpleNamespace(num_processes=1, device="cpu")
    for name, value in (("is_quantized", False), ("enable_adamw_bf16", True), ("model_type_label", "")):
        if not hasattr(trainer.config, name):
            setattr(trainer.config, name, value)
    trainer.config.max_train_steps = trainer.config.max_train_steps or SOME_STEPS
    yield from judged("optimizer", trainer.init_optimizer)
    if hasattr(trainer, "optimizer"):
        yield from judged("lr_scheduler", trainer.init_lr_scheduler)
