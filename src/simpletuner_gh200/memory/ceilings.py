"""How much memory may be taken, of what and by whom: every ceiling and every share, with its reason. Pure.

Facts about the machine are passed in. Whoever takes memory asks here first; nobody else keeps a number of his own.

====================  ==============================================  ==========================================
who                   may have                                        so that
====================  ==============================================  ==========================================
a staged dataset      its limit, or what the host can really give     the last page is never taken
all unified caches    their limit, or 80 % of what the host can give  SimpleTuner itself can grow
both, in one pool     what half of all memory leaves them together    the GPU, which lives in it, has the other half
each cache            its need, small entries first                   a hit saves most where entries are small
a checkpoint          what its memory file system has free, less      the run can grow
                      3 % of the host
pictures in flight    their limit, or a fifth of what is free         data sets and caches come first
idle batch buffers    2 GiB                                           a large bucket does not keep its buffers for ever
model state in Grace  so many times HBM, within its rank's share      a run ends with an error, not with a kill
                      of what the host can give
saved activations     their limit, or half of what is free, by ranks  optimizer state and caches live there, too
the same, in HBM      what is free, less a step's needs and a reserve nothing else is pushed out
the doctor's trial    so many times HBM, in 90 % of all memory        a question never takes the machine down
====================  ==============================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simpletuner_gh200.memory.driver.interface import Capabilities
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import GIB, MIB, counted, format_bytes, gib_to_bytes

STAGING_WORK = 256 * MIB
"""What staging may need besides what it holds; never given to the dataset."""

DATASET_HEADROOM = 0.02
"""Of the host, left free besides: a machine whose last page is taken does not page, it kills."""

CACHES_SHARE = 0.8
"""Of what the host can spare, when no limit is set: the rest is for SimpleTuner's own growth."""

GPU_SHARE = 0.5
"""Of a pool that CPU and GPU share, kept for the model, its gradients, its optimizer and its activations."""

IDLE_BUFFERS = 2 * GIB
"""Batch buffers that nobody uses and that are kept to be used again."""

DEVICE_HEADROOM = 0.05
LEAST_DEVICE_HEADROOM = 2 * GIB
"""HBM we leave to torch and to fragmentation, beyond what is in use when we look."""

STATE_RESERVE = 2 * GIB
STATE_RESERVE_SHARE = 0.03
"""Of the host, beside model state: it is unswappable, so the kernel can only kill where nothing else is left."""

ACTIVATIONS_SHARE = 0.5
"""Of the host memory that is free when training begins, for all ranks of a node together, where no limit is set."""

PICTURES_SHARE = 0.2
"""Of what is free when a data set's pictures are to be encoded, for all ranks of a node together."""

TRIAL_SHARE = 0.9
"""Of all memory that managed pages can be in, for an allocation that is made only to see whether it can be."""

LOW_SHARE = 0.03
LOW_AT_MOST = 8 * GIB
LOW_AT_LEAST = 256 * MIB
"""Of available host memory that a checkpoint in memory leaves to the run."""
END_SHARE = 0.02
"""Of a single pool: the point at which nothing responds any more is below it."""


@dataclass(frozen=True)
class Allowance:
    """So many bytes, and why so many."""

    size: int
    why: str


# -- host memory -------------------------------------------------------------------------------------------


def dataset_allowance(limit_gb: float | None, host: HostMemory, *, single_pool: bool = False) -> Allowance:
    """Of one staged dataset: the lower of the configured limit and what the machine and its cgroups can give.

    In a pool shared with the GPU a dataset without a limit leaves the GPU its share; a limit is the user's own word.
    """
    if single_pool and limit_gb is None:
        left = _beside_gpu(host)
        return Allowance(left, f"{format_bytes(host.available)} available, half of all memory kept for the GPU")
    possible = max(host.available - STAGING_WORK - int(host.total * DATASET_HEADROOM), 0)
    if limit_gb is not None and gib_to_bytes(limit_gb) <= possible:
        return Allowance(gib_to_bytes(limit_gb), f"memory_limit_gb {limit_gb:g}")
    return Allowance(possible, f"{format_bytes(host.available)} by {host.limit}, less working memory and headroom")


def staging_must_stop(host: HostMemory) -> bool:
    """Has the machine so much less than it had when the staging began that it can't go on?"""
    return host.available < STAGING_WORK // 2


def caches_allowance(limit: int | None, host: HostMemory, *, single_pool: bool = False) -> int:
    """Of all unified caches of a node together; a limit is taken at its word."""
    if limit is not None:
        return limit
    share = int(host.available * CACHES_SHARE)
    return min(share, _beside_gpu(host)) if single_pool else share


def _beside_gpu(host: HostMemory) -> int:
    """What is taken already is not ``available`` any more: so the share holds for datasets and caches together."""
    return max(0, host.available - int(host.total * GPU_SHARE))


def divide(needs: Mapping[str, tuple[int, int]], allowed: int) -> dict[str, int]:
    """Share an allowance among caches: name -> (entries, bytes) becomes name -> bytes.

    A hit saves an open and an unpickle whatever its size, so caches with small entries come first.
    """
    shares: dict[str, int] = {}
    left = allowed
    for name, (_entries, size) in sorted(needs.items(), key=lambda item: (item[1][1] / max(item[1][0], 1), item[0])):
        shares[name] = min(size, left)
        left -= min(size, left)
    # What is over is room to grow, the same for each.
    extra = left // max(len(needs), 1)
    return {name: share + extra for name, share in shares.items()}


def activations_allowance(limit_gb: float | None, host: HostMemory, ranks: int) -> Allowance:
    """Of one rank's saved activations in Grace: its limit, or its part of a share, never more than there is."""
    spare = max(host.available - int(host.total * DATASET_HEADROOM), 0)
    if limit_gb is not None and gib_to_bytes(limit_gb) <= spare:
        return Allowance(gib_to_bytes(limit_gb), f"activation_limit_gb {limit_gb:g}")
    if limit_gb is not None:
        return Allowance(
            spare, f"activation_limit_gb {limit_gb:g} is more than {format_bytes(spare)}, all that is left"
        )
    share = int(spare * ACTIVATIONS_SHARE) // max(ranks, 1)
    return Allowance(share, f"{ACTIVATIONS_SHARE:.0%} of {format_bytes(spare)}, for {counted(max(ranks, 1), 'rank')}")


def checkpoint_allowance(free: int, host: HostMemory) -> Allowance:
    """Of a checkpoint that is saved to memory, on a file system with so much ``free``."""
    spare = max(host.available - low_mark(host.total), 0)
    if free <= spare:
        return Allowance(free, f"{format_bytes(free)} free on the memory file system")
    return Allowance(
        spare, f"{format_bytes(host.available)} by {host.limit}, less {format_bytes(low_mark(host.total))}"
    )


def pictures_allowance(limit_gb: float | None, host: HostMemory, ranks: int) -> int:
    """Of one rank's decoded pictures that the VAE has not had yet; a limit is taken at its word."""
    whole = gib_to_bytes(limit_gb) if limit_gb is not None else int(host.available * PICTURES_SHARE)
    return whole // max(ranks, 1)


def low_mark(total: int) -> int:
    """Available memory that counts as low: 3 % of what there is, within bounds that make sense."""
    return min(LOW_AT_MOST, max(LOW_AT_LEAST, int(total * LOW_SHARE)))


def end_mark(total: int) -> int:
    """Available memory of a single pool below which a run ends by itself."""
    return min(LOW_AT_MOST // 2, max(LOW_AT_LEAST // 2, int(total * END_SHARE)))


# -- device memory -----------------------------------------------------------------------------------------


def device_headroom(total: int) -> int:
    """HBM that is left to torch and to fragmentation."""
    return max(LEAST_DEVICE_HEADROOM, int(DEVICE_HEADROOM * total))


def state_reserve(host_total: int) -> int:
    """Host memory that model state never takes: what is pinned for it can't be paged out or given back."""
    return max(STATE_RESERVE, int(STATE_RESERVE_SHARE * host_total))


def state_allowance(
    *, ratio: float, device_total: int, host: HostMemory, claimed: int, ranks: int, on_node: int | None = None
) -> Allowance:
    """Of one rank's optimizer state and EMA in Grace.

    At most ``uvm_oversubscription_ratio`` times HBM, and no more than its share of what the host can really give:
    ``claimed`` is what caches and datasets have been promised and not taken yet, ``on_node`` what is free on the CPU
    node of the device, to which it is bound. Without a device only the host counts.
    """
    reserve = state_reserve(host.total)
    share = max(host.available - claimed - reserve, 0) // max(ranks, 1)
    if on_node is not None and on_node - reserve // 4 < min(share, int(ratio * device_total)):
        size = max(on_node - reserve // 4, 0)
        return Allowance(size, f"{format_bytes(on_node)} on the device's CPU node, less {format_bytes(reserve // 4)}")
    wanted = int(ratio * device_total)
    if device_total and wanted <= share:
        return Allowance(wanted, f"{ratio:g} x HBM")
    why = f"{format_bytes(host.available)} by {host.limit}, less {format_bytes(reserve)} reserve"
    if claimed:
        why += f" and {format_bytes(claimed)} promised to datasets and caches"
    return Allowance(share, why if ranks <= 1 else f"{why}, divided among {ranks} ranks")


def activations_reserve(limit_gb: float | None, device_total: int) -> int:
    """HBM that saved activations leave alone whatever is free."""
    return device_headroom(device_total) if limit_gb is None else gib_to_bytes(limit_gb)


def activations_room(free: int, total: int, needs: int, reserve: int) -> int:
    """HBM for saved activations, of what is free before a step that ``needs`` so much besides them."""
    return max(min(free, total) - needs - reserve, 0)


def trial_room(caps: Capabilities, available: int) -> int:
    """What the doctor may allocate to see whether it can be had: of host memory, and of HBM where that is apart."""
    return int(TRIAL_SHARE * (available + (0 if caps.integrated else caps.device_total)))
