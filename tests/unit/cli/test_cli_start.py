from __future__ import annotations

import subprocess
import sys

import typer
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app

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


def test_every_command_has_an_example_in_its_help():
    app = build_app()
    names = list(every_command(typer.main.get_command(app)))
    assert ("train",) in names and ("config", "check") in names
    for words in names:
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, words
        assert f"gh200 {words[0]}" in shown.stdout, f"no example in the help of {' '.join(words)}"
