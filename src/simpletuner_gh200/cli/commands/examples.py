"""``gh200 examples``: the files that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.compat import shipped
from simpletuner_gh200.demo.project import write_tiny_images
from simpletuner_gh200.errors import UsageError

IMAGES = "datasets/train_images"
"""As config/gh200_in_memory_datasets.json has it."""


def examples(
    folder: Annotated[Path | None, typer.Argument(help="Where they go; without one they are listed.")] = None,
    pages: Annotated[bool, typer.Option("--pages", help="The documentation too, into docs/.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Tiny pictures too, where the in-memory example expects its own.")
    ] = False,
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

      gh200 examples try --data && cd try && gh200 train --config config/gh200_in_memory_example.json
    """
    if data and folder is None:
        raise UsageError("--data writes pictures, and no folder was named", remedy="gh200 examples DIR --data")
    wanted = (*shipped.PATTERNS, *shipped.PAGES) if pages else shipped.PATTERNS
    found = shipped.names(wanted) if folder is None else shipped.write(folder, wanted, force=force)
    if data and folder is not None:
        write_tiny_images(folder / IMAGES)
    words = "\n".join(f"{'' if folder is None else 'wrote '}{path}" for path in found)
    document = {"folder": str(folder or shipped.root()), "files": [str(path) for path in found]}
    conclude(document, as_json, lambda: say(words))


COMMAND = Command("examples", examples, panel="More: before a run", order=50)
