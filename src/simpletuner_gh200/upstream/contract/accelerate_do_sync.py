"""Where accelerate decides whether a micro-batch closes its window."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Accelerator._do_sync"
DECISIONS = {"True", "self.step % self.gradient_state.num_steps == 0"}


def _counts_by_one(scope: ast.AST) -> str | None:
    writes = [ast.unparse(node) for node in syntax.assignments(scope, "self.step")]
    return None if sorted(writes) == ["self.step += 1", "self.step = 0"] else f"{writes} in {WHERE}"


def _syncs_modulo(scope: ast.AST) -> str | None:
    calls = syntax.calls(scope, "self.gradient_state._set_sync_gradients")
    decisions = {ast.unparse(call.args[0]) for call in calls if call.args}
    return None if decisions == DECISIONS else f"{sorted(decisions)} in {WHERE}"


def _setter_stores(module: ast.Module) -> str | None:
    return facts.contains(
        "Accelerator.gradient_accumulation_steps",
        'self.gradient_state.plugin_kwargs.update({"num_steps": gradient_accumulation_steps})',
    )(module)


SPEC = SeamSpec(
    name="accelerate.do_sync",
    module="accelerate.accelerator",
    qualname=WHERE,
    parameters=("self",),
    features=("ramp",),
    reason="a window closes when the step count is a multiple of the accumulation; both may be reset between windows",
    facts=(
        Fact("counts by one", "the step count is what we set to zero", facts.inside(WHERE, _counts_by_one)),
        Fact(
            "syncs at a multiple", "so a window has exactly the accumulation we set", facts.inside(WHERE, _syncs_modulo)
        ),
        Fact("accumulation can be set", "the setter changes what the modulus reads", _setter_stores),
        Fact(
            "accumulate decides on entry",
            "a value set before the block is the one used in it",
            facts.calls("Accelerator.accumulate", "self._do_sync", times=1),
        ),
    ),
)
