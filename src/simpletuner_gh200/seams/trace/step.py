"""One step under fake tensors: forward, loss and backward through SimpleTuner's own trainer, every byte counted."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from simpletuner_gh200.seams.trace import batches, build
from simpletuner_gh200.seams.trace.counted import Counted, tokens_of
from simpletuner_gh200.seams.trace.guise import AllTrueMasks, LikeHopper
from simpletuner_gh200.seams.trace.meter import LiveBytes, Operations, SavedBytes, storages


def run(trainer: Any, made: torch.nn.Module, request: Mapping[str, Any]) -> tuple[Counted, dict[int, int]]:
    """Take one step of a model on ``meta`` with a batch of the requested shape; also the rows of its parameters."""
    model = build.prepare(trainer, made)
    rows = build.rows(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    build.into_fake(model, mode)
    trained, frozen = build.parameters(model)
    held = [*trained, *frozen, *model.buffers()]
    tokens = request["tokens"] or tokens_of(
        trainer.config.model_family, getattr(trainer.config, "tokenizer_max_length", None)
    )
    latents = batches.latent_shape(trainer.model, request)
    batch = trainer.prepare_batch(batches.make(latents, tokens=tokens, config=request["model"]))
    trainer.accelerator.prepare_model(model, device_placement=False)
    trainer.model.set_prepared_model(model)
    with contextlib.ExitStack() as modes:
        modes.enter_context(mode)
        batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        known = storages([*held, *given])
        modes.enter_context(AllTrueMasks(tokens))
        if request["like"] == "hopper":
            modes.enter_context(LikeHopper())
        operations = modes.enter_context(Operations())
        live = modes.enter_context(LiveBytes(known))
        forward, saved = _step(trainer, batch, live, known)
        counted = Counted(
            parameters=sum(p.numel() for p in (*trained, *frozen)),
            trained=sum(p.numel() for p in trained),
            weights=sum(storages(held).values()),
            trained_bytes=sum(storages(trained).values()),
            stepped=sum(p.numel() for p in trained if p.grad is not None),
            gradients=sum(p.grad.numel() * p.grad.element_size() for p in trained if p.grad is not None),
            saved=saved.bytes,
            saved_tensors=saved.tensors,
            forward=forward,
            peak=live.peak,
            flops=operations.total,
        )
    trainer.model.set_prepared_model(None)
    del model, batch, given, held, trained, frozen
    gc.collect()
    return counted, rows


def _step(trainer: Any, batch: Any, live: LiveBytes, known: Mapping[int, int]) -> tuple[int, SavedBytes]:
    saved = SavedBytes(known)
    with saved.watching():
        output = trainer.model_predict(prepared_batch=batch)
        loss = trainer.model.loss(prepared_batch=batch, model_output=output, apply_conditioning_mask=True)
    del output
    forward = live.peak
    # What loss.backward() ends in. A function mode is off inside what it handles; checkpointing computes again there.
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    return forward, saved


def traced(trainer: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """The step with two blocks of each stack, and what one more of each adds: a step is linear in alike blocks."""
    template = build.on_meta(trainer.model.MODEL_CLASS, request["model"], trainer.config.weight_dtype)
    found = build.stacks(template) if request["extrapolate"] else {}
    two = dict.fromkeys(found, 2)
    base, rows = run(trainer, build.shortened(copy.deepcopy(template), found, two), request)
    stacks = {}
    for name, stack in found.items():
        more, with_one = run(trainer, build.shortened(copy.deepcopy(template), found, {**two, name: 3}), request)
        added = {count: size - rows.get(count, 0) for count, size in with_one.items() if size != rows.get(count, 0)}
        stacks[name] = {"count": stack.count, "each": asdict(more.minus(base)), "rows": added}
    return {"base": asdict(base), "stacks": stacks, "rows": rows}
