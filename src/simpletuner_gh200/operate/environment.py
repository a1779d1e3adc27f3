"""The environment of a run on a GH200: what to export, decided once, and spelt for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from simpletuner_gh200.config.allocator import carried_over
from simpletuner_gh200.config.blocks import StateSettings
from simpletuner_gh200.config.environment import (
    ACCESS_PATTERN,
    ACTIVATIONS,
    ALLOCATOR,
    HINTS,
    OVERSUBSCRIPTION_RATIO,
    SWITCH,
    USE_UVM,
    switched_off,
)
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import UsageError


@dataclass
class Exports:
    """Variables to set, variables to unset, and what users should know about it."""

    values: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def decide(environment: Mapping[str, str]) -> Exports:
    """What a GH200 run wants set, keeping a ratio and pattern that are set already; ConfigError if they are bad.

    Our own variables rule; then what the allocator's variable says, as earlier guides write it; then defaults.
    """
    settled, notes = carried_over(environment)
    state = resolve({}, settled, source="the environment").part(StateSettings)
    exports = Exports({HINTS: "1"}, notes=notes)
    if not environment.get(USE_UVM):
        if settled.get(USE_UVM):
            exports.values[USE_UVM] = str(int(state.use_uvm))
        else:
            switch = f"export {USE_UVM}=1, or set use_uvm in the configuration"
            ratio = f"{OVERSUBSCRIPTION_RATIO}={state.uvm_oversubscription_ratio:g}"
            exports.notes.append(f"{ratio} has no effect by itself: to keep optimizer state in CPU memory, {switch}")
    if settled.get(ACTIVATIONS) and not environment.get(ACTIVATIONS):
        exports.values[ACTIVATIONS] = settled[ACTIVATIONS]
    exports.values[OVERSUBSCRIPTION_RATIO] = str(state.uvm_oversubscription_ratio)
    exports.values |= {ACCESS_PATTERN: state.uvm_access_pattern, "ACCELERATE_MIXED_PRECISION": "bf16"}
    # Whoever prepares a shell for a GH200 wants the extension in what he starts there, plain launches included.
    if switched_off(environment):
        exports.notes.append(f"{SWITCH}=0 is set: the extension stays off; unset it to train with it")
    else:
        exports.values[SWITCH] = "1"
    for name in ALLOCATOR:
        if name in settled and settled[name] != environment[name]:
            exports.values[name] = settled[name]
    exports.unset = [name for name in ALLOCATOR if name in environment and name not in settled]
    return exports


# -- spelt for sh, so that no value can be anything but a value ----------------------------------------

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def spell(exports: Exports) -> str:
    """The commands to evaluate, one a line."""
    for name in (*exports.values, *exports.unset):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} can't be the name of a variable")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.values.items()]
    return "\n".join([*lines, *(f"unset {name}" for name in exports.unset)])
