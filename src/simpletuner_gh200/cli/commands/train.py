"""``gh200 train`` and ``gh200 server``: SimpleTuner, and its Web UI, with the extension on."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner_gh200.cli.command import PASSED_ON, AsJson, Command
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, stdout_kept_for_json, upstream_spelling
from simpletuner_gh200.config.environment import SWITCH, switched_off
from simpletuner_gh200.telemetry.redact import redact, redact_command, redact_text

if TYPE_CHECKING:
    from simpletuner_gh200.operate import planned, preflight
    from simpletuner_gh200.operate.ending import Outcome
    from simpletuner_gh200.operate.launching import LaunchCommand

logger = logging.getLogger("simpletuner_gh200")


def train(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(help="A .json, .toml or .env file anywhere.")] = None,
    env: Annotated[str | None, typer.Option(help="Named environment: config/NAME/config.*")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print command and environment, start nothing.")] = False,
    checkpoint_on_interrupt: Annotated[
        bool, typer.Option("--checkpoint-on-interrupt", help="Ctrl-C writes a checkpoint first, as SIGTERM does.")
    ] = False,
    again_file: Annotated[
        Path | None, typer.Option(help="Make this file and end with 0, where 75 would say: start it again.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan/--no-plan", help="Refuse a run that can't fit (gh200 plan).")] = True,
    as_json: AsJson = False,
) -> None:
    """Train. Takes what `simpletuner train` takes; flags that follow override the configuration file.

    Examples:

      gh200 train --config config/config.json

      gh200 train --env my-project --max_train_steps=500

      gh200 train --config run.toml --num_processes 2 --dry-run

      gh200 train --config config/config.json --json | jq .weights
    """
    from simpletuner_gh200.operate.ending import code_with_again_file

    flags, env = upstream_spelling(context.args, env)
    with stdout_kept_for_json(as_json):
        checked, planned_run = _prepare(config, env, flags, plan=plan)
    launch = replace(checked.launch, environment={**checked.launch.environment, **planned_run.environment})
    if dry_run:
        say(json.dumps(launch.to_json()) if as_json else launch.shown())
        return
    with stdout_kept_for_json(as_json):
        outcome, document = _run(
            launch, checked.training.values, planned_run, checkpoint_on_interrupt=checkpoint_on_interrupt
        )
        code = code_with_again_file(outcome, again_file)
    if as_json:
        print(json.dumps(redact(document)))
    raise typer.Exit(code)


def _prepare(
    config: str | None, env: str | None, flags: list[str], *, plan: bool
) -> tuple[preflight.Checked, planned.PlannedRun]:
    """Everything that can be known before anything is started; raises where the run may not start."""
    from simpletuner_gh200.operate import planned, preflight

    if switched_off():
        checked = preflight.check_stock(explicit=config, env_name=env, flags=flags, say=say_on_a_terminal)
        _say(f"{SWITCH}=0: this is stock SimpleTuner, without the extension")
    else:
        checked = preflight.check_run(explicit=config, env_name=env, flags=flags, say=say_on_a_terminal)
    found = planned.check(checked.training) if plan and checked.training.values else planned.PlannedRun()
    for note in (*checked.notes, *found.notes):
        _say(redact_text(note))
    return checked, found


def _run(
    launch: LaunchCommand, values: Mapping[str, Any], found: planned.PlannedRun, *, checkpoint_on_interrupt: bool
) -> tuple[Outcome, dict[str, Any]]:
    """Train and say how it went; the same for scripts."""
    from simpletuner_gh200.operate import ending, launching, planned

    output = Path(str(values["output_dir"])) if values.get("output_dir") else None
    outcome = launching.run(
        launch, output, checkpoint_on_interrupt=checkpoint_on_interrupt, once_ours=found.keep, say=_say
    )
    if outcome.signal is not None or (outcome.exit_code and not outcome.summaries):
        say("", error=True)  # SimpleTuner's progress bar may have been left in the middle of its line
    with _whatever_becomes_of("what the run did"):
        for label, text in (line for summary in outcome.summaries[:1] for line in ending.closing_lines(summary)):
            _say(f"{label}: {redact_text(text)}")
    last = None
    with _whatever_becomes_of("how the run ended"):
        again = shlex.join(["gh200", *redact_command(sys.argv[1:])])
        last = ending.closing_line(
            outcome, output=output, again=again, resumes=bool(values.get("resume_from_checkpoint"))
        )
        if last is not None:
            _say(redact_text(last))
    with _whatever_becomes_of("what the plan can learn from the run"):
        planned.learn(values, outcome.summary)
    return outcome, ending.document(outcome, output, last)


@contextmanager
def _whatever_becomes_of(what: str) -> Iterator[None]:
    """The run is over and its exit code stands: words about it that go wrong are a warning."""
    try:
        yield
    except Exception as failure:  # noqa: BLE001 - said right here
        logger.warning("gh200: %s can't be shown: %s: %s", what, type(failure).__name__, failure)


def _say(words: str) -> None:
    say(f"gh200: {words}", error=True)


def server(context: typer.Context) -> None:
    """Start SimpleTuner's Web UI with the extension on; every option is passed on to `simpletuner server`.

    The same as `SIMPLETUNER_GH200=1 simpletuner server ...`, and jobs that the page starts find `accelerate` beside
    this Python also where its environment is not activated.

    Examples:

      gh200 server

      gh200 server --port 8080 --host 127.0.0.1
    """
    from simpletuner_gh200.operate.launching import serve
    from simpletuner_gh200.operate.preflight import check_installation

    check_installation(say_on_a_terminal, trusting=True)
    serve(context.args)


COMMAND = (
    Command("train", train, panel="Start here", order=50, context_settings=PASSED_ON),
    Command("server", server, panel="More: runs", order=30, context_settings=PASSED_ON),
)
