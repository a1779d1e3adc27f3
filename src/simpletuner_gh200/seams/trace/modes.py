"""What is put over torch while a step is traced: meters of bytes and operations, and the guise of a Hopper GPU.

Meters count by storages, real and fake ones alike. The guise: a fake CUDA backward needs a visible device, and a
machine that plans has none. As far as memory goes two things make the difference between fake CPU tensors and those of
a GPU: which attention kernel is chosen, and which operations autocast runs in float32. Both are decided above autograd,
so a function mode can decide them as CUDA does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

# -- meters ------------------------------------------------------------------------------------------------


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Storage -> bytes, each counted once however many tensors look at it."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that were made while it is on and still live, and the most there ever were.

    ``known`` are storages that were there before: weights, and the batch.
    """

    def __init__(self, known: Collection[int] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = known
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class SavedBytes:
    """What autograd keeps for backward: each storage once, without those that are ``known``."""

    def __init__(self, known: Collection[int]) -> None:
        self.bytes = 0
        self._known = known
        self._held: dict[int, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._held.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage._cdata not in self._held:
            # Held while it is counted: its address must not be used again for another one.
            self._held[storage._cdata] = storage
            self.bytes += storage.nbytes()
        return tensor


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Floating point operations of matrix products, convolutions and attention.

    By torch's own formulas, but without its counter, which watches modules with hooks that keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=made))
        return made


# -- fake tensors ------------------------------------------------------------------------------------------


def into_fake(model: torch.nn.Module, mode: Any, *, device: str = "cpu") -> None:
    """Every parameter and buffer becomes a fake tensor; what was shared stays shared."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return made[id(tensor)]

    kept: list[Any] = []  # ids stay unique only while their objects live
    with mode:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                kept.append(parameter)
                module._parameters[name] = torch.nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                kept.append(buffer)
                module._buffers[name] = fake(buffer)


_CUDA_LIST = """
acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy
cumprod cumsum dist erfinv exp expm1 group_norm kl_div l1_loss layer_norm log log10 log1p log2 log_softmax
mse_loss norm pow __pow__ __rpow__ prod reciprocal renorm rsqrt sinh smooth_l1_loss softmax softmin softplus sum
tan __rdiv__ __rtruediv__
"""
_IN_FLOAT32 = frozenset(_CUDA_LIST.split())
"""CUDA autocast's list, as PyTorch documents it; the CPU's own list is shorter."""

_HALVES = (torch.bfloat16, torch.float16)


class LikeHopper(TorchFunctionMode):  # type: ignore[misc]
    """While it is on, CPU tensors take the attention kernels and the autocast rules of a Hopper GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return attention(*args, **kwargs)
        if name in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs)
        return func(*args, **kwargs)


class AllTrueMasks(TorchFunctionMode):  # type: ignore[misc]
    """A fake mask has no values, so what it selects has no length; ours select everything, and nothing is padding.

    What a model counts in them is then the number of ``tokens``.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and _selects_by_mask(args):
            return args[0].clone()
        if name == "__setitem__" and _selects_by_mask(args):
            # Padding is written where a mask has it: a row stands for however many there are.
            return func(args[0], torch.zeros(1, dtype=torch.long), args[2])
        if name in ("tolist", "item") and isinstance(args[0], FakeTensor):
            counted = self._tokens if not args[0].is_floating_point() else float(self._tokens)
            return counted if args[0].ndim == 0 else [counted] * len(args[0])
        return func(*args, **(kwargs or {}))


def _selects_by_mask(args: Any) -> bool:
    index = args[1]
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim == 1


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention without a mask and in half precision, the memory-efficient kernel otherwise."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    if enable_gqa and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is None and query.dtype in _HALVES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
