"""``gh200 examples``: the files that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.compat import shipped


def examples(
    folder: Annotated[Path | None, typer.Argument(help="Where they go; without one they are listed.")] = None,
    pages: Annotated[bool, typer.Option("--pages", help="The documentation too, into docs/.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the example configurations, accelerate files and scripts of the guides into a folder.

    Environment script, diagnostic, feature matrices, train.py and the rebase script, by the names the guides use: in
    that folder their command lines work as they are printed. For a project of your own: `gh200 init`.

    Examples:

      gh200 examples

      gh200 examples gh200-files && source gh200-files/scripts/setup_gh200_env.sh

      gh200 examples gh200-files --pages
    """
    wanted = (*shipped.PATTERNS, *shipped.PAGES) if pages else shipped.PATTERNS
    found = shipped.names(wanted) if folder is None else shipped.write(folder, wanted, force=force)
    words = "\n".join(f"{'' if folder is None else 'wrote '}{path}" for path in found)
    document = {"folder": str(folder or shipped.root()), "files": [str(path) for path in found]}
    conclude(document, as_json, lambda: say(words))


COMMAND = Command("examples", examples, panel="More: before a run", order=50)
