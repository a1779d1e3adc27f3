"""Stock torch and the allocator keys of the earlier guides: refused by itself, never met once we are active."""

from __future__ import annotations

import os
import subprocess
import sys

GUIDES = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"
USE_CUDA = "import torch; print(torch.empty(8, device='cuda').device)"
ACTIVATE = "import os; from simpletuner_gh200.config.allocator import activate; activate(os.environ); "


def run(code: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": GUIDES}
    return subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, timeout=120)


def test_stock_torch_alone_refuses_the_keys() -> None:
    done = run(USE_CUDA)
    assert done.returncode != 0
    assert "Unrecognized" in done.stderr


def test_with_the_extension_it_runs_even_if_torch_was_imported_before() -> None:
    done = run("import torch; " + ACTIVATE + USE_CUDA + "; print(os.environ['GH200_USE_UVM'])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cuda:0", "True"]
