"""A proof as one page: no script, nothing from elsewhere, every word escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simpletuner_gh200.units import format_bytes, format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark}body{margin:0;font:15px/1.45 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1rem}h1{font-size:1.3rem}h2{font-size:1rem;margin-top:1.6rem}
table{border-collapse:collapse;width:100%;font-size:.85rem}
td,th{border-bottom:1px solid #8884;padding:.25rem .5rem;text-align:left;vertical-align:top}
.bar{background:#0b6e4f;height:.7rem;border-radius:.2rem}.failed{color:#c00000}.wide{overflow-x:auto}
"""

QUESTIONS = {
    "1": "what is memory in Grace to the driver, and how fast is a copy from it to HBM?",
    "2": "how fast are kernels that read and write it where it is?",
    "3": "how fast are AdamW's kernels over state in Grace?",
    "4": "do copies from Grace run beside computation? 1: entirely, 0: one after the other",
    "5": "how much of HBM goes to the CUDA context and the libraries' workspaces?",
    "6": "where Grace is full, is there an error or a kill?",
    "7": "what does the first use of new memory cost?",
}
"""By the numbers that the self-test gives them."""


def as_html(told: Mapping[str, Any]) -> str:
    gpus = ", ".join(str(gpu.get("name")) for gpu in told["machine"]["gpus"]) or "no GPU"
    title = f"gh200 prove: {gpus}{', emulated' if told['emulated'] else ''}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (verdict(told), *told["notes"])),
        "<h2>Runs</h2>",
        _runs(told["ab"]),
        "<h2>Rates, GB/s</h2>",
        _table(("what", "GB/s"), rates(told)),
        *_against(told.get("against")),
        "<h2>Questions that only hardware answers</h2>",
        _table(("number", "question", "answer"), _asked(told["questions"])),
        "<h2>Self-test</h2>",
        _table(
            ("status", "check", "found"),
            [(row["status"], row["what"], row["found"]) for row in told["selftest"]["checks"]],
        ),
        "<h2>Doctor</h2>",
        _table(
            ("status", "code", "what", "found"),
            [(row["status"], row["code"], row["what"], row["found"]) for row in told["doctor"]["checks"]],
        ),
        "<h2>Machine</h2>",
        _table(("field", "value"), list(told["machine"].items())),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def verdict(told: Mapping[str, Any]) -> str:
    ran = [row for row in told["ab"] if row["status"] != "skip"]
    failed = [row["name"] for row in ran if row["status"] == "failed"]
    tested = told["selftest"]["summary"]
    rounds = "1 round" if told["rounds"] == 1 else f"{told['rounds']} rounds"
    runs = f"{len(ran) - len(failed)} of {len(ran)} arms trained over {rounds}"
    lost = f" (failed: {', '.join(failed)})" if failed else ""
    return f"{runs}{lost}; self-test {tested['pass']} passed, {tested['fail']} failed, {tested['skip']} skipped"


NOT_MEASURED = "not measured"


def rates(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, GB/s) of the link and of every way to Grace memory."""
    pairs = [(f"link {way}", told["link"][way]) for way in ("h2d", "d2h")]
    pairs += [(f"{name}, {way}", found.get(way)) for name, found in told["pool"].items() for way in ("read", "write")]
    return [(name, NOT_MEASURED if rate is None else f"{rate:.1f}") for name, rate in pairs]


def arm_cells(row: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    """Name, status, step, against stock, HBM, what shows it."""
    return (
        row["title"],
        row["status"],
        "" if row["step_s"] is None else format_seconds(row["step_s"]),
        "" if row["vs_stock"] is None else f"{row['vs_stock']:.2f}",
        "" if row["peak_hbm"] is None else format_bytes(row["peak_hbm"]),
        row["told"],
    )


ARM_HEADINGS = ("arm", "status", "step", "vs stock", "HBM", "what shows it")


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    longest = max([row["step_s"] or 0.0 for row in rows], default=0.0) or 1.0
    body = []
    for row in rows:
        width = 100 * (row["step_s"] or 0.0) / longest
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in arm_cells(row))
        mark = ' class="failed"' if row["status"] == "failed" else ""
        body.append(f'<tr{mark}>{cells}<td><div class="bar" style="width:{width:.0f}%"></div></td></tr>')
    head = "".join(f"<th>{heading}</th>" for heading in (*ARM_HEADINGS, "step, drawn"))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _asked(answers: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [
        (number, QUESTIONS[number], NOT_MEASURED if answer is None else answer) for number, answer in answers.items()
    ]


def _against(found: Mapping[str, Any] | None) -> Iterable[str]:
    if found is None:
        return
    yield "<h2>Against the earlier report</h2>"
    yield from (f"<p>{escape(note)}</p>" for note in found["notes"])
    yield _table(
        ("what", "before", "now", "ratio"),
        [(row["name"], f"{row['before']:.4g}", f"{row['now']:.4g}", _ratio(row["ratio"])) for row in found["rows"]],
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(_plain(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(cell: Any) -> str:
    """For people: part by part, numbers to four digits."""
    if isinstance(cell, Mapping):
        parts = ((str(name).replace("_", " "), value) for name, value in cell.items() if value is not None)
        return "; ".join(
            f"{name} {f'({_plain(value)})' if isinstance(value, Mapping) else _plain(value)}" for name, value in parts
        )
    if isinstance(cell, list):
        return "; ".join(_plain(each) for each in cell)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
