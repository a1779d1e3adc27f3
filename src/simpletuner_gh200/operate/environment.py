"""The environment of a run on a GH200: what to export, decided once, and spelt for the shell in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from simpletuner_gh200.config.allocator import OUR_KEYS, VARIABLES, TorchBuild, join_options, split_options
from simpletuner_gh200.config.settings import default_of, read_variables

HINTS = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"
RATIO = "GH200_UVM_OVERSUBSCRIPTION_RATIO"
PATTERN = "GH200_UVM_ACCESS_PATTERN"

Options = list[tuple[str, str]]


@dataclass
class Exports:
    """Variables to set, variables to unset, and what a person should know about it."""

    values: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def decide(environment: Mapping[str, str], torch: TorchBuild | None) -> Exports:
    """What a GH200 run wants set, keeping a ratio and pattern that are set already; ConfigError if they are bad."""
    allocator = {name: split_options(environment[name]) for name in VARIABLES if environment.get(name)}
    chosen = _chosen(environment, allocator.values())
    exports = Exports({HINTS: "1", **chosen, "ACCELERATE_MIXED_PRECISION": "bf16"})
    for name, options in allocator.items():
        _keep_accepted(name, options, torch, exports)
    if torch is not None and torch.cuda and torch.knows("use_uvm"):
        _tell_patched_torch(allocator.get(VARIABLES[0], []), exports)
    return exports


def _chosen(environment: Mapping[str, str], allocator: Iterable[Options]) -> dict[str, str]:
    """Our own variables rule; then what the allocator's variable says, as earlier guides write it; then defaults."""
    carried = {OUR_KEYS[key]: value for options in allocator for key, value in options if key in OUR_KEYS}
    known = {name: environment.get(name) or carried.get(name, "") for name in OUR_KEYS.values()}
    values = read_variables(known)
    wanted = {RATIO, PATTERN, *carried}
    return {name: _text(values.get(name, default_of(name))) for name in OUR_KEYS.values() if name in wanted}


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _keep_accepted(name: str, options: Options, torch: TorchBuild | None, exports: Exports) -> None:
    """Take out what this torch would reject; leave the variable alone where there is nothing to take out."""
    rejected = [key for key, _value in options if torch is not None and not torch.knows(key)]
    if not rejected or torch is None:
        return
    kept = [option for option in options if option[0] not in rejected]
    exports.notes.append(f"{name}: {', '.join(rejected)} left out, torch {torch.version} would reject it")
    if kept:
        exports.values[name] = join_options(kept)
    else:
        exports.unset.append(name)


def _tell_patched_torch(options: Options, exports: Exports) -> None:
    ours = {"use_uvm": "True", "uvm_oversubscription_ratio": exports.values[RATIO]}
    ours["uvm_access_pattern"] = exports.values[PATTERN]
    others = [option for option in options if option[0] not in ours]
    exports.values[VARIABLES[0]] = join_options([*others, *ours.items()])
    exports.notes.append("this torch is a patched build that knows use_uvm: it is told")
