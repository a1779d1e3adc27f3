"""How a cached value looks, apart from its bytes: a tree of containers with tensors and plain values at the leaves.

Stored as JSON, one tagged list per node, so that packs can be read by anyone and by any Python:

====================================  ====================================================================
``["T", dtype, shape, strides, at]``  a tensor; ``strides`` is null where it is contiguous, ``at`` counts bytes;
                                      a sixth element, ``true``, says that it requires grad
``["d", [[key, node], ...]]``         a dict, in order; keys are nodes that hold plain values
``["l", [node, ...]]``, ``["t", …]``  a list, a tuple
``["s", value]``, ``["b", hex]``      None, bool, int, float or str; bytes
====================================  ====================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

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
        leaves = tuple(_leaves(root))
        single = leaves[0] if root[0] == "T" else None
        return Layout(text, _builder(root), leaves, single, _named(root))
    except (ValueError, TypeError, IndexError, KeyError) as broken:
        raise CacheError(f"a stored layout is unreadable: {text[:80]!r}", remedy="rebuild the pack") from broken


def _leaf(node: Node) -> Leaf:
    _, dtype, shape, strides, offset, *grad = node
    return Leaf(dtype, tuple(shape), None if strides is None else tuple(strides), offset, bool(grad))


def _leaves(node: Node) -> Iterator[Leaf]:
    kind = node[0]
    if kind == "T":
        yield _leaf(node)
    elif kind == "d":
        for _, child in node[1]:
            yield from _leaves(child)
    elif kind in ("l", "t"):
        for child in node[1]:
            yield from _leaves(child)
    elif kind not in ("s", "b"):
        raise ValueError(f"unknown kind of node {kind!r}")


def _named(root: Node) -> dict[str, Leaf]:
    if root[0] != "d":
        return {}
    return {key[1]: _leaf(node) for key, node in root[1] if isinstance(key[1], str) and node[0] == "T"}


def _builder(node: Node) -> Callable[[Callable[[Leaf], Any]], Any]:
    """The tree as nested functions, made once per layout, since every hit runs them."""
    kind, content = node[0], node[1]
    if kind == "T":
        leaf = _leaf(node)
        return lambda tensor: tensor(leaf)
    if kind == "d":
        pairs = [(_plain(key), _builder(child)) for key, child in content]
        return lambda tensor: {key: child(tensor) for key, child in pairs}
    if kind in ("l", "t"):
        children = [_builder(child) for child in content]
        if kind == "l":
            return lambda tensor: [child(tensor) for child in children]
        return lambda tensor: tuple(child(tensor) for child in children)
    value = _plain(node)
    return lambda tensor: value


def _plain(node: Node) -> Any:
    return bytes.fromhex(node[1]) if node[0] == "b" else node[1]
