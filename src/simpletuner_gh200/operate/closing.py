"""What a person wants to know when a run has ended: where things are, where the time went, what each feature did.

Lines of (label, text), made from a rank's summary and what lies in the output folder. `gh200 train` and the demo share
them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.operate.outcome import Outcome
from simpletuner_gh200.units import counted, format_bytes, format_seconds
from simpletuner_gh200.upstream.checkpoints import newest_whole

Lines = list[tuple[str, str]]
"""(label, text) pairs; none where there is nothing to say."""

PHASES = {
    "prepare": "making the project",
    "import": "importing SimpleTuner",
    "configure": "reading the configuration",
    "models": "loading",
    "data": "datasets and caches",
    "model load": "loading",
    "train": "training",
    "save": "checkpoints",
    "finish": "final weights",
    "total": "in all",
}
"""A phase of the summary, for people. Loading comes in two parts: encoders before the data, the model after it."""

WEIGHTS, CHECKPOINT = "weights", "last checkpoint"
_WEIGHTS = ("pytorch_lora_weights.safetensors", "pipeline", "model.safetensors")
"""Where SimpleTuner leaves what was trained, below the output folder: a LoRA, a whole model."""


def closing_lines(summary: Mapping[str, Any]) -> Lines:
    """Everything about a run whose training began; nothing about one that never got there."""
    output = summary.get("output_dir")
    if not output:
        return []
    done, wanted = summary.get("global_step", 0), summary.get("max_train_steps")
    steps = f"{done} of {counted(wanted, 'optimizer step')}" if wanted else counted(done, "optimizer step")
    trained = [("trained", steps)]
    return [
        *trained,
        *time_split(summary.get("seconds", {})),
        *feature_lines(summary.get("details", {})),
        *lost_features(summary.get("features", {})),
        *file_lines(Path(output)),
        *report_lines(summary),
    ]


def document(outcome: Outcome, output: Path | None, said: str | None) -> dict[str, Any]:
    """How a run ended, for scripts. ``said``: the last line to people, where it did not complete."""
    summary = outcome.summary
    files = dict(file_lines(output)) if output is not None else {}
    return {
        "ok": outcome.exit_code == 0,
        "exit_code": outcome.exit_code,
        "status": summary.get("status") or ("completed" if outcome.exit_code == 0 else "failed"),
        "reason": said,
        "global_step": summary.get("global_step"),
        "max_train_steps": summary.get("max_train_steps"),
        "output_dir": str(output) if output is not None else None,
        "weights": files.get(WEIGHTS),
        "checkpoint": files.get(CHECKPOINT),
        "telemetry": (summary.get("details") or {}).get("telemetry", {}).get("file"),
        "ranks": len(outcome.summaries),
        "seconds": summary.get("seconds", {}),
        "features": summary.get("features", {}),
    }


def by_phase(seconds: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase in words: phases of the same name together, those of no length left out."""
    shown: dict[str, float] = {}
    for phase, length in seconds.items():
        if isinstance(length, int | float) and 0 < length < 1e9:
            name = PHASES.get(phase, phase)
            shown[name] = shown.get(name, 0.0) + length
    return shown


def time_split(seconds: Mapping[str, float]) -> Lines:
    parts = [f"{name} {format_seconds(length)}" for name, length in by_phase(seconds).items() if length >= 0.05]
    return [("time", ", ".join(parts))] if parts else []


# -- where things are ----------------------------------------------------------------------------------


def file_lines(output: Path) -> Lines:
    """The weights, and the checkpoint that a next start resumes from."""
    lines = [(WEIGHTS, str(output / name)) for name in _WEIGHTS if (output / name).exists()][:1]
    last = newest_whole(output)
    return [*lines, *([(CHECKPOINT, str(last))] if last is not None else [])]


def report_lines(summary: Mapping[str, Any]) -> Lines:
    """How to look at the run, where it was recorded."""
    if not summary.get("details", {}).get("telemetry", {}).get("file"):
        return []
    return [("report", f"gh200 report {shlex.quote(str(summary['output_dir']))}")]


# -- what each feature did -----------------------------------------------------------------------------


def lost_features(features: Mapping[str, str]) -> Lines:
    """Features that were wanted and are off, with the reason; what nobody asked for is not worth a line."""
    wanted = {name: status for name, status in features.items() if status not in ("on", "off: not asked for")}
    return [("feature", f"{name} is {status}") for name, status in wanted.items()]


def _datasets(store: Mapping[str, Any]) -> Lines:
    lines = []
    for name, held in store.items():
        # Only a dataset that was staged whole, and for this entry, has its size on disk in the summary.
        files = f"{format_bytes(held['bytes'])} of files in " if "bytes" in held else ""
        late = "" if held.get("arrived", True) else " (not all of it had arrived)"
        sizes = f"{files}{format_bytes(held['held_bytes'])} of memory{late}"
        reads = f"{counted(held['served'], 'read')} from memory, {held['elsewhere']} from disk"
        lines.append(("in-memory dataset", f"{name}: {counted(held['files'], 'file')}, {sizes}; {reads}"))
    return lines


def _caches(caches: Mapping[str, Any]) -> Lines:
    lines = []
    for name, cache in caches.items():
        asked = cache["hits"] + cache["misses"]
        served = (
            f"{cache['hits']} of {counted(asked, 'read')} served without opening a file"
            if asked
            else "nothing was read from it"
        )
        held = f"{counted(cache['entries'], 'entry', 'entries')}, {format_bytes(cache['bytes'])}"
        lines.append(("unified cache", f"{name}: {served}; {held}"))
    return lines


def _ramp(ramp: Mapping[str, Any]) -> Lines:
    if not ramp:
        return []
    grown = " → ".join(f"{change['effective']} (step {change['step']})" for change in ramp["changes"])
    return [("batch ramp", f"effective batch {grown}; {counted(ramp['samples'], 'sample')}")]


def _pressure(pressure: Mapping[str, Any]) -> Lines:
    given = pressure.get("given_back", [])
    return [("memory", f"ran short {counted(len(given), 'time')}; caches gave back what they could")] if given else []


def _activations(activations: Mapping[str, Any]) -> Lines:
    """What of the bytes that autograd saved went to CPU memory; views of one storage go once."""
    if not activations.get("tensors"):
        return []
    moved, saved = format_bytes(activations["moved"]), format_bytes(activations["saved"])
    looked = counted(activations["tensors"], "saved tensor")
    return [("activations", f"{moved} to CPU memory and back for {saved} of {looked}")]


FEATURE_LINES: tuple[tuple[str, Callable[[Mapping[str, Any]], Lines]], ...] = (
    ("store", _datasets),
    ("caches", _caches),
    ("ramp", _ramp),
    ("activations", _activations),
    ("pressure", _pressure),
)
"""(feature, what its part of the summary says to people), in the order in which data goes through them."""


def feature_lines(details: Mapping[str, Any]) -> Lines:
    return [line for name, lines in FEATURE_LINES for line in lines(details.get(name) or {})]
