"""The C code that takes files apart, under the address and undefined-behaviour sanitizers: a damaged or hostile file
reads and writes nothing beyond its buffers."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from isal import igzip_lib

from simpletuner_gh200.held.bulk import SOURCE
from simpletuner_gh200.memory.compiled import FLAGS, LIBRARIES

FUZZER = Path(__file__).with_name("fuzz_tensor_files.py")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("sanitized") / "bulk.so"
    subprocess.run(["gcc", *FLAGS, *SANITIZERS, "-o", str(library), str(SOURCE.path), *LIBRARIES], check=True)
    return library


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    """Files as SimpleTuner writes them, gzipped and not."""
    values = (
        torch.arange(512, dtype=torch.bfloat16).reshape(4, 16, 8),
        {"prompt_embeds": torch.randn(7, 16), "mask": torch.ones(7, dtype=torch.int64)},
        [torch.zeros(3000), torch.randn(5, 5).t()],
    )
    for number, value in enumerate(values):
        out = io.BytesIO()
        torch.save(value, out)
        (tmp_path / f"{number}.pt").write_bytes(out.getvalue())
        (tmp_path / f"{number}-gzipped.pt").write_bytes(gzip.compress(out.getvalue()))
    return tmp_path


def test_damaged_files_touch_nothing_beyond_their_buffers(sanitized: Path, originals: Path) -> None:
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    watched = {
        **{name: value for name, value in os.environ.items() if name != "SIMPLETUNER_GH200"},
        "LD_PRELOAD": runtime.stdout.strip(),
        "PYTHONMALLOC": "malloc",  # else many of Python's own objects share one allocation
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's are none of ours
    }
    seed = 1 if os.environ.get("CI") else random.randrange(1 << 30)
    command = [sys.executable, "-S", str(FUZZER), str(sanitized), igzip_lib.__file__, str(originals)]
    ran = subprocess.run([*command, "600", str(seed)], env=watched, capture_output=True, text=True)
    assert ran.returncode == 0, f"seed {seed}\n{ran.stderr[-4000:]}"
    statuses = set(map(int, ran.stdout.split()[1:]))
    assert statuses >= {1, 2, 3}, "files that are whole, that are something else and that are damaged were all met"
