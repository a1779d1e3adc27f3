"""GH101: is this torch able to use the GPU that is here?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    torch = context.torch
    if torch is None:
        return failed("torch is not installed here", "pip install torch, from the index that has CUDA builds")
    if torch.cuda:
        return passed(f"torch {torch.version}, built for CUDA {torch.cuda}")
    if torch.hip:
        return warned(f"torch {torch.version} is built for AMD (HIP {torch.hip})", "what needs CUDA stays off here")
    if not context.nvidia_gpus:
        return passed(f"torch {torch.version}, a CPU build; no NVIDIA GPU here either")
    return failed(
        f"torch {torch.version} is a CPU build on a machine with an NVIDIA GPU ({', '.join(context.nvidia_gpus)})",
        _fix(context.machine),
    )


def _fix(machine: str) -> str:
    if machine in {"aarch64", "arm64"}:
        return (
            "aarch64 wheels of torch 2.8 to 2.10 on the public index are CPU-only: pip install 'torch>=2.11', "
            "or take a CUDA wheel from PyTorch's own index (its start page gives the command)"
        )
    return "install torch's CUDA wheel: PyTorch's start page gives the command for your CUDA version"


CHECK = Check(
    code="GH101",
    what="torch build",
    why="A CPU build of torch on a GPU machine trains on the CPU, or not at all, and says nothing about it.",
    run=_run,
)
