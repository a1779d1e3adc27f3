#!/usr/bin/env python3
"""Build the documentation site (`make site`) and follow every link in it.

    python3 scripts/dev/build_site.py            build/site, from docs/ and scripts/site/

MkDocs, strict, refuses pages that are not in the navigation and links in Markdown that lead nowhere. What it does not
see is looked at here, in the pages as a browser gets them: pictures, links written in HTML, and anything that would
be fetched from elsewhere. Needs only the standard library; MkDocs lives in `.venv-site`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SERVED = "python3 -m http.server -d build/site"


def main() -> int:
    site = ROOT / "build" / "site"
    ran = run_mkdocs(ROOT, site)
    if ran.returncode:
        print(ran.stderr, file=sys.stderr)
        return 1
    found = list(problems(site))
    made = f"{site.relative_to(ROOT)}/index.html (search works once it is served: {SERVED})"
    print("\n".join(found) if found else made)
    return 1 if found else 0


def run_mkdocs(tree: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Of the docs and the navigation that ``tree`` has, into ``target``."""
    environments = [sys.executable, str(ROOT / "scripts" / "dev" / "environments.py"), "site"]
    subprocess.run(environments, check=True, stdout=subprocess.DEVNULL)
    mkdocs = [str(ROOT / ".venv-site" / "bin" / "python"), "-m", "mkdocs", "build", "--strict"]
    # Without --quiet, which hides warnings from --strict too. The variable: that MkDocs 2 will be another program is
    # known, and no news in every build.
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*mkdocs, "--config-file", str(tree / "scripts" / "site" / "mkdocs.yml"), "--site-dir", str(target)],
        env=variables,
        capture_output=True,
        text=True,
    )


@dataclass
class Page(HTMLParser):
    """What a built page points to, and what can be pointed to in it."""

    links: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Words in angle brackets that were meant to be read, and are a tag to a browser."""
    fetched: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "_" in tag or tag in {"name", "id", "n", "dir", "size", "file", "version"}:
            self.unknown.append(tag)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag in {"a", "area"}:
            self.links += [values["href"]] if "href" in values else []
            return
        for name in ("src", "href", "data", "poster"):
            if name in values and tag != "base":
                self.fetched.append(values[name])
        self.fetched += [piece.split()[0] for piece in values.get("srcset", "").split(",") if piece.strip()]


def problems(site: Path) -> Iterator[str]:
    """Every link that leads nowhere, and everything that a browser would fetch from another machine."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site)
        for word in page.unknown:
            yield f"{where}: <{word}> is lost as a tag: write it as code"
        for target in page.fetched:
            if urlsplit(target).netloc:
                yield f"{where}: fetches {target} from elsewhere"
        if path.name == "404.html":
            continue  # served at any address, so its links start at the site's root, which is not known
        for target in (*page.links, *page.fetched):
            if reason := nowhere(target, path, pages):
                yield f"{where}: {target}: {reason}"


def nowhere(target: str, path: Path, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if there.is_dir():
        there /= "index.html"
    if not there.exists():
        return "no such file"
    if parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
        return "no such place in that page"
    return None


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


if __name__ == "__main__":
    sys.exit(main())
