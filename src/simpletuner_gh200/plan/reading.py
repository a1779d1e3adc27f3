"""What is known of a run before anything is calculated: its model's files, its data, its shapes, and a traced step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from simpletuner_gh200.config.training import Training
from simpletuner_gh200.plan import traces
from simpletuner_gh200.plan.buckets import Traced, ends
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.model_files import Component, model_of, read_components, trained_elsewhere
from simpletuner_gh200.plan.published import published_traces
from simpletuner_gh200.plan.shapes import Shape, latent_factors, read_data, shapes_of
from simpletuner_gh200.plan.sizes import Sizes
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.seams.trace.text import text_width, tokens_of

PACKED = 64
"""Channels that go into a transformer whose patches of two by two are made outside of it: Flux, Qwen-Image."""

USUAL_WIDTH = 4096
"""Of T5."""


def read_sizes(
    training: Training, facts: RunFacts, machine: Machine, *, trace: bool, patience: float | None = None
) -> tuple[Sizes, Traced, list[str]]:
    """What is known of the model, its data and its shapes, and what could not be found out."""
    notes: list[str] = []
    parts = _components(facts, notes)
    denoiser = next((part for part in parts if part.kind == "denoiser"), None)
    if denoiser is None:
        notes.append(f"{named(facts)}: neither its files nor a published size are here; its weights are not counted")
        denoiser = Component("transformer", 0, "assumed")
    vae = next((part for part in parts if part.kind == "vae"), None)
    factor, temporal = latent_factors(facts.family, vae.config if vae else None)
    counts = shapes_of(training)
    small, shape = ends(counts)
    latent, least = (one.latent(factor, temporal) for one in (shape, small))
    basis = facts.checkpointing and (facts.activations == "off" or machine.one_pool)
    questions = _questions(facts, denoiser, latent, like="hopper" if machine.has_device else "cpu")
    if "plain" in questions and small.area < shape.area:
        basic = questions["checkpointed" if basis else "plain"]
        questions["smallest"] = {**basic, "latent": list(least)}
    questions.update(_vae_questions(vae, shape))
    questions.update(_count_questions(parts))
    answers = _answers(questions, trace=trace, notes=notes)
    parts = [_counted(part, answers) for part in parts]
    latent_bytes = _elements(latent) * _latent_channels(vae, denoiser) * 4
    embed_bytes = _embed_bytes(facts, denoiser)
    sizes = Sizes(
        denoiser=denoiser,
        data=read_data(training, latent_bytes=latent_bytes, embed_bytes=embed_bytes, patience=patience),
        encoders=tuple(part for part in parts if part.kind == "encoder"),
        vae=next((part for part in parts if part.kind == "vae"), None),
        vae_work=answers.get("vae", {}),
        traces={name: Trace.from_json(answers[key]) for key, name in _BY_CHECKPOINTING.items() if key in answers},
        traced_batch=facts.batch,
        latent_bytes=latent_bytes,
        embed_bytes=embed_bytes,
    )
    if not sizes.traces:
        sizes = _with_published(sizes, facts, shape)
        if sizes.guessed:
            notes.append("activations are those of the published model at its usual shape, scaled to this one")
    if not sizes.traces:
        notes.append("the step was not traced: activations are not counted, weights and gradients are a lower bound")
    low = Trace.from_json(answers["smallest"]) if "smallest" in answers and basis in sizes.traces else None
    return sizes, Traced(counts, basis, low), notes


def _with_published(sizes: Sizes, facts: RunFacts, shape: Shape) -> Sizes:
    """With traces of a published model that were made before, scaled to this shape: a good guess, and marked as one."""
    known = published_traces(model_of(facts.options), facts.family, full=facts.full)
    if known is None or known.parameters != sizes.denoiser.parameters:
        return sizes  # another model of the same family
    batch = known.area / shape.area
    return replace(sizes, traces=known.traces, traced_batch=batch, guessed=True)


_BY_CHECKPOINTING = {"checkpointed": True, "plain": False}


def _components(facts: RunFacts, notes: list[str]) -> list[Component]:
    parts = list(read_components(model_of(facts.options), facts.family, os.environ).values())
    own = trained_elsewhere(facts.options, os.environ)
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


def _count_questions(parts: Sequence[Component]) -> dict[str, dict[str, Any]]:
    """About parts whose configuration is here and whose weights are not. Asked with the rest: a child costs seconds."""
    return {
        f"size of {part.name}": traces.count_request(part.config)
        for part in parts
        if part.config and not part.parameters and part.kind != "denoiser"
    }


def _counted(part: Component, answers: Mapping[str, Any]) -> Component:
    found = answers.get(f"size of {part.name}")
    return part if found is None else replace(part, parameters=found["parameters"])


def _questions(facts: RunFacts, denoiser: Component, latent: Sequence[int], *, like: str) -> dict[str, dict[str, Any]]:
    """The step as configured first; the other way second, so that advice has a basis."""
    if not denoiser.config:
        return {}
    ways = sorted(_BY_CHECKPOINTING.items(), key=lambda item: item[1] != facts.checkpointing)
    return {
        name: traces.step_request(
            facts.options, denoiser.config, batch=facts.batch, latent=latent, checkpointing=checkpointing, like=like
        )
        for name, checkpointing in ways
    }


def _vae_questions(vae: Component | None, shape: Shape) -> dict[str, dict[str, Any]]:
    if vae is None or not vae.config or shape.frames:
        return {}
    channels = int(vae.config.get("in_channels") or 3)
    return {"vae": traces.vae_request(vae.config, (1, channels, shape.height, shape.width), "bf16")}


def _answers(questions: Mapping[str, dict[str, Any]], *, trace: bool, notes: list[str]) -> dict[str, Any]:
    if trace:
        found = traces.ask(list(questions.values()))
    else:
        found = [traces.remembered(question) or {} for question in questions.values()]
    answers = dict(zip(questions, found, strict=True))
    notes += [
        f"{name}: could not be traced: {answer['error']}" for name, answer in answers.items() if "error" in answer
    ]
    return {name: answer for name, answer in answers.items() if answer and "error" not in answer}


def _elements(latent: Sequence[int]) -> int:
    total = 1
    for length in latent:
        total *= length
    return total


def _latent_channels(vae: Component | None, denoiser: Component) -> int:
    """As its VAE says, or what goes into the denoiser, which may take four of them at once."""
    config = vae.config if vae is not None and vae.config else {}
    named = config.get("latent_channels") or config.get("z_dim")
    if named:
        return int(named)
    given = int((denoiser.config or {}).get("in_channels") or 16)
    return given // 4 if given == PACKED else given


def _embed_bytes(facts: RunFacts, denoiser: Component) -> int:
    """Of one cached text embed, where no cache tells."""
    try:
        width = text_width(denoiser.config or {})
    except ValueError:
        width = USUAL_WIDTH
    return tokens_of(facts.family, facts.options.get("tokenizer_max_length")) * width * 2
