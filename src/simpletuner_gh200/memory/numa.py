"""Keeping memory on the CPU's own nodes: which nodes to use (pure), telling the kernel, and asking it.

Containers may be forbidden to: Docker's default filter of system calls refuses all four of these calls without
CAP_SYS_NICE. Memory then lands where the kernel likes, HBM included where that is a node.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger("simpletuner_gh200")

Call = Literal["mbind", "move_pages", "set_mempolicy", "get_mempolicy"]
NUMBERS: dict[Call, dict[str, int]] = {
    "mbind": {"x86_64": 237, "aarch64": 235},
    "move_pages": {"x86_64": 279, "aarch64": 239},
    "set_mempolicy": {"x86_64": 238, "aarch64": 237},
    "get_mempolicy": {"x86_64": 239, "aarch64": 236},
}
ALLOW = "in a container: docker run --cap-add SYS_NICE"
_MOST_SAMPLES = 1024
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_SYS = Path("/sys/devices/system/node")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Node:
    """One NUMA node. A node without CPUs is device memory (HBM) or an expander: never ours to fill."""

    index: int
    has_cpus: bool
    free: int
    cached: int = field(default=0, compare=False)
    total: int = field(default=0, compare=False)


def choose_nodes(nodes: Sequence[Node], *, near: int | None, device_node: int | None, size: int) -> tuple[int, ...]:
    """The node next to the GPU if the slab fits there, else every CPU node; the device's own node never."""
    cpu = [node for node in nodes if node.has_cpus and node.index != device_node]
    near_it = [node for node in cpu if node.index == near and node.free >= size]
    return tuple(node.index for node in near_it or cpu)


def read_nodes(root: Path = _SYS) -> tuple[Node, ...]:
    """The nodes that are online, as the kernel tells; empty where it doesn't."""
    found = (_node(folder) for folder in root.glob("node[0-9]*"))
    return tuple(sorted(found, key=lambda node: node.index))


def _node(folder: Path) -> Node:
    """The page cache counts as free, since it makes way; shared memory, which is in it, does not."""
    sizes = re.findall(r"(\w+):\s+(\d+) kB", (folder / "meminfo").read_text())
    of = {name: int(kib) * 1024 for name, kib in sizes}
    cached = of.get("FilePages", 0) - of.get("Shmem", 0)
    has_cpus = bool((folder / "cpulist").read_text().strip())
    return Node(int(folder.name[4:]), has_cpus, of.get("MemFree", 0) + cached, cached, of.get("MemTotal", 0))


def bind(address: int, size: int, *, near: int | None = None, device_node: int | None = None) -> str:
    """Bind fresh, untouched memory to the CPU nodes near a device; what became of it, for the record."""
    nodes = read_nodes()
    chosen = choose_nodes(nodes, near=near, device_node=device_node, size=size)
    if len(nodes) < 2:
        return "this machine has one memory node: nothing to choose"
    if not chosen:
        return "no memory node with CPUs was found"
    refused = _mbind(address, size, _MPOL_BIND, *_mask(chosen))
    return f"bound to {_listed(chosen)}" if refused is None else _warned_once(f"mbind refused: {refused}")


_warned: set[str] = set()


def _warned_once(reason: str) -> str:
    if reason not in _warned:
        _warned.add(reason)
        logger.warning("gh200: memory may land on any node, HBM included: %s; %s (said once)", reason, ALLOW)
    return reason


def stay_on_cpu_nodes(root: Path = _SYS) -> str | None:
    """Bind what this thread, and those it starts, will allocate; None where there is nothing to keep it off.

    Page cache and pinned memory follow the policy of whoever causes them. A policy that is there already (numactl) is
    somebody's wish and stays.
    """
    nodes = read_nodes(root)
    cpu = [node.index for node in nodes if node.has_cpus]
    if not cpu or len(cpu) == len(nodes):
        return None
    policy = ctypes.c_int(_MPOL_DEFAULT)
    refused = _read_policy(policy)
    if refused is None and policy.value != _MPOL_DEFAULT:
        return "a memory policy is set already (numactl?) and stays"
    refused = refused or _call("set_mempolicy", ctypes.c_int(_MPOL_BIND), *_mask(cpu))
    if refused is not None:
        return _warned_once(f"set_mempolicy refused: {refused}")
    return f"memory of this process stays on {_listed(cpu)}"


def refused_calls() -> dict[Call, str]:
    """Which of the calls the kernel refuses this process, and why: tried on a page of our own, nothing is changed."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page[0] = 1
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    answers: dict[Call, str | None] = {
        "get_mempolicy": _read_policy(ctypes.c_int()),
        "mbind": _mbind(place, mmap.PAGESIZE, _MPOL_DEFAULT, None, ctypes.c_ulong(0)),
        "move_pages": _places(place, [0], (ctypes.c_int * 1)()),
    }
    return {call: answer for call, answer in answers.items() if answer is not None}


def _read_policy(found: ctypes.c_int) -> str | None:
    return _call("get_mempolicy", ctypes.byref(found), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))


def _mbind(address: int, size: int, policy: int, mask: Any, bits: ctypes.c_ulong) -> str | None:
    span = ctypes.c_void_p(address), ctypes.c_ulong(size)
    return _call("mbind", *span, ctypes.c_int(policy), mask, bits, ctypes.c_uint(0))


def _places(address: int, offsets: Sequence[int], nodes: Any) -> str | None:
    """Fill in the node of each page. Without target nodes the call moves nothing and reports where pages are."""
    pages = (ctypes.c_void_p * len(offsets))(*(address + offset for offset in offsets))
    return _call("move_pages", ctypes.c_int(0), ctypes.c_ulong(len(offsets)), pages, None, nodes, ctypes.c_int(0))


def _mask(nodes: Sequence[int]) -> tuple[Any, ctypes.c_ulong]:
    """The nodes as bits, and how many bits to read: the kernel reads one less than it is told."""
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return mask, ctypes.c_ulong(words * 64 + 1)


def _call(name: Call, *arguments: Any) -> str | None:
    """None if the kernel did it, else why not."""
    number = NUMBERS[name].get(platform.machine())
    if number is None:
        return f"not known for {platform.machine()}"
    if _libc.syscall(ctypes.c_long(number), *arguments) >= 0:
        return None
    return os.strerror(ctypes.get_errno())


def nodes_of_pages(address: int, size: int, page: int) -> Counter[int]:
    """On which nodes the kernel has the pages of a range: node -> pages, sampled where there are many.

    Pages that were never touched are nowhere and not counted; empty where the kernel doesn't tell.
    """
    count = size // page
    if count == 0:
        return Counter()
    picked = range(0, count * page, -(-count // _MOST_SAMPLES) * page)
    status = (ctypes.c_int * len(picked))()
    if _places(address, picked, status) is not None:
        return Counter()
    return Counter(node for node in status if node >= 0)


def _listed(nodes: Sequence[int]) -> str:
    return f"CPU node{'s' if len(nodes) > 1 else ''} {', '.join(str(node) for node in nodes)}"
