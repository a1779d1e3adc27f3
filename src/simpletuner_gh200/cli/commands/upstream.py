"""``gh200 upstream``: does this SimpleTuner have what we rely on?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import show_table
from simpletuner_gh200.cli.terminal import say, screen
from simpletuner_gh200.upstream.features import FEATURES

if TYPE_CHECKING:
    from simpletuner_gh200.upstream.check import Verdict

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def upstream() -> None:
    """Check SimpleTuner against what the extension relies on."""


@app.command()
def check(
    version: Annotated[str | None, typer.Option(help="A release; its wheel comes from the package index.")] = None,
    path: Annotated[Path | None, typer.Option(help="A checkout, a site-packages folder or a wheel.")] = None,
    git: Annotated[Path | None, typer.Option(help="A git repository of SimpleTuner.")] = None,
    ref: Annotated[str | None, typer.Option(help="With --git: a branch, tag or commit (default HEAD).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every release on the index from 3.1 on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare SimpleTuner's source with the contract. Nothing of it is imported or run.

    Examples:

      gh200 upstream check  # the installed SimpleTuner

      gh200 upstream check --version 4.10.1  # a release from the package index

      gh200 upstream check --path ~/SimpleTuner  # a folder or a wheel

      gh200 upstream check --git ~/SimpleTuner --ref origin/main

      gh200 upstream check --all --json  # every release from 3.1 on
    """
    from simpletuner_gh200.errors import UsageError
    from simpletuner_gh200.upstream.check import check_remembered
    from simpletuner_gh200.upstream.source import released, releases, select

    if every:
        if any((version, path, git, ref)):
            raise UsageError("--all checks every release", remedy="leave out --version, --path, --git and --ref")
        verdicts = [check_remembered(released(release)) for release in releases()]
        ok = all(verdict.ok for verdict in verdicts)
        document = {"ok": ok, "releases": [verdict.to_json() for verdict in verdicts]}
        conclude(document, as_json, lambda: _show_sweep(verdicts), ok=ok)
    else:
        found = check_remembered(select(version=version, path=path, repository=git, ref=ref))
        conclude(found.to_json(), as_json, lambda: _show_one(found), ok=found.ok)


def _show_one(verdict: Verdict) -> None:
    seams = [(row.name, row.status, row.feature, "" if row.status == "ok" else row.found) for row in verdict.seams]
    show_table(screen(), ("seam", "status", "features", "found"), seams, title=f"SimpleTuner {verdict.version}: seams")
    features = [(name, info.title, str(verdict.features[name])) for name, info in FEATURES.items()]
    show_table(screen(), ("feature", "what", "verdict"), features, title="what that means")
    broken = len(verdict.broken)
    say(f"SimpleTuner {verdict.version}: " + ("every seam holds" if verdict.ok else f"{broken} broken"))


def _show_sweep(verdicts: Sequence[Verdict]) -> None:
    rows = [(v.version, *("on" if v.features[name].on else "off" for name in FEATURES)) for v in verdicts]
    show_table(screen(), ("SimpleTuner", *FEATURES), rows, title="features per release")
    for verdict in verdicts:
        for row in verdict.broken:
            say(f"{verdict.version}: {row.name}: {row.found} -> off: {row.feature}")
    good = sum(verdict.ok for verdict in verdicts)
    say(f"{good} of {len(verdicts)} releases hold every seam")


COMMAND = Command("upstream", app, panel="More: SimpleTuner's releases", order=10)
