"""Whatever page, message or checklist names a ``gh200`` command names one that exists, with options that it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from simpletuner_gh200.cli.main import build_app

ROOT = Path(__file__).resolve().parents[2]
WORD = r"[a-z][a-z-]*"
NAMED = re.compile(rf"(?<![\w./-])gh200 ({WORD})((?:[ \t]+[^\s`|#;&)\"']+)*)")


def texts() -> dict[Path, str]:
    """Pages whole where they are marked as code; the package's own words and scripts as they are."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    found = {page: "\n".join(_code(page.read_text(encoding="utf-8"))) for page in pages}
    for file in (*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")):
        found[file] = "\n".join(re.findall(r"`+(gh200 [^`\n]+)`", file.read_text(encoding="utf-8")))
    return found


def _code(page: str) -> list[str]:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page, re.S | re.M)
    inline = re.findall(r"`(gh200 [^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M))
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [*(line for line in lines if line.startswith("gh200 ")), *inline]


def test_every_command_that_is_named_exists() -> None:
    commands: Any = typer.main.get_command(build_app())
    wrong, seen = [], 0
    for path, text in texts().items():
        for name, rest in NAMED.findall(text):
            seen += 1
            wrong += [f"{path.relative_to(ROOT)}: gh200 {name}{rest}: {why}" for why in mistakes(commands, name, rest)]
    assert seen > 150
    assert wrong == []


def mistakes(commands: Any, name: str, rest: str) -> list[str]:
    command = commands.commands.get(name)
    if command is None:
        return ["no such command"]
    words = rest.split()
    if hasattr(command, "commands") and words and re.fullmatch(WORD, words[0]):
        command = command.commands.get(words[0])
        if command is None:
            return ["no such subcommand"]
    if command.context_settings.get("ignore_unknown_options"):  # what follows is SimpleTuner's
        return []
    known = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
    known |= {option for parameter in getattr(command, "params", ()) for option in parameter.secondary_opts}
    before_theirs = words[: words.index("--")] if "--" in words else words
    given = {word.partition("=")[0] for word in before_theirs if re.match(r"--[a-z]", word)}
    return [f"{option}: no such option" for option in sorted(given - known - {"--help"})]
