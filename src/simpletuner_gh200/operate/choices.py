"""What ``gh200 init`` chooses where the wish leaves it open, each choice with its reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.datasets import Survey
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.models import Model
from simpletuner_gh200.units import GIB, counted, format_bytes

_ROOM = 1.5
"""A dataset may grow by half before its ceiling has to be raised."""
_SMALLEST = 10
"""One picture of so many may be smaller than the resolution."""
_STEP = 64
"""Edges are a multiple of it: all families take that."""
_OFTEN, _SMALL_SET = 100, 100
_TINY, _REHEARSED, _SOME = 64, 20, 64
"""Pixels, steps and pictures of a rehearsal."""


@dataclass(frozen=True)
class Wish:
    """What was asked for; None is left to us. ``cpu`` gives settings that also train without a GPU."""

    folder: Path
    model: Model
    data: Path
    nodes: int = 1
    gpus_per_node: int = 1
    steps: int | None = None
    batch: int = 4
    resolution: int | None = None
    full: bool = False
    """All weights, instead of a LoRA beside them."""
    cpu: bool = False
    ramp: bool = False
    """A batch that grows."""
    rehearsal: bool = False
    """Is the model a tiny one that is of no use, and the run over in minutes?"""
    slurm: bool = False
    """A script for sbatch, too."""
    container: str = "none"
    image: str | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def sharded(self) -> bool:
        """Does each GPU hold a part of what is trained? A LoRA is small enough to be held by all."""
        return self.full and self.ranks > 1 and not self.cpu


@dataclass(frozen=True)
class Decision:
    """Settings that belong together, and why they are as they are. ``why`` is said to people."""

    what: str
    why: str
    training: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the training configuration."""
    dataset: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the image dataset's entry."""


def decide(wish: Wish, data: Survey) -> Iterator[Decision]:
    """Every choice that the wish leaves open, with its reason. Pure."""
    steps, why = _length(wish, data)
    yield _trained(wish)
    yield _resolution(wish, data)
    lengths = {"max_train_steps": steps, "lr_warmup_steps": min(100, steps // 10)}
    lengths["checkpoint_step_interval"] = max(1, steps // 4)
    some = {"max_num_samples": _SOME} if wish.rehearsal and data.samples > _SOME else {}
    yield Decision(counted(steps, "optimizer step"), why, training=lengths, dataset=some)
    yield _captions(data)
    yield Decision(
        "square crops from the centre",
        "all images then share one shape, so that every batch is full and none is left out; "
        'set "crop": false in datasets.json to keep whole pictures, sorted by shape',
        dataset={"crop": True, "crop_aspect": "square", "crop_style": "center"},
    )
    yield Decision(
        "no validation pictures",
        "they cost time at every checkpoint and need a prompt of yours; to have them, set validation_disable to false "
        "and validation_prompt to your words in config.json",
        training={"validation_disable": True},
    )
    limit = max(1, math.ceil(data.bytes * _ROOM / GIB))
    yield Decision(
        f"the dataset held in memory, {limit} GiB at most",
        f"it has {format_bytes(data.bytes)} now, and room to grow by half",
        dataset={"in_memory": {"compression": "auto", "memory_limit_gb": limit}},
    )
    yield Decision(
        "latents and text embeds cached in memory the GPU reaches",
        "no file is opened for a sample, and the next start loads them from disk",
        training={
            "cache_config": {
                "vae_cache_type": "unified_memory",
                "text_cache_type": "unified_memory",
                "cache_dir": str(wish.folder.absolute() / "cache" / "gh200"),
                "persistent_cache": True,
            }
        },
    )
    if not wish.cpu and not wish.sharded:  # sharded weights come and go, and stay FSDP2's
        yield Decision(
            "the model's memory placed by the plan when a run starts",
            "what HBM has no room for lives in Grace, what is used least per byte first, on whatever machine it is",
            training={"gh200_optimizations": {"memory": "auto"}},
        )
    yield _batch(wish, steps, data.samples)
    yield _activations(wish)


def _resolution(wish: Wish, data: Survey) -> Decision:
    """What the model was made for, but no more than the pictures have: enlarging them adds blur and no detail."""
    made_for, edges = wish.model.resolution, data.edges
    had = edges[len(edges) // _SMALLEST] if edges else None
    pixels, why = made_for, f"{wish.model.family} was made for that"
    if wish.resolution:
        pixels, why = wish.resolution, "as asked"
    elif wish.rehearsal:
        pixels, why = _TINY, "enough for a rehearsal"
    elif had is None:
        why += "; no picture's size could be read"
    elif had < made_for:
        pixels = max(_STEP, had // _STEP * _STEP)
        why = (
            f"{wish.model.family} was made for {made_for}, and nine of ten pictures have no less than {had} at their "
            "shorter edge; --resolution takes another, and enlarges what is smaller"
        )
        why += "; that is little for this model, and larger pictures would help more than any setting" * (
            pixels < made_for // 2
        )
    small = sum(edge < pixels for edge in edges)
    if small:
        why += f"; {small} of {counted(len(edges), 'picture')} looked at {'is' if small == 1 else 'are'} enlarged"
    keys = {"resolution": pixels, "resolution_type": "pixel"}
    return Decision(f"{pixels} x {pixels} pixels", why, training=keys, dataset=keys)


def _length(wish: Wish, data: Survey) -> tuple[int, str]:
    """Optimizer steps: small sets are seen often, large ones at least once, those between by the square root."""
    each = wish.batch * wish.ranks
    if wish.steps:
        return wish.steps, f"as asked: each picture is seen about {wish.steps * each / data.samples:.3g} times"
    if wish.rehearsal:
        some = f" on {_SOME} of the pictures" if data.samples > _SOME else ""
        return _REHEARSED, f"a rehearsal{some}: what the tiny model learns is of no use; without --cpu it is a real one"
    seen = max(data.samples, _OFTEN * min(data.samples, math.sqrt(data.samples * _SMALL_SET)))
    steps = math.ceil(seen / each)
    return steps, (
        f"each of {counted(data.samples, 'picture')} is then seen about {steps * each / data.samples:.3g} times, in "
        f"batches of {each}; {_OFTEN} times up to {_SMALL_SET} pictures, less often the more there are: a rule of "
        "thumb, to be corrected by what checkpoints show; --steps takes another number"
    )


def _captions(data: Survey) -> Decision:
    if data.captioned == data.samples and data.captioned:
        why, strategy = "each image has one", {"caption_strategy": "textfile"}
        return Decision("captions from .txt files", why, dataset=strategy)
    why = "no image has a .txt caption"
    if data.captioned:
        why = (
            f"only {data.captioned} of {data.samples} images have a .txt beside them, and SimpleTuner stops at the "
            "first without; write the others and set caption_strategy to textfile"
        )
    return Decision("file names as captions", why, dataset={"caption_strategy": "filename"})


def _batch(wish: Wish, steps: int, samples: int) -> Decision:
    first = wish.batch * wish.ranks
    if not wish.ramp:
        why = "it is the same in every step; --ramp lets it grow"
        return Decision(f"batches of {first}", why, training={"gh200_optimizations": {"enable_uvm_hints": True}})
    length, last = min(400, steps), first * max(2, min(8, samples // first))
    return Decision(
        f"an effective batch that grows from {first} to {last} over {length} micro-batches",
        "small batches learn fast at first, large ones are steady later; batch_rampup_steps counts micro-batches per "
        "rank, not optimizer steps",
        training={
            "gh200_optimizations": {
                "enable_uvm_hints": True,
                "enable_batch_size_rampup": True,
                "initial_effective_batch_size": first,
                "target_effective_batch_size": last,
                "batch_rampup_steps": length,
            }
        },
    )


def _trained(wish: Wish) -> Decision:
    """A LoRA, or all weights; with what; and how several ranks share the work."""
    optimizer = "torch-adamw" if wish.sharded else "optimi-adamw" if wish.cpu else "adamw_bf16"
    each = f", the whole model on each of {wish.ranks} ranks" if wish.ranks > 1 else ""
    if not wish.full:
        why = "a small adapter is trained, the weights stay frozen; --full trains them all"
        if each:
            why += ". FSDP2 is for those: SimpleTuner 4.10.1 saves no LoRA that it shards"
        lora = {"model_type": "lora", "lora_type": "standard", "lora_rank": 16}
        training = {**lora, "optimizer": optimizer, "learning_rate": 1e-4}
        return Decision(f"a LoRA of rank 16 trained with {optimizer}{each}", why, training)
    # They are pulled along a tenth as fast as a LoRA, which begins at nothing.
    weights = {"model_type": "full", "optimizer": optimizer, "learning_rate": 1e-5}
    if wish.sharded:
        return Decision(
            f"all weights trained with {optimizer}, sharded over {wish.ranks} GPUs by FSDP2",
            "each GPU keeps its part of weights, gradients and optimizer state; accelerate keeps what is trained in "
            "fp32, on which adamw_bf16 refuses to step",
            {**weights, **_sharding(wish)},
        )
    why = "it also trains in fp32, without a GPU"
    if each:
        why = "accelerate shards on GPUs only"
    elif not wish.cpu:
        why = "weights and optimizer state stay in bf16, stochastically rounded: the least that AdamW takes"
    return Decision(f"all weights trained with {optimizer}{each}", why, weights)


def _sharding(wish: Wish) -> dict[str, Any]:
    """FSDP2, in SimpleTuner's words."""
    model = wish.model
    if not model.blocks:
        raise UsageError(
            f"--full over {wish.ranks} GPUs: SimpleTuner names no blocks of {model.family} for FSDP2 to wrap",
            remedy="leave --full out, or train on one GPU",
        )
    return {
        "fsdp_enable": True,
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_limit_all_gathers": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(model.blocks),
    }


def _activations(wish: Wish) -> Decision:
    """Computing them again, or not. FSDP wraps what it checkpoints: doing it twice fails."""
    what, why = (
        "activations computed again in the backward pass",
        "it fits every model and resolution here; where memory is left, gradient_checkpointing false is faster",
    )
    if wish.cpu:
        what, why = "activations kept", "a model small enough for a CPU has room for them"
    elif wish.sharded:
        what = "activations computed again by FSDP2 in the backward pass"
        why = "SimpleTuner's own gradient_checkpointing would do it a second time"
    return Decision(what, why, {"gradient_checkpointing": not (wish.cpu or wish.sharded)})
