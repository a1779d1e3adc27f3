"""``gh200 prove``: what this machine can do, and what each feature does to a run on it, as a report to send back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import paragraph, show_table
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, screen, stdout_kept_for_json
from simpletuner_gh200.draw import save
from simpletuner_gh200.errors import UsageError

NAME = "gh200_prove"


def prove(
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all of it.")] = 20,
    config: Annotated[Path | None, typer.Option(help="The one to train. Default: a tiny one made here.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 8,
    folder: Annotated[Path, typer.Option(help="Where runs and the report go.")] = Path("gh200-prove"),
    as_json: AsJson = False,
) -> None:
    """Examine and measure this machine, then train the same model with and without each feature, in turns.

    Arms: stock, caches, state in Grace, activations in Grace, gradient checkpointing, and SimpleTuner's own offloaders
    where they are and there is a GPU. Each says what of it was on; one that was silently off has failed. The report,
    gh200_prove.json in --folder, holds no names, paths, tokens or serial numbers; what was measured is used by
    `gh200 plan` on this machine. Exit code 1: a check of the self-test, or an arm, failed.

    Examples:

      gh200 prove

      gh200 prove --minutes 60 --config config/config.json

      gh200 prove --folder again --json
    """
    from simpletuner_gh200.bench.prove import proof
    from simpletuner_gh200.bench.prove.arms import configured_subject, tiny_subject
    from simpletuner_gh200.operate import preflight
    from simpletuner_gh200.plan.machines import this_machine

    preflight.check_installation(say_on_a_terminal)
    _make(folder)
    with stdout_kept_for_json(as_json):
        found = proof.prove(
            lambda: configured_subject(config, os.environ) if config is not None else tiny_subject(folder),
            folder,
            minutes=minutes,
            steps=steps,
            report=lambda words: say(f"gh200: {words}", error=True),
        )
        found["plan_learned"] = proof.calibrate(found, this_machine())
    save(json.dumps(found, indent=2) + "\n", folder / f"{NAME}.json")
    conclude(found, as_json, lambda: _print(found, folder), ok=found["ok"])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise UsageError(f"cannot make {folder}: {refused.strerror}", remedy="name another --folder") from None


def _print(found: Mapping[str, Any], folder: Path) -> None:
    from simpletuner_gh200.bench.prove.words import ARM_HEADINGS, NOT_MEASURED, arm_cells, rates, verdict

    console = screen()
    title = f"gh200 prove: {found['model']['title']}"
    show_table(console, ARM_HEADINGS, [arm_cells(row) for row in found["ab"]], title=title)
    measured = [f"{name} {rate} GB/s" for name, rate in rates(found) if rate != NOT_MEASURED]
    learned = found["plan_learned"]
    for line in (
        *(["; ".join(measured)] if measured else []),
        *found["notes"],
        *([f"`gh200 plan` learned: {', '.join(learned)}"] if learned else []),
        verdict(found),
        f"to send back: {folder / NAME}.json",
    ):
        paragraph(console, line)


COMMAND = Command("prove", prove, panel="More: measure", order=20)
