"""Compares each window's gradient, as the optimizer gets it, with that of one large batch of the same samples.

At every optimizer step of the real run, on a copy of the model with the weights of that moment:

* ``h_k``: the gradient of micro-batch k's loss divided by n, in float32, as accelerate weighs it;
* ``g32``, ``g64``: the gradient of the large batch's loss in float32, and in float64;
* ``e_k``: how far ``h_k`` is from the same thing in float64, and ``e``: how far ``g32`` is from ``g64``.

The window's gradient is a float32 sum of the ``h_k``, which rounds by at most gamma_m * sum |h_k| (m additions and
divisions, gamma_m = m u / (1 - m u), u = 2**-24). In float64 the mean of the micro-batches is the large batch. By the
triangle inequality the two float32 gradients differ by at most

    sum e_k + gamma_m * sum |h_k| + e

and that, computed for each window, is the tolerance. All norms are Euclidean, over all trained parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

UNIT = 2.0**-24

Gradient = dict[str, torch.Tensor]


def install(record: dict[str, Any]) -> None:
    from accelerate.optimizer import AcceleratedOptimizer
    from simpletuner.helpers.training.trainer import Trainer

    record["windows"] = []
    batches: list[dict[str, Any]] = []
    trainers: list[Any] = []
    prepare, train, step = Trainer.prepare_batch, Trainer.train, AcceleratedOptimizer.step

    def watched_prepare(self: Any, batch: Any) -> Any:
        prepared = prepare(self, batch)
        if isinstance(prepared, dict):
            batches.append(detached(prepared))
        return prepared

    def watched_train(self: Any) -> Any:
        trainers.append(self)
        return train(self)

    def watched_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_state.sync_gradients:
            everyone = gathered(list(batches))
            batches.clear()
            if trainers[0].accelerator.is_main_process:  # the others wait in their next collective
                record["windows"].append(compare(trainers[0], everyone))
        return step(self, *args, **kwargs)

    Trainer.prepare_batch, Trainer.train, AcceleratedOptimizer.step = watched_prepare, watched_train, watched_step


def compare(trainer: Any, everyone: list[list[dict[str, Any]]]) -> dict[str, Any]:
    world, length = len(everyone), len(everyone[0])
    micro = [batch for batches in everyone for batch in batches]
    large = joined(micro)
    window = {name: p.grad.detach().clone() for name, p in trained(component_of(trainer)).items()}
    with set_aside(trainer), torch.random.fork_rng(devices=[]):
        with in_precision(trainer, torch.float32) as parameters:
            single = [gradient(trainer, batch, parameters, length) for batch in micro]
            large32 = gradient(trainer, large, parameters, 1)
        with in_precision(trainer, torch.float64) as parameters:
            double = [gradient(trainer, batch, parameters, length) for batch in micro]
            large64 = gradient(trainer, large, parameters, 1)
    errors = sum(norm(minus(h, exact)) for h, exact in zip(single, double, strict=True)) / world
    operations = length + world + 1
    gamma = operations * UNIT / (1 - operations * UNIT)
    rounding = gamma * sum(norm(h) for h in single) / world
    mean64 = {name: sum(part[name] for part in double) / world for name in large64}
    return {
        "length": length,
        "samples": sum(batch["latents"].shape[0] for batch in micro),
        "same_bits": world == 1 and all(torch.equal(window[name], summed(single, name)) for name in window),
        "difference": norm(minus(window, large32)),
        "tolerance": errors + rounding + norm(minus(large32, large64)),
        "identity64": norm(minus(mean64, large64)),
        "size": norm(large64),
        "weight": inner(window, large64) / inner(large64, large64),
    }


def gradient(trainer: Any, batch: dict[str, Any], parameters: dict[str, Any], divisor: int) -> Gradient:
    """Of the loss divided as accelerate divides it, through SimpleTuner's own prediction and loss."""
    dtype = next(iter(parameters.values())).dtype
    converted = detached(batch, dtype)
    output = trainer.model_predict(prepared_batch=converted)
    loss = trainer.model.loss(prepared_batch=converted, model_output=output, apply_conditioning_mask=True)
    found = torch.autograd.grad(loss / divisor, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@contextmanager
def in_precision(trainer: Any, dtype: torch.dtype) -> Iterator[dict[str, torch.nn.Parameter]]:
    """A copy of the model in ``dtype`` takes its place; what SimpleTuner casts to its types is cast to ``dtype``."""
    config, foundation, as_float = trainer.config, trainer.model, torch.Tensor.float
    kept = (config.weight_dtype, config.base_weight_dtype, foundation.model)
    model = copy.deepcopy(component_of(trainer)).to(dtype)
    config.weight_dtype = config.base_weight_dtype = dtype
    foundation.model = model
    torch.Tensor.float = lambda self: self.to(dtype)
    try:
        yield trained(model)
    finally:
        config.weight_dtype, config.base_weight_dtype, foundation.model = kept
        torch.Tensor.float = as_float


@contextmanager
def set_aside(trainer: Any) -> Iterator[None]:
    """Gradients are not part of a copy of the model, and must be there again for the step."""
    parameters = trained(component_of(trainer))
    kept = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.grad = kept[name]


def component_of(trainer: Any) -> Any:
    return trainer.model.get_trained_component(unwrap_model=True)


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gathered(own: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Every rank's micro-batches of the window."""
    if not torch.distributed.is_initialized():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def detached(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of everything in a prepared batch that is a tensor, number or text; the rest is left out."""
    if torch.is_tensor(value):
        copied = value.detach().clone()
        return copied.to(dtype) if dtype is not None and copied.is_floating_point() else copied
    if isinstance(value, dict):
        return {key: detached(inner, dtype) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(detached(inner, dtype) for inner in value)
    return value if isinstance(value, int | float | str | bool | type(None)) else None


def joined(parts: list[Any]) -> Any:
    """One large batch: tensors and lists one after the other, everything else as in the first."""
    first = parts[0]
    if torch.is_tensor(first):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return first


def summed(parts: list[Gradient], name: str) -> torch.Tensor:
    """In the order of the micro-batches, as they were accumulated."""
    total = parts[0][name].clone()
    for part in parts[1:]:
        total += part[name]
    return total


def minus(left: Gradient, right: Gradient) -> Gradient:
    return {name: left[name].double() - right[name].double() for name in left}


def inner(left: Gradient, right: Gradient) -> float:
    return float(sum((left[name].double() * right[name].double()).sum() for name in left))


def norm(value: Gradient) -> float:
    return inner(value, value) ** 0.5
