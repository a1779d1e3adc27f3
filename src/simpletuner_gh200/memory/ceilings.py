"""How much memory may be taken, of what and by whom: every ceiling and every share, with its reason. Pure.

Facts about the machine are passed in. Whoever takes memory asks here first; nobody else keeps a number of his own.

====================  ==============================================  ==========================================
who                   may have                                        so that
====================  ==============================================  ==========================================
a staged dataset      its limit, or what the host can really give     the last page is never taken
all unified caches    their limit, or 80 % of what the host can give  SimpleTuner itself can grow
each cache            its need, small entries first                   a hit saves most where entries are small
a copy per GPU        80 % of what is free on the GPU's own node      what is no cache stays near, too
hot embeds in HBM     their limit, or 10 % of what is free            training comes first
idle batch buffers    2 GiB                                           a large bucket does not keep its buffers for ever
model state in Grace  so many times HBM, within its rank's share      a run ends with an error, not with a kill
                      of what the host can give
the doctor's trial    so many times HBM, in 90 % of all memory        a question never takes the machine down
====================  ==============================================  ==========================================

Below ``low_mark`` of available host memory, what is held for speed alone is given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simpletuner_gh200.memory.driver.interface import Capabilities
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import GIB, MIB, format_bytes, gib_to_bytes

STAGING_WORK = 256 * MIB
"""What staging may need besides what it holds; never given to the dataset."""

DATASET_HEADROOM = 0.02
"""Of the host, left free besides: a machine whose last page is taken does not page, it kills."""

CACHES_SHARE = 0.8
"""Of what the host can spare, when no limit is set: the rest is for SimpleTuner's own growth."""

NODE_SHARE = 0.8
"""Of what is free on one memory node: the rest is for everything that is not a cache."""

IDLE_BUFFERS = 2 * GIB
"""Batch buffers that nobody uses and that are kept to be used again."""

EMBEDS_SHARE = 0.1
"""Of the device memory that is free when the caches are ready, where no limit is set: training comes first."""

DEVICE_HEADROOM = 0.05
LEAST_DEVICE_HEADROOM = 2 * GIB
"""HBM we leave to torch and to fragmentation, beyond what is in use when we look."""

STATE_RESERVE = 2 * GIB
STATE_RESERVE_SHARE = 0.03
"""Of the host, beside model state: it is unswappable, so the kernel can only kill where nothing else is left."""

TRIAL_SHARE = 0.9
"""Of all memory that managed pages can be in, for an allocation that is made only to see whether it can be."""

LOW_SHARE = 0.03
LOW_AT_MOST = 8 * GIB
LOW_AT_LEAST = 256 * MIB


@dataclass(frozen=True)
class Allowance:
    """So many bytes, and why so many."""

    size: int
    why: str


# -- host memory -------------------------------------------------------------------------------------------


def dataset_allowance(limit_gb: float | None, host: HostMemory) -> Allowance:
    """Of one staged dataset: the lower of the configured limit and what the machine and its cgroups can give."""
    possible = max(host.available - STAGING_WORK - int(host.total * DATASET_HEADROOM), 0)
    if limit_gb is not None and gib_to_bytes(limit_gb) <= possible:
        return Allowance(gib_to_bytes(limit_gb), f"memory_limit_gb {limit_gb:g}")
    return Allowance(possible, f"{format_bytes(host.available)} by {host.limit}, less working memory and headroom")


def staging_must_stop(host: HostMemory) -> bool:
    """Has the machine so much less than it had when the staging began that it can't go on?"""
    return host.available < STAGING_WORK // 2


def caches_allowance(limit: int | None, available: int) -> int:
    """Of all unified caches of a node together; a limit is taken at its word."""
    return limit if limit is not None else int(available * CACHES_SHARE)


def divide(needs: Mapping[str, tuple[int, int]], allowed: int | None) -> dict[str, int | None]:
    """Share an allowance among caches: name -> (entries, bytes) becomes name -> bytes; None where nothing limits them.

    A hit saves an open and an unpickle whatever its size, so caches with small entries come first.
    """
    if allowed is None:
        return dict.fromkeys(needs, None)
    shares: dict[str, int | None] = {}
    left = allowed
    for name, (_entries, size) in sorted(needs.items(), key=lambda item: (item[1][1] / max(item[1][0], 1), item[0])):
        shares[name] = min(size, left)
        left -= min(size, left)
    # What is over is room to grow, the same for each.
    extra = left // max(len(needs), 1)
    return {name: (share or 0) + extra for name, share in shares.items()}


def node_allowance(free: int) -> int:
    """Of a copy of the caches on one memory node."""
    return int(free * NODE_SHARE)


def low_mark(total: int) -> int:
    """Available memory below which we give back: 3 % of what there is, within bounds that make sense."""
    return min(LOW_AT_MOST, max(LOW_AT_LEAST, int(total * LOW_SHARE)))


# -- device memory -----------------------------------------------------------------------------------------


def embeds_allowance(caps: Capabilities, free: int, limit: int | None) -> Allowance:
    """Of hot text embeds on the device: the limit or a share of what is free, if the headroom leaves that much."""
    if caps.mode == "none":
        return Allowance(0, "no CUDA device")
    if caps.integrated:
        return Allowance(0, "one physical pool: a device copy would be a second copy of the same memory")
    headroom = device_headroom(caps.device_total)
    spare = max(0, free - headroom)
    asked = limit if limit is not None else int(free * EMBEDS_SHARE)
    if asked < spare:
        return Allowance(asked, "hbm_limit_gb" if limit is not None else f"{EMBEDS_SHARE:.0%} of {format_bytes(free)}")
    return Allowance(spare, f"{format_bytes(free)} free less {format_bytes(headroom)} headroom")


def device_headroom(total: int) -> int:
    """HBM that is left to torch and to fragmentation."""
    return max(LEAST_DEVICE_HEADROOM, int(DEVICE_HEADROOM * total))


def state_reserve(host_total: int) -> int:
    """Host memory that model state never takes: what is pinned for it can't be paged out or given back."""
    return max(STATE_RESERVE, int(STATE_RESERVE_SHARE * host_total))


def state_allowance(
    *, ratio: float, device_total: int, host: HostMemory, claimed: int, ranks: int, beside: int | None = None
) -> Allowance:
    """Of one rank's optimizer state and EMA in Grace.

    At most ``uvm_oversubscription_ratio`` times HBM, and no more than its share of what the host can really give:
    ``claimed`` is what caches and datasets have been promised and not taken yet, ``beside`` what is free on the CPU
    node of the device, to which it is bound. Without a device only the host counts.
    """
    reserve = state_reserve(host.total)
    share = max(host.available - claimed - reserve, 0) // max(ranks, 1)
    if beside is not None and beside - reserve // 4 < min(share, int(ratio * device_total)):
        size = max(beside - reserve // 4, 0)
        return Allowance(size, f"{format_bytes(beside)} on the device's CPU node, less {format_bytes(reserve // 4)}")
    wanted = int(ratio * device_total)
    if device_total and wanted <= share:
        return Allowance(wanted, f"{ratio:g} x HBM")
    why = f"{format_bytes(host.available)} by {host.limit}, less {format_bytes(reserve)} reserve"
    if claimed:
        why += f" and {format_bytes(claimed)} promised to caches"
    return Allowance(share, why if ranks <= 1 else f"{why}, divided among {ranks} ranks")


def trial_size(scale: float, device_total: int) -> int:
    """Of the doctor's trial beyond HBM."""
    return int(scale * device_total)


def managed_room(caps: Capabilities, available: int) -> int:
    """Where managed pages can be: the host's available memory, and HBM where that is memory of its own."""
    return available + (0 if caps.integrated else caps.device_total)


def trial_fits(size: int, room: int) -> bool:
    """May the doctor allocate so much of ``managed_room`` to see whether it can be had?"""
    return size <= TRIAL_SHARE * room
