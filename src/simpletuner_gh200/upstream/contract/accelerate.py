"""accelerate's accelerator: where a window of micro-batches closes, and what each of them weighs."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

MODULE = "accelerate.accelerator"

DECISIONS = {"True", "self.step % self.gradient_state.num_steps == 0"}


def _counts_by_one(scope: ast.AST) -> str | None:
    writes = [ast.unparse(node) for node in syntax.assignments(scope, "self.step")]
    return None if sorted(writes) == ["self.step += 1", "self.step = 0"] else f"{writes} in Accelerator._do_sync"


def _syncs_modulo(scope: ast.AST) -> str | None:
    calls = syntax.calls(scope, "self.gradient_state._set_sync_gradients")
    decisions = {ast.unparse(call.args[0]) for call in calls if call.args}
    return None if decisions == DECISIONS else f"{sorted(decisions)} in Accelerator._do_sync"


def _setter_stores(module: ast.Module) -> str | None:
    return facts.contains(
        "Accelerator.gradient_accumulation_steps",
        'self.gradient_state.plugin_kwargs.update({"num_steps": gradient_accumulation_steps})',
    )(module)


DO_SYNC = SeamSpec(
    name="accelerate.do_sync",
    module=MODULE,
    qualname="Accelerator._do_sync",
    parameters=("self",),
    features=("ramp",),
    reason="a window closes when the step count is a multiple of the accumulation; both may be reset between windows",
    facts=(
        Fact(
            "counts by one",
            "the step count is what we set to zero",
            facts.inside("Accelerator._do_sync", _counts_by_one),
        ),
        Fact(
            "syncs at a multiple",
            "so a window has exactly the accumulation we set",
            facts.inside("Accelerator._do_sync", _syncs_modulo),
        ),
        Fact("accumulation can be set", "the setter changes what the modulus reads", _setter_stores),
        Fact(
            "accumulate decides on entry",
            "a value set before the block is the one used in it",
            facts.calls("Accelerator.accumulate", "self._do_sync", times=1),
        ),
    ),
)


BACKWARD = SeamSpec(
    name="accelerate.backward",
    module=MODULE,
    qualname="Accelerator.backward",
    parameters=("self", "loss", "**kwargs"),
    features=("ramp",),
    reason="each micro-batch counts one n-th of a window of n",
    facts=(
        Fact(
            "divides by the accumulation of the moment",
            "the weights of a window add up to one only if its accumulation is constant and used here",
            facts.contains("Accelerator.backward", "loss = loss / self.gradient_accumulation_steps"),
        ),
    ),
)


LOAD_STATE = SeamSpec(
    name="accelerate.load_state",
    module=MODULE,
    qualname="Accelerator.load_state",
    parameters=None,
    features=("state",),
    reason="with several ranks a checkpoint is loaded on the CPU first, not on a device that is full",
    facts=(
        Fact(
            "takes a map_location",
            "ours is the one that is used",
            facts.contains("Accelerator.load_state", 'map_location = load_model_func_kwargs.pop("map_location", None)'),
        ),
    ),
)


SPECS = (
    DO_SYNC,
    BACKWARD,
    LOAD_STATE,
)
