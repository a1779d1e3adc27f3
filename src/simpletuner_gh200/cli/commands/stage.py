"""``gh200 stage``: try a dataset folder without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.config.settings import resolve_dataset
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.units import counted, format_bytes

COMPRESSIONS = tuple(get_args(get_args(InMemorySettings.model_fields["compression"].annotation)[0]))


def stage_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The dataset's folder.")],
    compression: Annotated[
        str | None, typer.Option(help=f"{', '.join(COMPRESSIONS)}; without it, raw.", metavar="CODEC")
    ] = None,
    memory_limit_gb: Annotated[float | None, typer.Option(help="Stop above this many GiB.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Threads; without it, all cores, 72 at most.")] = None,
    verify: Annotated[str, typer.Option(help="How images are checked: header, decode or none.")] = "header",
    as_json: AsJson = False,
) -> None:
    """Stage a folder as a run would, say what it holds, how fast, what is broken and what compression saves.

    Everything is given back at the end. Exit code 1 if it does not fit or holds broken files.

    Examples:

      gh200 stage datasets/portraits

      gh200 stage datasets/portraits --compression auto --memory-limit-gb 200

      gh200 stage datasets/portraits --verify decode --json
    """
    from simpletuner_gh200.held.staging import try_folder

    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is not a folder", remedy="give the instance_data_dir of a dataset")
    given = {
        "compression": compression,
        "memory_limit_gb": memory_limit_gb,
        "num_workers": num_workers,
        "verify": verify,
    }
    settings = resolve_dataset({key: value for key, value in given.items() if value is not None}, where="gh200 stage")
    assert isinstance(settings, InMemorySettings)
    found = try_folder(folder, settings)
    conclude({"fits": True, **found}, as_json, lambda: _show(found), ok=not found["broken"])


def _show(found: dict[str, Any]) -> None:
    say(f"{found['staged']} of {counted(found['files'], 'file')}, {format_bytes(found['bytes'])}")
    say(f"held: {format_bytes(found['held_bytes'])} in {found['seconds']:.1f} s ({found['gb_per_s']:.2f} GB/s)")
    for extension, why in found["choices"].items():
        say(f"  .{extension or '(none)'}: {why}")
    for name, size in found["estimates"].items():
        say(f"with {name}: about {format_bytes(size)}")
    for reason, count in found["problem_counts"].items():
        say(f"{count} {reason}")
    for line in found["first_problems"]:
        say(f"  {line}")


COMMAND = Command("stage", stage_folder, panel="More: before a run", order=30)
