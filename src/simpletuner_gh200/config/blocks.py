"""Every key of ours: the models of both training blocks and of the dataset block, part by part.

To add a key, add a field to its model; to add a part, add its model here and a row to ``PARTS``. Validation, ``gh200
config check``, the reference page and the environment's variables follow from there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from simpletuner_gh200.config.environment import ACCESS_PATTERN, ACTIVATIONS, HINTS, OVERSUBSCRIPTION_RATIO, USE_UVM
from simpletuner_gh200.config.part import DATASET_BLOCK, Part, PartModel

MOST_WORKERS = 72
"""Cores of a Grace CPU; more loader threads than that were never useful to the earlier system either."""

CacheType = Literal["unified_memory", "standard"]


def _key(default: Any, title: str, **limits: Any) -> Any:
    """``title`` labels it in a form; the text below it is its help there and on the reference page."""
    return Field(default, title=title, **limits)


def _decimal(default: float | None, title: str, **limits: Any) -> Any:
    """A number that may be written as a whole one, or as text."""
    return _key(default, title, strict=False, **limits)


class CacheSettings(PartModel):
    """Which of SimpleTuner's caches live in memory, and with what budgets."""

    vae_cache_type: CacheType = _key("standard", "VAE latents")
    """VAE latents: unified_memory serves them from memory, standard leaves them to SimpleTuner's files."""
    text_cache_type: CacheType = _key("standard", "Text embeds")
    """Text embeds: from memory, or from SimpleTuner's files."""
    image_embed_cache_type: CacheType | None = _key(None, "Image embeds")
    """Image embeds; unset: as text."""
    audio_cache_type: CacheType | None = _key(None, "Audio latents")
    """Audio latents; unset: as vae."""
    distillation_cache_type: CacheType = _key("standard", "Distillation caches")
    """Distillation caches."""
    cache_dir: str | None = _key(None, "Folder for saved caches", min_length=1)
    """Where caches are saved for the next start (packs); unset: <output_dir>/gh200/cache."""
    persistent_cache: bool = _key(True, "Save caches for the next start")
    """Write caches to disk and load them at the next start; false: memory only."""
    memory_limit_gb: float | None = _decimal(None, "Memory limit", gt=0)
    """Host budget in GiB; unset: from MemAvailable and the cgroup."""
    hbm_limit_gb: float | None = _decimal(None, "HBM for text embeds", ge=0)
    """Device copies of text embeds, GiB; not made any more: anything but 0 is refused."""
    slab: Literal["auto", "registered", "managed", "host"] = _key("auto", "Kind of memory")
    """How the memory of caches is allocated; an explicit choice is used or refused, managed is always refused."""
    fill: Literal["background", "start", "lazy"] = _key("background", "When caches are filled")
    """Fill while training runs, before it starts, or only on first use."""

    caching: Literal["parallel", "stock"] | None = _key(None, "Caching pass")
    """Pictures are decoded and prepared on all cores, ahead of the VAE (parallel), or one by one as SimpleTuner does it
    (stock); unset: parallel where a data set is in memory or VAE latents are unified."""
    caching_memory_gb: float | None = _decimal(None, "Pictures in flight", gt=0)
    """Most memory, in GiB, for pictures that are decoded and not encoded yet; unset: a fifth of what is free."""

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

    enable_uvm_hints: bool | None = _key(None, "Placement hints")
    """Placement hints on batches and cached data. Overrides the environment; implied true by any cache of type
    unified_memory; false also returns the caches to standard."""


class StateSettings(PartModel):
    """Model state beyond HBM: optimizer state and EMA in Grace memory."""

    use_uvm: bool = _key(False, "Optimizer state and EMA in Grace")
    """Keep optimizer state and EMA in Grace memory, in place over the link."""
    uvm_oversubscription_ratio: float = _decimal(5.0, "Most of it, as a multiple of HBM", gt=0)
    """The most that is kept there, as a multiple of HBM; never more than the host can really give."""
    uvm_access_pattern: Literal["gpu_first", "balanced", "cpu_first"] = _key("gpu_first", "Access pattern")
    """gpu_first: HBM up to a budget, Grace beyond; cpu_first and balanced: all of it in Grace. Hints follow it, too.
    """
    uvm_scope: Literal["optimizer", "all"] = _key("optimizer", "What goes there")
    """What goes there: optimizer state and EMA; all is refused with the reason."""
    uvm_hbm_budget_gb: float | None = _decimal(None, "State kept in HBM", ge=0)
    """State that gpu_first keeps in HBM, in GiB; unset: what the first forward and backward leave."""
    uvm_min_tensor_kb: int = _key(1024, "Smallest tensor of state", ge=0)
    """Smaller tensors of state, weights and gradients stay where they are: torch rounds up to megabytes in a pool."""
    uvm_streaming: Literal["auto", "on", "off"] = _key("auto", "Stage state through HBM")
    """Stage state through HBM during the optimizer step: auto does so where the optimizer passes over its state so
    often that it wins."""
    oom_reserve_gb: float = _decimal(0.0, "Reserve against running out of HBM", ge=0)
    """Grace memory, in GiB, that torch falls back on when HBM is full, instead of ending with OutOfMemoryError; 0:
    none."""


class ActivationSettings(PartModel):
    """What autograd saves for the backward pass, in Grace instead of being computed again."""

    activations: Literal["off", "grace", "auto"] = _key("off", "Saved activations")
    """Saved tensors beyond what HBM may keep: off leaves them to SimpleTuner, grace moves them to CPU memory and back,
    auto compares that with gradient checkpointing at the start and keeps what is faster; without checkpointing it moves
    them only for batches that would not fit."""
    activation_limit_gb: float | None = _decimal(None, "CPU memory for activations", gt=0)
    """CPU memory for them in GiB, for each rank; unset: half of what is free, shared by the ranks."""
    activation_hbm_reserve_gb: float | None = _decimal(None, "HBM that stays free", ge=0)
    """HBM in GiB that they leave free; unset: 5 %, at least 2."""
    activation_min_tensor_kb: int = _key(1024, "Smallest saved tensor", ge=0)
    """Smaller tensors stay where they are, in KiB."""


class CheckpointSettings(PartModel):
    """Where training waits for a checkpoint to be written to."""

    checkpoints: Literal["stock", "behind"] = _key("stock", "Checkpoints")
    """stock: training waits for the disk. behind: SimpleTuner saves to memory, and a process of its own writes that to
    the disk while training goes on; where memory has no room for it, that checkpoint is saved as stock."""


class WeightSettings(PartModel):
    """Weights of the model's blocks and gradients in Grace."""

    weights: Literal["hbm", "grace", "auto"] = _key("hbm", "Weights of the blocks")
    """Where the weights of the denoiser's repeated blocks live: hbm leaves them to SimpleTuner, grace keeps those in
    Grace that HBM has no room for and copies each block ahead of its use, auto does so where the GPU has
    Grace memory. Without a GPU grace runs with host memory on both sides."""
    weights_hbm_budget_gb: float | None = _decimal(None, "HBM for the blocks", ge=0)
    """HBM in GiB that the blocks' weights may take, those on their way included; unset: what the first forward and
    backward leave, without a GPU none."""
    gradients: Literal["hbm", "grace", "auto"] = _key("hbm", "Gradients")
    """Where gradients live: hbm leaves them to SimpleTuner, grace moves each to Grace as soon as it is there, auto does
    so where the GPU has Grace memory, until a step has shown that HBM has room for all of them."""
    release_weight_files: bool | None = _key(None, "Give back pages of weights files")
    """Give back the memory that files of weights take as page cache, once they were loaded for good: behind each block
    on its way, the rest before training. Unset: where weights live in Grace, or memory is auto."""


class MemorySettings(PartModel):
    """One setting for all of the model's memory."""

    memory: Literal["manual", "auto"] = _key("manual", "Memory")
    """auto: before the run the plan places weights, gradients, optimizer state, EMA, activations and caches, what is
    used least per byte leaving HBM first; settings that are given stay as they are. Larger batches are rehearsed before
    they are trained on, and what runs out of HBM there moves the next thing. manual: as the other settings say."""


PLACED: Mapping[str, tuple[str, Any]] = {
    "state": ("use_uvm", True),
    "gradients": ("gradients", "auto"),
    "weights": ("weights", "auto"),
    "activations": ("activations", "auto"),
}
"""Feature -> the key of ``gh200_optimizations`` that moves what it keeps, and the value that does; as a rule in the
order in which they leave HBM. ``memory: "auto"`` decides about those that nobody has set."""


def placed_setting(feature: str, *, device: bool) -> dict[str, Any]:
    """By ``block.key``. Without a device host memory is on both sides, which ``auto`` would not do."""
    key, value = PLACED[feature]
    return {f"gh200_optimizations.{key}": value if device or value is True else "grace"}


def _check_weights(model: WeightSettings) -> list[tuple[str, str]]:
    if model.weights != "hbm" or not model.weights_hbm_budget_gb:
        return []
    return [("weights_hbm_budget_gb", f"{model.weights_hbm_budget_gb:g} has no effect with weights: 'hbm'")]


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

    enable_prefetch: bool = _key(True, "Copy batches ahead")
    """Copy batches of unified caches to the device on a side stream, without the CPU waiting; false: they are handed
    over in CPU memory."""
    prefetch_depth: Literal["auto"] | int = _key("auto", "Batches prepared ahead")
    """Batches that SimpleTuner prepares ahead: auto leaves it as SimpleTuner is set, a number from 1 switches on its
    own dataloader_prefetch with a queue of that length. It is upstream's option, and draws random numbers as upstream
    does when it prefetches: so such a run differs from one without it."""


def _check_prefetch(model: PrefetchSettings) -> list[tuple[str, str]]:
    depth = model.prefetch_depth
    return [("prefetch_depth", f"{depth} is below 1")] if isinstance(depth, int) and depth < 1 else []


class RampSettings(PartModel):
    """The batch ramp."""

    enable_batch_size_rampup: bool = _key(False, "Ramp the effective batch")
    """Grow the effective batch over the run by exact accumulation windows."""
    initial_effective_batch_size: int | None = _key(None, "Effective batch at the start", ge=1)
    """Effective batch, over all ranks, of the first window."""
    target_effective_batch_size: int | None = _key(None, "Effective batch at the end", ge=1)
    """Effective batch at the end of the ramp; unset: train_batch_size x world x gradient_accumulation_steps."""
    batch_rampup_steps: int | None = _key(None, "Length of the ramp", ge=1)
    """Length of the ramp in micro-batches per rank; unset: a tenth of the run's at the target."""
    ramp_curve: Literal["quadratic", "linear", "stepwise"] = _key("quadratic", "Shape of the ramp")
    """Shape of the ramp."""
    ramp_increment: int | None = _key(None, "Height of a step", ge=1)
    """Effective batch added at each step of a stepwise ramp."""
    ramp_lr_rule: Literal["none", "linear", "sqrt"] = _key("none", "Learning rate follows the batch")
    """Tie the learning rate to the effective batch. Never on by itself."""


def _check_ramp(model: RampSettings) -> list[tuple[str, str]]:
    if not model.enable_batch_size_rampup:
        return []
    problems = []
    if model.initial_effective_batch_size is None:
        problems.append(("initial_effective_batch_size", "not set, and the ramp begins with it"))
    if model.ramp_curve == "stepwise" and model.ramp_increment is None:
        problems.append(("ramp_increment", "needed when ramp_curve is 'stepwise', and not set"))
    return problems


class InMemorySettings(PartModel):
    """``in_memory`` in a dataset entry of type ``in_memory``."""

    compression: Literal["lz4", "zlib", "snappy", "zstd", "auto"] | None = _key(None, "Compression")
    """Codec of what is held; unset: raw."""
    num_workers: int | None = _key(None, "Staging threads", ge=1)
    """Staging threads; unset: the machine's cores, 72 at most."""
    memory_limit_gb: float | None = _decimal(None, "Memory limit", gt=0)
    """Hard ceiling, in GiB, on what is held."""
    max_corruption_rate: float = _decimal(0.01, "Broken images allowed", ge=0, le=1)
    """Share of broken images above which the run stops."""
    verify: Literal["header", "decode", "none"] = _key("header", "Check images")
    """How images are checked while they are staged."""
    file_extensions: tuple[str, ...] | None = _key(None, "File extensions", strict=False)
    """Stage only these; unset: every file."""
    per_node: Literal["all", "shard"] = _key("all", "Held on each node")
    """Stage all of the dataset on each node, or only what its ranks read."""
    wait: bool = _key(False, "Stage before training starts")
    """Stage before training starts; false: files are read from disk until they are there."""

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
        "gh200_optimizations", "hints", HintSettings, title=PREFETCH_AND_HINTS, environment={"enable_uvm_hints": HINTS}
    ),
    Part(
        "gh200_optimizations",
        "state",
        StateSettings,
        title="Memory: model state",
        switch="use_uvm",
        environment=STATE_VARIABLES,
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
    Part("gh200_optimizations", "memory", MemorySettings, title="Memory", main=("memory",)),
    Part("gh200_optimizations", "checkpoints", CheckpointSettings, title="Checkpoints", switch="checkpoints"),
    Part(
        "gh200_optimizations",
        "weights",
        WeightSettings,
        title="Memory: weights and gradients",
        main=("weights", "gradients"),
        check=_check_weights,
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


def part_with(model: type[PartModel]) -> Part:
    return next(part for part in PARTS if part.model is model)


def parts_of(block: str) -> tuple[Part, ...]:
    return tuple(part for part in PARTS if part.block == block)
