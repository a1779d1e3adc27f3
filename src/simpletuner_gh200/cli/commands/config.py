"""``gh200 config``: what a configuration means, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import screen
from simpletuner_gh200.cli.words import say_on_a_terminal, upstream_spelling
from simpletuner_gh200.errors import ConfigError
from simpletuner_gh200.telemetry.redact import redact, redact_text

app = typer.Typer(help="Look at a training configuration.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Look at a training configuration."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Training configuration: JSON, TOML or ENV.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Everything `gh200 train` checks before it starts, in the same words; nothing is started.

    SimpleTuner's own keys and flags, our blocks, the dataset list, folders and captions, model paths, limits. Prints
    every effective setting and where it comes from. Flags that follow are taken as `gh200 train` takes them.

    Examples:

      gh200 config check config/config.json

      gh200 config check run.toml --json

      gh200 config check config/config.json --max_train_steps=500
    """
    from simpletuner_gh200.operate.preflight import check_file

    flags, _env = upstream_spelling(context.args, None)
    try:
        ready = check_file(str(file), flags, say_on_a_terminal)
    except ConfigError as wrong:
        if as_json:
            print(json.dumps({"ok": False, "problems": [redact(vars(problem)) for problem in wrong.problems]}))
        raise
    settings = ready.checked.settings
    rows = [(key, redact(value, name=key.rpartition(".")[2]), origin) for key, value, origin in settings.rows()]
    notes = [redact_text(note) for note in ready.notes]
    datasets = list(settings.in_memory_datasets)
    if as_json:
        shown = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        print(json.dumps({"ok": True, "settings": shown, "in_memory_datasets": datasets, "notes": notes}))
        return
    _print(rows, datasets, notes)


def _print(rows: list[tuple[str, Any, str]], datasets: list[str], notes: list[str]) -> None:
    console = screen()
    table = Table(title="Effective settings", title_justify="left")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for key, value, origin in rows:
        style = None if origin == "default" else "bold"
        table.add_row(key, json.dumps(value), origin, style=style)
    console.print(table)
    for name in datasets:
        console.print(f"dataset held in memory: {name}", markup=False)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    console.print("[green]no problems[/green]")


COMMAND = Command("config", app, panel="Before a run")
