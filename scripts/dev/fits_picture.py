"""The first page's picture: what full fine-tunes need of a 96 GB superchip's HBM, without us and with state in Grace.

Every number is that of `gh200 plan config/gh200_full_example.json --machine gh200-96 --no-trace`, for the model that
is named, with the example's own blocks and without them. `make docs` draws it.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.draw import charts
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.pictures import bars
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.plan.text import POOL_NAMES
from simpletuner_gh200.units import format_bytes

EXAMPLE = Path(__file__).resolve().parents[2] / "config" / "gh200_full_example.json"
OURS = ("cache_config", "gh200_optimizations")
MODELS = {
    "FLUX.1-dev": {},
    "Qwen-Image": {"model_family": "qwen_image", "pretrained_model_name_or_path": "Qwen/Qwen-Image"},
}


def picture() -> str:
    """What training holds in HBM; what is assumed is paler, and what does not fit ends right of the line."""
    rows = [row for name in MODELS for row in (_row(name, stock=True), _row(name, stock=False))]
    whole = max(map(_total, rows))
    limit = format_bytes(MACHINES["gh200-96"].hbm)
    title = f"Full fine-tunes on one GH200: HBM in training. The line: all of it, {limit}. Computed, not run."
    return charts.bars([replace(row, whole=whole) for row in rows], label=title).document()


def words() -> str:
    """The picture's numbers in a sentence; the first page has it as it is."""
    parts = []
    for name in MODELS:
        (stock, _), (ours, grace) = training(name, stock=True), training(name, stock=False)
        needs, takes, held = (format_bytes(size) for size in (_total(stock), _total(ours), grace))
        parts.append(f"{name} needs {needs} of HBM; with optimizer state in Grace {takes}, and {held} there")
    capacity = format_bytes(MACHINES["gh200-96"].hbm)
    return f"Full fine-tunes on one GH200, whose HBM has {capacity}. {'. '.join(parts)}."


def training(name: str, *, stock: bool) -> tuple[charts.Bar, int]:
    """HBM while it trains, and bytes of state in Grace."""
    values = {**json.loads(EXAMPLE.read_text(encoding="utf-8")), **MODELS[name]}
    if stock:
        values = {key: value for key, value in values.items() if key not in OURS}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        file = Path(folder, "config.json")
        file.write_text(json.dumps(values), encoding="utf-8")
        plan = make_plan(read_training(Located.at(file), {}), MACHINES["gh200-96"], trace=False)
    (bar,) = (bar for bar in bars(plan) if bar.name == f"{POOL_NAMES['hbm']}, train")
    return bar, sum(row.bytes for row in plan.evaluated.of("train", "grace") if row.what == "optimizer")


def _row(name: str, *, stock: bool) -> charts.Bar:
    bar, grace = training(name, stock=stock)
    total = format_bytes(_total(bar))
    over = bar.limit is not None and _total(bar) > bar.limit
    note = f"{total}: does not fit" if over else f"{total}; Grace: {format_bytes(grace)}"
    return replace(bar, name=name if stock else "with use_uvm", note=note)


def _total(bar: charts.Bar) -> int:
    return round(sum(piece.size for piece in bar.pieces))
