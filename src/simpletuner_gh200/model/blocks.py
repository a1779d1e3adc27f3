"""The repeated blocks of a model, and which of their parameters may leave the device between two uses."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from simpletuner_gh200.memory.lane import spot_of
from simpletuner_gh200.model.tensors import move_to, owns_its_storage, size_of

ALIGNMENT = 512
"""As torch's own allocator on a device, so that kernels find what they would find without us."""
NESTED_SHARE = 0.5
"""Where lists inside a block hold more of its bytes than this, their elements are the blocks."""

_VERSION = operator.attrgetter("_version")

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class BlockWeight:
    """One parameter of a block: where it begins in a slot, and its home."""

    def __init__(self, parameter: nn.Parameter, offset: int) -> None:
        self.parameter = parameter
        self.offset = offset
        self.size = size_of(parameter)
        self.layout: Layout = parameter.dtype, parameter.size(), parameter.stride()
        self.settle()

    def settle(self) -> None:
        """Home is where the parameter is now. RuntimeError where it has become another kind of tensor."""
        home = self.parameter.data
        if (home.dtype, home.size(), home.stride()) != self.layout:
            raise RuntimeError(f"a weight of {self.layout[0]} became {home.dtype} with strides {home.stride()}")
        self.home, self.address, self.spot = home, home.data_ptr(), spot_of(home)

    def move(self, home: torch.Tensor) -> None:
        """It lives there from now on; nothing of where it lived is held."""
        move_to(self.parameter, home)
        self.settle()


@dataclass(eq=False)
class ModelBlock:
    """One element of a list of like blocks: what is copied together."""

    name: str
    module: nn.Module
    pieces: list[BlockWeight] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Of its pieces."""
    size: int = 0
    """Of its pieces in a slot, one behind the other."""
    offsets: list[int] = field(default_factory=list)
    layouts: tuple[Layout, ...] = ()
    """The same object in blocks of one kind."""

    def add(self, parameter: nn.Parameter) -> None:
        piece = BlockWeight(parameter, self.size)
        self.pieces.append(piece)
        self.parameters.append(parameter)
        self.offsets.append(piece.offset)
        self.layouts += (piece.layout,)
        self.size += -(-piece.size // ALIGNMENT) * ALIGNMENT

    def places(self) -> list[int]:
        """Where each of its parameters points."""
        return list(map(torch.Tensor.data_ptr, self.parameters))

    def versions(self) -> list[int]:
        """Of its parameters. A change in place raises one, unless it is made through ``.data``."""
        return list(map(_VERSION, self.parameters))


def find_blocks(models: Iterable[nn.Module], smallest: int = 0) -> list[ModelBlock]:
    """In the order of the models' own lists. Parameters below ``smallest`` bytes stay on the device.

    So do those that are no plain tensors, that other modules share (tied weights), or that are views of something.
    """
    models = list(models)
    found, seen, kinds = list[ModelBlock](), set[int](), dict[tuple[Layout, ...], tuple[Layout, ...]]()
    owners = Counter(id(parameter) for module in _modules(models) for parameter in _own(module))
    plain = {id(one): one for module in _modules(models) for one in _own(module) if type(one) is nn.Parameter}
    storages = Counter(one.untyped_storage()._cdata for one in plain.values())
    for model in models:
        for name, element in _elements(model):
            if id(element) in seen:
                continue
            seen.add(id(element))
            block = ModelBlock(name, element)
            for module in element.modules():
                for parameter in _own(module):
                    if owners[id(parameter)] == 1 and _may_leave(parameter, smallest, storages):
                        block.add(parameter)
            if block.pieces:
                block.layouts = kinds.setdefault(block.layouts, block.layouts)
                found.append(block)
    return found


def without_plain_weights(blocks: Iterable[ModelBlock]) -> str | None:
    """Why these blocks, as they were found, are not worth bringing; None where they are."""
    blocks = list(blocks)
    if not blocks:
        return "no block of the model has weights that are plain tensors of uvm_min_tensor_kb or more, and its own"
    wrapped = Counter[str]()
    for parameter in {id(one): one for block in blocks for one in block.module.parameters()}.values():
        if not _is_plain(parameter):
            wrapped[type(parameter.data).__name__] += size_of(parameter)
    if wrapped.total() > sum(piece.size for block in blocks for piece in block.pieces):
        return f"most bytes of the blocks are quantised, and in {', '.join(wrapped)}: not one plain tensor each"
    return None


def _modules(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    seen = set[int]()
    for model in models:
        for module in model.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _elements(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not _alike(child):
            yield from _elements(child, f"{path}.")
            continue
        for number, element in child.named_children():
            inner = list(_elements(element, f"{path}.{number}."))
            nested = sum(_bytes(one) for _name, one in inner)
            yield from inner if nested > NESTED_SHARE * _bytes(element) else [(f"{path}.{number}", element)]


def _alike(module: nn.Module) -> bool:
    """A list of modules of one class, which are made of others."""
    if not isinstance(module, nn.ModuleList) or not len(module):
        return False
    return len({type(element) for element in module}) == 1 and any(True for _ in module[0].children())


def _bytes(module: nn.Module) -> int:
    return sum(size_of(parameter) for parameter in module.parameters())


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor


def _may_leave(parameter: nn.Parameter, smallest: int, storages: Counter[int]) -> bool:
    if not _is_plain(parameter):
        return False
    if parameter.layout is not torch.strided or parameter.is_meta or not size_of(parameter):
        return False
    alone = storages[parameter.untyped_storage()._cdata] == 1 and owns_its_storage(parameter)
    return alone and size_of(parameter) >= smallest
