"""Stock SimpleTuner: what the extension must leave as it is."""

from __future__ import annotations

import subprocess
import sys
import wave
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from scripts.feature_matrix.matrix import Row, Skip, attempt
from scripts.feature_matrix.observations import backend_active, manual_validation_fired, phases_around_evaluation
from scripts.feature_matrix.runs import VALIDATION, Bench, Run, need_backend

SCRIPT = "scripts/test_upstream_features.sh"
HERE_TOO = "native-math"
"""A backend that every machine has."""
STEPS = 4
LOAD = """
import sys
from simpletuner.helpers.audio import load_audio
form, path = sys.argv[1:]
sound, rate = load_audio(path if form == "path" else open(path, "rb").read())
print(tuple(sound.shape), rate)
"""
NOTES = (
    "the guides' --enable_manual_validation is no flag of SimpleTuner's; the trigger is "
    "Trainer.register_manual_validation_trigger(), which the Web UI's button uses, and so does this test",
    "the guides' --attention_mechanism flash_attn_3 is spelled flash-attn-3; underscores are accepted here",
)


class UpstreamScenarios:
    """One stock run serves the attention and the manual-validation rows."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def rows(self, wanted: set[str]) -> Iterator[Row]:
        if "attention" in wanted:
            yield attempt("U1", "backend chosen", f"{SCRIPT} --attention", lambda: backend_active(self._run, HERE_TOO))
            yield attempt(
                "U2", "phases around evaluation", f"{SCRIPT} --attention", lambda: phases_around_evaluation(self._run)
            )
            for number, name in enumerate(("flash-attn-3", "sageattention"), start=3):
                yield attempt(
                    f"U{number}", f"backend {name}", f"{SCRIPT} --attention", lambda name=name: self._backend(name)
                )
        if "manual-validation" in wanted:
            yield attempt("U5", "manual validation", f"{SCRIPT} --manual-validation", self._manual)
        if "audio" in wanted:
            yield attempt("U6", "audio loader, from bytes", f"{SCRIPT} --audio", lambda: self._audio("bytes"))
            yield attempt("U7", "audio loader, from a path", f"{SCRIPT} --audio", lambda: self._audio("path"))

    @cached_property
    def _run(self) -> Run:
        config = {**VALIDATION, "attention_mechanism": HERE_TOO}
        run = self._bench.stock("upstream", steps=STEPS, config=config, ask_at=1)
        run.reached(STEPS)
        return run

    def _backend(self, name: str) -> str:
        spelled = need_backend(name)
        run = self._bench.stock(f"upstream-{spelled}", steps=2, config={"attention_mechanism": spelled})
        run.reached(2)
        return backend_active(run, spelled)

    def _manual(self) -> str:
        taken = manual_validation_fired(self._run)
        return f"images made at step {taken['global_step']}"

    def _audio(self, form: str) -> str:
        path = write_sound(self._bench.folder / "sound.wav")
        done = subprocess.run([sys.executable, "-c", LOAD, form, str(path)], capture_output=True, text=True)
        if done.returncode != 0 and "torchcodec" in done.stderr:
            raise Skip("torchaudio reads paths with torchcodec, which can't load its FFmpeg libraries here")
        assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
        shape = done.stdout.strip().splitlines()[-1]
        assert shape == "(1, 1600) 16000", f"load_audio gave {shape}"
        return f"load_audio: {shape}"


def write_sound(path: Path, *, samples: int = 1600, rate: int = 16000) -> Path:
    """A tenth of a second of a rising saw tooth, mono, 16 bit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(
            b"".join((index * 37 % 65536 - 32768).to_bytes(2, "little", signed=True) for index in range(samples))
        )
    return path
