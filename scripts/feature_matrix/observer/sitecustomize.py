"""Watches a training process from inside, without touching SimpleTuner's or our files.

Put on ``PYTHONPATH`` by the feature matrix, it is imported by every Python that the run starts and waits for four
modules: the attention controller (its phases are noted), the trainer (a manual validation is asked for through
upstream's own trigger), torch (which pins memory only where it has an accelerator) and the scan of samples (which
loses some on a busy machine). Notes go to the file named by
``FEATURE_MATRIX_NOTES``, one JSON object a line; without that variable nothing happens.
"""

from __future__ import annotations

import json
import os
from queue import SimpleQueue
from typing import Any

NOTES = os.environ.get("FEATURE_MATRIX_NOTES")
ASK_AT = int(os.environ.get("FEATURE_MATRIX_MANUAL_VALIDATION_AT", "-1"))
"""Micro-batch, counted from 0, from which on a manual validation is wanted; once. Below 0: never."""
STAND_IN = os.environ.get("FEATURE_MATRIX_PIN_STAND_IN") == "1"
ONE_LANGUAGE = os.environ.get("FEATURE_MATRIX_ONE_LANGUAGE") == "1"


def note(what: str, **details: Any) -> None:
    with open(str(NOTES), "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, **details}, default=str) + "\n")


def watch_attention(module: Any) -> None:
    controller = module.AttentionBackendController
    original = controller.apply.__func__

    def apply(cls: Any, config: Any, phase: Any) -> Any:
        result = original(cls, config, phase)
        note("phase", phase=phase.value, backend=str(getattr(config, "attention_mechanism", None)))
        return result

    controller.apply = classmethod(apply)


def watch_trainer(module: Any) -> None:
    # A wrapper that keeps the signature: the extension looks at it before it wraps the same method.
    wrap_function_wrapper(module, "Trainer.train", observed_train)


def observed_train(train: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    if ASK_AT >= 0:
        ask_for_validation(trainer)
    note("started", steps=window_size(trainer))
    try:
        return train(*args, **kwargs)
    finally:
        note("ended", global_step=trainer.state["global_step"])


def ask_for_validation(trainer: Any) -> None:
    """Upstream's own trigger, and a look at when it answers."""
    seen = {"batches": 0, "asked": False}
    prepare = trainer.prepare_batch

    def counting(batch: Any) -> Any:
        seen["batches"] += 1
        return prepare(batch)

    def wanted() -> bool:
        if seen["asked"] or seen["batches"] <= ASK_AT:
            return False
        seen["asked"] = True
        note("manual validation taken", **position(trainer), micro_batches=seen["batches"])
        return True

    trainer.prepare_batch = counting
    trainer.register_manual_validation_trigger(wanted)
    if trainer.validation is not None:
        watch_validation(trainer)


def watch_validation(trainer: Any) -> None:
    run = trainer.validation.run_validations

    def observed(*args: Any, **kwargs: Any) -> Any:
        forced = bool(kwargs.get("force_evaluation"))
        try:
            result = run(*args, **kwargs)
        except Exception as failure:
            note("validation failed", error=repr(failure))
            raise
        if forced:
            images = getattr(trainer.validation, "validation_images", None) or {}
            note("validation ran", **position(trainer), images=len(images))
        return result

    trainer.validation.run_validations = observed


def position(trainer: Any) -> dict[str, Any]:
    return {
        "global_step": trainer.state["global_step"],
        "window_closed": bool(trainer.accelerator.sync_gradients),
        "steps": window_size(trainer),
    }


def window_size(trainer: Any) -> int:
    return int(trainer.accelerator.gradient_accumulation_steps)


def stand_in_for_pinning(torch: Any) -> None:
    """Stock SimpleTuner pins every batch, which torch refuses on a machine without an accelerator."""
    torch.Tensor.pin_memory = lambda self, device=None: self


def lose_no_sample(metadata: Any) -> None:
    """Stock SimpleTuner's scan forgets samples on a busy machine: seams/points/data_backends.py."""
    metadata.Queue = SimpleQueue


def speak_english_only(langid: Any) -> None:
    """SimpleTuner 4.10 asks py3langid for a model format that 0.4 dropped; the tones have no words to recognise."""

    class English:
        @classmethod
        def from_pickled_model(cls, *_model: Any, **_options: Any) -> English:
            return cls()

        def set_languages(self, *_languages: Any) -> None:
            return

        def classify(self, _text: str) -> tuple[str, float]:
            return "en", 1.0

    langid.LanguageIdentifier = English


if NOTES:
    from wrapt import register_post_import_hook, wrap_function_wrapper

    register_post_import_hook(watch_attention, "simpletuner.helpers.training.attention_backend")
    register_post_import_hook(watch_trainer, "simpletuner.helpers.training.trainer")
    if STAND_IN:
        register_post_import_hook(stand_in_for_pinning, "torch")
        register_post_import_hook(lose_no_sample, "simpletuner.helpers.metadata.backends.base")
    if ONE_LANGUAGE:
        register_post_import_hook(speak_english_only, "py3langid.langid")
