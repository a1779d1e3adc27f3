"""Run every optimizer of the installed SimpleTuner on the CPU and print what it keeps, as one JSON object.

For each entry of its table: does it run at all; are weights and states the same to the bit when its state is caught
into a pool, and when its step is streamed; is every state tensor accounted for; how many bytes it keeps per parameter
and how often it passes over them. `scripts/dev/generate_optimizer_table.py` and the integration tests run this file in
an environment that has SimpleTuner; nothing else of the extension than the room `model` is used.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from simpletuner.helpers.training.optimizer_param import optimizer_choices
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner_gh200.memory.lane import lanes
from simpletuner_gh200.memory.nested import tensors_in
from simpletuner_gh200.model.catching import CaughtOptimizer, HostPool, Keeper
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.streaming import StreamedOptimizer
from simpletuner_gh200.model.tensors import plain_tensors, shares_storage, size_of

# Compiled kernels have other passes, and take minutes; the states they keep are the same.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

STEPS = 12
LATE = 4
"""The step at which the last parameter has its first gradient."""
SIDE = 256
"""Of the square matrix by which bytes per parameter are measured."""

Stepper = Callable[[Any], None]


def make(name: str, parameters: list[torch.nn.Parameter]) -> Any:
    """As SimpleTuner makes it: its class with its default settings, those that the constructor takes."""
    entry = optimizer_choices[name]
    settings = copy.deepcopy(entry["default_settings"])
    if entry.get("can_warmup"):
        settings["warmup_steps"] = 2
    settings["lr"] = 1e-3
    accepted = inspect.signature(entry["class"].__init__).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        settings = {key: value for key, value in settings.items() if key in accepted}
    optimizer = entry["class"](parameters, **settings)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """A matrix, a convolution in channels_last, a vector, and a matrix that is late."""
    noise = torch.Generator().manual_seed(7)
    shapes = [(160, 160), (16, 8, 3, 3), (48,), (32, 64)]
    made = [torch.randn(shape, generator=noise).to(dtype) for shape in shapes]
    made[1] = made[1].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(tensor) for tensor in made]


def train(name: str, dtype: torch.dtype, steps: range, taken: Callable[[Any], Stepper], resumed: bytes | None = None):
    """Steps with accumulation, clipping, a late first gradient; returns (optimizer, weights, trace of every step)."""
    parameters = weights(dtype)
    optimizer = make(name, parameters)
    torch.manual_seed(11)  # importing an optimizer may have drawn numbers
    step = taken(optimizer)
    if resumed is not None:
        saved = torch.load(io.BytesIO(resumed), weights_only=False)
        with torch.no_grad():
            for parameter, value in zip(parameters, saved["weights"], strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    noise = torch.Generator().manual_seed(5)
    trace = []
    for number in range(steps.stop):
        gradients = [[torch.randn(p.shape, generator=noise) for p in parameters] for _ in range(1 + number % 3)]
        if number not in steps:
            continue
        for micro in gradients:
            for index, (parameter, gradient) in enumerate(zip(parameters, micro, strict=True)):
                if index == 3 and number < LATE:
                    continue
                gradient = gradient.to(dtype) / len(gradients)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        step(optimizer)
        optimizer.zero_grad()
        trace.append(fingerprint(optimizer, parameters))
    return optimizer, parameters, trace


def fingerprint(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[bytes]:
    """Weights and every tensor of state, to the bit."""
    found = [raw(parameter.data) for parameter in parameters]
    for parameter in parameters:
        for _keys, tensor in tensors_in(optimizer.state.get(parameter, {})):
            found += [raw(part) for part in plain_tensors(tensor)]
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def plainly(optimizer: Any) -> Stepper:
    return lambda _: optimizer.step()


class Pooled:
    """Catching, and streaming where asked, as in a run; keeps what a test looks at."""

    def __init__(self, *, streamed: bool = False) -> None:
        self.pool = HostPool(1 << 32)
        self.streamed = streamed
        self.caught: CaughtOptimizer | None = None
        self.stream: StreamedOptimizer | None = None

    def __call__(self, optimizer: Any) -> Stepper:
        self.caught = CaughtOptimizer(optimizer, Keeper(self.pool, Placement("cpu_first", 1)))
        self.stream = StreamedOptimizer(self.caught, lanes(torch.device("cpu")), room=1 << 14)
        original, load = optimizer.step, optimizer.load_state_dict
        taken = self.stream if self.streamed else self.caught

        def loaded(state: Any) -> None:
            load(state)
            self.caught.sweep()

        optimizer.load_state_dict = loaded
        self.caught.sweep()
        return lambda _: taken.step(original)

    def unaccounted(self) -> list[str]:
        """State tensors that are neither in the pool nor counters, views or empty."""
        found = []
        for parameter, values in self.caught.optimizer.state.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                for _keys, tensor in tensors_in(value):
                    for part in plain_tensors(tensor):
                        if part.dim() and part.numel() and not self.pool.holds(part):
                            found.append(f"{key} {tuple(part.shape)} of {tuple(parameter.shape)}")
        return found


def saved(optimizer: Any, parameters: list[torch.nn.Parameter]) -> bytes:
    file = io.BytesIO()
    kept = {"weights": [p.data.clone() for p in parameters], "optimizer": optimizer.state_dict()}
    torch.save({**kept, "random": torch.get_rng_state()}, file)
    return file.getvalue()


class Passes(TorchDispatchMode):
    """Counts bytes of state that operations read and write."""

    ONLY_WRITE = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")

    def __init__(self, places: dict[int, int]) -> None:
        super().__init__()
        self.places = places
        self.read = self.written = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper's own operations come here one by one
        result = function(*args, **given)
        for index, wanted in enumerate(function._schema.arguments):
            value = args[index] if index < len(args) else given.get(wanted.name)
            written = wanted.alias_info is not None and wanted.alias_info.is_write
            only_writes = written and function._schema.name.split("::")[1] in self.ONLY_WRITE
            for _keys, tensor in tensors_in(value):
                if not self._is_state(tensor):
                    continue
                if written:
                    self.written += size_of(tensor)
                is_view = not written and any(shares_storage(tensor, made) for _keys, made in tensors_in(result))
                if not only_writes and not is_view:
                    self.read += size_of(tensor)
        return result

    def _is_state(self, tensor: torch.Tensor) -> bool:
        try:
            return tensor.untyped_storage().data_ptr() in self.places
        except (NotImplementedError, RuntimeError):  # a wrapper has no storage; what is inside it comes by itself
            return False


def kept(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes of state per parameter, and passes over it, of one square matrix."""
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(SIDE, SIDE).to(dtype))
    optimizer = make(name, [parameter])
    at_birth = state_size(optimizer)

    def step() -> None:
        parameter.grad = torch.randn(SIDE, SIDE).to(dtype)
        optimizer.step()

    for _ in range(3):
        step()
    parts = [
        part for values in optimizer.state.values() for _keys, t in tensors_in(values) for part in plain_tensors(t)
    ]
    parts = [part for part in parts if part.dim()]
    size = sum(map(size_of, parts))
    counting = Passes({part.untyped_storage().data_ptr(): size_of(part) for part in parts})
    parameter.grad = torch.randn(SIDE, SIDE).to(dtype)
    with counting:
        optimizer.step()
    passes = (counting.read / size, counting.written / size) if size else (0.0, 0.0)
    born = "none" if not size else "init" if at_birth >= size else "step"
    return {"bytes": round(size / parameter.numel(), 3), "passes": [round(p, 1) for p in passes], "born": born}


def state_size(optimizer: Any) -> int:
    tensors = (tensor for values in optimizer.state.values() for _keys, tensor in tensors_in(values))
    return sum(size_of(part) for tensor in tensors for part in plain_tensors(tensor) if part.dim())


def groups_change(name: str, dtype: torch.dtype) -> list[str]:
    """Keys of a parameter group, or attributes of the optimizer, that a step counts up: state across parameters."""
    optimizer = make(name, weights(dtype))
    seen = []
    for _ in range(2):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()
        seen.append({key: repr(value) for key, value in optimizer.param_groups[0].items() if key != "params"})
    return sorted(key for key in seen[1] if seen[0].get(key) != seen[1][key])


def examine(name: str) -> dict[str, Any]:
    """One row. ``fails`` where it does not run without us, on the weights it is made for."""
    dtype = torch.bfloat16
    try:
        _, _, plain = train(name, dtype, range(STEPS), plainly)
    except Exception as failure:  # noqa: BLE001 - whatever upstream's entry raises is the finding
        return {"fails": f"{type(failure).__name__}: {str(failure).splitlines()[0][:120] if str(failure) else ''}"}
    pooled = Pooled()
    caught_optimizer, _, caught = train(name, dtype, range(STEPS), pooled)
    row: dict[str, Any] = {"same": caught == plain, "unaccounted": pooled.unaccounted()}
    row["plain_dicts"] = all(type(values) is dict for values in caught_optimizer.state.values())
    row["tensors"] = pooled.caught.tally.tensors
    row["resumes"] = resumes(name, dtype)
    across = groups_change(name, dtype)
    streaming = Pooled(streamed=True)
    _, _, streamed = train(name, dtype, range(STEPS), streaming)
    row["streams"] = streamed == plain
    row["across"] = across
    row["stream_steps"] = streaming.stream.steps
    row["bf16"] = kept(name, torch.bfloat16)
    try:
        row["fp32"] = kept(name, torch.float32)
    except Exception:  # noqa: BLE001 - some take bf16 weights only, and say so each in its own way
        row["fp32"] = None
    return row


def resumes(name: str, dtype: torch.dtype) -> bool | str:
    """Saved in the middle and loaded again, plain and caught: the same from there on, and all of it in the pool."""
    half = STEPS // 2
    optimizer, parameters, _ = train(name, dtype, range(half), plainly)
    checkpoint = saved(optimizer, parameters)
    pooled = Pooled()
    own, own_parameters, _ = train(name, dtype, range(half), pooled)
    own_checkpoint = saved(own, own_parameters)
    try:
        _, _, plain = train(name, dtype, range(half, STEPS), plainly, checkpoint)
    except Exception as failure:  # noqa: BLE001 - upstream's own loading fails: nothing to compare with
        return f"not without us: {type(failure).__name__}"
    again = Pooled()
    _, _, caught = train(name, dtype, range(half, STEPS), again, own_checkpoint)
    return caught == plain and not again.unaccounted()


def names() -> Iterator[str]:
    chosen = os.environ.get("OPTIMIZERS", "").split()
    yield from (name for name in optimizer_choices if not chosen or name in chosen)


def measured() -> dict[str, Any]:
    rows = {}
    for name in names():
        rows[name] = examine(name)
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    print(json.dumps(measured()))
