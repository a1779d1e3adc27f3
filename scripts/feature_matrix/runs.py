"""Real runs of the tiny project: stock SimpleTuner, or ours through ``gh200 train``, watched from inside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.feature_matrix.matrix import Skip
from simpletuner_gh200.config.environment import SUMMARY_FOLDER
from simpletuner_gh200.demo.project import DemoProject, write_project_in_subprocess
from simpletuner_gh200.operate.launching import accelerator_present
from simpletuner_gh200.seams.rank import train_script

OBSERVER = Path(__file__).parent / "observer"
SECONDS = int(os.environ.get("FEATURE_MATRIX_TIMEOUT", "900"))

VALIDATION = {
    "validation_disable": False,
    "validation_prompt": "a tiny picture",
    "validation_num_inference_steps": 2,
    "validation_resolution": "64x64",  # a bare 64 would mean megapixels
    "validation_guidance": 1.0,
    "validation_step_interval": 100000,
    "num_eval_images": 0,
}
"""Validation that only happens when it is asked for (and at the end), and takes a second."""


@dataclass
class Run:
    """What a run left: the observer's notes in order, our summary if it was ours, the log."""

    exit_code: int
    notes: list[dict[str, Any]]
    log: Path
    summary: dict[str, Any] = field(default_factory=dict)

    def of(self, what: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["what"] == what]

    def reached(self, steps: int) -> None:
        """Judged by the step it reached, because SimpleTuner 3.x exits 0 on failure."""
        ended = self.of("ended")
        found = ended[-1]["global_step"] if ended else None
        if self.exit_code != 0 or found != steps:
            raise RuntimeError(f"reached step {found} of {steps}, exit code {self.exit_code}; see {self.log}")


class Bench:
    """One project folder for all runs of a matrix, so that model, images and caches are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stock(self, name: str, *, steps: int, config: dict[str, Any], ask_at: int = -1) -> Run:
        """SimpleTuner's own train.py, without the extension."""
        return self.train_stock(name, self._project(steps, config, {}).config, ask_at)

    def train_stock(self, name: str, config: Path, ask_at: int = -1, **environment: str) -> Run:
        """SimpleTuner's own train.py with a configuration that is there."""
        added = {"SIMPLETUNER_GH200": "0", "CONFIG_BACKEND": "json", "CONFIG_PATH": str(config), **environment}
        if not accelerator_present():
            added["FEATURE_MATRIX_PIN_STAND_IN"] = "1"
        return self._run(name, [sys.executable, str(train_script())], added, ask_at)

    def ours(self, name: str, *, steps: int, config: dict[str, Any], dataset: dict[str, Any], ask_at: int = -1) -> Run:
        """``gh200 train`` with the extension's blocks in the configuration."""
        return self.train(name, self._project(steps, config, dataset).config, ask_at)

    def train(self, name: str, config: Path, ask_at: int = -1, **environment: str) -> Run:
        """``gh200 train`` with a configuration that is there."""
        command = [sys.executable, "-m", "simpletuner_gh200", "train", "--config", str(config)]
        with tempfile.TemporaryDirectory() as left:
            run = self._run(name, command, {SUMMARY_FOLDER: left, **environment}, ask_at)
            for path in sorted(Path(left).glob("rank-*.json"))[:1]:
                run.summary = json.loads(path.read_text(encoding="utf-8"))
        return run

    def _project(self, steps: int, config: dict[str, Any], dataset: dict[str, Any]) -> DemoProject:
        project = DemoProject(self.folder, steps=steps)
        shutil.rmtree(project.output, ignore_errors=True)
        write_project_in_subprocess(project, config, dataset)
        return project

    def _run(self, name: str, command: list[str], added: dict[str, str], ask_at: int) -> Run:
        notes, log = self.folder / f"{name}.notes", self.folder / f"{name}.log"
        notes.unlink(missing_ok=True)
        watched = {
            "FEATURE_MATRIX_NOTES": str(notes),
            "FEATURE_MATRIX_MANUAL_VALIDATION_AT": str(ask_at),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(OBSERVER), os.environ.get("PYTHONPATH")))),
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment = {**os.environ, **watched, **added}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                command, env=environment, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS
            )
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        return Run(done.returncode, [json.loads(line) for line in lines], log)


class Kept:
    """Folders as they are now, to be put back before a run that is compared with another."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder, self._names = folder, names
        self._copy = folder / "kept"
        shutil.rmtree(self._copy, ignore_errors=True)
        for name in names:
            shutil.copytree(folder / name, self._copy / name)

    def restore(self) -> None:
        for name in self._names:
            shutil.rmtree(self._folder / name)
            shutil.copytree(self._copy / name, self._folder / name)


def trained_weights(output: Path) -> dict[str, tuple[str, bytes]]:
    """Tensor -> its type and bytes, of the weights that a run left; files differ in the order of their headers."""
    from safetensors import deserialize

    found = sorted(output.glob("**/pytorch_lora_weights.safetensors"), key=lambda path: len(path.parts))
    tensors = deserialize(found[0].read_bytes()) if found else []
    return {name: (str(content["dtype"]), bytes(content["data"])) for name, content in tensors}


def need_audio() -> None:
    """Skip where SimpleTuner can't train on audio: its loader decodes with FFmpeg's libraries."""
    if shutil.which("ffmpeg") is None:
        raise Skip("SimpleTuner reads audio with FFmpeg's libraries, and there is no ffmpeg here")


def need_backend(name: str) -> str:
    """The backend as upstream spells it; Skip where this machine can't run it."""
    spelled = name.replace("_", "-")
    modules = {
        "xformers": "xformers",
        "sageattention": "sageattention",
        "flash-attn": "flash_attn",
        "flash-attn-2": "flash_attn",
    }
    modules |= {"flash-attn-3": "flash_attn_interface", "flash-attn-3-varlen": "flash_attn_interface"}
    anywhere = {"diffusers", "native", "native-math", "native-efficient", "native-flash", "flex"}
    if spelled not in anywhere and not accelerator_present():
        raise Skip(f"attention backend {spelled} needs a CUDA device, and this machine has none")
    from importlib.util import find_spec

    wanted = modules.get(spelled)
    if wanted is not None and find_spec(wanted) is None:
        raise Skip(f"attention backend {spelled} needs the package {wanted}, which is not installed")
    return spelled
