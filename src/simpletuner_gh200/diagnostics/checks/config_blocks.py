"""GH401: is the given configuration readable, and are our blocks in it sound?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    training = context.training
    if training is None:
        return skipped("no configuration was given")
    if training.problems:
        return failed(
            " | ".join(map(str, training.problems)), f"correct them; then: gh200 config check {context.config}"
        )
    blocks = [name for name, block in (training.settings.given_blocks if training.settings else {}).items() if block]
    return passed(f"{context.config}: {len(training.datasets)} datasets; blocks of ours: {', '.join(blocks) or 'none'}")


CHECK = Check(
    code="GH401",
    what="configuration",
    why="A key that is misspelt, or a value out of its range, stops the run at its start.",
    run=_run,
)
