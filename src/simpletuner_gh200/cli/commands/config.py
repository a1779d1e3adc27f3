"""``gh200 config``: what a configuration means, before anything runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from simpletuner_gh200.cli.command import PASSED_ON, AsJson, Command, Configuration, conclude
from simpletuner_gh200.cli.tables import paragraph
from simpletuner_gh200.cli.terminal import say_on_a_terminal, screen, stdout_kept_for_json, upstream_spelling
from simpletuner_gh200.telemetry.redact import redact, redact_text
from simpletuner_gh200.units import counted

app = typer.Typer(help="Look at a training configuration.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Look at a training configuration."""


@app.command(context_settings=PASSED_ON)
def check(
    context: typer.Context,
    file: Configuration,
    show_all: Annotated[bool, typer.Option("--all", help="Settings at their defaults, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Everything `gh200 train` checks before it starts, in the same words; nothing is started.

    SimpleTuner's own keys and flags, our blocks, the dataset list, folders and captions, model paths, limits; then
    SimpleTuner's own rules, which takes as long as importing it. Prints what is set and where it comes from. Flags
    that follow are taken as `gh200 train` takes them.

    Examples:

      gh200 config check config/config.json

      gh200 config check config/config.json --all

      gh200 config check run.toml --json

      gh200 config check config/config.json --max_train_steps=500
    """
    from simpletuner_gh200.operate.preflight import check_run

    flags, _env = upstream_spelling(context.args, None)
    with stdout_kept_for_json(as_json):
        checked = check_run(explicit=str(file), env_name=None, flags=flags, say=say_on_a_terminal, starting=False)
    settings = checked.settings
    rows = [(key, redact(value, name=key.rpartition(".")[2]), origin) for key, value, origin in settings.rows()]
    notes = [redact_text(note) for note in checked.notes]
    datasets = list(settings.in_memory_datasets)
    shown = {key: {"value": value, "origin": origin} for key, value, origin in rows}
    document = {"ok": True, "settings": shown, "in_memory_datasets": datasets, "notes": notes}
    conclude(document, as_json, lambda: _print(rows, datasets, notes, show_all=show_all))


def _print(rows: list[tuple[str, Any, str]], datasets: list[str], notes: list[str], *, show_all: bool) -> None:
    console = screen()
    console.print("[green]no problems[/green]")
    for note in notes:
        paragraph(console, f"note: {note}")
    for name in datasets:
        paragraph(console, f"dataset held in memory: {name}")
    shown = [row for row in rows if show_all or row[2] != "default"]
    for source in dict.fromkeys(origin for _key, _value, origin in shown):
        paragraph(console, f"set by {source}:" if source != "default" else "at the default:", style="bold")
        for key, value, origin in shown:
            if origin == source:
                paragraph(console, f"{key} = {json.dumps(value)}", first="  ", indent="    ")
    if len(shown) < len(rows):
        console.print(f"{counted(len(rows) - len(shown), 'setting')} at the default (--all shows them)")


COMMAND = Command("config", app, panel="More: before a run", order=10)
