"""The benchmark's parts give the promised keys, and what is compared does the work it is named after."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from simpletuner_gh200.bench.suites.activations import Stack, measure


def test_it_gives_what_the_contract_names() -> None:
    found = measure(quick=True)
    assert {"us_per_tensor", "moved_vs_saved", "vs_save_on_cpu", "vs_upstream"} <= found.keys()
    assert 0 < found["moved"] < found["tensors"], "some of them only stay"
    assert found.keys() >= {"us_per_moved", "us_per_tensor_doing_nothing"}
    assert 0.5 < found["moved_vs_saved"] <= 1.5
    assert found["vs_save_on_cpu"] > 0
    assert found["vs_upstream"] is None, "it needs a GPU"


def test_all_candidates_give_the_same_gradients() -> None:
    """Ours to the bit; torch's forgets strides, so that other kernels run."""
    stack = Stack(8, width=8, depth=2)
    found = []
    around = (nullcontext(), stack.offloading(stack.offloader()), torch.autograd.graph.save_on_cpu(pin_memory=True))
    for context in around:
        stack.step(context)
        found.append([weight.grad.clone() for weight in stack.blocks.parameters()])
    plain, ours, theirs = found
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(plain, theirs, strict=True))
