"""``gh200 setup``: SimpleTuner, at versions that work together; ``gh200 constraints`` prints them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, stdout_kept_for_json
from simpletuner_gh200.upstream import tested

if TYPE_CHECKING:
    from simpletuner_gh200.upstream.importing import ImportVerdict


Release = Annotated[
    str | None, typer.Option("--release", help="A tested SimpleTuner release. Default: the newest for this Python.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Leave out what only CUDA needs.")]

HERE = f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine()
"""What decides which release it is."""


def setup(
    release: Release = None,
    cpu: Cpu = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Install SimpleTuner into this environment, at the versions it is tested with, and import it.

    With uv, or pip. A SimpleTuner that imports is left alone, unless --release asks for another. Python 3.12 and 3.13
    get the newest release, 3.11 the older one. Exit code 0: it imports; 1: it does not, or could not be installed.

    Examples:

      python3.13 -m venv tuner && . tuner/bin/activate && pip install simpletuner-gh200 && gh200 setup

      gh200 setup --dry-run

      gh200 setup --cpu --release 4.10.1
    """
    from simpletuner_gh200.operate.installing import decide, install
    from simpletuner_gh200.upstream.importing import check_import

    python, machine = HERE
    wanted = decide(release, python=python, machine=machine)
    if release is None and (held := tested.held_back(python)):
        say(f"gh200: {held}", error=True)
    found = check_import(say_on_a_terminal, refresh=True)
    installer: str | None = None
    changed: list[str] = []
    if found.imports is False or release not in (None, found.version):
        with stdout_kept_for_json(as_json):
            say_on_a_terminal(f"{'would install' if dry_run else 'installing'} {wanted.requirement(cpu=cpu)} ...")
            show = sys.stderr.isatty() and not as_json
            installer, changed = install(wanted, cpu=cpu, dry_run=dry_run, show=show)
            found = found if dry_run else check_import(say_on_a_terminal, refresh=True)
    ok = found.imports is True
    result = {"simpletuner": found.version, "installer": installer, "changed": changed}
    lines = _told(found, installer, changed, dry_run)
    conclude({**result, "imports": ok, "cause": found.cause}, as_json, lambda: say("\n".join(lines)), ok=dry_run or ok)


def constraints(release: Release = None, cpu: Cpu = False) -> None:
    """Print the versions that SimpleTuner is tested with, one `name==version` per line.

    For environments that are built elsewhere, an image say. The same on x86-64 and aarch64.

    Examples:

      gh200 constraints > pins.txt && pip install -c pins.txt 'simpletuner[cuda13]==4.10.1'

      gh200 constraints --release 3.1.6 --cpu
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    chosen = release or tested.choose(python, platform.machine()).release
    pins = tested.constraints(chosen, cpu=cpu)
    print(pins, end="")


def _told(found: ImportVerdict, installer: str | None, changed: list[str], dry_run: bool) -> Iterator[str]:
    if dry_run:
        yield from changed
    if installer is None:
        yield "nothing to change"
    else:
        yield f"{len(changed)} packages {'would change' if dry_run else 'changed'}, with {installer}"
    if found.version is None:
        yield f"{found.cause} yet"
    elif found.imports:
        yield f"SimpleTuner {found.version} imports ({tested.versions_in_words(found.version)})"
    else:
        yield f"SimpleTuner {found.version} does not import: {found.cause} ({tested.versions_in_words(found.version)})"


COMMAND = (
    Command("setup", setup, panel="Start here", order=10),
    Command("constraints", constraints, panel="More: before a run", order=70),
)
