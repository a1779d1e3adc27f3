"""Predicted bytes against measured ones: tiny models of seven families, full and LoRA, with and without checkpointing.

What is measured is a real step of SimpleTuner's own trainer with real tensors on the CPU (``plan_families.py``); what
is predicted is the tracing child's answer to the same configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.model.optimizer_table import optimizers
from simpletuner_gh200.plan import traces
from simpletuner_gh200.plan.variants import between
from simpletuner_gh200.seams.trace.counted import Counted
from tests.integration import plan_families
from tests.integration.workbench import Workbench

TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    """Whatever was traced before, by whichever code, is traced again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def name_here(family: str) -> str:
    """What this release calls it on its command line."""
    from importlib.metadata import version

    older = {"pixart": "pixart_sigma", "z_image": "z-image"}
    return older.get(family, family) if version("simpletuner").startswith("3.") else family


def predicted(cases: list[tuple[str, dict[str, Any]]]) -> list[Counted]:
    return [trace.whole for trace in traced([(*case, plan_families.latent_of(case[0])) for case in cases], like="cpu")]


def traced(cases: list[tuple[str, dict[str, Any], tuple[int, ...]]], *, like: str = "hopper") -> list[traces.Trace]:
    """Of (family, options, shape of a latent)."""
    questions = [
        traces.step_request(
            options,
            plan_families.FAMILIES[family],
            batch=plan_families.BATCH,
            latent=latent,
            checkpointing=options["gradient_checkpointing"],
            like=like,
            tokens=plan_families.TOKENS,
        )
        for family, options, latent in cases
    ]
    answers = traces.ask(questions, timeout=3600)
    assert [answer["error"] for answer in answers if "error" in answer] == []
    return [traces.Trace.from_json(answer) for answer in answers]


def measured(workbench: Workbench, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    asked, answers = folder / "cases.json", folder / "answers.json"
    asked.write_text(json.dumps(cases))
    child = workbench.train(code=CODE.format(asked=str(asked), answers=str(answers)), timeout=3600)
    assert child.ok, child.explain()
    return json.loads(answers.read_text())


CODE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.integration.plan_families import measure_all
measure_all(Path({{asked!r}}), Path({{answers!r}}))
"""


@pytest.fixture
def compare(workbench: Workbench, tmp_path: Path) -> Callable[..., None]:
    return partial(compare_in, workbench, tmp_path)


def compare_in(workbench: Workbench, folder: Path, wanted: list[tuple[str, bool, bool, str]], **more: str) -> None:
    cases = []
    for family, full, checkpointing, precision in wanted:
        here = plan_families.options(name_here(family), full=full, checkpointing=checkpointing, precision=precision)
        cases.append((family, {**here, **more}))
    wrong = []
    for case, foreseen, seen in zip(wanted, predicted(cases), measured(workbench, folder, cases), strict=True):
        each = optimizers()["torch-adamw"].bytes_per_parameter("fp32" if case[3] == "no" else "bf16")
        assert each is not None
        pairs = {
            name: (getattr(foreseen, name), seen[name])
            for name in ("parameters", "weights", "gradients", "saved", "forward", "peak")
        }
        pairs["state"] = (round(each * foreseen.stepped), seen["state"])
        wrong += [f"{case} {name}: {a} for {b}" for name, (a, b) in pairs.items() if abs(a - b) > TOLERANCE * b]
    assert wrong == []


@pytest.mark.matrix
def test_seven_families_full_and_lora_with_and_without_checkpointing(compare):
    compare([(*case, "no") for case in product(plan_families.FAMILIES, (True, False), (True, False))])


@pytest.mark.matrix
def test_half_precision_under_autocast(compare):
    compare([(*case, "bf16") for case in product(("flux", "sd3", "sdxl"), (True, False), (True, False))])


@pytest.mark.matrix
def test_lycoris(compare, tmp_path):
    chosen = {"algo": "lokr", "multiplier": 1.0, "linear_dim": 8, "linear_alpha": 1, "factor": 4}
    chosen["apply_preset"] = {"target_module": ["Attention", "FeedForward"]}
    config = tmp_path / "lycoris.json"
    config.write_text(json.dumps(chosen))
    cases = [
        (family, False, checkpointing, "bf16") for family, checkpointing in product(("flux", "sdxl"), (True, False))
    ]
    compare(cases, lora_type="lycoris", lycoris_config=str(config))


@pytest.mark.matrix
def test_what_lies_between_two_shapes_is_on_the_line_between_them():
    """Bytes of a shape in the middle, traced, against the line that a plan draws through both ends."""
    edges = (8, 16, 24)
    wrong = []
    for family in ("flux", "sdxl", "wan"):
        options = plan_families.options(family, full=True, checkpointing=False, precision="bf16")
        before = plan_families.latent_of(family)[:-2]
        low, middle, high = traced([(family, options, (*before, edge, edge)) for edge in edges])
        share = (edges[1] ** 2 - edges[0] ** 2) / (edges[2] ** 2 - edges[0] ** 2)
        line, true = between(low, high, share).whole, middle.whole
        wrong += [
            f"{family} {name}: {getattr(line, name)} for {getattr(true, name)}"
            for name in ("saved", "forward")
            if abs(getattr(line, name) - getattr(true, name)) > TOLERANCE * getattr(true, name)
        ]
        wrong += [f"{family} {name}: below" for name in ("peak", "flops") if getattr(line, name) < getattr(true, name)]
    assert wrong == []
