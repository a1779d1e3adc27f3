"""``gh200 train``: train with SimpleTuner under the extension."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.errors import UsageError
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
    from simpletuner_gh200.seams.rank import KILL_SWITCH

    flags, env = _upstream_spelling(context.args, env)
    preflight.check_installation()
    if os.environ.get(KILL_SWITCH) == "0":
        checked = preflight.check_stock(explicit=config, env_name=env)
        notices = [f"{KILL_SWITCH}=0: this is stock SimpleTuner, without the extension"]
    else:
        checked = preflight.check_configuration(explicit=config, env_name=env, flags=flags)
        notices = [*checked.settings.notes, *preflight.check_seams(checked.settings)]
        if plan:
            notices += planned.check(checked.located, flags, keep=not dry_run)
    command = launching.launch_command(
        checked.located, flags, os.environ, explicit=config is not None, env_name=env, config=checked.config
    )
    for notice in (*notices, *command.notices):
        print(f"gh200: {notice}", file=sys.stderr)
    if dry_run:
        print(command.shown())
        return
    ended = launching.run(command)
    for summary in ended.summaries[:1]:
        if summary["status"] != "completed":
            print(f"gh200: training {summary['status']}: {redact_text(str(summary['reason']))}", file=sys.stderr)
    planned.learn(checked.config)
    raise typer.Exit(ended.exit_code)


def _upstream_spelling(words: list[str], env: str | None) -> tuple[list[str], str | None]:
    """SimpleTuner also takes ``key=value`` without dashes, and ``env=NAME`` and ``example=NAME`` among them."""
    flags: list[str] = []
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        after_flag = before.startswith("--") and "=" not in before
        if not word.startswith("--") and "=" not in word and not after_flag:
            raise UsageError(f"{word!r} is not a flag", remedy=f"did you mean --config {word}?")
        if word.startswith("--") or "=" not in word or after_flag:
            flags.append(word)
        elif word.startswith("env="):
            env = word.removeprefix("env=")
        elif word.startswith("example="):
            env = "examples/" + word.removeprefix("example=")
        else:
            flags.append(f"--{word}")
    return flags, env


COMMAND = Command(
    "train",
    train,
    panel="Train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
