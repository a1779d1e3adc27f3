"""``python -m simpletuner_gh200.seams.rules``: what SimpleTuner itself would say of a configuration before any model.

A question, JSON on standard input: ``{"values": {...}, "datasets": [...], "ranks": 2, "folder": ...}``, with nothing of
ours left in either; paths are relative to ``folder``. The answer, JSON on one line: ``{"refusals": [{"where": ...,
"what": ...}]}``. SimpleTuner's trainer is made without an accelerator, as its own debugging does, and its factory is
asked for each dataset what it asks itself at a start; no weights are read, nothing is written but in a folder that goes
afterwards, and nobody outside is told.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simpletuner_gh200.seams.probe import innermost, innermost_of

logger = logging.getLogger("simpletuner_gh200")

IMPORTED = ("simpletuner.helpers.training.trainer", "simpletuner.helpers.data_backend.factory")

TRAINED = frozenset({"image", "video", "audio", "caption"})

LOOKED_AT = 100
"""Pictures of a dataset, by their headers."""

SOME_STEPS = 1000
"""Of a run whose length is given by epochs: a schedule is made once its data have been counted."""

OUTWARD = ("webhook_config", "publishing_config", "push_to_hub", "report_to", "post_checkpoint_script")
"""Options that would tell somebody, or ask for an account."""

NETWORK = frozenset({"huggingface_hub", "httpx", "httpcore", "requests", "urllib3", "socket"})
"""Modules whose exceptions say that a hub could not be reached: that is no answer. diffusers says so by an OSError."""

PRIMARY = frozenset({"image", "video", "audio", "conditioning", "eval", "caption"})
"""Kinds of datasets that hold samples; the others hold what is made of them."""

OF_ALL_DATASETS = (
    "_prevalidate_backend_ids",
    "_ensure_text_embed_backends_present",
    "_validate_edit_model_conditioning_type",
    "_validate_audio_only_datasets",
    "_evaluate_distiller_requirements",
    "configure_text_embed_backends",
    "configure_image_embed_backends",
)
"""Its factory's questions about the list as a whole; older releases have fewer."""


def refusals(values: Mapping[str, Any], datasets: list[dict[str, Any]], ranks: int) -> Iterator[dict[str, str]]:
    """Everything that SimpleTuner refuses: the first of its arguments, else each dataset's."""
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
            yield from _refusal("", refused)
            return
        yield from _of_the_weights(trainer)
        yield from _of_datasets(trainer, ranks)
        yield from _of_the_optimizer(trainer)


def _of_the_weights(trainer: Any) -> Iterator[dict[str, str]]:
    """A folder of this machine has the parts that the family reads from it."""
    config, family = trainer.config, trainer.model
    named = config.pretrained_model_name_or_path
    folder = Path(str(named))
    parts = {str(getattr(family, "MODEL_SUBFOLDER", None) or ""), "vae"}
    if getattr(config, "pretrained_vae_model_name_or_path", None) or not getattr(family, "AUTOENCODER_CLASS", None):
        parts.discard("vae")
    if not named or not folder.is_dir() or _named_apart(config):
        return
    for part in sorted(filter(None, parts)):
        if not (folder / part).is_dir():
            what = f"{str(folder)!r} has no {part!r}, which {config.model_family} reads"
            yield {"where": "pretrained_model_name_or_path", "what": what}


def _named_apart(config: Any) -> bool:
    apart = ("pretrained_transformer_model_name_or_path", "pretrained_unet_model_name_or_path")
    return any(getattr(config, name, None) for name in apart)


def _of_datasets(trainer: Any, ranks: int) -> Iterator[dict[str, str]]:
    """Its factory is taken through each dataset, up to where it would look through the files."""
    module = importlib.import_module("simpletuner.helpers.data_backend.factory")
    process = SimpleNamespace(
        is_main_process=True,
        is_local_main_process=True,
        num_processes=ranks,
        process_index=0,
        device="cpu",
        wait_for_everyone=lambda: None,
    )
    factory = module.FactoryRegistry(trainer.config, process, [], [], trainer.model)
    try:
        entries = factory.load_configuration()
    except Exception as refused:  # noqa: BLE001 - its words are the answer
        yield from _refusal("", refused)
        return
    _write_nothing(module, factory)
    for judge in filter(None, (getattr(factory, name, None) for name in OF_ALL_DATASETS)):
        yield from _judged("", judge, copy.deepcopy(entries))
    enabled = [entry for entry in entries if not entry.get("disabled") and not entry.get("disable")]
    if not any(map(_trained, enabled)):
        yield {"where": "data_backend_config", "what": "no dataset to train on: none of images, videos or audio is on"}
    primary = [(f"dataset {entry.get('id')!r}", entry) for entry in enabled if _kind(entry) in PRIMARY]
    for where, entry in primary:
        yield from _judged(where, module.init_backend_config, copy.deepcopy(entry), trainer.config, process)
        yield from _judged(where, _validated, module, copy.deepcopy(entry), vars(trainer.config))
    if not factory.text_embed_backends:  # judged above, or made of something that this process has not
        return
    for where, entry in primary:
        configure = factory._configure_single_data_backend
        yield from _judged(where, configure, copy.deepcopy(entry), entries, [], [], False)


def _validated(module: Any, entry: dict[str, Any], arguments: dict[str, Any]) -> None:
    module.create_backend_config(entry, arguments).validate(arguments)


def _kind(entry: Mapping[str, Any]) -> str:
    return str(entry.get("dataset_type") or "image")


def _trained(entry: Mapping[str, Any]) -> bool:
    """Is it dealt to the training loop, now or later?"""
    return _kind(entry) in TRAINED and entry.get("probability", 1) != 0


class _Nothing:
    """Stands for a cache: whatever is asked of it is answered, and nothing happens."""

    def __getattr__(self, _name: str) -> _Nothing:
        return self

    def __call__(self, *_arguments: object, **_named: object) -> _Nothing:
        return self


class _Enough(BaseException):
    """A dataset has passed all that can be asked before its files."""


def _write_nothing(module: Any, factory: Any) -> None:
    """In this process, which only asks: no folder is made, no index removed, no embed computed, no file looked for."""
    nothing = _Nothing()
    module.TextEmbeddingCache = module.ImageEmbedCache = module.DistillationCache = nothing
    module.StateTracker.delete_cache_files = staticmethod(nothing)
    for name in ("get_vae", "load_vae", "load_text_encoder", "get_pipeline", "load_model"):
        setattr(factory.model, name, nothing)
    os.makedirs = nothing  # type: ignore[assignment]
    Path.mkdir = nothing  # type: ignore[assignment, method-assign]

    def files_come_now(backend: Any, init_backend: Any, *_more: Any, **_named: Any) -> None:
        pictures = _pictures(init_backend.get("instance_data_dir") or backend.get("instance_data_dir"))
        sizes = [size for size in map(_size, pictures) if size]
        if pictures and not sizes and _kind(backend) == "image":
            raise ValueError(f"none of its pictures can be opened, {pictures[0]} for one")
        fits = init_backend["metadata_backend"].meets_resolution_requirements
        if sizes and not any(fits(image_metadata={"original_size": size}) for size in sizes):
            wide, high = max(sizes)
            raise ValueError(
                f"no picture is large enough for minimum_image_size: the largest has {wide} x {high} pixels"
            )
        raise _Enough

    factory._handle_bucket_operations = files_come_now


def _pictures(folder: object) -> list[Path]:
    """A few, from all over."""
    found = [path for path in Path(str(folder)).rglob("*") if path.suffix.lower() in {".png", ".jpg", ".jpeg", ".webp"}]
    return found[:: max(1, len(found) // LOOKED_AT)]


def _size(path: Path) -> tuple[int, int] | None:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            wide, high = picture.size
            return wide, high
    except Exception:  # noqa: BLE001 - SimpleTuner passes over it, whatever is wrong
        return None


def _judged(where: str, judge: Callable[..., Any], *arguments: Any) -> Iterator[dict[str, str]]:
    """What is raised by a stand-in of ours, that lacks what the real one has, is no answer."""
    try:
        judge(*arguments)
    except _Enough:
        return
    except (ValueError, KeyError, TypeError, OSError) as refused:
        yield from _refusal(where, refused)
    except Exception as unable:  # noqa: BLE001
        logger.info("not judged: %r", unable)


def _of_the_optimizer(trainer: Any) -> Iterator[dict[str, str]]:
    """Made for a layer that stands for the model, and its schedule. What a GPU is needed for is not judged here."""
    torch = importlib.import_module("torch")
    layer = torch.nn.Linear(2, 2)
    trainer.model.get_trained_component = lambda *_args, **_kwargs: layer
    trainer.lycoris_wrapped_network = layer
    trainer.accelerator = trainer.accelerator or SimpleNamespace(num_processes=1, device="cpu")
    for name, value in (("is_quantized", False), ("enable_adamw_bf16", True), ("model_type_label", "")):
        if not hasattr(trainer.config, name):
            setattr(trainer.config, name, value)
    trainer.config.max_train_steps = trainer.config.max_train_steps or SOME_STEPS
    yield from _judged("optimizer", trainer.init_optimizer)
    if hasattr(trainer, "optimizer"):
        yield from _judged("lr_scheduler", trainer.init_lr_scheduler)


def _refusal(where: str, refused: BaseException) -> Iterator[dict[str, str]]:
    """Of a traceback in its words, as its parser's, the end says what is wrong."""
    first = innermost_of(refused)
    words = str(first).strip()
    what = (
        f"it has no {words}"
        if isinstance(first, KeyError)
        else words.splitlines()[-1].strip()
        if "Traceback (" in words
        else innermost(refused)
    )
    unreachable = type(first) is OSError or type(first).__module__.partition(".")[0] in NETWORK
    if not unreachable:
        yield {"where": where, "what": what}


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        question = json.load(sys.stdin)
        for name in IMPORTED:  # in the folder we were started in: it is where their log goes
            importlib.import_module(name)
        os.chdir(question["folder"])
        found = list(refusals(question["values"], question["datasets"], question["ranks"]))
        out.write(json.dumps({"refusals": found}) + "\n")


if __name__ == "__main__":
    main()
