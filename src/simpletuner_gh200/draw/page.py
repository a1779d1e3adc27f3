"""HTML pages: one file, no script, no network, every word from outside escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from simpletuner_gh200.draw.style import PAGE, PICTURE
from simpletuner_gh200.telemetry.redact import printable

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Even if something slipped through, the browser would neither run nor fetch it."""


def escaped(text: str) -> str:
    """For the page: no markup, and nothing that would steer a reader who looks at its source on a terminal."""
    return escape(printable(text, lines=True))


def breakable(text: str) -> str:
    """Escaped, with places where a long key or path may go on in the next line: after dots, slashes and the like."""
    # Entities that escaping makes hold none of these characters, and numbers stay whole.
    parted = re.sub(r"([._/=,:-])(?=[^\W\d])", r"\1<wbr>", escaped(text))
    return re.sub(r"([^\s<>&;]{24})(?=[^\s<>&;]{8})", r"\1<wbr>", parted)  # a checksum has no such place


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{PICTURE}{PAGE}</style></head>"
        f"<body><main><h1>{escaped(title)}</h1>{''.join(parts)}</main></body></html>\n"
    )


def section(title: str, content: str, *, folded: bool = False) -> str:
    """Nothing where there is no content."""
    if not content:
        return ""
    if folded:
        return f"<details><summary>{escaped(title)}</summary>{content}</details>"
    return f"<section><h2>{escaped(title)}</h2>{content}</section>"


def paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escaped(line)}</p>" for line in lines)


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{escaped(a)}</dt><dd>{escaped(b)}</dd></div>" for a, b in rows) + "</dl>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Nothing where there are no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escaped(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{breakable(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
