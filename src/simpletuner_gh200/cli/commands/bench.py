"""``gh200 bench``: measure, as ratios to named references in the same run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simpletuner_gh200.bench.suite import all_suites, find_suite
from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import paragraph, show_table
from simpletuner_gh200.cli.terminal import say_on_a_terminal, screen, stdout_kept_for_json
from simpletuner_gh200.operate.preflight import check_installation


def bench(
    suite: Annotated[str | None, typer.Argument(help="Which suite; without one, they are listed.")] = None,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: shows the shape, not the speed.")] = False,
    samples: Annotated[int | None, typer.Option(min=2, help="Of suite start: images to start with.")] = None,
) -> None:
    """Measure on this machine. Numbers are ratios to a reference that is measured in the same run.

    Examples:

      gh200 bench

      gh200 bench store

      gh200 bench hooks --json

      gh200 bench start --samples 20000
    """
    if suite is None:
        offered = {name: found.help for name, found in all_suites().items()}
        conclude({"suites": offered}, as_json, lambda: _list(offered))
    else:
        wanted = find_suite(suite)
        if wanted.needs_simpletuner:
            check_installation(say_on_a_terminal)
        with stdout_kept_for_json(as_json):
            numbers = wanted.run(quick, samples)
        conclude(numbers, as_json, lambda: _show(suite, numbers))


def _show(suite: str, numbers: dict[str, Any]) -> None:
    rows = [(key, f"{value:.4g}" if isinstance(value, float) else str(value)) for key, value in flatten(numbers)]
    show_table(screen(), ("measure", "value"), rows, title=f"gh200 bench {suite}", right=(1,))


def _list(offered: dict[str, str]) -> None:
    width, console = max(map(len, offered)), screen()
    for name, text in offered.items():
        paragraph(console, text, first=f"{name:{width}}  ", indent=" " * (width + 2))


def flatten(numbers: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """``{"a": {"b": 1}}`` -> ``[("a/b", 1)]``."""
    rows: list[tuple[str, Any]] = []
    for key, value in numbers.items():
        if isinstance(value, dict):
            rows.extend(flatten(value, f"{prefix}{key}/"))
        else:
            rows.append((prefix + key, value))
    return rows


COMMAND = Command("bench", bench, panel="More: measure", order=30)
