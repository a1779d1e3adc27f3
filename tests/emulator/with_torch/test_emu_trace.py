"""Fake CPU tensors in a Hopper's guise take what fake CUDA tensors take, backward included.

A fake CUDA backward needs a visible device; the emulated one is enough for it.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from simpletuner_gh200.seams.trace.modes import LikeHopper, LiveBytes, SavedBytes, attention, into_fake, storages


class Block(torch.nn.Module):
    """What transformers and UNets are made of, as far as autocast and attention tell them apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.groups = torch.nn.GroupNorm(4, width)
        self.attend = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attend(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + functional.gelu(self.groups(scaled.transpose(1, 2)).transpose(1, 2))


def counted(device: str, *, autocast: bool, checkpointed: bool) -> tuple[int, int, int]:
    """(saved, forward, peak) of one step of three blocks in bf16."""
    with torch.device("meta"):
        model = torch.nn.ModuleList(Block(64) for _ in range(3)).to(torch.bfloat16)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    into_fake(model, mode, device=device)
    with ExitStack() as modes:
        modes.enter_context(mode)
        if device == "cpu":
            modes.enter_context(LikeHopper())
        else:
            modes.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
        x = torch.empty(2, 256, 64, dtype=torch.bfloat16, device=device)
        known = storages([x, *model.parameters()])
        live, saved = modes.enter_context(LiveBytes(known)), SavedBytes(known)
        with saved.watching(), torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = x
            for block in model:
                out = checkpoint(block, out, use_reentrant=False) if checkpointed else block(out)
            loss = out.float().square().mean()
        forward = live.peak
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return saved.bytes, forward, live.peak


@pytest.mark.parametrize("checkpointed", [False, True])
def test_under_autocast_the_guise_takes_what_cuda_takes(emulator, checkpointed: bool) -> None:
    real = counted("cuda", autocast=True, checkpointed=checkpointed)
    assert counted("cpu", autocast=True, checkpointed=checkpointed) == real
    assert real[0] > 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_without_autocast_only_statistics_differ(emulator, checkpointed: bool) -> None:
    """Of a norm in bf16, CUDA keeps mean and deviation in float32, the CPU in bf16."""
    real = counted("cuda", autocast=False, checkpointed=checkpointed)
    assert counted("cpu", autocast=False, checkpointed=checkpointed) == pytest.approx(real, rel=0.005)
