"""``gh200 cache``: the packs of unified caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.units import counted, format_bytes

app = typer.Typer(no_args_is_help=True, help="List, check and delete the packs of unified caches.")

Folder = Annotated[Path, typer.Argument(help="A cache_config.cache_dir, or the output or project folder of a run.")]
Names = Annotated[list[str] | None, typer.Option("--name", "-n", help="Only this cache; may be repeated.")]


@app.command("ls")
def ls(cache_dir: Folder, name: Names = None, as_json: AsJson = False) -> None:
    """List caches: entries, how many still match SimpleTuner's files, bytes.

    Examples:

      gh200 cache ls output/gh200/cache

      gh200 cache ls output/gh200/cache --json
    """
    from simpletuner_gh200.held.inspect import describe

    def line(found: dict[str, Any]) -> str:
        packs = f"{counted(found['packs'], 'pack')}, {format_bytes(found['bytes'])}, of {found['source']}"
        return f"{_entries(found['entries'])} ({found['fresh']} fresh) in {packs}"

    _run(cache_dir, name, as_json, describe, line)


@app.command("verify")
def verify(cache_dir: Folder, name: Names = None, as_json: AsJson = False) -> None:
    """Read every entry against its checksum; exit 1 if one is damaged.

    Examples:

      gh200 cache verify output/gh200/cache

      gh200 cache verify output/gh200/cache -n vae-photos-1a2b3c4d
    """
    from simpletuner_gh200.held.inspect import verify as check

    _run(cache_dir, name, as_json, check, lambda found: f"{_entries(found['checked'])} read")


@app.command("drop")
def drop(cache_dir: Folder, name: Names = None, as_json: AsJson = False) -> None:
    """Delete packs, never SimpleTuner's own files and nothing outside the cache folder.

    Examples:

      gh200 cache drop output/gh200/cache

      gh200 cache drop output/gh200/cache -n text-embeds-1a2b3c4d
    """
    from simpletuner_gh200.held.inspect import drop as delete

    def line(found: dict[str, Any]) -> str:
        return f"{counted(found['packs'], 'pack')}, {format_bytes(found['bytes'])} deleted"

    _run(cache_dir, name, as_json, delete, line)


def _entries(number: int) -> str:
    return counted(number, "entry", "entries")


def _run(
    cache_dir: Path,
    names: list[str] | None,
    as_json: bool,
    act: Callable[[Any], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
) -> None:
    """Act on each cache and print; exit 1 where something is wrong with one."""
    from simpletuner_gh200.held.inspect import packed_caches
    from simpletuner_gh200.operate.run_folder import caches_of

    cache_dir = caches_of(cache_dir)
    found = [act(cache) for cache in packed_caches(cache_dir, names)]
    problems = [problem for one in found for problem in one.get("problems", ())]
    lines = [f"{one['name']}: {line(one)}" for one in found] + [f"problem: {problem}" for problem in problems]
    words = "\n".join(lines) or f"no packed caches in {cache_dir}"
    conclude({"caches": found, "problems": problems}, as_json, lambda: say(words), ok=not problems)


COMMAND = Command("cache", app, panel="More: runs", order=10)
