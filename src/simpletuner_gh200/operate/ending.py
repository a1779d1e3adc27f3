"""How a run ended: one outcome, from which exit code, closing lines and ``--json`` are made.

For people lines of (label, text), made from a rank's summary and what lies in the output folder; `gh200 train` and the
demo share them. Where a run did not complete, one line says what happened, what is kept, and how to go on.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import switched_off
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.seams.preemption import ASKING, TRY_AGAIN
from simpletuner_gh200.units import counted, format_bytes, format_seconds
from simpletuner_gh200.upstream.checkpoints import flaw, newest_whole

Line = tuple[str, str]
"""(label, text)"""

TRAINING = "training"
"""The phase in which steps are lost that no checkpoint has."""
PHASES = {
    "prepare": "making the project",
    "import": "importing SimpleTuner",
    "configure": "reading the configuration",
    "models": "loading",
    "data": "datasets and caches",
    "model load": "loading",
    "train": TRAINING,
    "save": "checkpoints",
    "finish": "final weights",
    "process": "processes that begin and end",
    "total": "in all",
}
"""A phase of the summary, for people. Loading comes in two parts: encoders before the data, the model after it."""

_WEIGHTS = ("pytorch_lora_weights.safetensors", "pipeline", "model.safetensors")
"""Where SimpleTuner leaves what was trained, below the output folder: a LoRA, a whole model."""


# -- the outcome -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code to return, and each rank's summary."""

    exit_code: int
    summaries: list[dict[str, Any]] = field(default_factory=list)
    signal: int | None = None
    """What stopped it, where something did."""
    phase: str | None = None
    """What it was at last, in words; None if no rank got as far as to say so."""
    hurried: bool = False
    """Did a second signal ask for an end at once?"""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The first rank's; empty where none was left."""
        return self.summaries[0] if self.summaries else {}


def outcome_of(
    returned: int, interrupted: int | None, phases: Mapping[str, str], reported: Mapping[str, dict[str, Any]]
) -> Outcome:
    """Judged by what the ranks reported, not by the 0 alone that the process in the middle ``returned``.

    ``phases`` and summaries are those of each rank that was heard; ``interrupted``: by the first signal to stop it.
    """
    summaries = [reported[rank] for rank in sorted(reported, key=_rank_order)]
    phase = next((phases[rank] for rank in sorted(phases, key=_rank_order)), None)
    return Outcome(_exit_code(returned, interrupted, len(phases), summaries), summaries, interrupted, phase)


def _rank_order(rank: str) -> tuple[int, str]:
    """Ranks by their numbers, and those that have none behind them."""
    return (int(rank), rank) if rank.isdigit() else (1 << 30, rank)


def _exit_code(returned: int, interrupted: int | None, heard: int, summaries: list[dict[str, Any]]) -> int:
    completed = bool(summaries) and all(summary["status"] == "completed" for summary in summaries)
    failed = any(summary["status"] == "failed" for summary in summaries)
    if any(summary.get("exit_code") == TRY_AGAIN for summary in summaries):
        return TRY_AGAIN
    if interrupted in ASKING and completed and len(summaries) >= heard:
        return 0  # asked for a checkpoint and an end when both were there already
    if interrupted == signal.SIGUSR1:
        if not failed:
            return TRY_AGAIN
        returned, interrupted = 1, None  # a checkpoint that failed would fail again, as often as it is requeued
    if interrupted is not None:
        return 128 + interrupted
    if returned < 0:
        return 128 - returned
    if returned == 0 and (completed or (not summaries and switched_off())):
        return 0  # stock SimpleTuner leaves no summary
    # A rank's own code is truer than the launcher's, which knows only that something failed.
    return 2 if any(summary.get("exit_code") == 2 for summary in summaries) else returned or 1


def code_with_again_file(outcome: Outcome, file: Path | None) -> int:
    """For a scheduler that ends the other nodes at any code but 0: "try again" is a file instead."""
    if file is None or outcome.exit_code != TRY_AGAIN:
        return outcome.exit_code
    try:
        file.touch()
    except OSError as refused:
        raise UsageError(
            f"--again-file {file}: {refused}", remedy="name a file in a folder that is there, on a shared file system"
        ) from None
    return 0


# -- a run that did not complete -------------------------------------------------------------------------------


def closing_line(outcome: Outcome, *, output: Path | None, again: str, resumes: bool) -> str | None:
    """None for a run that completed. ``again``: the command that was given; ``resumes``: it asks for the checkpoint."""
    failed = next((summary for summary in outcome.summaries if summary["status"] == "failed"), None)
    if outcome.signal is not None and (failed is None or outcome.exit_code not in (1, 2)):
        return "; ".join(_interrupted(outcome, output, again, resumes=resumes))
    failed = failed or next((summary for summary in outcome.summaries if summary["status"] != "completed"), None)
    if failed is not None:
        # Some libraries give a page for a reason: its first line is ours, the others hang below it.
        reason = "\n  ".join(line.strip() for line in str(failed["reason"]).splitlines() if line.strip())
        return f"training {failed['status']}: {reason}"
    if outcome.exit_code:
        # 137 is what a shell and the kernel's OOM killer leave.
        killed = " (killed; the kernel does so when memory runs out: see dmesg)" if outcome.exit_code == 137 else ""
        return f"training failed: a rank exited without reporting why while {outcome.phase or 'starting'}{killed}"
    return None


def _interrupted(outcome: Outcome, output: Path | None, again: str, *, resumes: bool) -> Iterator[str]:
    summary, training = outcome.summary, outcome.phase == TRAINING
    if summary.get("status") == "completed":
        yield f"interrupted while {outcome.phase}"
        yield "training had completed and nothing of it is lost"
        return
    step, steps = summary.get("global_step"), summary.get("max_train_steps")
    stopped = "stopped after a checkpoint" if summary.get("exit_code") == TRY_AGAIN else "interrupted"
    at = f" at step {step} of {steps}" if training and steps else ""
    yield f"{stopped} while {outcome.phase or 'starting'}{at}"
    if not training:
        yield "nothing lost"
    pending = (summary.get("details") or {}).get("checkpoints", {}).get("pending")
    if pending and flaw(Path(pending)) is not None:
        yield f"{Path(pending).name} is not on disk yet"
    checkpoint = newest_whole(output) if output is not None else None
    if checkpoint:
        yield f"the last checkpoint is {checkpoint}"
    elif training:
        yield "there is no checkpoint yet"
    if checkpoint:
        yield f"resume with: {again}" + ("" if resumes else " --resume_from_checkpoint=latest")
    else:
        yield f"start again with: {again}"


# -- every run that trained ------------------------------------------------------------------------------------


def closing_lines(summary: Mapping[str, Any]) -> list[Line]:
    """Everything about a run whose training began; nothing about one that never got there."""
    refused = summary.get("exit_code") == UsageError.exit_code
    return list(_lines(summary)) if summary.get("output_dir") and not refused else []


def _lines(summary: Mapping[str, Any]) -> Iterator[Line]:
    done, wanted = summary.get("global_step", 0), summary.get("max_train_steps")
    yield "trained", f"{done} of {counted(wanted, 'optimizer step')}" if wanted else counted(done, "optimizer step")
    phases = {name: length for name, length in by_phase(summary.get("seconds", {})).items() if length >= 0.05}
    if phases:
        yield "time", ", ".join(f"{name} {format_seconds(length)}" for name, length in phases.items())
    details, output = summary.get("details", {}), str(summary["output_dir"])
    for name, lines in FEATURE_LINES.items():
        if details.get(name):
            yield from lines(details[name])
    for name, status in summary.get("features", {}).items():
        if status not in ("on", "off: not asked for"):  # what nobody asked for is not worth a line
            yield "feature", f"{name} is {status}"
    weights, checkpoint = _left_in(Path(output))
    if weights:
        yield "weights", weights
    if checkpoint:
        yield "last checkpoint", checkpoint
    if details.get("telemetry", {}).get("file"):
        yield "report", f"gh200 report {shlex.quote(output)}"


def by_phase(seconds: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase in words: phases of the same name together, those of no length left out."""
    shown: dict[str, float] = {}
    for phase, length in seconds.items():
        if isinstance(length, int | float) and 0 < length < 1e9:
            name = PHASES.get(phase, phase)
            shown[name] = shown.get(name, 0.0) + length
    return shown


def _left_in(output: Path) -> tuple[str | None, str | None]:
    """The weights, and the checkpoint that a next start resumes from."""
    weights = next((str(output / name) for name in _WEIGHTS if (output / name).exists()), None)
    checkpoint = newest_whole(output)
    return weights, str(checkpoint) if checkpoint is not None else None


def document(outcome: Outcome, output: Path | None, line: str | None) -> dict[str, Any]:
    """How a run ended, for scripts. ``line``: the last one to people, where it did not complete."""
    summary = outcome.summary
    weights, checkpoint = _left_in(output) if output is not None else (None, None)
    return {
        "ok": outcome.exit_code == 0,
        "exit_code": outcome.exit_code,
        "status": summary.get("status") or ("completed" if outcome.exit_code == 0 else "failed"),
        "reason": line,
        "global_step": summary.get("global_step"),
        "max_train_steps": summary.get("max_train_steps"),
        "output_dir": str(output) if output is not None else None,
        "weights": weights,
        "checkpoint": checkpoint,
        "telemetry": (summary.get("details") or {}).get("telemetry", {}).get("file"),
        "ranks": len(outcome.summaries),
        "seconds": summary.get("seconds", {}),
        "features": summary.get("features", {}),
    }


# -- what each feature did -------------------------------------------------------------------------------------


def _datasets(store: Mapping[str, Any]) -> Iterator[Line]:
    for name, held in store.items():
        # Only a dataset that was staged whole, and for this entry, has its size on disk in the summary.
        files = f"{format_bytes(held['bytes'])} of files in " if "bytes" in held else ""
        late = "" if held.get("arrived", True) else " (not all of it had arrived)"
        sizes = f"{files}{format_bytes(held['held_bytes'])} of memory{late}"
        trained = held.get("elsewhere_in_training")
        apart = "" if trained is None else f", {trained} of them during training"
        reads = f"{counted(held['served'], 'read')} from memory, {held['elsewhere']} from disk{apart}"
        yield "in-memory dataset", f"{name}: {counted(held['files'], 'file')}, {sizes}; {reads}"


def _caches(caches: Mapping[str, Any]) -> Iterator[Line]:
    for name, cache in caches.items():
        reads = cache["hits"] + cache["misses"]
        trained = cache.get("misses_in_training")
        apart = "" if trained is None else f", {counted(trained, 'file')} opened during training"
        served = f"{cache['hits']} of {counted(reads, 'read')} served without opening a file{apart}"
        held = f"{counted(cache['entries'], 'entry', 'entries')}, {format_bytes(cache['bytes'])}"
        yield "unified cache", f"{name}: {served if reads else 'nothing was read from it'}; {held}"


def _ramp(ramp: Mapping[str, Any]) -> Iterator[Line]:
    grown = " → ".join(f"{change['effective']} (step {change['step']})" for change in ramp["changes"])
    yield "batch ramp", f"effective batch {grown}; {counted(ramp['samples'], 'sample')}"


def _weights(weights: Mapping[str, Any]) -> Iterator[Line]:
    if weights.get("blocks"):
        brought, size = format_bytes(weights["streamed"]), format_bytes(weights["bytes"])
        yield (
            "blocks",
            f"{size} of {counted(weights['blocks'], 'block')} in Grace; {brought} copied ahead of use",
        )


def _gradients(gradients: Mapping[str, Any]) -> Iterator[Line]:
    if gradients.get("tensors"):
        yield "gradients", f"{format_bytes(gradients['bytes'])} of {counted(gradients['tensors'], 'tensor')} in Grace"


def _activations(activations: Mapping[str, Any]) -> Iterator[Line]:
    """What of the bytes that autograd saved went to CPU memory; views of one storage go once."""
    if activations.get("tensors"):
        moved, saved = format_bytes(activations["moved"]), format_bytes(activations["saved"])
        tensors = counted(activations["tensors"], "saved tensor")
        yield "activations", f"{moved} to CPU memory and back for {saved} of {tensors}"


def _checkpoints(found: Mapping[str, Any]) -> Iterator[Line]:
    if found.get("behind"):
        lost, behind = format_seconds(found["stall_s"]), format_seconds(found["drain_s"])
        waited = f", {format_seconds(found['waited_s'])} of it waiting for the disk" if found["waited_s"] else ""
        safe = f"the last one safe on disk is {Path(found['safe']).name}" if found["safe"] else "none was safe on disk"
        saved = f"{found['behind']} saved to memory: training lost {lost}{waited}"
        yield "checkpoints", f"{saved}; written to disk in {behind} behind it; {safe} when training ended"


def _caching(caching: Mapping[str, Any]) -> Iterator[Line]:
    if caching.get("pictures"):
        pictures, seconds = counted(caching["pictures"], "picture"), caching["seconds"]
        rate = f"{caching['pictures'] / max(seconds, 1e-6):.3g}/s with {counted(caching['workers'], 'worker')}"
        yield "caching", f"{pictures} in {format_seconds(seconds)}, {rate}"


def _memory(memory: Mapping[str, Any]) -> Iterator[Line]:
    if memory.get("moved"):
        yield "memory", f"moved to Grace when HBM ran out: {', '.join(move['what'] for move in memory['moved'])}"


FEATURE_LINES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Line]]] = {
    "store": _datasets,
    "caching": _caching,
    "caches": _caches,
    "ramp": _ramp,
    "memory": _memory,
    "weights": _weights,
    "gradients": _gradients,
    "activations": _activations,
    "checkpoints": _checkpoints,
}
"""What a feature's part of the summary says to people, in the order in which data goes through them."""
