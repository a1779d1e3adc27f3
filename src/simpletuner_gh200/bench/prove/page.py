"""A proof as one page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.draw.charts import Bar, Piece, bars
from simpletuner_gh200.draw.page import page, paragraphs, section, table
from simpletuner_gh200.units import format_bytes, format_seconds

QUESTIONS = {
    "1": "what is memory in Grace to the driver, and how fast is a copy from it to HBM?",
    "2": "how fast are kernels that read and write it where it is?",
    "3": "how fast are AdamW's kernels over state in Grace?",
    "4": "do copies from Grace run during computation? 1: entirely, 0: one after the other",
    "5": "how much of HBM goes to the CUDA context and the libraries' workspaces?",
    "6": "where Grace is full, is there an error or a kill?",
    "7": "what does the first use of new memory cost?",
}
"""By the numbers that the self-test gives them."""
NOT_MEASURED = "not measured"
ARM_HEADINGS = ("arm", "status", "step", "vs stock", "HBM", "what shows it")


def as_html(proof: Mapping[str, Any]) -> str:
    gpus = ", ".join(str(gpu.get("name")) for gpu in proof["machine"]["gpus"]) or "no GPU"
    answers = [(number, QUESTIONS[number], plain(answer)) for number, answer in proof["questions"].items()]
    tested = [(row["status"], row["what"], plain(row["found"])) for row in proof["selftest"]["checks"]]
    examined = [(row["status"], row["code"], row["what"], plain(row["found"])) for row in proof["doctor"]["checks"]]
    machine = [(name, plain(value)) for name, value in proof["machine"].items()]
    return page(
        f"gh200 prove: {gpus}{', emulated' if proof['emulated'] else ''}",
        (
            paragraphs((verdict(proof), *proof["notes"])),
            section("Runs", table(ARM_HEADINGS, [arm_cells(row) for row in proof["ab"]]) + _drawn(proof)),
            section("Rates, GB/s", table(("what", "GB/s"), rates(proof))),
            section("Questions that only hardware answers", table(("number", "question", "answer"), answers)),
            section("Self-test", table(("status", "check", "found"), tested)),
            section("Doctor", table(("status", "code", "what", "found"), examined)),
            section("Machine", table(("field", "value"), machine)),
        ),
    )


def _drawn(proof: Mapping[str, Any]) -> str:
    """The step of every arm that has one."""
    steps = {row["name"]: row["step_s"] for row in proof["ab"] if row["step_s"]}
    rows = [
        Bar([Piece("step", seconds, 0, format_seconds(seconds))], max(steps.values()), name, format_seconds(seconds))
        for name, seconds in steps.items()
    ]
    return bars(rows, label="Seconds of a step, by arm").on_page() if rows else ""


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


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plain(value: Any) -> str:
    """For people: part by part, numbers to four digits."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, Mapping):
        parts = {str(name).replace("_", " "): each for name, each in value.items() if each is not None}
        return "; ".join(
            f"{name} ({plain(each)})" if isinstance(each, Mapping) else f"{name} {plain(each)}"
            for name, each in parts.items()
        )
    if isinstance(value, list):
        return "; ".join(map(plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
