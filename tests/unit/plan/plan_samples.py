"""A small model as the tracing child would describe it, and a run of it: every number easy to follow."""

from __future__ import annotations

from simpletuner_gh200.plan.beside import Constants
from simpletuner_gh200.plan.changes import Situation
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import MACHINES, Machine
from simpletuner_gh200.plan.model_files import Component
from simpletuner_gh200.plan.shapes import Data
from simpletuner_gh200.plan.sizes import Sizes
from simpletuner_gh200.plan.traces import Stack, Trace
from simpletuner_gh200.seams.trace.counted import Counted
from simpletuner_gh200.units import GIB

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


def sizes(**changed: object) -> Sizes:
    found = {
        "denoiser": Component("transformer", 10 * BILLION, "measured"),
        "data": Data(samples=1000, held=3 * GIB, latents=GIB, embeds=4 * GIB, cached="measured"),
        "encoders": (Component("text_encoder", BILLION, "measured"),),
        "vae": Component("vae", BILLION // 10, "measured"),
        "vae_work": {"encode": GIB, "decode": 2 * GIB},
        "traces": {True: trace(checkpointed=True), False: trace(checkpointed=False)},
        "latent_bytes": 1 << 20,
        "embed_bytes": 4 << 20,
    }
    return Sizes(**{**found, **changed})  # type: ignore[arg-type]


def facts(**changed: object) -> RunFacts:
    found = {"family": "flux", "full": True, "optimizer": "adamw_bf16", "checkpointing": True, "validates": True}
    return RunFacts(**{**found, **changed})  # type: ignore[arg-type]


def situation(machine: Machine | str = "gh200-96", **changed: object) -> Situation:
    chosen = MACHINES[machine] if isinstance(machine, str) else machine
    return Situation(sizes(**changed), chosen, Constants())
