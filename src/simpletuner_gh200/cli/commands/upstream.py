"""``gh200 upstream``: does this SimpleTuner have what we rely on, and what changed between two of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import screen
from simpletuner_gh200.upstream.features import FEATURES

if TYPE_CHECKING:
    from simpletuner_gh200.upstream.check import Verdict

app = typer.Typer(
    help="Check SimpleTuner against what the extension relies on.", no_args_is_help=True, rich_markup_mode="rich"
)

CHECK_EXAMPLES = """
Examples:

  gh200 upstream check  # the installed SimpleTuner

  gh200 upstream check --version 4.10.1  # a release from the package index

  gh200 upstream check --path ~/SimpleTuner  # a folder or a wheel

  gh200 upstream check --git ~/SimpleTuner --ref origin/main

  gh200 upstream check --all --json  # every release from 3.1 on
"""


@app.command(epilog=CHECK_EXAMPLES)
def check(
    version: Annotated[str | None, typer.Option(help="A release; its wheel comes from the package index.")] = None,
    path: Annotated[Path | None, typer.Option(help="A checkout, a site-packages folder or a wheel.")] = None,
    git: Annotated[Path | None, typer.Option(help="A git repository of SimpleTuner.")] = None,
    ref: Annotated[str | None, typer.Option(help="With --git: a branch, tag or commit (default HEAD).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every release on the index from 3.1 on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Compare SimpleTuner's source with the contract. Nothing of it is imported or run."""
    from simpletuner_gh200.errors import UsageError
    from simpletuner_gh200.upstream.check import check_remembered
    from simpletuner_gh200.upstream.releases import select, sweep

    if every:
        if any((version, path, git, ref)):
            raise UsageError("--all checks every release", remedy="leave out --version, --path, --git and --ref")
        verdicts = list(sweep())
        _print_sweep(verdicts, as_json)
    else:
        verdicts = [check_remembered(select(version=version, path=path, repository=git, ref=ref))]
        _print_one(verdicts[0], as_json)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


DIFF_EXAMPLES = """
Examples:

  gh200 upstream diff 4.9.3 4.10.0

  gh200 upstream diff 4.10.1 ~/SimpleTuner  # a release and a folder or wheel

  gh200 upstream diff 4.10.1 ~/SimpleTuner@origin/main  # a release and a commit
"""


@app.command(epilog=DIFF_EXAMPLES)
def diff(
    old: Annotated[str, typer.Argument(help="A release, a path, or DIR@REF.")],
    new: Annotated[str, typer.Argument(help="What to compare it with.")],
    full: Annotated[bool, typer.Option("--full", help="Show long diffs whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Show what changed in and around the seams. Exit code 1 if a seam holds in OLD and is broken in NEW."""
    from simpletuner_gh200.upstream.diff import compare, review_lines
    from simpletuner_gh200.upstream.releases import parse_operand

    comparison = compare(parse_operand(old), parse_operand(new))
    if as_json:
        typer.echo(json.dumps(comparison))
    else:
        for line in review_lines(comparison, full=full):
            typer.echo(line)
    if not comparison["ok"]:
        raise typer.Exit(1)


PARITY_EXAMPLES = """
Examples:

  gh200 upstream parity --repo ~/SimpleTuner  # its whole test suite, twice

  gh200 upstream parity --repo ~/SimpleTuner tests/test_trainer.py -k manual
"""


@app.command(epilog=PARITY_EXAMPLES, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def parity(
    context: typer.Context,
    repo: Annotated[Path, typer.Option(help="A git checkout of SimpleTuner, with its tests.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Run SimpleTuner's own tests with and without the extension and compare outcome by outcome.

    Everything else on the command line goes to pytest. Exit code 1 if a test's outcome differs.
    """
    from simpletuner_gh200.operate.parity import run_parity

    found = run_parity(repo.absolute(), context.args)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        for each in found.differences:
            kind = "unstable" if each.unstable else "DIFFERS"
            typer.echo(f"{kind}: {each.test}: {each.without} without, {each.with_extension} with the extension")
        counted = ", ".join(f"{count} {name}" for name, count in sorted(found.counts.items()))
        typer.echo(f"without the extension: {counted}; with it: {'the same' if found.ok else 'not the same'}")
    if not found.ok:
        raise typer.Exit(1)


SUPPORT_EXAMPLES = """
Examples:

  gh200 upstream support  # print the table

  gh200 upstream support --sweep --write docs/support.md  # for maintainers
"""


@app.command(epilog=SUPPORT_EXAMPLES)
def support(
    sweep_first: Annotated[bool, typer.Option("--sweep", help="Renew the data from the package index first.")] = False,
    write: Annotated[Path | None, typer.Option(help="Renew the table in this page instead of printing it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Show which features work on which SimpleTuner release."""
    from simpletuner_gh200.upstream.releases import sweep
    from simpletuner_gh200.upstream.support import (
        known_releases,
        support_document,
        support_rows,
        write_data,
        write_page,
    )

    if sweep_first:
        write_data(sweep())
    renewed = write_page(write) if write is not None else None
    if as_json:
        typer.echo(json.dumps({**support_document(known_releases()), "renewed": renewed}))
    elif write is None:
        _show(("SimpleTuner", "releases", "checked", "features"), support_rows(known_releases()))
    else:
        typer.echo(f"{write}: {'renewed' if renewed else 'up to date'}")


def _print_one(verdict: Verdict, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(verdict.to_json()))
        return
    seams = [(row.name, row.status, row.feature, "" if row.status == "ok" else row.found) for row in verdict.seams]
    _show(("seam", "status", "features", "found"), seams, f"SimpleTuner {verdict.version}: seams")
    features = [(name, info.title, str(verdict.features[name])) for name, info in FEATURES.items()]
    _show(("feature", "what", "verdict"), features, "what that means")
    broken = len(verdict.broken)
    typer.echo(f"SimpleTuner {verdict.version}: " + ("every seam holds" if verdict.ok else f"{broken} broken"))


def _print_sweep(verdicts: Sequence[Verdict], as_json: bool) -> None:
    if as_json:
        document = {"ok": all(verdict.ok for verdict in verdicts), "releases": [v.to_json() for v in verdicts]}
        typer.echo(json.dumps(document))
        return
    rows = [(v.version, *("on" if v.features[name].on else "off" for name in FEATURES)) for v in verdicts]
    _show(("SimpleTuner", *FEATURES), rows, "features per release")
    for verdict in verdicts:
        for row in verdict.broken:
            typer.echo(f"{verdict.version}: {row.name}: {row.found} -> off: {row.feature}")
    good = sum(verdict.ok for verdict in verdicts)
    typer.echo(f"{good} of {len(verdicts)} releases hold every seam")


def _show(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    from simpletuner_gh200.cli.tables import show_table

    show_table(screen(), headings, rows, title=title)


COMMAND = Command("upstream", app, panel="Upstream", order=10)
