"""The table of docs/plan.md: real models traced without weights, and what others published beside it.

    python scripts/dev/plan_table.py            trace all, write published_traces.json, print the table
    python scripts/dev/plan_table.py --new      the same, but trace only models that are not written yet
    python scripts/dev/plan_table.py --print    print the table from what is written

Tracing takes some minutes; what was traced before is remembered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from simpletuner_gh200.plan import traces
from simpletuner_gh200.plan.models import PUBLISHED
from simpletuner_gh200.plan.models import PUBLISHED_TRACES as DATA
from simpletuner_gh200.units import GIB

VIDEOS = ("wan", "hunyuanvideo", "kandinsky5_video", "ltxvideo", "ltxvideo2", "sanavideo")
_VIDEO = (81, 480, 832)
SHAPES = {**dict.fromkeys(VIDEOS, _VIDEO), "sd1x": (0, 512, 512), "sd2x": (0, 768, 768)}
TOKENS = {"sd2x": 77, "sd3": 333, "sdxl": 77, "sd1x": 77, "pixart": 300}


def questions(model: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """bf16, one sample of 1024 pixels squared, or as SHAPES says; LoRA of rank 16 on SimpleTuner's usual layers."""
    shape = SHAPES.get(model["family"], (0, 1024, 1024))
    frames, height, width = shape
    latent = ((frames - 1) // 4 + 1, height // 8, width // 8) if frames else (height // 8, width // 8)
    found = {}
    for kind in ("full", "lora"):
        for name in ("plain", "checkpointed"):
            options = {
                "model_family": model["family"],
                "model_type": kind,
                "lora_type": "standard",
                "lora_rank": 16,
                "lora_dropout": 0.0,
                "mixed_precision": "bf16",
            }
            found[kind, name] = traces.step_request(
                options,
                model["config"],
                batch=1,
                latent=latent,
                checkpointing=name == "checkpointed",
                tokens=TOKENS.get(model["family"], 512),
            )
    return found


def trace_all(known: dict[str, Any]) -> dict[str, Any]:
    models: dict[str, Any] = {}
    for model in json.loads(PUBLISHED.read_text(encoding="utf-8"))["models"]:
        if model["names"][0] in known:
            models[model["names"][0]] = known[model["names"][0]]
            continue
        asked = questions(model)
        answers = dict(zip(asked, traces.ask(list(asked.values()), timeout=3600), strict=True))
        frames, height, width = SHAPES.get(model["family"], (1, 1024, 1024))
        entry: dict[str, Any] = {"area": max(frames, 1) * height * width, "full": {}, "lora": {}}
        why = _against(model, answers)
        print(f"{model['names'][0]}: {why or 'traced'}", file=sys.stderr, flush=True)
        if why is None:
            for (kind, name), answer in answers.items():
                entry[kind][name] = answer
            models[model["names"][0]] = entry
    return models


def _against(model: dict[str, Any], answers: dict[tuple[str, str], dict[str, Any]]) -> str | None:
    """Why what was traced is not written; None where it is what was published."""
    for (kind, name), answer in answers.items():
        if "error" in answer:
            return f"{kind} {name} could not be traced: {answer['error'][:300]}"
        parameters = traces.Trace.from_json(answer).whole.parameters
        if kind == "full" and parameters != model["parameters"]:
            return f"SimpleTuner's class has {parameters} parameters, and {model['parameters']} are published"
    return None


def rows(models: dict[str, Any]) -> list[str]:
    lines = [
        "| GiB | weights | saved, plain | saved, checkpointed | peak beyond weights, plain / checkpointed | PFLOP |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in models.items():
        for kind in ("full", "lora"):
            plain, checkpointed = (traces.Trace.from_json(entry[kind][way]).whole for way in ("plain", "checkpointed"))
            shown = [plain.weights, plain.saved, checkpointed.saved]
            cells = [f"{value / GIB:.1f}" for value in shown]
            peaks = f"{plain.peak / GIB:.1f} / {checkpointed.peak / GIB:.1f}"
            lines.append(f"| {name}, {kind} | {' | '.join(cells)} | {peaks} | {plain.flops / 1e15:.2g} |")
    return lines


def main() -> None:
    if "--print" not in sys.argv:
        known = json.loads(DATA.read_text(encoding="utf-8"))["models"] if "--new" in sys.argv else {}
        Path(DATA).write_text(json.dumps({"models": trace_all(known)}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(rows(json.loads(DATA.read_text(encoding="utf-8"))["models"])))


if __name__ == "__main__":
    main()
