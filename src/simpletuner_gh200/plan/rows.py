"""The bytes of a run, each with its pool, its phase and its source: what everything else of a plan is read from. Pure.

To add a row, add a function to ``ROWS``: it is given all that is known of the run, and yields what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from simpletuner_gh200.memory.ceilings import IDLE_BUFFERS, STAGING_WORK
from simpletuner_gh200.plan.facts import ELEMENT, Source
from simpletuner_gh200.plan.placing import Placed, cached
from simpletuner_gh200.units import GIB

Pool = Literal["hbm", "grace", "disk"]
Phase = Literal["load", "cache", "train", "save", "validate"]

POOLS: tuple[Pool, ...] = get_args(Pool)
PHASES: tuple[Phase, ...] = get_args(Phase)

TRAINED: tuple[Phase, ...] = ("train", "save", "validate")
"""From the first step on."""

FRAGMENTS = 0.03
"""Of torch's bytes, lost between blocks; assumed, 1 to 6 %."""

VAE_WORK = 4 * GIB


@dataclass(frozen=True)
class Row:
    """``phase`` None: held in every phase."""

    what: str
    pool: Pool
    phase: Phase | None
    bytes: int
    source: Source
    note: str = ""

    @property
    def certain(self) -> bool:
        """Does it count towards what is needed at least?"""
        return self.source != "assumed"

    def to_json(self) -> dict[str, Any]:
        found = {"what": self.what, "pool": self.pool, "phase": self.phase, "bytes": self.bytes, "source": self.source}
        return {**found, "note": self.note} if self.note else found


def rows_of(placed: Placed) -> tuple[Row, ...]:
    """Rows of no bytes say nothing, nor do those of a phase that the run has not."""
    rows = (row for kind in ROWS for row in kind(placed))
    there = (row for row in rows if row.bytes > 0 and (row.phase != "validate" or placed.facts.validates))
    return tuple(_doubted(_in_its_pool(row, placed), placed) for row in there)


def _in_its_pool(row: Row, placed: Placed) -> Row:
    """Where the device has no memory of its own, what would be in HBM is in the host's."""
    return replace(row, pool="grace") if row.pool == "hbm" and placed.machine.one_pool else row


_OF_THE_MODEL = frozenset({"weights", "gradients", "optimizer", "ema", "activations", "checkpoint", "checkpoints"})


def _doubted(row: Row, placed: Placed) -> Row:
    """What others may place is a guess, and so is all of a model that is guessed: no refusal rests on it."""
    denoiser = placed.sizes.denoiser
    if denoiser.source == "assumed" and row.what in _OF_THE_MODEL:
        return replace(row, source="assumed", note=row.note or denoiser.note)
    if row.pool == "disk" or row.what not in placed.facts.placed_by_others:
        return row
    return replace(row, source="assumed", note=row.note or "another setting may keep it elsewhere")


# -- the model that is trained -----------------------------------------------------------------------------


def _weights(run: Placed) -> Iterator[Row]:
    source: Source = "computed" if run.facts.quantised is not None else run.step.weights_source
    loading, note = run.whole_weights, ""
    if run.weights_in_grace and run.facts.quantised is None:
        loading, note = run.step.outside + run.step.largest_block, "one block at a time, and what is in none"
    yield Row("weights", "hbm", "load", loading, source, note)
    for phase in TRAINED:
        yield Row("weights", "hbm", phase, run.step.weights, source)
        yield Row("weights", "grace", phase, run.weights_in_grace, source, "blocks, copied ahead of use")
    read = "read into CPU memory first; mapped files may do with less"
    if run.step.whole:
        read = "every rank reads the whole model before it is sharded"
    yield Row("weights", "grace", "load", run.step.whole or run.whole_weights, "assumed", read)


def _gradients(run: Placed) -> Iterator[Row]:
    source: Source = "computed" if run.facts.full or run.step.source == "computed" else "assumed"
    for phase in TRAINED[:1] if run.facts.drops_gradients else TRAINED:
        yield Row("gradients", "hbm", phase, run.step.gradients, source)
    for phase in TRAINED:  # their memory is kept for the next step
        yield Row("gradients", "grace", phase, run.gradients_in_grace, source)


def _activations(run: Placed) -> Iterator[Row]:
    update = run.ema_update
    note = "an EMA update" if update > run.transient else ""
    yield Row("activations", "hbm", "train", max(run.transient, update), run.step.source, note)
    yield Row("activations", "grace", "train", run.offloaded, run.step.source, run.mix.why if run.mix else "")


def _optimizer(run: Placed) -> Iterator[Row]:
    for phase in TRAINED:
        yield Row("optimizer", "hbm", phase, run.state_in_hbm, run.state.source, run.facts.optimizer)
        yield Row("optimizer", "grace", phase, run.state_in_grace, run.state.source, run.facts.optimizer)


def _ema(run: Placed) -> Iterator[Row]:
    pool: Pool = "hbm" if run.held.ema_on_device and not run.facts.state_in_grace else "grace"
    for phase in TRAINED if run.facts.ema else ():
        yield Row("ema", pool, phase, run.copy_of_trained, "computed")


def _checkpoints(run: Placed) -> Iterator[Row]:
    facts, whole = run.facts, run.step.whole
    shadows = run.step.trained * ELEMENT["fp32"] if facts.ema and facts.full else 0
    note = "safetensors are put together in CPU memory" + (", on the first rank the whole model" * bool(whole))
    if shadows:
        note = "shadows are copied into an fp32 model that is saved"
    yield Row("checkpoint", "grace", "save", max(whole or run.copy_of_trained, shadows), "computed", note)
    copies = run.copy_of_trained * (2 if facts.ema else 1) + shadows
    each = (copies + run.state.bytes) * (facts.ranks if facts.is_sharded else 1)
    yield Row("checkpoints", "disk", None, each * facts.checkpoints, "computed", f"{facts.checkpoints} of them")
    yield Row("checkpoint", "disk", "save", each, "computed", "written before the oldest goes")
    behind = (each + run.copy_of_trained * facts.full) // run.machine.sharing(facts.ranks) if facts.behind else 0
    for phase in TRAINED:
        # No run is refused for it: where there is no room, SimpleTuner saves to the disk as ever.
        note = "saved to memory until it is on disk, a whole model's weights twice; as stock where there is no room"
        yield Row("checkpoints", "grace", phase, behind, "assumed", note)


def _fragmentation(run: Placed) -> Iterator[Row]:
    torchs = run.step.weights + run.step.gradients + run.transient + run.state_in_hbm
    yield Row("fragmentation", "hbm", "train", int(FRAGMENTS * torchs), "assumed", "1 to 6 % of torch's bytes")


# -- other models ------------------------------------------------------------------------------------------


def _encoders(run: Placed) -> Iterator[Row]:
    phases: tuple[Phase, ...] = ("cache", *TRAINED) if run.facts.encoders_stay else ("cache",)
    for encoder in run.sizes.encoders:
        size = encoder.parameters * run.facts.bytes_per_weight
        for phase in phases:
            yield Row(encoder.name, "hbm", phase, size, encoder.source, encoder.note)


def _vae(run: Placed) -> Iterator[Row]:
    vae, work = run.sizes.vae, run.sizes.vae_work
    if vae is None:
        return
    phases: tuple[Phase, ...] = ("cache", *TRAINED) if run.facts.vae_stays else ("cache", "validate")
    for phase in phases:
        yield Row("vae", "hbm", phase, vae.parameters * ELEMENT["bf16"], vae.source, vae.note)
    if "encode" in work:
        known = run.sizes.data.cached == "measured"
        note = "encoding, unless all of it is cached already" if known else "encoding"
        size = work["encode"] * run.facts.vae_batch
        yield Row("vae work", "hbm", "cache", size, "assumed" if known else "computed", note)
    else:
        yield Row("vae work", "hbm", "cache", VAE_WORK, "assumed", "encoding; 1 to 8 GiB at 1024 pixels")
    decoding: Source = "computed" if "decode" in work else "assumed"
    yield Row("vae work", "hbm", "validate", work.get("decode", VAE_WORK), decoding, "decoding")


# -- data, and the process itself --------------------------------------------------------------------------


def _datasets(run: Placed) -> Iterator[Row]:
    data = run.sizes.data
    share = run.machine.sharing(run.facts.ranks)
    yield Row("datasets", "grace", None, data.held // share, "measured", "once per node")
    yield Row("staging", "grace", "load", STAGING_WORK * bool(data.held), "computed")


def _caches(run: Placed) -> Iterator[Row]:
    facts, sizes = run.facts, run.sizes
    held = cached(facts, sizes, run.machine) // run.machine.sharing(facts.ranks)
    for phase in TRAINED:
        yield Row("caches", "grace", phase, held, sizes.data.cached)
    both = sizes.data.latents + sizes.data.embeds
    fresh = 0 if sizes.data.cached == "measured" else both
    yield Row("cache files", "disk", None, fresh, "computed", "SimpleTuner's own")
    if any(facts.unified.values()):
        buffers = min(4 * facts.batch * (sizes.latent_bytes + sizes.embed_bytes), IDLE_BUFFERS)
        yield Row("buffers", "grace", "train", buffers, "computed", "batches of the unified caches")
        yield Row("packs", "disk", None, both, sizes.data.cached)


def _process(run: Placed) -> Iterator[Row]:
    note = "Python, torch and SimpleTuner: 4 to 10 GiB"
    yield Row("process", "grace", None, run.machine.process, "assumed", note)
    if run.machine.has_device:
        cited = "CUDA context, cuBLAS and cuDNN workspaces: 0.5 to 2.5 GiB"
        note = run.machine.sources.get("context", cited)
        yield Row("context", "hbm", None, run.machine.context, "assumed", note)


ROWS: tuple[Callable[[Placed], Iterator[Row]], ...] = (
    *(_weights, _gradients, _activations, _optimizer, _ema, _checkpoints),
    *(_encoders, _vae, _datasets, _caches, _process, _fragmentation),
)
