"""``gh200 rebase``: carry the extension into a git checkout of SimpleTuner, step by step, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say, stdout_kept_for_json

if TYPE_CHECKING:
    from simpletuner_gh200.compat.rebase.workflow import Journal, StepRecord

app = typer.Typer(
    help="Bring the extension into your own SimpleTuner tree, on a fresh upstream.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Repo = Annotated[Path, typer.Option("--repo", help="The git checkout of SimpleTuner.")]
HERE = Path()


@app.command()
def start(
    onto: Annotated[str, typer.Option(help="Upstream's branch, tag or commit to build on.")],
    repo: Repo = HERE,
    remote: Annotated[str | None, typer.Option(help="Fetch this remote first, such as origin or upstream.")] = None,
    skip_tests: Annotated[bool, typer.Option("--skip-tests", help="No smoke and integration tests.")] = False,
    as_json: AsJson = False,
) -> None:
    """Back up, branch from upstream, test it, then bring in the package, one commit per component.

    Examples:

      gh200 rebase start --repo ~/SimpleTuner --onto origin/main --remote origin

      gh200 rebase start --repo ~/SimpleTuner --onto v4.10.1 --skip-tests
    """
    from simpletuner_gh200.compat.rebase import workflow

    with stdout_kept_for_json(as_json):
        journal = workflow.start(repo, onto=onto, remote=remote, skip_tests=skip_tests, tell=_tell)
    _conclude(journal, as_json)


@app.command("continue")
def go_on(repo: Repo = HERE, as_json: AsJson = False) -> None:
    """Go on where an interrupted or failed rebase stopped.

    Example:

      gh200 rebase continue --repo ~/SimpleTuner
    """
    from simpletuner_gh200.compat.rebase import workflow

    with stdout_kept_for_json(as_json):
        journal = workflow.go_on(repo, _tell)
    _conclude(journal, as_json)


@app.command()
def status(repo: Repo = HERE, as_json: AsJson = False) -> None:
    """Show what is done and what is next. Exit code 1 if a step failed.

    Example:

      gh200 rebase status --repo ~/SimpleTuner --json
    """
    from simpletuner_gh200.compat.rebase import workflow

    journal = workflow.status(repo)
    for record in () if as_json else journal.steps:
        _tell(record)
    _conclude(journal, as_json, ok=all(record.status != "failed" for record in journal.steps))


@app.command()
def rollback(repo: Repo = HERE, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Go back to the branch it started from. The new branch and the backup are kept.

    Example:

      gh200 rebase rollback --repo ~/SimpleTuner --yes
    """
    from simpletuner_gh200.compat.rebase import workflow

    raise typer.Exit(workflow.rollback(repo, yes=yes))


def _tell(record: StepRecord) -> None:
    typer.echo(f"{record.status:>8}  {record.name}" + (f": {record.result}" if record.result else ""))


def _conclude(journal: Journal, as_json: bool, *, ok: bool = True) -> None:
    following = journal.next_step()
    words = f"done. Read GH200_REBASE_CHECKLIST.md; the backup is {journal.backup_branch}"
    if following is not None:
        words = f"next: {following.name} (gh200 rebase continue)"
    document = {**asdict(journal), "finished": journal.finished, "backup_branch": journal.backup_branch}
    conclude(document, as_json, lambda: say(words), ok=ok)


COMMAND = Command("rebase", app, panel="More: SimpleTuner's releases", order=20)
