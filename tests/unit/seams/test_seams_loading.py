"""A model on its way from its file: whose pages are there while its blocks move, and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.weight_files import give_back, give_back_mapped
from simpletuner_gh200.seams.features.loading import LoadingFeature
from simpletuner_gh200.seams.features.weights import WeightsFeature
from simpletuner_gh200.seams.patch import wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from tests.page_cache import cached_bytes, settled
from tests.unit.seams.test_seams_weights import runtime_with

MIB = 1 << 20
DEPTH, SIDE = 8, 512
SIZE = 2 * SIDE * SIDE * 4
"""Of a block."""


def stack() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)) for _ in range(DEPTH)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(SIDE, 8)})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(stack().state_dict(), tmp_path / "model.safetensors")
    return settled(tmp_path / "model.safetensors")


def loaded(file: Path) -> nn.Module:
    """As SimpleTuner's from_pretrained does: each weight is the file's pages."""
    with torch.device("meta"):
        model = stack()
    model.load_state_dict(load_file(file), assign=True)
    return model


class Watching(LoadingFeature):
    """Counts what the file takes whenever a block has moved."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.seen: list[tuple[int, int]] = []

    def _applied(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        block = id(instance) in self._moving
        result = super()._applied(wrapped, instance, args, kwargs)
        if block:
            pool = self.runtime.grace.pool
            self.seen.append((cached_bytes(self.file), pool.state().held if pool is not None else 0))
        return result


@pytest.fixture
def run(file: Path) -> Iterator[Any]:
    runtimes: list[Runtime] = []

    def start(**block: Any) -> tuple[Runtime, Watching]:
        runtime = runtime_with(Watching(file), WeightsFeature(), uvm_min_tensor_kb=0, **block)
        runtimes.append(runtime)
        runtime.call("start", runtime.trainer)
        return runtime, next(one for one in runtime.features if isinstance(one, Watching))

    with detect.using(NullDriver("a test")):
        yield start
        for runtime in runtimes:
            runtime.close()
    assert not hasattr(nn.Module._apply, "__wrapped__")
    assert "from_file" not in vars(torch.UntypedStorage)


def moved(runtime: Runtime, file: Path, *how: Any) -> nn.Module:
    """SimpleTuner's way with it: into a wrapper of adapters, and to the device as a whole."""
    model = runtime.trainer.model.model = loaded(file)
    nn.ModuleDict({"inside": model}).to(*how)
    return model


@pytest.mark.parametrize("how", [("cpu",), ("cpu", torch.bfloat16)], ids=["as it is", "converted"])
def test_pages_are_given_back_behind_each_block(run: Any, file: Path, how: tuple[Any, ...]) -> None:
    """File and pool together hold one model and one block, at most; else they would hold two."""
    runtime, loading = run(weights="grace")
    model = moved(runtime, file, *how)
    assert len(loading.seen) == DEPTH
    itemsize = model["head"].weight.element_size()
    for at, (cached, held) in enumerate(loading.seen, start=1):
        assert held == at * SIZE * itemsize // 4
        assert cached <= (DEPTH - at) * SIZE + MIB
    assert loading.summary()["given_back_behind_blocks"] > 0.9 * DEPTH * SIZE
    plain = load_file(file)
    assert all(torch.equal(value, plain[name].to(value.dtype)) for name, value in model.state_dict().items())
    assert all(runtime.grace.pool.holds(one) for one in model["blocks"].parameters())
    assert not runtime.grace.pool.holds(model["head"].weight)


def test_without_pages_given_back_weights_still_go_home_one_by_one(run: Any, file: Path) -> None:
    runtime, loading = run(weights="grace", release_weight_files=False)
    moved(runtime, file, "cpu")
    assert [held for _cached, held in loading.seen] == [at * SIZE for at in range(1, DEPTH + 1)]
    assert all(cached >= DEPTH * SIZE for cached, _held in loading.seen)


@pytest.mark.parametrize("block", [{"release_weight_files": True}, {"memory": "auto"}])
def test_weights_that_stay_with_simpletuner_leave_no_pages_either(run: Any, file: Path, block: dict[str, Any]) -> None:
    runtime, loading = run(**block)
    model = moved(runtime, file, torch.bfloat16)
    assert loading.seen[-1][0] <= MIB
    runtime.call("hooks_ready", runtime.trainer)
    runtime.call("before_train", runtime.trainer)
    del model, runtime.trainer.model.model
    give_back(str(file))
    assert cached_bytes(file) == 0


def test_weights_that_somebody_else_looks_at_keep_their_pages(run: Any, file: Path) -> None:
    runtime, loading = run(release_weight_files=True)
    model = runtime.trainer.model.model = loaded(file)
    kept = [one.detach() for one in model["blocks"][0].parameters()]
    before = [one.clone() for one in kept]
    model.to(torch.bfloat16)
    assert loading.seen[0][0] >= SIZE
    assert all(map(torch.equal, kept, before))


def test_what_was_written_to_mapped_weights_stays_written(run: Any, file: Path) -> None:
    """Pages of a private mapping that were changed are nowhere else: only those of a block that has moved may go."""
    runtime, loading = run(weights="grace")
    model = runtime.trainer.model.model = loaded(file)
    changed = {name: value.add_(1).clone() for name, value in model.state_dict().items()}
    applied, seen = loading._applied, []

    def compared(*given: Any) -> Any:
        result = applied(*given)
        seen.append(all(torch.equal(value, changed[name].to(value)) for name, value in model.state_dict().items()))
        return result

    loading._patches.remove()
    loading._patches.install(wrap_method(nn.Module, "_apply", compared))
    model.to("cpu")
    assert seen and all(seen), "also of the blocks that wait, whose pages are those of the same mapping"
    assert loading.summary()["given_back_behind_blocks"] > 0.9 * DEPTH * SIZE


def test_only_private_mappings_of_the_files_named_are_given_back(file: Path, tmp_path: Path) -> None:
    """What is anonymous, or another's, keeps its bytes."""
    anonymous = torch.ones(MIB)
    tensors = load_file(file)
    spans = [(anonymous.data_ptr(), 4 * MIB), *((one.data_ptr(), one.nbytes) for one in tensors.values())]
    assert give_back_mapped(spans, {str(tmp_path / "another")}) == 0
    assert bool((anonymous == 1).all())
    assert give_back_mapped(spans, {str(file)}) > 0.9 * DEPTH * SIZE
    assert bool((anonymous == 1).all())
