"""What the demo tells people in the end: lines made from its JSON, a function for each thing worth a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.units import format_bytes, format_seconds

Result = Mapping[str, Any]
Lines = list[tuple[str, str]]
"""(label, text) pairs; none where there is nothing to say."""


def what_ran(result: Result) -> Lines:
    versions = f"SimpleTuner {result['simpletuner']}, torch {result['torch']}, Python {result['python']}"
    return [("ran", versions), ("trained", f"{result['global_step']} optimizer steps of a LoRA on a tiny SDXL")]


def where_the_time_went(result: Result) -> Lines:
    return [("seconds", "  ".join(f"{name} {format_seconds(value)}" for name, value in result["seconds"].items()))]


def seams_and_features(result: Result) -> Lines:
    """What is in place and on, and each that is not, with its reason."""
    seams = result["seams"]
    holding = [name for name, status in seams.items() if status == "ok"]
    lines = [("seams", f"{len(holding)} of {len(seams)} in place: {', '.join(holding)}")]
    lines += [("seam", f"{name} is {status}") for name, status in seams.items() if status != "ok"]
    features = result["features"]
    lines.append(("features", "on: " + ", ".join(name for name, status in features.items() if status == "on")))
    return lines + [("feature", f"{name} is {status}") for name, status in features.items() if status != "on"]


def datasets_in_memory(result: Result) -> Lines:
    lines = []
    for name, held in result.get("store", {}).items():
        sizes = f"{format_bytes(held['bytes'])} held in {format_bytes(held['held_bytes'])}"
        reads = f"{held['served']} reads served, {held['elsewhere']} from disk"
        lines.append(("dataset", f"{name}: {held['files']} files in memory, {sizes}; {reads}"))
    return lines


def unified_caches(result: Result) -> Lines:
    lines = []
    for name, cache in result.get("cache", {}).items():
        hits = f"{cache['hits']} hits, {cache['misses']} misses"
        lines.append(("cache", f"{name}: {cache['entries']} entries, {format_bytes(cache['bytes'])}, {hits}"))
    return lines


def batch_ramp(result: Result) -> Lines:
    ramp = result.get("ramp")
    if not ramp:
        return []
    grown = " → ".join(f"{change['effective']} (step {change['step']})" for change in ramp["changes"])
    return [("ramp", f"effective batch {grown}; {ramp['samples']} samples")]


def where_the_files_are(result: Result) -> Lines:
    checkpoint = Path(result["checkpoint"])
    weights = checkpoint.parent / "pytorch_lora_weights.safetensors"
    return [("checkpoint", str(checkpoint)), ("weights", str(weights)), ("project", str(checkpoint.parent.parent))]


LINES: tuple[Callable[[Result], Lines], ...] = (
    what_ran,
    where_the_time_went,
    seams_and_features,
    datasets_in_memory,
    unified_caches,
    batch_ramp,
    where_the_files_are,
)
"""In the order in which they are shown."""


def summary_lines(result: Result) -> Lines:
    return [pair for lines in LINES for pair in lines(result)]
