"""What the site does beside MkDocs' own work: pages from the repository's root, and links that leave docs/.

In a checkout every link is relative, so that it works there and on the hosting site. Here a link to a file that is a
page leads to that page. A link to any other file leads to the repository, whose address is one setting (`repository` in
pyproject.toml), and is plain text as long as that is empty. A file that is not there fails the strict build.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""File of the repository -> page of the site."""
PAGES = {page: file for file, page in FROM_ROOT.items()}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<>\s]{16,}(?=</code>)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    address = repository()

    def on_the_site(match: re.Match[str]) -> str:
        target = match["target"]
        if ELSEWHERE.match(target):
            return match[0]
        file, _, anchor = target.partition("#")
        place = os.path.normpath(os.path.join(os.path.dirname(source), file))
        if not (ROOT / place).exists():
            log.warning("%s links to %s, which is not there", source, target)
        if inside := page_of(place):
            there = os.path.relpath(inside, os.path.dirname(page.file.src_uri))
            return f"{match['image']}[{match['text']}]({there}{'#' + anchor if anchor else ''})"
        return f"[{match['text']}]({address}/blob/main/{place})" if address else match["text"]

    return outside_fences(markdown, lambda text: LINK.sub(on_the_site, text))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Long names in tables may break behind an underscore, a dot or a slash; a column is narrow on a telephone."""
    return CODE.sub(lambda match: re.sub(r"([_./])(?=\w)", r"\1<wbr>", match[0]), html)


def page_of(place: str) -> str | None:
    """The page, or picture, of the site that a file of the repository is."""
    if place in FROM_ROOT:
        return FROM_ROOT[place]
    return place.removeprefix("docs/") if place.startswith("docs/") else None


def outside_fences(markdown: str, change: Any) -> str:
    """Examples of code may look like links."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def repository() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]).rstrip("/")
