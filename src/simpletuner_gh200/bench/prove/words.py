"""A proof in words, for the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.units import format_bytes, format_seconds

NOT_MEASURED = "not measured"
ARM_HEADINGS = ("arm", "status", "step", "vs stock", "HBM", "what shows it")


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
