"""What the child answers, under fake tensors: a training step through SimpleTuner's trainer, other models' work."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from simpletuner_gh200.seams.trace import build
from simpletuner_gh200.seams.trace.counted import Counted, pooled_width, text_width, tokens_of
from simpletuner_gh200.seams.trace.modes import (
    AllTrueMasks,
    LikeHopper,
    LiveBytes,
    Operations,
    SavedBytes,
    into_fake,
    storages,
)


def run(trainer: Any, made: torch.nn.Module, request: Mapping[str, Any]) -> tuple[Counted, dict[int, int]]:
    """Take one step of a model on ``meta`` with a batch of the requested shape; also the rows of its parameters."""
    model = build.prepare(trainer, made)
    rows = build.rows(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    into_fake(model, mode)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = [*model.parameters(), *model.buffers()]
    tokens = request["tokens"] or tokens_of(
        trainer.config.model_family, getattr(trainer.config, "tokenizer_max_length", None)
    )
    # Batch, channels and what the request says of the rest; a film has its frames in between.
    latents = (int(request["batch"]), int(trainer.model.LATENT_CHANNEL_COUNT), *request["latent"])
    batch = trainer.prepare_batch(make_batch(latents, tokens=tokens, config=request["model"]))
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
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in trained),
            weights=sum(storages(held).values()),
            trained_bytes=sum(storages(trained).values()),
            stepped=sum(p.numel() for p in trained if p.grad is not None),
            gradients=sum(p.grad.numel() * p.grad.element_size() for p in trained if p.grad is not None),
            saved=saved.bytes,
            forward=forward,
            peak=live.peak,
            flops=operations.total,
        )
    trainer.model.set_prepared_model(None)
    del model, batch, given, held, trained
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
    found = build.stacks(template)
    two = dict.fromkeys(found, 2)
    base, rows = run(trainer, build.shortened(copy.deepcopy(template), found, two), request)
    stacks = {}
    for name, stack in found.items():
        more, with_one = run(trainer, build.shortened(copy.deepcopy(template), found, {**two, name: 3}), request)
        added = {count: size - rows.get(count, 0) for count, size in with_one.items() if size != rows.get(count, 0)}
        stacks[name] = {"count": stack.count, "each": asdict(more.minus(base)), "rows": added}
    return {"base": asdict(base), "stacks": stacks, "rows": rows}


def make_batch(latents: Sequence[int], *, tokens: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """As SimpleTuner's collate would hand it over, of the right shapes and no meaning.

    Real tensors, zeros: they are small, and what prepares a batch may look at their values.
    """
    size = latents[0]
    embeds = torch.zeros(size, tokens, text_width(config))
    pooled = pooled_width(config)
    mask = torch.ones(size, tokens)
    text = {"prompt_embeds": embeds, "attention_masks": mask}
    if pooled:
        text["pooled_prompt_embeds"] = torch.zeros(size, pooled)
    height, width = latents[-2:]
    conditioning = (f"conditioning_{kind}" for kind in ("pixel_values", "latents", "image_embeds", "type"))
    return {
        "latent_batch": torch.zeros(*latents),
        "prompts": [""] * size,
        "text_encoder_output": text,
        "prompt_embeds": embeds,
        "add_text_embeds": text.get("pooled_prompt_embeds"),
        "batch_time_ids": torch.tensor([[height * 8.0, width * 8.0, 0, 0, height * 8.0, width * 8.0]] * size),
        "encoder_attention_mask": mask,
        **dict.fromkeys(("is_regularisation_data", "is_i2v_data"), False),
        **dict.fromkeys(("latent_metadata", "loss_mask_type", *conditioning)),
    }


# -- the other models of a pipeline ------------------------------------------------------------------------


def count_parameters(config: Mapping[str, Any]) -> int:
    """Of a component, from its configuration alone."""
    return sum(parameter.numel() for parameter in _made(config, torch.bfloat16).parameters())


def vae_work(config: Mapping[str, Any], pixels: Sequence[int]) -> dict[str, int]:
    """Bytes beyond its weights while a VAE encodes ``pixels`` (batch, channels, ...), and while it decodes them."""
    vae = _made(config, torch.bfloat16).eval()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    into_fake(vae, mode)
    known = storages([*vae.parameters(), *vae.buffers()])
    with mode, LikeHopper(), torch.no_grad():
        image = torch.empty(*pixels, dtype=torch.bfloat16)
        with LiveBytes(known) as encoding:
            latent = vae.encode(image).latent_dist.mode()
        del image
        with LiveBytes(known) as decoding:
            vae.decode(latent)
    return {"encode": encoding.peak, "decode": decoding.peak}


def _made(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    import diffusers

    name = str(config.get("_class_name") or "")
    if hasattr(diffusers, name):
        return build.on_meta(getattr(diffusers, name), config, dtype)
    import transformers

    given = dict(config)
    kind = getattr(transformers, str((given.get("architectures") or [""])[0]), transformers.AutoModel)
    settings = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        return kind(settings) if kind is not transformers.AutoModel else kind.from_config(settings)
