"""What a configuration says about memory, in one object, from the one reading of it (``config.training``). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from simpletuner_gh200.config.blocks import (
    ActivationSettings,
    CacheSettings,
    CheckpointSettings,
    MemorySettings,
    RampSettings,
    StateSettings,
    WeightSettings,
)
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.settings import DEFAULT
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.model.optimizer_table import WeightType
from simpletuner_gh200.units import gib_to_bytes

Source = Literal["measured", "computed", "cited", "assumed"]
"""Of a number: read from a file or a run; follows from the configuration; published by somebody; our guess."""

ELEMENT: Mapping[WeightType, int] = {"bf16": 2, "fp32": 4}

_QUANTISED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "uint4": 0.5, "nf4": 0.56, "int2": 0.25, "float8": 1.0}
"""Bytes per weight of a base model that is quantised; scales come on top, a few per cent."""

SCALES = 1.03


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that decides where bytes go. A change of a setting is a ``replace`` of this."""

    family: str
    full: bool
    weights: WeightType
    base_precision: str
    optimizer: str
    batch: int
    accumulation: int
    """Micro-batches of the largest window."""
    vae_batch: int
    checkpoints: int
    checkpointing: bool
    validates: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    """SimpleTuner's own options, as given."""
    ranks: int = 1
    sharded: bool = False
    drops_gradients: bool = False
    """Are gradients freed after each optimizer step? SimpleTuner's default fills them with zeros and keeps them."""
    ema: bool = False
    ema_on_device: bool = False
    ema_foreach: bool = True
    encoders_stay: bool = False
    vae_stays: bool = False
    """Loaded while it trains too: what is not cached is encoded when it is needed."""
    placed_by_others: frozenset[str] = frozenset()
    """Rows whose bytes SimpleTuner or an engine of its may keep in another place than we count them."""
    ramped: bool = False
    """Does the batch ramp decide about accumulation?"""
    state_in_grace: bool = False
    state_pattern: Literal["gpu_first", "balanced", "cpu_first"] = "gpu_first"
    state_budget: int | None = None
    weights_in_grace: bool = False
    """Of the blocks, beyond what HBM has room for."""
    weights_budget: int | None = None
    gradients_in_grace: bool = False
    activations: Literal["off", "grace", "auto"] = "off"
    activation_limit_gb: float | None = None
    behind: bool = False
    """Are checkpoints saved to memory?"""
    memory_auto: bool = False
    explicit: frozenset[str] = frozenset()
    """Settings of ours, by ``block.key``, that somebody has given."""
    unified: Mapping[str, bool] = field(default_factory=dict)
    """Kind of cache -> whether we hold it."""
    cache_limit: int | None = None

    @property
    def bytes_per_weight(self) -> int:
        return ELEMENT[self.weights]

    @property
    def gradients_outlive(self) -> bool:
        """Are gradients of an earlier micro-batch or step there during a forward pass?"""
        return self.accumulation > 1 or not self.drops_gradients

    @property
    def is_sharded(self) -> bool:
        return self.sharded and self.ranks > 1

    @property
    def quantised(self) -> float | None:
        """Bytes per weight of the frozen base model where it is quantised."""
        if self.full or self.base_precision in ("no_change", "bf16", "fp32", "fp16", ""):
            return None
        found = next((size for name, size in _QUANTISED.items() if name in self.base_precision), None)
        return found * SCALES if found is not None else None

    @property
    def switched_on(self) -> dict[str, Any]:
        """Options that request something: files spell "off" in many ways, and refusals expect SimpleTuner's values."""
        return {key: value for key, value in self.options.items() if truth(value)}


def read_facts(training: Training, *, ranks: int | None = None) -> RunFacts:
    """Raises ConfigError where our blocks are not sound."""
    settings = training.raise_if_bad()
    values = training.effective
    on = {key for key, value in values.items() if truth(value)}
    caches, ramp = settings.part(CacheSettings), settings.part(RampSettings)
    state, saved = settings.part(StateSettings), settings.part(ActivationSettings)
    away = settings.part(WeightSettings)
    count = ranks or training.job.ranks
    return RunFacts(
        family=str(values.get("model_family") or ""),
        full="lora" not in str(values["model_type"]),
        weights="fp32" if values["mixed_precision"] == "no" else "bf16",
        base_precision=str(values["base_model_precision"]),
        optimizer=str(values["optimizer"]),
        batch=_whole(training, "train_batch_size"),
        accumulation=_accumulation(ramp, training, count),
        vae_batch=_whole(training, "vae_batch_size"),
        checkpoints=_whole(training, "checkpoints_total_limit"),
        checkpointing=bool({"gradient_checkpointing", "fsdp_activation_checkpointing"} & on),
        validates="validation_disable" not in on,
        options={key: plain(v) for key, v in training.values.items() if key not in (*TRAINING_BLOCKS, "datasets")},
        ranks=count,
        sharded="fsdp_enable" in on,
        drops_gradients=bool({"set_grads_to_none", "ramtorch"} & on),
        ema="use_ema" in on,
        ema_on_device="use_ema" in on and values["ema_device"] == "accelerator",
        ema_foreach="ema_foreach_disable" not in on,
        encoders_stay=bool({"text_cache_ondemand", "text_cache_disable", "train_text_encoder"} & on),
        vae_stays=bool({"vae_cache_ondemand", "vae_cache_disable"} & on),
        placed_by_others=_placed_by_others(values, on),
        ramped=ramp.enable_batch_size_rampup,
        state_in_grace=state.use_uvm,
        state_pattern=state.uvm_access_pattern,
        state_budget=None if state.uvm_hbm_budget_gb is None else gib_to_bytes(state.uvm_hbm_budget_gb),
        weights_in_grace=away.weights != "hbm",
        weights_budget=None if away.weights_hbm_budget_gb is None else gib_to_bytes(away.weights_hbm_budget_gb),
        gradients_in_grace=away.gradients != "hbm",
        activations=saved.activations,
        activation_limit_gb=saved.activation_limit_gb,
        behind=settings.part(CheckpointSettings).checkpoints == "behind",
        memory_auto=settings.part(MemorySettings).memory == "auto",
        explicit=frozenset(key for key, origin in settings.origins.items() if origin != DEFAULT),
        unified=caches.served(),
        cache_limit=None if caches.memory_limit_gb is None else gib_to_bytes(caches.memory_limit_gb),
    )


_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "image_encoder")
_STATE = ("weights", "gradients", "optimizer")

NOT_FOLLOWED = ("controlnet", "control", "distillation_method", "tread_config")
"""What trains other parts, or more of them, or fewer tokens than a plain step: a plan counts the plain step."""

_MOVED_BY: Mapping[str, tuple[str, ...]] = {
    "deepspeed_config": _STATE,
    "fsdp_cpu_offload": _STATE,
    "ramtorch": _STATE,
    "ramtorch_text_encoder": _ENCODERS,
    "ramtorch_vae": ("vae",),
    "offload_during_startup": (*_ENCODERS, "vae"),
    "vae_enable_tiling": ("vae work",),
    "vae_enable_slicing": ("vae work",),
    "vae_enable_patch_conv": ("vae work",),
    "optimizer_cpu_offload_method": ("gradients", "optimizer"),
    "optimizer_release_gradients": ("gradients",),
    "musubi_blocks_to_swap": ("weights", "gradients"),
    "enable_group_offload": ("weights", "gradients", *_ENCODERS, "vae"),
    "gradient_checkpointing_offload_attention": ("activations",),
    **dict.fromkeys(NOT_FOLLOWED, (*_STATE, "ema", "activations", "checkpoint")),
}
"""SimpleTuner's switches, and what each keeps out of HBM, or frees early, in a measure that we do not know."""


def _placed_by_others(values: Mapping[str, Any], on: set[str]) -> frozenset[str]:
    found = {row for key, rows in _MOVED_BY.items() if key in on for row in rows}
    if str(values["optimizer"]).endswith("-paged"):
        found.add("optimizer")  # its pages leave HBM under pressure
    for number, name in enumerate(_ENCODERS[:4], 1):
        if str(values.get(f"text_encoder_{number}_precision") or "no_change") != "no_change":
            found.add(name)
    if str(values.get("gradient_checkpointing_backend") or "").startswith("unsloth"):
        found.add("activations")
    return frozenset(found)


def _accumulation(ramp: RampSettings, training: Training, ranks: int) -> int:
    fixed = _whole(training, "gradient_accumulation_steps")
    if not ramp.enable_batch_size_rampup:
        return fixed
    unit = _whole(training, "train_batch_size") * ranks
    sizes = (ramp.initial_effective_batch_size, ramp.target_effective_batch_size)
    return max([fixed, *(round(size / unit) for size in sizes if size)])


def truth(value: object) -> bool:
    """A switch as SimpleTuner's files spell it."""
    return str(value).strip().lower() not in ("false", "0", "no", "", "none")


def plain(value: Any) -> Any:
    """The same whether a JSON file or a ``config.env`` has it: a trace is found again by the options it was made of."""
    if not isinstance(value, str | int | float):
        return value
    text = str(value).strip()
    return {"true": True, "false": False}.get(text.lower(), text)


def _whole(training: Training, key: str) -> int:
    """Of an option; where its text is no number, SimpleTuner's default: others say that it will be refused."""
    for value in (training.effective[key], training.defaults[key]):
        try:
            return max(1, int(float(str(value))))
        except ValueError:
            continue
    return 1
