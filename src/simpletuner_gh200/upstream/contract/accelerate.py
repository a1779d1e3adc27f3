"""accelerate's accelerator: where a window of micro-batches closes, and what each of them weighs."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.facts import calls, contains
from simpletuner_gh200.upstream.spec import fact, seam

MODULE = "accelerate.accelerator"

DECISIONS = {"True", "self.step % self.gradient_state.num_steps == 0"}


def _counts_by_one(scope: ast.AST) -> str | None:
    writes = [ast.unparse(node) for node in syntax.assignments(scope, "self.step")]
    return None if sorted(writes) == ["self.step += 1", "self.step = 0"] else str(writes)


def _syncs_modulo(scope: ast.AST) -> str | None:
    found = syntax.calls(scope, "self.gradient_state._set_sync_gradients")
    decisions = {ast.unparse(call.args[0]) for call in found if call.args}
    return None if decisions == DECISIONS else str(sorted(decisions))


SPECS = (
    seam(
        "accelerate.do_sync",
        f"{MODULE}:Accelerator._do_sync(self)",
        "ramp: a window closes when the step count is a multiple of the accumulation; both may be reset there",
        # The step count is what we set to zero.
        fact("counts by one", _counts_by_one),
        fact("syncs at a multiple", _syncs_modulo),
        fact(
            "accumulation can be set",
            contains('self.gradient_state.plugin_kwargs.update({"num_steps": gradient_accumulation_steps})'),
            "Accelerator.gradient_accumulation_steps",
        ),
        # A value set before the block is the one used in it.
        fact("accumulate decides on entry", calls("self._do_sync", times=1), "Accelerator.accumulate"),
    ),
    seam(
        "accelerate.backward",
        f"{MODULE}:Accelerator.backward(self, loss, **kwargs)",
        "ramp: each micro-batch counts one n-th of a window of n",
        # The weights of a window add up to one only if its accumulation is constant and used here.
        fact("divides by the accumulation of the moment", contains("loss = loss / self.gradient_accumulation_steps")),
    ),
    seam(
        "accelerate.load_state",
        f"{MODULE}:Accelerator.load_state",
        "state: with several ranks a checkpoint is loaded on the CPU first, not on a device that is full",
        fact("takes a map_location", contains('map_location = load_model_func_kwargs.pop("map_location", None)')),
    ),
)
