"""The extension with everything on, beside the upstream features the guides name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from scripts.feature_matrix.matrix import Row, Skip, attempt
from scripts.feature_matrix.media_project import STEPS as MEDIA_STEPS
from scripts.feature_matrix.observations import (
    at_window_boundary,
    backend_active,
    features_on,
    phases_around_evaluation,
)
from scripts.feature_matrix.runs import VALIDATION, Bench, Kept, Run, need_audio, need_backend, trained_weights
from scripts.feature_matrix.upstream_scenarios import HERE_TOO
from simpletuner_gh200.demo.run import BLOCKS, DATASET
from simpletuner_gh200.operate.launching import accelerator_present

SCRIPT = "scripts/test_combined_features.sh"
STEPS = 5
ASK_AT = 2
"""From the third micro-batch on: the first of the second window, which has two."""
RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 4,
    "target_effective_batch_size": 8,
    "batch_rampup_steps": 8,
}
NOTES = (
    "--manual and --manual-validation are the same test; SimpleTuner's trigger is "
    "Trainer.register_manual_validation_trigger(), there is no command-line flag",
)


class CombinedScenarios:
    """One run with all features and a ramp of windows 2 to 4 serves the attention and the manual-validation rows."""

    def __init__(self, bench: Bench, backend: str | None) -> None:
        self._bench = bench
        self._backend = backend or HERE_TOO

    def rows(self, wanted: set[str]) -> Iterator[Row]:
        if "backend" in wanted:
            command = f"{SCRIPT} --backend {self._backend}"
            yield attempt("C1", f"everything on + {self._backend}", command, self._with_backend)
            yield attempt("C2", "phases around evaluation", command, lambda: phases_around_evaluation(self._run))
        if "manual-validation" in wanted:
            command = f"{SCRIPT} --manual-validation"
            yield attempt("C3", "ramp + manual validation", command, lambda: at_window_boundary(self._run))
        if "audio" in wanted:
            yield attempt("C4", "audio files in memory", f"{SCRIPT} --audio", self._audio_staged)
            yield attempt("C5", "audio batch hinted", f"{SCRIPT} --audio", self._audio_hinted)
            yield attempt("C6", "the same, emulated driver", f"{SCRIPT} --audio", self._audio_emulated)
            yield attempt("C7", "training on an audio dataset", f"{SCRIPT} --audio", self._audio_training)
        if "video" in wanted:
            yield attempt("C8", "training on a video dataset", f"{SCRIPT} --video", self._video_training)

    @cached_property
    def _run(self) -> Run:
        ours = {**BLOCKS, "gh200_optimizations": {**BLOCKS["gh200_optimizations"], **RAMP}}
        config = {**VALIDATION, **ours, "attention_mechanism": need_backend(self._backend)}
        run = self._bench.ours("combined", steps=STEPS, config=config, dataset=DATASET, ask_at=ASK_AT)
        run.reached(STEPS)
        return run

    def _with_backend(self) -> str:
        seen = backend_active(self._run, need_backend(self._backend))
        return f"{seen}; {features_on(self._run, ('store', 'caches', 'ramp', 'hints'))}"

    @cached_property
    def _audio(self) -> dict[str, object]:
        return self._audio_path(dict(os.environ))

    def _audio_path(self, environment: dict[str, str]) -> dict[str, object]:
        command = [sys.executable, "-m", "scripts.feature_matrix.audio_path", str(self._bench.folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the audio path: {done.stderr.strip()[-400:]}")
        found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def _audio_emulated(self) -> str:
        if shutil.which("gcc") is None or importlib.util.find_spec("cuda") is None:
            raise Skip("the emulated driver needs gcc and NVIDIA's cuda-bindings")
        try:
            from tests.emulator.emulation import environment
        except ModuleNotFoundError:
            raise Skip("the emulated driver is part of a checkout, and these scripts came without one") from None
        found = self._audio_path(environment(personality="gh200"))
        assert found["helped"] == 3, f"{found['helped']} of 3 placed: {found['reasons']}"
        return "3 audio tensors placed on the emulated driver; no real device was involved"

    def _audio_staged(self) -> str:
        found = self._audio
        assert found["same_bytes"], "what the in-memory backend returned differs from the files"
        assert found["served"] == found["files"], f"{found['served']} of {found['files']} files were read from memory"
        return f"{found['files']} files, read from memory, load_audio: {found['shape']}"

    def _audio_hinted(self) -> str:
        found = self._audio
        assert found["recognised"] == 3, f"{found['recognised']} of 3 audio tensors recognised as ours to place"
        if not accelerator_present():
            raise Skip(
                f"3 audio tensors recognised, but without a GPU there is nothing to place them on: {found['reasons']}"
            )
        assert found["helped"] == 3, f"{found['helped']} of 3 placed: {found['reasons']}"
        return "3 audio tensors placed"

    def _video_training(self) -> str:
        """Wan, tiny and real: clips in memory, latents and text from unified caches."""
        folder = self._made("video")
        run = self._bench.train("video", folder / "config.json")
        run.reached(MEDIA_STEPS)
        return f"{MEDIA_STEPS} steps of Wan; {_served(run)}"

    def _audio_training(self) -> str:
        """ACE-Step, tiny and real: tones in memory, latents and text from unified caches, to the bit as without us."""
        need_audio()
        folder = self._made("audio")
        # Offline, or SimpleTuner fetches two large encoders of speech that it can do without.
        usual = {"OMP_NUM_THREADS": "1", "FEATURE_MATRIX_ONE_LANGUAGE": "1", "HF_HUB_OFFLINE": "1"}
        # The first run fills the caches and writes the bucket index, which every run shuffles and writes again.
        self._bench.train_stock("audio-first", folder / "stock.json", **usual).reached(MEDIA_STEPS)
        before = Kept(folder, ("tones", "cache"))
        weights = []
        for name, train in (("stock", self._bench.train_stock), ("config", self._bench.train)):
            before.restore()
            shutil.rmtree(folder / name, ignore_errors=True)
            run = train(f"audio-{name}", folder / f"{name}.json", **usual)
            run.reached(MEDIA_STEPS)
            weights.append(trained_weights(folder / name))
        assert weights[0], "stock SimpleTuner left no weights to compare with"
        assert weights[0] == weights[1], "the weights differ from those of stock SimpleTuner"
        return f"{MEDIA_STEPS} steps of ACE-Step, weights equal stock's to the bit; {_served(run)}"

    def _made(self, kind: str) -> Path:
        """The folder of a tiny project of this kind, made now."""
        folder = self._bench.folder / kind
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", f"scripts.feature_matrix.{kind}_project", str(folder)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0 and "No module named" in made.stderr:
            raise Skip(f"the {kind} project can't be made here: {made.stderr.strip().splitlines()[-1]}")
        assert made.returncode == 0, made.stderr.strip()[-400:]
        return folder


def _served(run: Run) -> str:
    caches = run.summary["details"]["caches"]
    kinds = sorted(name for name, found in caches.items() if isinstance(found, dict) and found.get("batched"))
    assert kinds, "no batch came from a unified cache"
    return f"{features_on(run, ('store', 'caches'))}; batches from {', '.join(kinds)}"
