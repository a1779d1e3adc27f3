"""Every key of ours: the models of both training blocks and of the dataset block, part by part.

To add a key, add a field to its model; to add a part, add its model here and a row to ``PARTS``. Validation, ``gh200
config check``, the reference page and the environment's variables follow from there.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.environment import (
    ACCESS_PATTERN,
    ACTIVATIONS,
    HINTS,
    OVERSUBSCRIPTION_RATIO,
    USE_UVM,
    flag_from_text,
)
from simpletuner_gh200.config.part import DATASET_BLOCK, Part, PartModel

MOST_WORKERS = 72
"""Cores of a Grace CPU; more loader threads than that were never useful to the earlier system either."""

CacheType = Literal["unified_memory", "standard"]


class CacheSettings(PartModel):
    """Which of SimpleTuner's caches live in slabs, and with what budgets."""

    vae_cache_type: CacheType = Field(
        title="VAE latents",
        default="standard",
        description="VAE latents: unified_memory serves them from slabs, standard leaves them to SimpleTuner.",
    )
    text_cache_type: CacheType = Field(
        title="Text embeds", default="standard", description="Text embeds, from slabs or as SimpleTuner has them."
    )
    image_embed_cache_type: CacheType | None = Field(
        title="Image embeds", default=None, description="Image embeds; unset: as text."
    )
    audio_cache_type: CacheType | None = Field(
        title="Audio latents", default=None, description="Audio latents; unset: as vae."
    )
    distillation_cache_type: CacheType = Field(
        title="Distillation caches", default="standard", description="Distillation caches."
    )
    cache_dir: str | None = Field(
        title="Folder of the packs",
        default=None,
        min_length=1,
        description="Folder of the packs; unset: <output_dir>/gh200/cache.",
    )
    persistent_cache: bool = Field(
        title="Keep packs on disk", default=True, description="Write and load packs; false: memory only."
    )
    memory_limit_gb: float | None = Field(
        title="Memory limit",
        default=None,
        gt=0,
        strict=False,
        description="Host budget in GiB; unset: from MemAvailable and the cgroup.",
    )
    hbm_limit_gb: float | None = Field(
        title="HBM for text embeds",
        default=None,
        ge=0,
        strict=False,
        description="Device copies of text embeds, GiB; unset: none.",
    )
    slab: Literal["auto", "registered", "managed", "host"] = Field(
        title="Kind of slab",
        default="auto",
        description="How slabs are allocated; an explicit choice is obeyed or refused.",
    )
    fill: Literal["background", "start", "lazy"] = Field(
        title="When caches are filled",
        default="background",
        description="Fill while training runs, before it starts, or only on first use.",
    )

    def served(self) -> dict[str, bool]:
        """Kind of cache -> whether we serve it, with the defaults that follow another key resolved."""
        audio = self.audio_cache_type or self.vae_cache_type
        image = self.image_embed_cache_type or self.text_cache_type
        kinds = {
            "vae": self.vae_cache_type,
            "text": self.text_cache_type,
            "image_embed": image,
            "audio": audio,
            "distillation": self.distillation_cache_type,
        }
        return {kind: value == "unified_memory" for kind, value in kinds.items()}


class HintSettings(PartModel):
    """Placement hints."""

    enable_uvm_hints: bool | None = Field(
        title="Placement hints",
        default=None,
        description="Placement hints on batches and slabs. Overrides the environment; implied true by any cache of "
        "type unified_memory; false also returns the caches to standard.",
    )


class StateSettings(PartModel):
    """Model state beyond HBM: optimizer state and EMA in Grace memory."""

    use_uvm: bool = Field(
        title="Optimizer state and EMA in Grace",
        default=False,
        description="Keep optimizer state and EMA in Grace memory, in place over the link.",
    )
    uvm_oversubscription_ratio: float = Field(
        title="Most of it, as a multiple of HBM",
        default=5.0,
        gt=0,
        strict=False,
        description="The most that is kept there, as a multiple of HBM; never more than the host can really give.",
    )
    uvm_access_pattern: Literal["gpu_first", "balanced", "cpu_first"] = Field(
        title="Access pattern",
        default="gpu_first",
        description="gpu_first: HBM up to a budget, Grace beyond; cpu_first: Grace; balanced: managed memory, whose "
        "pages the driver moves.",
    )
    uvm_scope: Literal["optimizer", "all"] = Field(
        title="What goes there",
        default="optimizer",
        description="What goes there: optimizer state and EMA, or everything that the training thread allocates.",
    )
    uvm_hbm_budget_gb: float | None = Field(
        title="State kept in HBM",
        default=None,
        ge=0,
        strict=False,
        description="State that gpu_first keeps in HBM, in GiB; unset: what the first forward and backward leave.",
    )
    uvm_min_tensor_kb: int = Field(
        title="Smallest tensor of state",
        default=1024,
        ge=0,
        description="Smaller tensors stay where they are: torch rounds up to megabytes in a pool.",
    )
    uvm_streaming: Literal["auto", "on", "off"] = Field(
        title="Stage state through HBM",
        default="auto",
        description="Stage state through HBM during the optimizer step: auto does so where the optimizer passes over "
        "its state so often that it wins.",
    )
    oom_reserve_gb: float = Field(
        title="Reserve against running out of HBM",
        default=0.0,
        ge=0,
        strict=False,
        description="Grace memory, in GiB, that torch falls back on when HBM is full, instead of ending with "
        "OutOfMemoryError; 0: none.",
    )


class ActivationSettings(PartModel):
    """What autograd saves for the backward pass, in Grace instead of being computed again."""

    activations: Literal["off", "grace", "auto"] = Field(
        title="Saved activations",
        default="off",
        description="Saved tensors beyond what HBM may keep: off leaves them to SimpleTuner, grace moves them to CPU "
        "memory and back, auto compares that with gradient checkpointing at the start and keeps what is faster; "
        "without checkpointing it moves them only for batches that would not fit.",
    )
    activation_limit_gb: float | None = Field(
        title="CPU memory for activations",
        default=None,
        gt=0,
        strict=False,
        description="CPU memory for them in GiB, for each rank; unset: half of what is free, shared by the ranks.",
    )
    activation_hbm_reserve_gb: float | None = Field(
        title="HBM that stays free",
        default=None,
        ge=0,
        strict=False,
        description="HBM in GiB that they leave free; unset: 5 %, at least 2.",
    )
    activation_min_tensor_kb: int = Field(
        title="Smallest saved tensor", default=1024, ge=0, description="Smaller tensors stay where they are, in KiB."
    )


def _check_state(model: StateSettings) -> list[tuple[str, str]]:
    if model.use_uvm:
        return []
    alone = ("uvm_hbm_budget_gb", model.uvm_hbm_budget_gb), ("oom_reserve_gb", model.oom_reserve_gb)
    return [(key, f"{value:g} has no effect without use_uvm: true") for key, value in alone if value]


STATE_VARIABLES = {
    "use_uvm": USE_UVM,
    "uvm_oversubscription_ratio": OVERSUBSCRIPTION_RATIO,
    "uvm_access_pattern": ACCESS_PATTERN,
}


class PrefetchSettings(PartModel):
    """How batches of unified caches reach the device, and how many SimpleTuner prepares ahead."""

    enable_prefetch: bool = Field(
        title="Copy batches ahead",
        default=True,
        description="Copy batches of unified caches to the device on a side stream, without the CPU waiting; false: "
        "they are handed over in CPU memory.",
    )
    prefetch_depth: Literal["auto"] | int = Field(
        title="Batches prepared ahead",
        default="auto",
        description="Batches that SimpleTuner prepares ahead: auto leaves it as SimpleTuner is set, a number from 1 "
        "switches on its own dataloader_prefetch with a queue of that length. It is upstream's option, and draws "
        "random numbers as upstream does when it prefetches: so such a run differs from one without it.",
    )


def _check_prefetch(model: PrefetchSettings) -> list[tuple[str, str]]:
    depth = model.prefetch_depth
    return [("prefetch_depth", f"{depth} is below 1")] if isinstance(depth, int) and depth < 1 else []


class RampSettings(PartModel):
    """The batch ramp."""

    enable_batch_size_rampup: bool = Field(
        title="Ramp the effective batch",
        default=False,
        description="Grow the effective batch over the run by exact accumulation windows.",
    )
    initial_effective_batch_size: int | None = Field(
        title="Effective batch at the start",
        default=None,
        ge=1,
        description="Effective batch, over all ranks, of the first window.",
    )
    target_effective_batch_size: int | None = Field(
        title="Effective batch at the end",
        default=None,
        ge=1,
        description="Effective batch at the end of the ramp; unset: train_batch_size x world x "
        "gradient_accumulation_steps.",
    )
    batch_rampup_steps: int | None = Field(
        title="Length of the ramp",
        default=None,
        ge=1,
        description="Length of the ramp in micro-batches per rank; unset: a tenth of the run's at the target.",
    )
    ramp_curve: Literal["quadratic", "linear", "stepwise"] = Field(
        title="Shape of the ramp", default="quadratic", description="Shape of the ramp."
    )
    ramp_increment: int | None = Field(
        title="Height of a step",
        default=None,
        ge=1,
        description="Effective batch added at each step of a stepwise ramp.",
    )
    ramp_lr_rule: Literal["none", "linear", "sqrt"] = Field(
        title="Learning rate follows the batch",
        default="none",
        description="Tie the learning rate to the effective batch. Never on by itself.",
    )


def _check_ramp(model: RampSettings) -> list[tuple[str, str]]:
    if not model.enable_batch_size_rampup:
        return []
    problems = []
    if model.initial_effective_batch_size is None:
        problems.append(("initial_effective_batch_size", "needed when enable_batch_size_rampup is true, and not set"))
    if model.ramp_curve == "stepwise" and model.ramp_increment is None:
        problems.append(("ramp_increment", "needed when ramp_curve is 'stepwise', and not set"))
    return problems


class InMemorySettings(PartModel):
    """``in_memory`` in a dataset entry of type ``in_memory``."""

    compression: Literal["lz4", "zlib", "snappy", "zstd", "auto"] | None = Field(
        title="Compression", default=None, description="Codec of what is held; unset: raw."
    )
    num_workers: int | None = Field(
        title="Staging threads",
        default=None,
        ge=1,
        description=f"Staging threads; unset: the machine's cores, {MOST_WORKERS} at most.",
    )
    memory_limit_gb: float | None = Field(
        title="Memory limit", default=None, gt=0, strict=False, description="Hard ceiling, in GiB, on what is held."
    )
    max_corruption_rate: float = Field(
        title="Broken images allowed",
        default=0.01,
        ge=0,
        le=1,
        strict=False,
        description="Share of broken images above which the run stops.",
    )
    verify: Literal["header", "decode", "none"] = Field(
        title="Check images", default="header", description="How images are checked while they are staged."
    )
    file_extensions: tuple[str, ...] | None = Field(
        title="File extensions", default=None, strict=False, description="Stage only these; unset: every file."
    )
    per_node: Literal["all", "shard"] = Field(
        title="Held on each node",
        default="all",
        description="Stage all of the dataset on each node, or only what its ranks read.",
    )
    wait: bool = Field(
        title="Stage before training starts",
        default=False,
        description="Stage before training starts; false: files are read from disk until they are there.",
    )

    def workers(self) -> int:
        return self.num_workers or min(MOST_WORKERS, os.cpu_count() or 1)


PREFETCH_AND_HINTS = "Prefetch and hints"

PARTS = (
    Part(
        "cache_config",
        "caches",
        CacheSettings,
        title="Caches",
        main=("vae_cache_type", "text_cache_type", "cache_dir", "memory_limit_gb"),
    ),
    Part(
        "gh200_optimizations",
        "hints",
        HintSettings,
        title=PREFETCH_AND_HINTS,
        environment={"enable_uvm_hints": HINTS},
        from_environment={"enable_uvm_hints": flag_from_text},
    ),
    Part(
        "gh200_optimizations",
        "state",
        StateSettings,
        title="Memory: model state",
        switch="use_uvm",
        environment=STATE_VARIABLES,
        from_environment={"use_uvm": flag_from_text, "uvm_oversubscription_ratio": float},
        check=_check_state,
    ),
    Part(
        "gh200_optimizations",
        "activations",
        ActivationSettings,
        title="Memory: activations",
        switch="activations",
        environment={"activations": ACTIVATIONS},
    ),
    Part(
        "gh200_optimizations",
        "prefetch",
        PrefetchSettings,
        title=PREFETCH_AND_HINTS,
        main=("enable_prefetch",),
        check=_check_prefetch,
    ),
    Part(
        "gh200_optimizations",
        "ramp",
        RampSettings,
        title="Batch ramp",
        switch="enable_batch_size_rampup",
        main=("initial_effective_batch_size", "target_effective_batch_size", "batch_rampup_steps"),
        needs={"ramp_increment": ("ramp_curve", "stepwise")},
        check=_check_ramp,
    ),
    Part(
        DATASET_BLOCK,
        "store",
        InMemorySettings,
        title="In memory",
        main=("compression", "memory_limit_gb", "num_workers", "verify", "per_node"),
    ),
)
"""Grouped by block, in the order in which they are shown."""


def parts_of(block: str) -> tuple[Part, ...]:
    return tuple(part for part in PARTS if part.block == block)
