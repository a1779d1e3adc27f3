"""What the extension costs: an interpreter start with our ``.pth`` in place, and each training step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import simpletuner_gh200
from simpletuner_gh200.bench.hook_steps import seconds_per_step
from simpletuner_gh200.bench.suite import Suite, interleaved
from simpletuner_gh200.config.environment import SWITCH, for_child

PTH_LINE = (
    'import os, sys; gh200 = type(sys)("simpletuner.gh200"); '
    "gh200.__getattr__ = lambda name: getattr(object(), name) "
    'if name[:2] == "__" and name not in ("__path__", "__all__") '
    'else __import__("simpletuner_gh200.older_names", fromlist=["x"]).answer(name); '
    'sys.modules.setdefault("simpletuner.gh200", gh200); '
    '(os.environ.get("SIMPLETUNER_GH200") == "1" or "simpletuner/train.py" in " ".join(sys.orig_argv[1:4])) and '
    '__import__("simpletuner_gh200.startup", fromlist=["x"]).begin()\n'
)
"""The line of simpletuner_gh200.pth; a test keeps the two the same."""


def measure(quick: bool) -> dict[str, Any]:
    repeats = 5 if quick else 15
    startup = _startup(repeats)
    per_step = seconds_per_step(200 if quick else 2_000, repeats)
    step = _smallest_step_seconds(repeats)
    return {
        "startup_ms_off": (startup["off"] - startup["without"]) * 1000,
        "startup_ms_on": (startup["on"] - startup["without"]) * 1000,
        "interpreter_ms": startup["without"] * 1000,
        "per_step_us": per_step["telemetry"] * 1e6,
        "per_step_us_seams_only": per_step["seams"] * 1e6,
        "step_share": per_step["telemetry"] / step,
        "reference_step_ms": step * 1000,
    }


def _startup(repeats: int) -> dict[str, float]:
    """Interpreter starts over a site folder without our .pth, with it and off, with it and on."""
    with tempfile.TemporaryDirectory() as without, tempfile.TemporaryDirectory() as with_pth:
        Path(with_pth, "simpletuner_gh200.pth").write_text(PTH_LINE, encoding="utf-8")
        package = str(Path(simpletuner_gh200.__file__).parents[1])
        dependencies = next((path for path in sys.path if path.endswith("site-packages")), "")
        paths = os.pathsep.join((package, dependencies))

        def start(folder: str, switch: str | None) -> Callable[[], object]:
            environment = for_child({"PYTHONPATH": paths}, without=(SWITCH,)) | ({SWITCH: switch} if switch else {})
            code = f"import site; site.addsitedir({folder!r})"
            return lambda: subprocess.run([sys.executable, "-S", "-c", code], env=environment, check=True)

        candidates = {"without": start(without, None), "off": start(with_pth, None), "on": start(with_pth, "1")}
        return interleaved(candidates, repeats=repeats)


def _smallest_step_seconds(repeats: int) -> float:
    """Forward and backward of the demo's UNet at batch 2: a step no real training is shorter than."""
    import torch

    from simpletuner_gh200.demo.tiny_model import tiny_unet

    unet = tiny_unet()
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 64)
    added = {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)}

    def step() -> None:
        unet(latents, 500, text, added_cond_kwargs=added).sample.square().mean().backward()

    step()
    return interleaved({"step": step}, repeats=max(5, repeats))["step"]


SUITE = Suite("hooks", "What the extension costs at interpreter start and per training step.", measure)
