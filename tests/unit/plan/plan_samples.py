"""A small model as the tracing child would describe it, and a run of it: every number easy to follow."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.plan.data import Data, SampleShape
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.models import ModelPart
from simpletuner_gh200.plan.sizes import ModelSizes
from simpletuner_gh200.plan.traces import Stack, Trace
from simpletuner_gh200.seams.trace.counted import Counted
from simpletuner_gh200.units import GIB

FLUX = {
    "model_family": "flux",
    "model_type": "full",
    "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "optimizer": "adamw_bf16",
    "train_batch_size": 1,
    "validation_disable": True,
}
BILLION = 10**9
BLOCKS = 20


def trace(*, checkpointed: bool) -> Trace:
    """Ten billion parameters in twenty blocks; a block keeps 2 GiB, or 64 MiB of inputs where it is checkpointed."""
    each = Counted(
        parameters=BILLION // 2,
        trained=BILLION // 2,
        weights=BILLION,
        trained_bytes=BILLION,
        gradients=BILLION,
        saved=GIB // 16 if checkpointed else 2 * GIB,
        forward=GIB // 16 if checkpointed else 2 * GIB,
        peak=BILLION if checkpointed else 2 * GIB,
        flops=int(1.33e13 if checkpointed else 1e13),
    )
    twice = {name: 2 * value for name, value in vars(each).items()}
    base = Counted(**{**twice, "peak": twice["peak"] + GIB // 2 * checkpointed})
    return Trace(base, {"blocks": Stack(BLOCKS, each)})


def sizes(**changed: object) -> ModelSizes:
    found = {
        "denoiser": ModelPart("transformer", 10 * BILLION, "measured"),
        "data": Data(held=3 * GIB, latents=GIB, embeds=4 * GIB, cached="measured"),
        "encoders": (ModelPart("text_encoder", BILLION, "measured"),),
        "vae": ModelPart("vae", BILLION // 10, "measured"),
        "vae_work": {"encode": GIB, "decode": 2 * GIB},
        "traces": {True: trace(checkpointed=True), False: trace(checkpointed=False)},
        "shapes": {SampleShape(1024, 1024): 1000},
        "latent_bytes": 1 << 20,
        "embed_bytes": 4 << 20,
    }
    return ModelSizes(**{**found, **changed})  # type: ignore[arg-type]


def facts(**changed: object) -> RunFacts:
    found = {"family": "flux", "full": True, "weights": "bf16", "base_precision": "no_change", "checkpointing": True}
    found |= {"optimizer": "adamw_bf16", "batch": 1, "accumulation": 1, "vae_batch": 1, "checkpoints": 1}
    return RunFacts(**{**found, "validates": True, **changed})  # type: ignore[arg-type]


def configured(folder: Path, **values: object) -> Training:
    """A configuration as it stands in ``config.json``, read."""
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_training(Located.at(file), {})


def command(*words: object) -> Result:
    """``gh200 plan``, without tracing."""
    return CliRunner().invoke(build_app(), ["plan", *map(str, words), "--no-trace"])
