"""How large a run's model, its data and one traced step are: from files, published sizes and the tracing child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from simpletuner_gh200.config.training import Training
from simpletuner_gh200.plan import traces
from simpletuner_gh200.plan.data import Data, SampleShape, latent_factors, read_data, shapes_of
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.models import ModelPart, model_of, named_denoiser, published_traces, read_parts
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.seams.trace.counted import text_width, tokens_of

PACKED = 64
"""Channels that go into a transformer whose patches of two by two are made outside of it: Flux, Qwen-Image."""

PATCHED = "Flux2Transformer2DModel"
"""Takes four of its VAE's latents at once, too, of twice as many channels."""

USUAL_WIDTH = 4096
"""Of T5."""

_CHECKPOINTED = {"checkpointed": True, "plain": False}


@dataclass(frozen=True)
class ModelSizes:
    """``traces``: by whether blocks are checkpointed, of ``traced_batch`` samples; empty where nothing was traced."""

    denoiser: ModelPart
    data: Data
    encoders: tuple[ModelPart, ...] = ()
    vae: ModelPart | None = None
    vae_work: Mapping[str, int] = field(default_factory=dict)
    """Bytes beyond its weights while it encodes, and while it decodes."""
    traces: Mapping[bool, Trace] = field(default_factory=dict)
    traced_batch: float = 1
    guessed: bool = False
    """Are the traces of another shape, and scaled?"""
    shapes: Mapping[SampleShape, int] = field(default_factory=dict)
    """Every bucket -> its samples. The traces are of the largest."""
    smallest: Trace | None = None
    """Of the smallest, the way in which the run takes its steps; None where it was not traced."""
    latent_bytes: int = 0
    embed_bytes: int = 0
    """Of one sample as it is cached."""
    notes: tuple[str, ...] = ()
    """What could not be found out."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """What could not be traced -> the words of what was raised, for whoever mends it."""


def takes_checkpointed_steps(facts: RunFacts, machine: Machine) -> bool:
    """Where activations go to Grace the run switches checkpointing off block by block: the plain trace is its basis."""
    return facts.checkpointing and (facts.activations == "off" or machine.one_pool)


def ends(shapes: Mapping[SampleShape, int]) -> tuple[SampleShape, SampleShape]:
    """(smallest, largest): what is traced."""
    found = sorted(shapes, key=lambda shape: (shape.area, shape.height))
    return found[0], found[-1]


def read_sizes(
    training: Training, facts: RunFacts, machine: Machine, *, trace: bool, patience: float | None = None
) -> ModelSizes:
    """``trace`` False: only what was traced before. ``patience``: seconds for looking at files."""
    notes: list[str] = []
    parts = _parts(facts, notes)
    denoiser = next((part for part in parts if part.kind == "denoiser"), None)
    if denoiser is None:
        notes.append(f"{named(facts)}: neither its files nor a published size are here; its weights are not counted")
        denoiser = ModelPart("transformer", 0, "assumed")
    vae = next((part for part in parts if part.kind == "vae"), None)
    shapes = shapes_of(training)
    factors = latent_factors(facts.family, vae.config if vae else None)
    requests = {
        **_step_requests(facts, denoiser, machine, [shape.latent(*factors) for shape in ends(shapes)]),
        **_vae_request(vae, ends(shapes)[1]),
        **{
            part.name: {"kind": "count", "model": dict(part.config)}
            for part in parts
            if part.config and not part.parameters and part.kind != "denoiser"
        },
    }
    errors: dict[str, str] = {}
    answers = _answers(requests, trace=trace, notes=notes, errors=errors)
    parts = [replace(p, parameters=answers[p.name]["parameters"]) if p.name in answers else p for p in parts]
    latent_bytes = ends(shapes)[1].latent_bytes(*factors, _latent_channels(vae, denoiser))
    embed_bytes = _embed_bytes(facts, denoiser)
    sizes = ModelSizes(
        denoiser=denoiser,
        data=read_data(training, latent_bytes=latent_bytes, embed_bytes=embed_bytes, patience=patience),
        encoders=tuple(part for part in parts if part.kind == "encoder"),
        vae=next((part for part in parts if part.kind == "vae"), None),
        vae_work=answers.get("vae work", {}),
        traces={way: Trace.from_json(answers[name]) for name, way in _CHECKPOINTED.items() if name in answers},
        traced_batch=facts.batch,
        shapes=shapes,
        smallest=Trace.from_json(answers["smallest"]) if "smallest" in answers else None,
        latent_bytes=latent_bytes,
        embed_bytes=embed_bytes,
        errors=errors,
    )
    if not sizes.traces:
        sizes = _with_published(sizes, facts)
        notes.append(
            "activations are those of the published model at its usual shape, scaled to this one"
            if sizes.guessed
            else "the step was not traced: activations are not counted, weights and gradients are a lower bound"
        )
    return replace(sizes, notes=tuple(notes))


def _with_published(sizes: ModelSizes, facts: RunFacts) -> ModelSizes:
    """With traces of a published model that were made before, scaled to this shape: a good guess, and marked as one."""
    known = published_traces(model_of(facts.options), facts.family, full=facts.full)
    if known is None or known[1] != sizes.denoiser.parameters:
        return sizes  # another model of the same family
    area, _parameters, found = known
    return replace(sizes, traces=found, traced_batch=area / ends(sizes.shapes)[1].area, guessed=True)


def _parts(facts: RunFacts, notes: list[str]) -> list[ModelPart]:
    parts = list(read_parts(model_of(facts.options), facts.family).values())
    own = named_denoiser(facts.options)
    if own is not None:
        like = next((part for part in parts if part.kind == "denoiser"), own)
        if not own.parameters and own.config is None:
            own = replace(like, source="assumed", note=f"{own.note}; counted as {like.note or like.name}")
        parts = [own, *(part for part in parts if part.kind != "denoiser")]
    absent = next((part for part in parts if part.source in ("cited", "assumed")), None)
    if absent is not None:
        guess = "; no refusal rests on that" if absent.source == "assumed" else ""
        notes.append(f"the files of {named(facts)} are not here: {absent.note}{guess}")
    return parts


def named(facts: RunFacts) -> str:
    """What messages call the model."""
    return model_of(facts.options) or facts.family


# -- requests to the tracing child: all at once, since a child costs seconds --------------------------------


def _step_requests(
    facts: RunFacts, denoiser: ModelPart, machine: Machine, latents: Sequence[tuple[int, ...]]
) -> dict[str, dict[str, Any]]:
    """The step as configured first; the other way second, so that advice has a basis; then the smallest shape."""
    if not denoiser.config:
        return {}
    least, latent = latents
    found = {
        name: traces.step_request(
            facts.options,
            denoiser.config,
            batch=facts.batch,
            latent=latent,
            checkpointing=checkpointing,
            like="hopper" if machine.has_device else "cpu",
        )
        for name, checkpointing in sorted(_CHECKPOINTED.items(), key=lambda item: item[1] != facts.checkpointing)
    }
    if prod(least) < prod(latent):
        basis = found["checkpointed" if takes_checkpointed_steps(facts, machine) else "plain"]
        found["smallest"] = {**basis, "latent": list(least)}
    return found


def _vae_request(vae: ModelPart | None, shape: SampleShape) -> dict[str, dict[str, Any]]:
    if vae is None or not vae.config or shape.frames:
        return {}
    channels = int(vae.config.get("in_channels") or 3)
    pixels = [1, channels, shape.height, shape.width]
    return {"vae work": {"kind": "vae", "model": dict(vae.config), "pixels": pixels}}


def _answers(
    requests: Mapping[str, dict[str, Any]], *, trace: bool, notes: list[str], errors: dict[str, str]
) -> dict[str, Any]:
    """Those that are there; why not, of the others that were traced, goes into ``notes``, and whole into ``errors``."""
    if trace:
        found = traces.ask(list(requests.values()))
    else:
        found = [traces.remembered(request) or {} for request in requests.values()]
    answers = dict(zip(requests, found, strict=True))
    failed: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if "error" in answer:
            failed.setdefault(_why(answer["error"]), []).append(name)
            errors[name] = answer["error"]
    notes += [f"{', '.join(names)}: could not be traced: {why}" for why, names in failed.items()]
    return {name: answer for name, answer in answers.items() if answer and "error" not in answer}


def _why(error: str) -> str:
    """What a reader can do something with; words of torch and Python are for ``errors``."""
    if any(sign in error for sign in (traces.NOT_NEEDED, "LocalEntryNotFound", "connect to")):
        return "SimpleTuner reads files of this family besides its configuration, and a trace has none"
    return "SimpleTuner's code for this family can't be followed without weights yet; --json has the error"


# -- bytes of what is cached -------------------------------------------------------------------------------


def _latent_channels(vae: ModelPart | None, denoiser: ModelPart) -> int:
    """As its VAE says, or what goes into the denoiser, which may take four of them at once."""
    config = vae.config if vae is not None and vae.config else {}
    reported = config.get("latent_channels") or config.get("z_dim")
    if reported:
        return int(reported)
    given = int((denoiser.config or {}).get("in_channels") or 16)
    return given // 4 if given == PACKED or (denoiser.config or {}).get("_class_name") == PATCHED else given


def _embed_bytes(facts: RunFacts, denoiser: ModelPart) -> int:
    """Of one cached text embed, where no cache tells."""
    try:
        width = text_width(denoiser.config or {})
    except ValueError:
        width = USUAL_WIDTH
    return tokens_of(facts.family, facts.options.get("tokenizer_max_length")) * width * 2
