"""Every field of a run's telemetry file and its meaning: the reference page is made from it, records are tested by it.

A row is a path of names. ``*`` stands for a name of the run's own (a dataset, a cache, a key of the configuration); a
path that ends in it covers everything below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Field(NamedTuple):
    path: str
    meaning: str


START = (
    Field("kind", "`start`: the first record of a run and of each resume, repeated at the head of every further file"),
    Field("schema", "version of these records"),
    Field("time", "seconds since 1970"),
    Field("step", "optimizer step that the run starts from"),
    Field("max_steps", "`max_train_steps`"),
    Field("ranks", "processes that train together"),
    Field("rank", "which of them this is; beyond 0 in a file of its own, `telemetry.rankN.jsonl`"),
    Field("pid", "process that writes the file"),
    Field("host", "the machine's name"),
    Field("versions.*", "of Python, torch, SimpleTuner, this package and those around them"),
    Field("settings.*", "every key of ours: `value`, and its `origin` (default, environment, file, detected)"),
    Field("training.*", "SimpleTuner's own configuration, secrets hidden"),
    Field("command", "how the process was started, secrets hidden"),
    Field("seams.*", "each place in SimpleTuner: `ok`, or `off` and why"),
    Field("features.*", "each feature: `on`, or `off` and why"),
)
STEP = (
    Field("kind", "`step`: one per optimizer step"),
    Field("step", "number of the optimizer step"),
    Field("time", "seconds since 1970, when it ended"),
    Field("step_seconds", "wall time of the step"),
    Field("data_wait_seconds", "of it, waiting for batches to be ready"),
    Field("compute_seconds", "of it, from a ready batch to the end of `accelerator.accumulate`"),
    Field("save_seconds", "of it, writing checkpoints"),
    Field("other_seconds", "the rest: logging, validation"),
    Field("micro_batches", "forward and backward passes in the step, per rank"),
    Field("effective_batch", "samples in the step, over all ranks"),
    Field("samples_per_second", "over all ranks"),
    Field("loss", "`train_loss`, as SimpleTuner logs it"),
    Field("learning_rate", "the rate that was used"),
    Field("minor_faults", "page faults of the process so far that needed no disk"),
    Field("major_faults", "page faults of the process so far that did"),
    Field("slab_bytes", "bytes that all features hold in slabs"),
    Field("metrics.*", "what else of ours goes to the trackers, under the same names"),
    Field("host.available", "bytes that can still be taken: MemAvailable, or what the cgroup leaves"),
    Field("host.total", "bytes of host memory, or the cgroup's limit"),
    Field("host.resident", "bytes of this process in memory"),
    Field("host.shared", "of them, slabs that the ranks share"),
    Field("host.minor_faults", "as above"),
    Field("host.major_faults", "as above"),
    Field("device.total", "bytes of HBM, from NVML; all of `device` is there only with a GPU"),
    Field("device.used", "bytes of HBM in use, by anybody"),
    Field("device.free", "bytes of HBM that are free"),
    Field("device.reserved", "bytes that torch's allocator has taken"),
    Field("device.link_in_per_second", "bytes per second to the device, where NVML reports it"),
    Field("device.link_out_per_second", "bytes per second from the device"),
    Field("features.caches.*.hits", "entries served from memory"),
    Field("features.caches.*.misses", "entries that SimpleTuner read from its own files"),
    Field("features.caches.*.hit_rate", "hits as a share of both"),
    Field("features.caches.*.batched", "hits that went straight into a batch"),
    Field("features.caches.*.fallbacks.*", "entries left to SimpleTuner, by reason"),
    Field("features.caches.*.fill_seconds", "time spent filling the cache so far"),
    Field("features.caches.*.held_bytes", "bytes held"),
    Field("features.caches.*.staging_lead_seconds", "by how much a batch's copy to the device came before its use"),
    Field("features.store.*.served", "reads of an in-memory dataset that came from memory, in this process"),
    Field("features.store.*.elsewhere", "reads that went to disk: not staged, or changed since"),
    Field("features.store.*.mismatches", "reads whose checksum was wrong; the file is read from disk from then on"),
    Field("features.store.*.held_bytes", "bytes held, compressed"),
    Field("features.state.tensors", "tensors of optimizer state and EMA in the pool"),
    Field("features.state.bytes", "their bytes in Grace memory"),
    Field("features.state.hbm_bytes", "their bytes in HBM"),
    Field("features.state.oom_reserve.used", "bytes of `oom_reserve_gb` in use"),
    Field("features.state.oom_reserve.most", "the most that was in use"),
    Field("features.state.oom_reserve.times", "steps in which some of it was"),
    Field("features.activations.held_bytes", "Grace memory taken for saved tensors"),
    Field("features.activations.saved_bytes", "bytes that autograd saved in the step"),
    Field("features.activations.moved_bytes", "of them, bytes moved to Grace"),
    Field("features.activations.fetched_late", "tensors that backward had to wait for"),
    Field("features.activations.failed", "transfers that failed; what they were for is then kept on the device"),
    Field("features.activations.chosen", "what was chosen, and what it gained or lost"),
    Field("features.pressure.given_back", "how often memory was given back under pressure"),
)
END = (
    Field("kind", "`end`: the last record of a run that could still write one"),
    Field("time", "seconds since 1970"),
    Field("status", "`completed`, `interrupted` or `failed`"),
    Field("reason", "why, where it did not complete"),
    Field("step", "the last optimizer step"),
    Field("seconds.*", "wall time of each phase of the run"),
    Field("dropped", "records that could not be written"),
)
RECORDS: Mapping[str, tuple[Field, ...]] = {"start": START, "step": STEP, "end": END}


def undescribed(record: Mapping[str, Any]) -> list[str]:
    """The paths in a record that no row describes."""
    rows = RECORDS[str(record["kind"])]
    return [path for path in _paths(record) if not any(fnmatchcase(path, row.path) for row in rows)]


def _paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"
