"""Which models fit on which machine, without us and with `memory: "auto"`: docs/reference/models.md and the first
page's picture. `make docs` writes them; every number is the plan's own arithmetic, and nothing was run.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scripts.dev.plan_table import VIDEOS
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.draw import charts
from simpletuner_gh200.plan.deciding import decide
from simpletuner_gh200.plan.evaluation import Evaluated, evaluate
from simpletuner_gh200.plan.facts import read_facts
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.models import PUBLISHED, plain
from simpletuner_gh200.plan.sizes import read_sizes
from simpletuner_gh200.units import GIB, format_bytes

AUTO = 'memory "auto"'
LONGEST = 21
"""Letters of a name beside a bar."""
SHOWN = ("gh200-96", "gh200-144", "gb200", "h100", "gb10")
VIDEO: dict[str, Any] = {"video": {"num_frames": 81}, "resolution": 632}
"""About as many pixels as 480p, which tables of others take."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {"model_type": "full"},
    "LoRA": {"model_type": "lora", "lora_type": "standard", "lora_rank": 16},
}
COMMON: dict[str, Any] = {
    "optimizer": "adamw_bf16",
    "mixed_precision": "bf16",
    "train_batch_size": 1,
    "gradient_checkpointing": True,
    "validation_disable": True,
    "resolution": 1024,
    "resolution_type": "pixel",
}

PAGE = """# Which models fit

Every model whose size is known to `gh200 plan`, on machines as published: in bf16, with `adamw_bf16`, gradient
checkpointing, and one sample of 1024 pixels squared (video: 81 frames of about 480p). A LoRA has rank 16. The numbers
are GiB at the most in any phase of the run, of HBM (of the one memory on gb10): as stock SimpleTuner takes them, and
where that does not fit → with `"gh200_optimizations": {"memory": "auto"}`, which takes what is left of HBM to keep
activations instead of computing them again.

| mark | |
|---|---|
| ✓ | it fits |
| ✗ | it does not; on gb200 and h100 also for want of CPU memory, of which 240 and 256 GB are counted |
| ? | what is known of it fits; its step can't be traced here, so that activations are not counted (`≥`) |
| ~ | activations are scaled from another shape |

All of it is arithmetic ([how](../plan.md#how-it-knows)); nothing was run on these machines. On an h100 CPU memory is
behind PCIe, which is slow. `gh200 plan CONFIG --machine NAME` says all of this, and the seconds of a step, for your
configuration; `make docs` renews this page.

"""


@dataclass(frozen=True)
class Fit:
    """One model, trained in one way, on one machine."""

    stock: Evaluated
    ours: Evaluated
    sign: str
    """Before its numbers: what is not known of them."""

    @property
    def partly_known(self) -> bool:
        return self.sign == "≥"

    def cell(self) -> str:
        if self.stock.fits or self.stock.placed.machine.one_pool:
            return self._number(self.stock)
        return f"{self._number(self.stock)} → {self._number(self.ours)}"

    def _number(self, found: Evaluated) -> str:
        used = found.used("grace" if found.placed.machine.one_pool else "hbm") / GIB
        mark = "✗" if not found.fits else "?" if self.partly_known else "✓"
        return f"{mark} {self.sign}{used:.0f}"


@cache
def fits(kind: str) -> dict[str, dict[str, Fit]]:
    """Model -> machine -> what comes of it. Of files and remembered traces of this machine nothing is taken."""
    found = {}
    for model in json.loads(PUBLISHED.read_text(encoding="utf-8"))["models"]:
        video = VIDEO if model["family"] in VIDEOS else {}
        names = {"model_family": model["family"], "pretrained_model_name_or_path": model["names"][0]}
        found[model["names"][0]] = _of_one({**COMMON, **KINDS[kind], **names, **video})
    return found


def _of_one(values: dict[str, Any]) -> dict[str, Fit]:
    with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, XDG_CACHE_HOME=empty, HF_HUB_CACHE=empty):
        file = Path(empty, "config.json")
        file.write_text(json.dumps(values), encoding="utf-8")
        facts = read_facts(read_training(Located.at(file), {}))
        sizes = read_sizes(read_training(Located.at(file), {}), facts, MACHINES[SHOWN[0]], trace=False)
    sign = "≥" if not sizes.traces else "~" if sizes.traced_batch != 1 else ""
    machines = {name: MACHINES[name].of_one_rank(1) for name in SHOWN}
    return {
        name: Fit(evaluate(facts, sizes, machine), _ours(facts, sizes, machine), sign)
        for name, machine in machines.items()
    }


def _ours(facts: Any, sizes: Any, machine: Any) -> Evaluated:
    return evaluate(decide(facts, sizes, machine)[1], sizes, machine)


def page(note: str) -> str:
    return note + PAGE + "\n".join([*_tables(), *_unknown()]) + "\n"


def _tables() -> Iterator[str]:
    for kind in KINDS:
        yield f"## {'Full fine-tunes' if kind == 'full' else 'LoRA'}\n"
        yield f"| model | {' | '.join(SHOWN)} |\n|---|{'---|' * len(SHOWN)}"
        for model, machines in fits(kind).items():
            yield f"| {model} | {' | '.join(fit.cell() for fit in machines.values())} |"
        yield ""


def _unknown() -> Iterator[str]:
    known = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    families = {plain(model["family"]) for model in known["models"]}
    missing = [name for name in known["families"] if plain(name) not in families]
    yield f"## Not known\n\nFamilies of SimpleTuner {known['release']} whose sizes are not here;"
    yield "`gh200 plan` needs their `config.json`, or their files:\n"
    yield f"{', '.join(f'`{name}`' for name in missing)}."


# -- the first page ------------------------------------------------------------------------------------------


def picture() -> str:
    """HBM at the most, of full fine-tunes on one superchip; what does not fit ends right of the line, what is paler is
    known in part."""
    shown = _shown()
    whole = max(fit.stock.used("hbm") for fit in shown.values())
    rows = [bar for model, fit in shown.items() for bar in _bars(model, fit, whole)]
    limit = format_bytes(MACHINES["gh200-96"].hbm)
    title = f"Full fine-tunes on one GH200: HBM, all of it {limit}. Computed, not run; paler: no activations counted."
    return charts.bars(rows, label=title).document()


def _shown() -> dict[str, Fit]:
    """By size; of models of which only a part is known those that do not fit even so."""
    found = {model: machines["gh200-96"] for model, machines in fits("full").items()}
    known = {model: fit for model, fit in found.items() if not (fit.partly_known and fit.stock.fits)}
    return dict(sorted(known.items(), key=lambda item: item[1].stock.used("hbm")))


def _bars(model: str, fit: Fit, whole: int) -> Iterator[charts.Bar]:
    name = model.rpartition("/")[2].replace("stable-diffusion-", "SD ").removesuffix("-Diffusers")[:LONGEST]
    ways = [(fit.stock, name, 1)] + ([] if fit.stock.fits else [(fit.ours, AUTO, 0)])
    for found, called, shade in ways:
        used, limit = found.used("hbm"), found.placed.machine.hbm
        note = f"{fit.sign} {format_bytes(used)}{'' if found.fits else ': too much'}".strip()
        piece = charts.Piece("stock" if shade else AUTO, used, shade, f"{model}: {note}", pale=fit.partly_known)
        yield charts.Bar((piece,), whole, name=called, note=note, limit=limit)


def words() -> str:
    """The picture in a sentence; the first page has it as it is."""
    shown = {model: fit for model, fit in _shown().items() if not fit.partly_known}
    stock = [model for model, fit in shown.items() if fit.stock.fits]
    ours = [model.rpartition("/")[2] for model, fit in shown.items() if fit.ours.fits and model not in stock]
    limit = format_bytes(MACHINES["gh200-96"].hbm)
    return (
        f"Full fine-tunes on one GH200, whose HBM has {limit}: of {len(shown)} models whose steps were traced "
        f'{len(stock)} fit as they are, and with memory "auto" {len(stock) + len(ours)}: also {", ".join(ours)}.'
    )
