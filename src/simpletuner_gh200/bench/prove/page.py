"""A proof as one page: no script, nothing from elsewhere, every word escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from simpletuner_gh200.units import format_bytes, format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark}body{margin:0;font:15px/1.45 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1rem}h1{font-size:1.3rem}h2{font-size:1rem;margin-top:1.6rem}
table{border-collapse:collapse;width:100%;font-size:.85rem}
td,th{border-bottom:1px solid #8884;padding:.25rem .5rem;text-align:left;vertical-align:top}
.failed{color:#c00000}.wide{overflow-x:auto}
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
NOT_MEASURED = "not measured"
ARM_HEADINGS = ("arm", "status", "step", "vs stock", "HBM", "what shows it")


def as_html(proof: Mapping[str, Any]) -> str:
    gpus = ", ".join(str(gpu.get("name")) for gpu in proof["machine"]["gpus"]) or "no GPU"
    title = f"gh200 prove: {gpus}{', emulated' if proof['emulated'] else ''}"
    answers = [
        (number, QUESTIONS[number], NOT_MEASURED if answer is None else answer)
        for number, answer in proof["questions"].items()
    ]
    arms = [(arm_cells(row), row["status"] == "failed") for row in proof["ab"]]
    tested = [(row["status"], row["what"], row["found"]) for row in proof["selftest"]["checks"]]
    examined = [(row["status"], row["code"], row["what"], row["found"]) for row in proof["doctor"]["checks"]]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (verdict(proof), *proof["notes"])),
        *("<h2>Runs</h2>", _table(ARM_HEADINGS, *zip(*arms, strict=True))),
        *("<h2>Rates, GB/s</h2>", _table(("what", "GB/s"), rates(proof))),
        *_against(proof.get("against")),
        *("<h2>Questions that only hardware answers</h2>", _table(("number", "question", "answer"), answers)),
        *("<h2>Self-test</h2>", _table(("status", "check", "found"), tested)),
        *("<h2>Doctor</h2>", _table(("status", "code", "what", "found"), examined)),
        *("<h2>Machine</h2>", _table(("field", "value"), list(proof["machine"].items()))),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def verdict(proof: Mapping[str, Any]) -> str:
    ran = [row for row in proof["ab"] if row["status"] != "skip"]
    failed = [row["name"] for row in ran if row["status"] == "failed"]
    tested = proof["selftest"]["summary"]
    rounds = "1 round" if proof["rounds"] == 1 else f"{proof['rounds']} rounds"
    runs = f"{len(ran) - len(failed)} of {len(ran)} arms trained over {rounds}"
    lost = f" (failed: {', '.join(failed)})" if failed else ""
    return f"{runs}{lost}; self-test {tested['pass']} passed, {tested['fail']} failed, {tested['skip']} skipped"


def rates(proof: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, GB/s) of the link and of every way to Grace memory."""
    pairs = [(f"link {way}", proof["link"][way]) for way in ("h2d", "d2h")]
    pairs += [(f"{name}, {way}", found.get(way)) for name, found in proof["pool"].items() for way in ("read", "write")]
    return [(name, NOT_MEASURED if rate is None else f"{rate:.1f}") for name, rate in pairs]


def arm_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """As ARM_HEADINGS."""
    step = "" if row["step_s"] is None else format_seconds(row["step_s"])
    peak = "" if row["peak_hbm"] is None else format_bytes(row["peak_hbm"])
    return row["title"], row["status"], step, _ratio(row["vs_stock"]), peak, row["told"]


def _against(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    rows = [(row["name"], f"{row['before']:.4g}", f"{row['now']:.4g}", _ratio(row["ratio"])) for row in found["rows"]]
    notes = [f"<p>{escape(note)}</p>" for note in found["notes"]]
    return ["<h2>Against the earlier report</h2>", *notes, _table(("what", "before", "now", "ratio"), rows)]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]], failed: Sequence[bool] = ()) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = ""
    for number, row in enumerate(rows):
        mark = ' class="failed"' if number < len(failed) and failed[number] else ""
        body += f"<tr{mark}>" + "".join(f"<td>{escape(_plain(cell))}</td>" for cell in row) + "</tr>"
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
