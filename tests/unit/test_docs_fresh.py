"""Generated pages are as the code would write them now, and what is public is documented."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from scripts.dev import fits_picture, generate_docs
from simpletuner_gh200.api import PUBLIC_NAMES
from simpletuner_gh200.cli.main import build_app

ROOT = Path(__file__).resolve().parents[2]


PAGES = generate_docs.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_pages_are_fresh(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "stale: run `make docs`"


def test_the_first_page_says_what_its_picture_shows() -> None:
    assert f"![{fits_picture.words()}](docs/pictures/fits.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_public_name_exists_and_is_documented():
    page = (ROOT / "docs" / "compat" / "migration.md").read_text(encoding="utf-8")
    for name, module in PUBLIC_NAMES.items():
        assert f"`{name}" in page and find_spec(module) is not None, name


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_every_promise_names_tests_that_are_there() -> None:
    missing, path, named = [], "", 0
    for found in re.findall(r"`((?:tests/[\w/]+\.py)?::\w+)`", (ROOT / "docs" / "proven.md").read_text("utf-8")):
        path = found.partition("::")[0] or path  # "::test_other" is of the file before
        test = found.partition("::")[2]
        there = (ROOT / path).is_file() and f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
        missing += [] if there else [f"{path}::{test}"]
        named += 1
    assert missing == []
    assert named > 25


def test_every_file_that_the_architecture_page_names_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./-])((?:[a-z_]+/)*[a-z_]+(?:\.py|/))(?![\w-])", page)) - {"train.py", "src/"}
    package = ROOT / "src" / "simpletuner_gh200"
    # The page says once that paths are inside the package, and shortens those of the seams where it speaks of them.
    places = [package, package / "seams", package / "seams" / "features"]
    assert len(named) > 30
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


COMMAND = re.compile(r"(?:^|[`(;&|] ?|\$ )(gh200(?: +[^\s`|;&)]+)+)", re.MULTILINE)


def test_commands_on_the_pages_are_commands_with_those_options() -> None:
    """What a reader copies works. `gh200 train` passes flags on to SimpleTuner; after `--` they are another's."""
    app = typer.main.get_command(build_app())
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    lines = {(page, line) for page in pages for line in COMMAND.findall(page.read_text(encoding="utf-8"))}
    assert len(lines) > 100
    wrong = []
    for page, line in sorted(lines):
        words = line.partition("#")[0].partition(" -- ")[0].split()[1:]
        command = app
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"-h"}
        options = {word.partition("=")[0] for word in words if re.match(r"-[a-z]$|--\w", word)}
        passes_on = command.context_settings.get("ignore_unknown_options")
        unknown = [] if passes_on else sorted(options - known - {"--help"})
        if unknown or (hasattr(command, "commands") and words and re.match(r"[a-z]", words[0])):
            wrong.append(f"{page.relative_to(ROOT)}: {line}: {unknown or words[0]}")
    assert wrong == []
