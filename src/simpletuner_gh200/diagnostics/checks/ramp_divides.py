"""GH406: does the batch ramp come out even?"""

from __future__ import annotations

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    training = context.training
    if training is None or training.settings is None:
        return skipped("no configuration was given, or its blocks are not sound")
    ramp = training.settings.part(RampSettings)
    if not ramp.enable_batch_size_rampup:
        return skipped("no ramp in it")
    per_micro_batch = _whole(training.values.get("train_batch_size", 1)) * _whole(
        training.values.get("num_processes", 1)
    )
    sizes = {"initial": ramp.initial_effective_batch_size, "target": ramp.target_effective_batch_size}
    given = {name: size for name, size in sizes.items() if size is not None}
    below = {name: size for name, size in given.items() if size < per_micro_batch}
    uneven = {name: size for name, size in given.items() if size > per_micro_batch and size % per_micro_batch}
    if "initial" in given and "target" in given and given["target"] < given["initial"]:
        return warned(
            f"the target {given['target']} is below the initial {given['initial']}",
            "exchange them if that is not meant",
        )
    if uneven:
        return failed(
            f"{_shown(uneven)} is no multiple of train_batch_size x ranks = {per_micro_batch}",
            f"use multiples of {per_micro_batch}; see the windows: gh200 ramp {context.config}",
        )
    if below:
        return warned(
            f"{_shown(below)} is below train_batch_size x ranks = {per_micro_batch}: accumulation is 1 there",
            f"use at least {per_micro_batch}, or a smaller train_batch_size",
        )
    return passed(f"{_shown(given)}, in micro-batches of {per_micro_batch} over all ranks")


def _whole(value: object) -> int:
    return max(1, int(str(value)))


def _shown(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


CHECK = Check(
    code="GH406",
    what="batch ramp",
    why="The effective batch grows in whole micro-batches: sizes in between are rounded.",
    run=_run,
)
