"""Finding one's way: ``-h`` at every command, panels in the order of use, and `make help`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import typer
from typer.testing import CliRunner

from simpletuner_gh200.cli.command import PANELS, Command
from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.registry import contributions

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "simpletuner", "accelerate", "diffusers", "transformers", "cuda", "PIL")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from simpletuner_gh200.cli.main import build_app;"
        "from typer.testing import CliRunner; assert CliRunner().invoke(build_app(), ['--help']).exit_code == 0;"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def every_command(group, words=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, (*words, name))
        else:
            yield (*words, name)


def test_h_is_help_at_every_command_and_what_follows_an_example_is_a_comment_to_the_shell() -> None:
    app = build_app()
    names = list(every_command(typer.main.get_command(app)))
    assert ("train",) in names and ("config", "check") in names
    for words in [(), *names]:
        shown = CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, words
        assert f"Usage: {' '.join(('gh200', *words))} " in shown.stdout, words
        examples = [line for line in shown.stdout.splitlines() if line.strip().startswith("gh200 ")]
        assert not words or any(f"gh200 {words[0]}" in line for line in examples), words
        assert not [line for line in examples if re.search(r"\S {2,}[^ #]", line.strip())], words


def test_nothing_is_cut_short_on_a_narrow_screen() -> None:
    """Names of options, defaults, and paragraphs that are written in lines longer than the screen is wide."""
    app = build_app()
    found = typer.main.get_command(app)
    for words in every_command(found):
        shown = CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "80"}).stdout
        assert "…" not in shown, words
        command = found
        for word in words:
            command = command.commands[word]
        names = [name for one in command.params if not getattr(one, "hidden", False) for name in one.opts]
        assert all(name in shown for name in names if name.startswith("--")), words
        assert max(len(line) for line in shown.splitlines()) <= 80, words
        prose = shown[: shown.index("╭")].splitlines()
        for line, following in pairwise(prose):
            word = following.split()[0] if line.strip() and following.strip() else None
            assert word is None or len(f"{line.rstrip()} {word}") > 79, f"{words}: broken before {word!r}"


def test_every_panel_has_company_and_stands_in_the_order_of_use() -> None:
    found = list(contributions("simpletuner_gh200.cli.commands", "COMMAND", Command))
    assert {command.panel for command in found} == set(PANELS)
    assert min(Counter(command.panel for command in found).values()) > 1
    shown = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "100"}).stdout
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    listed = re.findall(r"^│ ([a-z]+)  ", shown, re.MULTILINE)
    assert listed == [command.name for command in sorted(found, key=lambda command: command.place)]
    assert "─ Commands ─" not in shown


def test_make_help_shows_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE))
    assert {"demo", "test", "lint", "clean", "help"} <= targets
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(["make", "help"], cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout
    described = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert set(described) == targets
    assert all(len(words) > 5 for words in described.values())


def test_a_beginner_meets_seven_commands_first() -> None:
    shown = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "100"}).stdout
    first = shown[shown.index(f"─ {PANELS[0]} ─") : shown.index(f"─ {PANELS[1]} ─")]
    assert re.findall(r"^│ (\w+) ", first, re.M) == ["setup", "doctor", "init", "plan", "train", "monitor", "report"]
    assert all(panel.startswith("More: ") for panel in PANELS[1:])
