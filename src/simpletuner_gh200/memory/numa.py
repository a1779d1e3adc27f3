"""Keeping slabs on the CPU's own memory nodes: which nodes to use (pure), telling the kernel, and asking it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_MOST_SAMPLES = 1024
_MPOL_BIND = 2
_SYS = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Node:
    """One NUMA node. A node without CPUs is device memory (HBM) or an expander: never ours to fill."""

    index: int
    has_cpus: bool
    free: int


@dataclass(frozen=True)
class Binding:
    """What became of a request to bind, for the record."""

    nodes: tuple[int, ...]
    bound: bool
    reason: str


def choose_nodes(nodes: Sequence[Node], *, near: int | None, device_node: int | None, size: int) -> tuple[int, ...]:
    """The node next to the GPU if the slab fits there, else every CPU node; the device's own node never."""
    cpu = [node for node in nodes if node.has_cpus and node.index != device_node]
    beside = [node for node in cpu if node.index == near and node.free >= size]
    return tuple(node.index for node in beside or cpu)


def read_nodes(root: Path = _SYS) -> tuple[Node, ...]:
    """The nodes that are online, as the kernel tells; empty where it doesn't."""
    found = []
    for folder in root.glob("node[0-9]*"):
        cpus = (folder / "cpulist").read_text().strip()
        found.append(Node(int(folder.name[4:]), bool(cpus), _free_bytes(folder / "meminfo")))
    return tuple(sorted(found, key=lambda node: node.index))


def _free_bytes(meminfo: Path) -> int:
    """Free, counting the page cache as free, since it makes way; shared memory, which is in it, does not."""
    parts = {"MemFree:": 1, "FilePages:": 1, "Shmem:": -1}
    kib = 0
    for line in meminfo.read_text().splitlines():
        words = line.split()
        if len(words) >= 4:
            kib += parts.get(words[2], 0) * int(words[3])
    return kib * 1024


def bind(address: int, size: int, *, near: int | None = None, device_node: int | None = None) -> Binding:
    """Bind fresh, untouched memory to the CPU nodes near a device. Says why where there is nothing to bind."""
    nodes = read_nodes()
    chosen = choose_nodes(nodes, near=near, device_node=device_node, size=size)
    if len(nodes) < 2:
        return Binding(chosen, False, "this machine has one memory node: nothing to choose")
    if not chosen:
        return Binding((), False, "no memory node with CPUs was found")
    return bind_to(address, size, chosen)


def bind_to(address: int, size: int, nodes: Sequence[int]) -> Binding:
    number = _MBIND.get(platform.machine())
    if number is None:
        return Binding(tuple(nodes), False, f"mbind is not known for {platform.machine()}")
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_MPOL_BIND))
    # The kernel reads maxnode - 1 bits.
    if libc.syscall(*arguments, mask, ctypes.c_ulong(words * 64 + 1), ctypes.c_uint(0)) != 0:
        return Binding(tuple(nodes), False, f"mbind refused: {os.strerror(ctypes.get_errno())}")
    return Binding(tuple(nodes), True, f"bound to CPU node{'s' if len(nodes) > 1 else ''} {_listed(nodes)}")


def nodes_of_pages(address: int, size: int, page: int) -> Counter[int]:
    """On which nodes the kernel has the pages of a range: node -> pages, sampled where there are many.

    Pages that were never touched are nowhere and not counted; empty where the kernel doesn't tell.
    """
    number = _MOVE_PAGES.get(platform.machine())
    count = size // page
    if number is None or count == 0:
        return Counter()
    picked = range(0, count, -(-count // _MOST_SAMPLES))
    places = (ctypes.c_void_p * len(picked))(*(address + index * page for index in picked))
    status = (ctypes.c_int * len(picked))()
    libc = ctypes.CDLL(None, use_errno=True)
    # Without target nodes it moves nothing and reports where pages are.
    arguments = (ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(len(picked)), places, None, status)
    if libc.syscall(*arguments, ctypes.c_int(0)) < 0:
        return Counter()
    return Counter(node for node in status if node >= 0)


def _listed(nodes: Sequence[int]) -> str:
    return ", ".join(str(node) for node in nodes)
