"""``gh200 train``: train with SimpleTuner under the extension."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.words import say_on_a_terminal, upstream_spelling
from simpletuner_gh200.telemetry.redact import redact_text


def train(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", help="Training configuration: a .json, .toml or .env file anywhere.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="Named environment: config/NAME/config.*")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command and environment, and start nothing.")
    ] = False,
) -> None:
    """Train. Takes what `simpletuner train` takes; flags that follow override the configuration file.

    Examples:

      gh200 train --config config/config.json

      gh200 train --env my-project --max_train_steps=500

      gh200 train --config run.toml --num_processes 2 --dry-run
    """
    from simpletuner_gh200.operate import launching, preflight
    from simpletuner_gh200.operate.closing import closing_lines
    from simpletuner_gh200.seams.rank import KILL_SWITCH

    flags, env = upstream_spelling(context.args, env)
    if os.environ.get(KILL_SWITCH) == "0":
        ready = preflight.check_stock(explicit=config, env_name=env, flags=flags)
        _say(f"{KILL_SWITCH}=0: this is stock SimpleTuner, without the extension")
    else:
        ready = preflight.check_run(explicit=config, env_name=env, flags=flags, say=say_on_a_terminal)
    for note in ready.notes:
        _say(redact_text(note))
    if dry_run:
        print(ready.launch.shown())
        return
    ended = launching.run(ready.launch)
    for summary in ended.summaries[:1]:
        if summary["status"] != "completed":
            _say(f"training {summary['status']}: {redact_text(str(summary['reason']))}")
        for label, text in closing_lines(summary):
            _say(f"{label}: {text}")
    raise typer.Exit(ended.exit_code)


def _say(words: str) -> None:
    print(f"gh200: {words}", file=sys.stderr, flush=True)


COMMAND = Command(
    "train",
    train,
    panel="Train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
