"""``gh200 train``: train with SimpleTuner under the extension."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.cli.words import say_on_a_terminal, upstream_spelling
from simpletuner_gh200.telemetry.redact import redact_command, redact_text

logger = logging.getLogger("simpletuner_gh200")


def train(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", help="Training configuration: a .json, .toml or .env file anywhere.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="Named environment: config/NAME/config.*")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command and environment, and start nothing.")
    ] = False,
    checkpoint_on_interrupt: Annotated[
        bool,
        typer.Option("--checkpoint-on-interrupt", help="Ctrl-C writes a checkpoint first, as SIGTERM and SIGUSR1 do."),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan/--no-plan", help="Refuse a run that can't fit on this machine (gh200 plan).")
    ] = True,
) -> None:
    """Train. Takes what `simpletuner train` takes; flags that follow override the configuration file.

    Examples:

      gh200 train --config config/config.json

      gh200 train --env my-project --max_train_steps=500

      gh200 train --config run.toml --num_processes 2 --dry-run
    """
    from simpletuner_gh200.operate import launching, planned, preflight
    from simpletuner_gh200.operate.closing import closing_lines
    from simpletuner_gh200.operate.ending import closing_line
    from simpletuner_gh200.seams.rank import KILL_SWITCH

    flags, env = upstream_spelling(context.args, env)
    if os.environ.get(KILL_SWITCH) == "0":
        ready = preflight.check_stock(explicit=config, env_name=env, flags=flags)
        _say(f"{KILL_SWITCH}=0: this is stock SimpleTuner, without the extension")
    else:
        ready = preflight.check_run(explicit=config, env_name=env, flags=flags, say=say_on_a_terminal)
    found = planned.check(ready.checked.located, flags) if plan and ready.checked.config else planned.Checked()
    for note in (*ready.notes, *found.notes):
        _say(redact_text(note))
    if dry_run:
        say(ready.launch.shown())
        return
    values = ready.checked.config
    output = Path(str(values["output_dir"])) if values.get("output_dir") else None
    ended = launching.run(ready.launch, output, checkpoint_on_interrupt=checkpoint_on_interrupt, once_ours=found.keep)
    if ended.signal is not None or (ended.exit_code and not ended.summaries):
        say("", error=True)  # SimpleTuner's progress bar may have been left in the middle of its line
    with _whatever_becomes_of("what the run did"):
        for label, text in (line for summary in ended.summaries[:1] for line in closing_lines(summary)):
            _say(f"{label}: {redact_text(text)}")
    with _whatever_becomes_of("how the run ended"):
        again = shlex.join(["gh200", *redact_command(sys.argv[1:])])
        last = closing_line(ended, output=output, again=again, resumes=bool(values.get("resume_from_checkpoint")))
        if last is not None:
            _say(redact_text(last))
    with _whatever_becomes_of("what the plan can learn from the run"):
        planned.learn(values)
    raise typer.Exit(ended.exit_code)


@contextmanager
def _whatever_becomes_of(what: str) -> Iterator[None]:
    """The run is over and its exit code stands: words about it that go wrong are a warning."""
    try:
        yield
    except Exception as failure:  # noqa: BLE001 - said right here
        logger.warning("gh200: %s can't be told: %s: %s", what, type(failure).__name__, failure)


def _say(words: str) -> None:
    say(f"gh200: {words}", error=True)


COMMAND = Command(
    "train",
    train,
    panel="Train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
