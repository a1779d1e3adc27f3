"""What a configuration says about memory, in one object. Pure, but for the one reading that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from simpletuner_gh200.config.blocks import ActivationSettings, CacheSettings, RampSettings, StateSettings
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.units import GIB

Weights = Literal["bf16", "fp32"]

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}

_QUANTISED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "uint4": 0.5, "nf4": 0.56, "int2": 0.25, "float8": 1.0}
"""Bytes per weight of a base model that is quantised; scales come on top, a few per cent."""

SCALES = 1.03


@dataclass(frozen=True)
class RunFacts:
    """Everything that decides where bytes go. A change of a setting is a ``replace`` of this."""

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """SimpleTuner's own options, as given."""
    full: bool = False
    weights: Weights = "bf16"
    base_precision: str = "no_change"
    optimizer: str = "adamw_bf16"
    batch: int = 1
    accumulation: int = 1
    """Micro-batches of the largest window."""
    ramped: bool = False
    """Does the batch ramp decide about accumulation?"""
    drops_gradients: bool = False
    """Are gradients freed after each optimizer step? SimpleTuner's default fills them with zeros and keeps them."""
    ranks: int = 1
    sharded: bool = False
    checkpointing: bool = True
    ema: bool = False
    ema_on_device: bool = False
    ema_foreach: bool = True
    state_in_grace: bool = False
    state_pattern: Literal["gpu_first", "balanced", "cpu_first"] = "gpu_first"
    state_budget: int | None = None
    state_ratio: float = 5.0
    activations: Literal["off", "grace", "auto"] = "off"
    activation_limit: int | None = None
    unified: Mapping[str, bool] = field(default_factory=dict)
    """Kind of cache -> whether we hold it."""
    cache_limit: int | None = None
    hbm_embeds: int = 0
    validates: bool = False
    encoders_stay: bool = False
    vae_stays: bool = False
    """Loaded while it trains too: what is not cached is encoded when it is needed."""
    vae_batch: int = 1
    checkpoints: int = 1
    elsewhere: frozenset[str] = frozenset()
    """Rows whose bytes SimpleTuner or an engine of its may keep in another place than we count them."""

    @property
    def bytes_per_weight(self) -> int:
        return ELEMENT[self.weights]

    @property
    def gradients_outlive(self) -> bool:
        """Are gradients of an earlier micro-batch or step there during a forward pass?"""
        return self.accumulation > 1 or not self.drops_gradients

    @property
    def quantised(self) -> float | None:
        """Bytes per weight of the frozen base model where it is quantised."""
        if self.full or self.base_precision in ("no_change", "bf16", "fp32", "fp16", ""):
            return None
        found = next((size for name, size in _QUANTISED.items() if name in self.base_precision), None)
        return found * SCALES if found is not None else None


def read_facts(training: Training, *, ranks: int | None = None) -> RunFacts:
    """Raises ConfigError where our blocks are not sound."""
    settings = training.raise_if_bad()
    values = training.effective
    options = {key: plain(value) for key, value in training.values.items() if key not in (*TRAINING_BLOCKS, "datasets")}
    caches = settings.part(CacheSettings)
    ramp = settings.part(RampSettings)
    state = settings.part(StateSettings)
    kept = settings.part(ActivationSettings)
    count = ranks or training.job.ranks
    ema = truth(values.get("use_ema"))
    return RunFacts(
        family=str(values.get("model_family") or ""),
        options=options,
        full="lora" not in str(values["model_type"]),
        weights=_weights(values),
        base_precision=str(values["base_model_precision"]),
        optimizer=str(values["optimizer"]),
        batch=_whole(training, "train_batch_size"),
        accumulation=_accumulation(ramp, training, count),
        ramped=ramp.enable_batch_size_rampup,
        drops_gradients=truth(values.get("set_grads_to_none")) or truth(values.get("ramtorch")),
        ranks=count,
        sharded=truth(values.get("fsdp_enable")),
        checkpointing=truth(values["gradient_checkpointing"]) or truth(values.get("fsdp_activation_checkpointing")),
        ema=ema,
        ema_on_device=ema and values["ema_device"] == "accelerator",
        ema_foreach=not truth(values.get("ema_foreach_disable")),
        state_in_grace=state.use_uvm,
        state_pattern=state.uvm_access_pattern,
        state_budget=_gib(state.uvm_hbm_budget_gb),
        state_ratio=state.uvm_oversubscription_ratio,
        activations=kept.activations,
        activation_limit=_gib(kept.activation_limit_gb),
        unified=caches.served(),
        cache_limit=_gib(caches.memory_limit_gb),
        hbm_embeds=_gib(caches.hbm_limit_gb) or 0,
        validates=not truth(values.get("validation_disable")),
        encoders_stay=any(truth(values.get(key)) for key in _KEEP_ENCODERS),
        vae_stays=any(truth(values.get(key)) for key in _KEEP_VAE),
        vae_batch=_whole(training, "vae_batch_size"),
        checkpoints=_whole(training, "checkpoints_total_limit"),
        elsewhere=_elsewhere(values),
    )


_KEEP_ENCODERS = ("text_cache_ondemand", "text_cache_disable", "train_text_encoder")
_KEEP_VAE = ("vae_cache_ondemand", "vae_cache_disable")

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "image_encoder")
_MODEL = ("weights", "gradients", "optimizer", "ema", "activations", "checkpoint")

NOT_FOLLOWED = ("controlnet", "control", "distillation_method", "tread_config")
"""What trains other parts, or more of them, or fewer tokens than a plain step: a plan counts the plain step."""

_MOVED_BY: Mapping[str, tuple[str, ...]] = {
    "deepspeed_config": ("weights", "gradients", "optimizer"),
    "fsdp_cpu_offload": ("weights", "gradients", "optimizer"),
    "ramtorch": ("weights", "gradients", "optimizer"),
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
    **dict.fromkeys(NOT_FOLLOWED, _MODEL),
}
"""SimpleTuner's switches, and what each keeps out of HBM, or frees early, in a measure that we do not know."""


def _elsewhere(values: Mapping[str, Any]) -> frozenset[str]:
    found = {row for key, rows in _MOVED_BY.items() if truth(values.get(key)) for row in rows}
    if str(values["optimizer"]).endswith("-paged"):
        found.add("optimizer")  # its pages leave HBM under pressure
    found |= {name for number, name in enumerate(_ENCODERS[:4], 1) if _quantises(values, number)}
    if str(values.get("gradient_checkpointing_backend") or "").startswith("unsloth"):
        found.add("activations")
    return frozenset(found)


def _quantises(values: Mapping[str, Any], number: int) -> bool:
    return str(values.get(f"text_encoder_{number}_precision") or "no_change") != "no_change"


def _weights(values: Mapping[str, Any]) -> Weights:
    return "fp32" if values["mixed_precision"] == "no" else "bf16"


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
    """A text of a ``config.env`` or a flag as a JSON file would have it: traces are found again by what is in them."""
    text = str(value)
    known = {"true": True, "false": False}
    if text.lower() in known or not isinstance(value, str):
        return known.get(text.lower(), value)
    return next((number for kind in (int, float) if (number := _number(text, kind)) is not None), value)


def _number(text: str, kind: type[int] | type[float]) -> float | None:
    try:
        return kind(text) if str(kind(text)) == text and text[-1].isdigit() else None
    except ValueError:
        return None


def _whole(training: Training, key: str) -> int:
    """Of an option; where its text is no number, SimpleTuner's default: others say that it will be refused."""
    for value in (training.effective[key], training.defaults[key]):
        try:
            return max(1, int(float(str(value))))
        except ValueError:
            continue
    return 1


def _gib(value: float | None) -> int | None:
    return None if value is None else int(value * GIB)
