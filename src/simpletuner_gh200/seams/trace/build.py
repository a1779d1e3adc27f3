"""SimpleTuner's own trainer with its own model class, brought to where training would begin, without any weights.

SimpleTuner's methods do the work, in the order in which a run calls them: the adapter, what is frozen, the data types
and checkpointing are theirs. Only loading is ours: the class is made from its configuration on the ``meta`` device.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch

LEAST_STACK = 4
"""A run of blocks shorter than this is run whole: two of it and three of it tell nothing more."""

_NEUTRAL = {
    "report_to": "none",
    "push_to_hub": False,
    "disable_benchmark": True,
    "validation_disable": True,
    "resume_from_checkpoint": "",
}
"""What a trace must not do, whatever the configuration says."""


@contextlib.contextmanager
def trainer_for(options: Mapping[str, Any]) -> Iterator[Any]:
    """A trainer of these options that has loaded nothing; what it writes goes to a folder of its own."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # the request before this one may have had another precision
    with tempfile.TemporaryDirectory(prefix="gh200-trace-") as folder:
        with contextlib.chdir(folder):  # where SimpleTuner is imported it empties debug.log, which may be a run's
            from simpletuner.helpers.training.trainer import Trainer
        datasets = Path(folder, "datasets.json")
        datasets.write_text("[]", encoding="utf-8")
        ours = {**options, **_NEUTRAL, "output_dir": folder, "data_backend_config": str(datasets)}
        config = {f"--{key}": value for key, value in ours.items() if value is not None}
        with schedulers_by_default():
            trainer = Trainer(config=config, exit_on_error=True)
        yield trainer


@contextlib.contextmanager
def schedulers_by_default() -> Iterator[None]:
    """A noise schedule whose file is not here has its class's defaults: its numbers change no size."""
    from diffusers import SchedulerMixin

    original = SchedulerMixin.from_pretrained.__func__

    def from_pretrained(kind: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(kind, *args, **kwargs)
        except OSError:
            return kind()

    with mock.patch.object(SchedulerMixin, "from_pretrained", classmethod(from_pretrained)):
        yield


def on_meta(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The class made from its configuration, every tensor without memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return kind.from_config(dict(config))
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Run:
    """Alike blocks that follow each other in a list of the model."""

    list: str
    start: int
    count: int


def stacks(model: torch.nn.Module) -> dict[str, Run]:
    """Name -> each run of alike blocks: those whose memory is so many times that of one.

    A list may hold several: the last block of SD3 has no context to write, the first of its medium one attend twice.
    """
    found = {}
    for name, child in model.named_children():
        if not isinstance(child, torch.nn.ModuleList):
            continue
        kinds = [(type(block), tuple(parameter.shape for parameter in block.parameters())) for block in child]
        start = 0
        for _kind, alike in groupby(kinds):
            count = len(list(alike))
            if count >= LEAST_STACK:
                found[f"{name}[{start}]" if start else name] = Run(name, start, count)
            start += count
    return found


def shortened(model: torch.nn.Module, runs: Mapping[str, Run], lengths: Mapping[str, int]) -> torch.nn.Module:
    """``model`` with so many blocks of each of its whole ``runs``."""
    for name in sorted(lengths, key=lambda name: -runs[name].start):  # from the end: what comes before keeps its place
        run = runs[name]
        del getattr(model, run.list)[run.start + lengths[name] : run.start + run.count]
    return model


def prepare(trainer: Any, made: torch.nn.Module) -> Any:
    """The component to be trained, adapters and checkpointing as configured; ``made`` is what loading gives."""
    foundation = trainer.model
    with loading_nothing(foundation, made):
        trainer.init_load_base_model()
    trainer.init_freeze_models()
    with torch.device("meta"):
        trainer.init_trainable_peft_adapter()
    component = foundation.get_trained_component(unwrap_model=False)
    dtype = trainer.config.weight_dtype
    component.to(dtype=dtype)
    if trainer.lycoris_wrapped_network is not None:
        trainer.lycoris_wrapped_network.to(dtype=dtype)
        component.add_module("lycoris_wrapped_network", trainer.lycoris_wrapped_network)
    trainer.init_post_load_freeze()
    return component.train()


@contextlib.contextmanager
def loading_nothing(foundation: Any, made: torch.nn.Module) -> Iterator[None]:
    """Its class gives ``made``, and 4.x takes that for loaded although it is on ``meta``."""
    with contextlib.ExitStack() as patches:
        given = staticmethod(lambda *_args, **_kwargs: made)
        patches.enter_context(mock.patch.object(foundation.MODEL_CLASS, "from_pretrained", given))
        if hasattr(type(foundation), "_module_has_meta_tensors"):
            loaded = staticmethod(lambda *_args: False)
            patches.enter_context(mock.patch.object(type(foundation), "_module_has_meta_tensors", loaded))
        yield


def rows(model: torch.nn.Module) -> dict[int, int]:
    """Length of the first dimension -> bytes of one row, of all parameters of that length: what FSDP2 shards by."""
    found: dict[int, int] = {}
    for parameter in model.parameters():
        length = parameter.shape[0] if parameter.dim() else 1
        size = parameter.numel() // max(length, 1) * parameter.element_size()
        found[length] = found.get(length, 0) + size
    return found
