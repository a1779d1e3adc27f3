"""Audio files through the in-memory backend and upstream's loader, then a batch of them through the hints."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.feature_matrix.upstream_scenarios import write_sound

COUNT = 4


def main(folder: Path) -> dict[str, Any]:
    sounds = [write_sound(folder / "sounds" / f"{index}.wav") for index in range(COUNT)]
    backend, dataset = in_memory(folder / "sounds")
    from simpletuner.helpers.audio import load_audio

    contents = [backend.read(str(path)) for path in sounds]
    waves = [load_audio(io.BytesIO(content))[0] for content in contents]
    with device():
        report = hinted(waves)
    return {
        "files": COUNT,
        "served": dataset.counts.served,
        "same_bytes": contents == [path.read_bytes() for path in sounds],
        "shape": list(waves[0].shape),
        "recognised": report.helped + report.not_helped,
        "helped": report.helped,
        "reasons": sorted(report.reasons),
    }


def in_memory(folder: Path) -> tuple[Any, Any]:
    from simpletuner_gh200.held.files import HeldFiles
    from simpletuner_gh200.held.staging import stage
    from simpletuner_gh200.seams.features.store.backend import backend_class

    dataset = HeldFiles.alone(stage(folder)[0])
    return backend_class()(None, "sounds", dataset), dataset


@contextmanager
def device() -> Iterator[None]:
    """The machine's own device, or the emulated driver where the environment names its library."""
    library = os.environ.get("GH200_EMU_LIBRARY")
    if library is None:
        yield
        return
    import ctypes

    import torch

    from simpletuner_gh200.memory.driver import detect
    from simpletuner_gh200.memory.driver.cuda import CudaDriver

    ctypes.CDLL(library).emu_become(b"gh200")
    torch.cuda.is_available = lambda: False  # there is no CUDA runtime above the emulated driver
    with detect.using(CudaDriver()):
        yield


def hinted(waves: list[Any]) -> Any:
    """The three places where audio sits in a batch; noise is there to be left alone."""
    import torch

    from simpletuner_gh200 import optimize_batch_for_gh200, set_uvm_hint_override

    set_uvm_hint_override(True)
    stacked = torch.stack(waves).repeat(1, 1, 16)  # a few pages each, as real sound has; less can't be placed
    batch = {
        "audio_latents": stacked,
        "waveform": stacked.clone(),
        "audio": {"samples": stacked.clone()},
        "noise": stacked.clone(),
    }
    return optimize_batch_for_gh200(batch)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
