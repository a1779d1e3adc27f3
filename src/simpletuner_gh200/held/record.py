"""From a value that SimpleTuner cached to raw bytes and a layout, and back.

Only what comes back exactly as ``torch.load`` would return it is represented. Everything else raises
``Unrepresentable`` with a short reason, and is left to SimpleTuner's own load.

A layout is a tree of containers with tensors and plain values at the leaves, stored as JSON, one tagged list per node,
so that packs can be read by anyone and by any Python:

====================================  ====================================================================
``["T", dtype, shape, strides, at]``  a tensor; ``strides`` is null where it is contiguous, ``at`` counts bytes;
                                      a sixth element, ``true``, says that it requires grad
``["d", [[key, node], ...]]``         a dict, in order; keys are nodes that hold plain values
``["l", [node, ...]]``, ``["t", …]``  a list, a tuple
``["s", value]``, ``["b", hex]``      None, bool, int, float or str; bytes
====================================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from simpletuner_gh200.held.segment import Bytes, aligned

if TYPE_CHECKING:
    import torch


import json
import math
from dataclasses import field
from functools import cached_property, lru_cache

from simpletuner_gh200.errors import CacheError

Node = list[Any]


@dataclass(frozen=True)
class Leaf:
    """One tensor: where its bytes start in the payload, and what they are."""

    dtype: str
    """Without the ``torch.`` in front."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    grad: bool = False

    @property
    def node(self) -> Node:
        strides = None if self.strides is None else list(self.strides)
        return ["T", self.dtype, list(self.shape), strides, self.offset, *([True] if self.grad else [])]

    @cached_property
    def count(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def stacks(self) -> dict[int, Any]:
        """What ``batch`` knows of stacks of so many of these."""
        return {}


@dataclass(frozen=True)
class Layout:
    """A parsed layout. ``leaves`` are its tensors, in the order of the tree."""

    text: bytes
    build: Callable[[Callable[[Leaf], Any]], Any] = field(compare=False, repr=False)
    """Given what makes a tensor of a leaf: a fresh value, in which every container is new."""
    leaves: tuple[Leaf, ...] = field(compare=False)
    single: Leaf | None = field(compare=False)
    """The tensor, where the value is nothing but one."""
    named: dict[str, Leaf] = field(compare=False)
    """The tensors directly under a name, where the value is a dict."""


def dump(root: Node) -> bytes:
    return json.dumps(root, separators=(",", ":")).encode()


@lru_cache(maxsize=4096)
def parse(text: bytes) -> Layout:
    """Read a stored layout; CacheError where it isn't one. Those of a batch are compared by identity."""
    try:
        root = json.loads(text)
        leaves: list[Leaf] = []
        build = _builder(root, leaves)
        single = leaves[0] if root[0] == "T" else None
        return Layout(text, build, tuple(leaves), single, _named(root))
    except (ValueError, TypeError, IndexError, KeyError) as broken:
        raise CacheError(f"a stored layout is unreadable: {text[:80]!r}", remedy="rebuild the pack") from broken


def _leaf(node: Node) -> Leaf:
    _, dtype, shape, strides, offset, *grad = node
    return Leaf(dtype, tuple(shape), None if strides is None else tuple(strides), offset, bool(grad))


def _named(root: Node) -> dict[str, Leaf]:
    if root[0] != "d":
        return {}
    return {key[1]: _leaf(node) for key, node in root[1] if isinstance(key[1], str) and node[0] == "T"}


def _builder(node: Node, leaves: list[Leaf]) -> Callable[[Callable[[Leaf], Any]], Any]:
    """The tree as nested functions, made once per layout, since every hit runs them; its tensors go to ``leaves``."""
    kind, content = node[0], node[1]
    if kind == "T":
        leaf = _leaf(node)
        leaves.append(leaf)
        return lambda tensor: tensor(leaf)
    if kind == "d":
        pairs = [(_plain(key), _builder(child, leaves)) for key, child in content]
        return lambda tensor: {key: child(tensor) for key, child in pairs}
    if kind in ("l", "t"):
        children = [_builder(child, leaves) for child in content]
        if kind == "l":
            return lambda tensor: [child(tensor) for child in children]
        return lambda tensor: tuple(child(tensor) for child in children)
    if kind not in ("s", "b"):
        raise ValueError(f"unknown kind of node {kind!r}")
    value = _plain(node)
    return lambda tensor: value


def _plain(node: Node) -> Any:
    return bytes.fromhex(node[1]) if node[0] == "b" else node[1]


_PLAIN = (type(None), bool, int, float, str)


class Unrepresentable(Exception):
    """This value is not ours to hold; ``reason`` is what the statistics count it under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Record:
    """A value taken apart. ``pieces`` are (offset in the payload, bytes); gaps between them are padding."""

    layout: bytes
    size: int
    pieces: tuple[tuple[int, Bytes], ...]
    finite: bool
    """No NaN and no infinity in any tensor; false also where nobody looked."""


def encode(value: Any, *, look_for_nan: bool = False) -> Record:
    """Take ``value`` apart without copying tensor bytes that are on the CPU already."""
    encoder = _Encoder(look_for_nan)
    root = encoder.node(value)
    return Record(dump(root), encoder.size, tuple(encoder.pieces), look_for_nan and encoder.finite)


class _Encoder:
    def __init__(self, look_for_nan: bool) -> None:
        self.size = 0
        self.pieces: list[tuple[int, Bytes]] = []
        self.finite = True
        self._look = look_for_nan
        self._containers: set[int] = set()
        self._storages: list[tuple[int, int]] = []

    def node(self, value: Any) -> Node:
        import torch

        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind in _PLAIN:
            return ["s", value]
        if kind is bytes:
            return ["b", value.hex()]
        if kind not in (dict, list, tuple):
            raise Unrepresentable(f"type {kind.__module__}.{kind.__qualname__}")
        if kind is not tuple:
            self._once(value)
        if kind is dict:
            return ["d", [[self._key(key), self.node(child)] for key, child in value.items()]]
        return ["l" if kind is list else "t", [self.node(child) for child in value]]

    def _key(self, key: Any) -> Node:
        if type(key) not in (*_PLAIN, bytes):
            raise Unrepresentable(f"dict key of type {type(key).__qualname__}")
        return self.node(key)

    def _once(self, container: Any) -> None:
        """The same list at two places would come back as two lists."""
        if id(container) in self._containers:
            raise Unrepresentable("a container that appears twice")
        self._containers.add(id(container))

    def _tensor(self, tensor: torch.Tensor) -> Node:
        refuse_odd(tensor)
        start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
        self._apart(start, start + tensor.numel() * tensor.itemsize)
        flat = flat_bytes(tensor)
        if self._look and self.finite:
            self.finite = is_finite(flat, tensor.dtype)
        offset = aligned(self.size)
        self.size = offset + flat.nbytes
        self.pieces.append((offset, flat))
        strides = tuple(tensor.stride())
        kept = None if strides == contiguous_strides(tuple(tensor.shape)) else strides
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Leaf(dtype, tuple(tensor.shape), kept, offset, tensor.requires_grad).node

    def _apart(self, start: int, end: int) -> None:
        """Two tensors on the same bytes would come back as two copies."""
        if any(start < other_end and other < end for other, other_end in self._storages):
            raise Unrepresentable("tensors that share memory")
        self._storages.append((start, end))


def refuse_odd(tensor: torch.Tensor) -> None:
    """Anything about a tensor that bytes, dtype, shape and strides don't say."""
    import torch

    if tensor.layout is not torch.strided:
        raise Unrepresentable(f"layout {tensor.layout}")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise Unrepresentable("quantized, conjugate or negative view")
    if tensor.device.type == "meta":
        raise Unrepresentable("no data (meta device)")
    if not _dense(tuple(tensor.shape), tuple(tensor.stride())):
        raise Unrepresentable("strides with gaps or overlap")


def flat_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes in storage order; no copy where they are in host memory."""
    import torch

    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    array: Bytes = flat.cpu().view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return array


EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
    "complex64": (np.uint32, 0x7F800000),
    "complex128": (np.uint64, 0x7FF0000000000000),
}
"""Of each dtype: the word that holds a number, and its exponent bits, which are all set in NaN and infinity only."""


def is_finite(flat: Bytes, dtype: torch.dtype) -> bool:
    """What upstream asks of a latent before it uses it. A dtype that can't be asked counts as not finite.

    On the bits: torch would wake its thread pool for every entry, which while filling costs more than all the rest.
    """
    known = EXPONENTS.get(str(dtype).removeprefix("torch."))
    if known is None:
        return not dtype.is_floating_point
    word, exponent = known
    mask = word(exponent)
    return not bool(((flat.view(word) & mask) == mask).any())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Do the elements fill their range of memory exactly, in whatever order of dimensions?"""
    if 0 in shape:
        return True
    expected = 1
    for stride, length in sorted((stride, length) for stride, length in zip(strides, shape, strict=True) if length > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def tensor_maker(payload: Bytes) -> Callable[[Leaf], torch.Tensor]:
    """Makes tensors on ``payload`` itself; the payload lives as long as any of them."""
    return lambda leaf: tensor_on(payload, leaf, leaf.offset)


def copying_maker(payload: Bytes) -> Callable[[Leaf], torch.Tensor]:
    """Makes tensors that own their bytes. Copied by numpy: torch's thread pool would hang in a forked child."""
    import torch

    def copy(leaf: Leaf) -> torch.Tensor:
        end = leaf.offset + leaf.count * getattr(torch, leaf.dtype).itemsize
        return tensor_on(payload[leaf.offset : end].copy(), leaf, 0)

    return copy


def tensor_on(data: Bytes, leaf: Leaf, offset: int) -> torch.Tensor:
    """The tensor that ``leaf`` describes, on the bytes of ``data`` from ``offset``."""
    frombuffer, dtype = _torch_for(leaf.dtype)
    count, strides = leaf.count, leaf.strides
    if not count:
        return _empty(leaf, dtype)
    flat: torch.Tensor = frombuffer(data, dtype=dtype, count=count, offset=offset)
    made = flat.view(leaf.shape) if strides is None else flat.as_strided(leaf.shape, strides)
    return made.detach().requires_grad_() if leaf.grad else made


@cache
def _torch_for(dtype: str) -> tuple[Any, torch.dtype]:
    """Asked for once: every hit needs them, and importing anew and looking up by name costs as much as a small copy."""
    import torch

    return torch.frombuffer, getattr(torch, dtype)


def _empty(leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
    import torch

    made = torch.empty_strided(leaf.shape, leaf.strides or contiguous_strides(leaf.shape), dtype=dtype)
    return made.detach().requires_grad_() if leaf.grad else made
