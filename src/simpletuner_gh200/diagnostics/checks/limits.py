"""GH307 to GH312: what the kernel and the container grant a process."""

from __future__ import annotations

import os
import re

from simpletuner_gh200.diagnostics.check import CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.mapping import LARGE_PAGE
from simpletuner_gh200.units import GIB, KIB, MIB, counted, format_bytes

_MORE_LOCKED = (
    "docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK; else /etc/security/limits.conf"
)

LEAST_FILES = 1024
GOOD_FILES = 16384
_MORE_FILES = "ulimit -n 65536, or docker run --ulimit nofile=65536:65536"

ENOUGH_SHARED = GIB
_MORE_SHARED = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}

_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage"


@check("GH307", "limit on locked memory")
def locked_memory(context: Context) -> CheckResult:
    """Slabs that the GPU copies from, and NCCL's buffers, are locked; containers often allow 64 KiB to 8 MiB."""
    limit = context.limit("Max locked memory")
    if limit is None:
        return passed("unlimited")
    shown = f"{format_bytes(limit)} may be locked"
    if context.has_device and context.driver.capabilities(0).host_page_tables:
        return warned(f"{shown}; registering slabs pins none on this device, NCCL's buffers may", _MORE_LOCKED)
    if limit >= 8 * GIB:
        return warned(f"{shown}; slabs beyond that can't be registered", _MORE_LOCKED)
    return failed(shown, _MORE_LOCKED) if context.nvidia_gpus or context.has_device else warned(shown, _MORE_LOCKED)


@check("GH308", "limit on open files")
def open_files(context: Context) -> CheckResult:
    """Staging workers, shared slabs, sockets between ranks and SimpleTuner's own readers each hold some open."""
    limit = context.limit("Max open files")
    if limit is None or limit >= GOOD_FILES:
        return passed("unlimited" if limit is None else f"{limit}")
    if limit < LEAST_FILES:
        return failed(f"{counted(limit, 'file')} may be open at once", _MORE_FILES)
    return warned(f"{limit} files may be open at once; staging with many workers wants {GOOD_FILES}", _MORE_FILES)


@check("GH309", "/dev/shm")
def shared_memory(context: Context) -> CheckResult:
    """NCCL and torch's workers meet there; Docker gives 64 MiB. Our own slabs are memfds: they don't need it,
    but the container's memory limit counts both.
    """
    size = _mounted_size(context)
    if size is None:
        return warned("/dev/shm is not mounted", _MORE_SHARED)
    if size < ENOUGH_SHARED:
        return warned(f"/dev/shm holds {format_bytes(size)}", _MORE_SHARED)
    return passed(f"/dev/shm holds {format_bytes(size)}")


def _mounted_size(context: Context) -> int | None:
    """Bytes that /dev/shm may hold: its size option, or what the kernel says where it has none."""
    for line in (context.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) > 3 and words[1] == "/dev/shm":
            found = re.search(r"\bsize=(\d+)([kmg]?)", words[3])
            if found:
                return int(found[1]) * _UNITS[found[2]]
            usage = os.statvfs(context.root / "dev/shm")
            return usage.f_blocks * usage.f_frsize
    return None


@check("GH310", "huge pages")
def huge_pages(context: Context) -> CheckResult:
    """The first touch of fresh small pages, not reading, is what limits how fast a dataset is staged."""
    if context.page_size >= LARGE_PAGE:
        return passed(f"none wanted: with {format_bytes(context.page_size)} pages a huge one is 512 MiB")
    mode = _chosen(context.read(f"{_HUGE_PAGES}/enabled"))
    if mode is None:
        return skipped("the kernel has no transparent huge pages")
    shared = _chosen(context.read(f"{_HUGE_PAGES}/shmem_enabled")) or "not available"
    shown = f"anonymous memory: {mode}; shared memory: {shared}"
    if mode == "never":
        fix = f"echo madvise > /{_HUGE_PAGES}/enabled as root: large slabs then cost far fewer page faults"
        return warned(shown, fix)
    return passed(shown)


def _chosen(text: str | None) -> str | None:
    """``always [madvise] never`` -> ``madvise``"""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


@check("GH311", "cores and staging workers")
def cores_for_workers(context: Context) -> CheckResult:
    """More workers than cores only take turns. A container's CPU quota counts, not what nproc of the host says."""
    usable = context.cores
    requested = (
        {name: block.num_workers for name, _folder, block in context.training.in_memory()} if context.training else {}
    )
    over = {name: workers for name, workers in requested.items() if workers and workers > usable}
    if over:
        shown = ", ".join(f"{name}: {workers}" for name, workers in over.items())
        fix = f"set num_workers to {usable}, or leave it out; or give the container more CPUs"
        return warned(f"{counted(usable, 'core')} may be used; num_workers asks for more ({shown})", fix)
    return passed(f"{counted(usable, 'core')} may be used")


@check("GH312", "memory placement calls")
def memory_policy_calls(context: Context) -> CheckResult:
    """Slabs are bound to the GPU's own CPU node, and each rank keeps its memory off HBM; containers may forbid
    the calls for it.
    """
    refused = context.refused_placement
    if not refused:
        return passed("mbind, move_pages and memory policies are allowed")
    shown = ", ".join(f"{call} ({why})" for call, why in refused.items())
    if len(context.nodes) < 2:
        return passed(f"refused, and not needed with one memory node: {shown}")
    return warned(
        f"refused: {shown}; slabs and pinned memory may land on any node, HBM included, unseen",
        "docker run --cap-add SYS_NICE (its default filter refuses these calls without), or a seccomp profile that "
        "allows them; Kubernetes: securityContext.capabilities.add: [SYS_NICE]",
    )
