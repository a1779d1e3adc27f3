"""What a run holds beside the model that it trains: other models, caches, datasets, files on disk. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simpletuner_gh200.memory.ceilings import IDLE_BUFFERS, STAGING_WORK, caches_allowance
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.plan.facts import ELEMENT, RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.rows import Phase, Row, Source
from simpletuner_gh200.plan.sharding import is_sharded
from simpletuner_gh200.plan.sizes import Sizes, StateFacts, Step
from simpletuner_gh200.units import GIB

TRAINED: tuple[Phase, ...] = ("train", "save", "validate")


@dataclass(frozen=True)
class Constants:
    """What no configuration says; a run's telemetry replaces them by what it measured."""

    context: int = 3 * GIB // 2
    context_note: str = "CUDA context, cuBLAS and cuDNN workspaces: 0.5 to 2.5 GiB"
    process: int = 6 * GIB
    process_note: str = "Python, torch and SimpleTuner: 4 to 10 GiB"


def other_models(facts: RunFacts, sizes: Sizes) -> Iterator[Row]:
    kept: tuple[Phase, ...] = ("cache", *TRAINED)
    for encoder in sizes.encoders:
        size = encoder.parameters * facts.bytes_per_weight
        for phase in kept if facts.encoders_stay else kept[:1]:
            yield Row(encoder.name, "hbm", phase, size, encoder.source, encoder.note)
    if sizes.vae is None:
        return
    weights = sizes.vae.parameters * ELEMENT["bf16"]
    for phase in kept if facts.vae_stays else ("cache", "validate"):
        yield Row("vae", "hbm", phase, weights, sizes.vae.source, sizes.vae.note)
    yield _encoding(facts, sizes)
    decode = sizes.vae_work.get("decode")
    source: Source = "assumed" if decode is None else "computed"
    yield Row("vae work", "hbm", "validate", decode or 4 * GIB, source, "decoding")


def _encoding(facts: RunFacts, sizes: Sizes) -> Row:
    encode = sizes.vae_work.get("encode")
    if encode is None:
        return Row("vae work", "hbm", "cache", 4 * GIB, "assumed", "encoding; 1 to 8 GiB at 1024 pixels")
    size = encode * facts.vae_batch
    if sizes.data.cached == "measured":
        return Row("vae work", "hbm", "cache", size, "assumed", "encoding, unless all of it is cached already")
    return Row("vae work", "hbm", "cache", size, "computed", "encoding")


def host(facts: RunFacts, sizes: Sizes, machine: Machine, constants: Constants) -> Iterator[Row]:
    data = sizes.data
    share = machine.sharing(facts.ranks)
    yield Row("datasets", "grace", None, data.held // share, "measured", "once per node")
    if data.held:
        yield Row("staging", "grace", "load", STAGING_WORK, "computed")
    for phase in TRAINED:
        yield Row("caches", "grace", phase, cached(facts, sizes, machine) // share, data.cached)
    if any(facts.unified.values()):
        batch = facts.batch * (sizes.latent_bytes + sizes.embed_bytes)
        yield Row(
            "buffers", "grace", "train", min(4 * batch, IDLE_BUFFERS), "computed", "batches of the unified caches"
        )
        yield Row("embeds", "hbm", "train", facts.hbm_embeds, "computed", "hbm_limit_gb")
    yield Row("process", "grace", None, constants.process, "assumed", constants.process_note)


def disk(facts: RunFacts, sizes: Sizes, step: Step, state: StateFacts) -> Iterator[Row]:
    data = sizes.data
    fresh = 0 if data.cached == "measured" else data.latents + data.embeds
    yield Row("cache files", "disk", None, fresh, "computed", "SimpleTuner's own")
    if any(facts.unified.values()):
        yield Row("packs", "disk", None, data.latents + data.embeds, data.cached)
    copies = step.trained * facts.bytes_per_weight * (2 if facts.ema else 1) + ema_saved(facts, step)
    each = (copies + state.bytes) * (facts.ranks if is_sharded(facts) else 1)
    yield Row("checkpoints", "disk", None, each * facts.checkpoints, "computed", f"{facts.checkpoints} of them")
    yield Row("checkpoint", "disk", "save", each, "computed", "written before the oldest goes")


def cached(facts: RunFacts, sizes: Sizes, machine: Machine) -> int:
    """What a node's unified caches hold: what there is of the kinds we serve, within their allowance."""
    wanted = sizes.data.latents * facts.unified.get("vae", False) + sizes.data.embeds * facts.unified.get("text", False)
    node = machine.grace * machine.sharing(facts.ranks)
    left = max(node - sizes.data.held, 0)
    host = HostMemory(node, left, left, machine.name)
    return min(wanted, caches_allowance(facts.cache_limit, host, single_pool=machine.one_pool))


def ema_saved(facts: RunFacts, step: Step) -> int:
    """SimpleTuner makes a whole model of its class's own precision to save shadows from."""
    return step.trained * ELEMENT["fp32"] if facts.ema and facts.full else 0
