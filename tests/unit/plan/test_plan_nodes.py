"""Several ranks and nodes: shards as torch cuts them, what is whole for a while, and what two nodes hold."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from simpletuner_gh200.config.job import Job
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.evaluation import evaluate
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.placing import place
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.plan.steps import one_step, shard_bytes
from simpletuner_gh200.plan.traces import Stack, Trace
from simpletuner_gh200.plan.variants import fewest, node_of, on_nodes, spread
from simpletuner_gh200.seams.trace.build import rows
from tests.unit.plan.plan_samples import BILLION, BLOCKS, FLUX, command, configured, facts, sizes, trace

GH200 = MACHINES["gh200-96"]


@contextlib.contextmanager
def one_of(ranks: int, rank: int):
    """A process that takes itself for one of several, without any other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    finally:
        torch.distributed.destroy_process_group()


class OddModel(torch.nn.Module):
    """First dimensions of 1, 5, 7, 24, 97 and 128: few of them divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(1, 24))
        self.patch = torch.nn.Conv2d(3, 7, 2)
        self.block = torch.nn.TransformerEncoderLayer(24, 3, dim_feedforward=97, batch_first=True)
        self.wide = torch.nn.Linear(5, 128, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(128, 5)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 2), (4, 0), (4, 3), (8, 7)])
def test_shards_are_as_large_as_fully_shard_makes_them(ranks, rank):
    from torch.distributed.fsdp import fully_shard

    model = OddModel()
    expected = shard_bytes(rows(model), ranks)
    with one_of(ranks, rank) as mesh:
        for part in (model.block, model.wide, model):
            fully_shard(part, mesh=mesh)
        held = {
            parameter.to_local().untyped_storage().data_ptr(): parameter.to_local().untyped_storage().nbytes()
            for parameter in model.parameters()
        }
    assert sum(held.values()) == expected
    assert expected > sum(p.numel() * p.element_size() for p in OddModel().parameters()) // ranks, "padding counts"


def with_rows(length: int) -> Trace:
    """The sample's trace, every parameter ``length`` rows long."""
    known = trace(checkpointed=True)
    each = known.stacks["blocks"]
    block = {length: each.each.weights // length}
    return Trace(known.base, {"blocks": Stack(BLOCKS, each.each, block)}, {length: 2 * block[length]})


def test_rows_of_a_trace_go_into_the_shards():
    run = facts(weights="fp32", optimizer="torch-adamw", ranks=4, sharded=True)
    whole = one_step(run, sizes(traces={True: with_rows(1000)})).weights
    assert place(run, sizes(traces={True: with_rows(1000)}), GH200).step.weights == whole // 4
    padded = place(run, sizes(traces={True: with_rows(10)}), GH200).step
    assert padded.weights == 3 * whole // 10, "ten rows over four ranks are three on each"
    assert padded.trained == 3 * (10 * BILLION) // 10


def test_what_is_trained_is_kept_in_fp32_and_moved_in_bf16():
    alone, shared = place(facts(), sizes(), GH200), place(facts(ranks=4, sharded=True), sizes(), GH200)
    assert shared.step.weights == 2 * alone.step.weights // 4
    assert shared.step.whole == 2 * alone.step.weights, "every rank reads all of it first"
    adapter = place(facts(full=False, ranks=4, sharded=True), sizes(), GH200)
    assert adapter.step.weights == alone.step.weights // 4, "accelerate widens what is trained only"


def test_windows_keep_whole_gradients_on_every_rank():
    run = facts(ranks=4, sharded=True)
    once = place(run, sizes(), GH200).step.gradients
    added = place(replace(run, accumulation=2), sizes(), GH200).step.gradients - once
    assert added == one_step(run, sizes()).gradients


def test_the_network_is_between_nodes_and_nvlink_within_one():
    run = facts(ranks=4, sharded=True)
    apart = evaluate(run, sizes(), GH200).seconds
    beside = evaluate(run, sizes(), replace(GH200, devices=4)).seconds
    assert apart["peers"] == 0 < apart["network"]
    assert beside["network"] == 0 < beside["peers"] < apart["network"]
    two = evaluate(replace(run, ranks=8), sizes(), replace(GH200, devices=4)).seconds
    assert 0 < two["network"] < apart["network"], "four ports a node"
    faster = replace(GH200, devices=4, network=2 * GH200.network)
    assert evaluate(replace(run, ranks=8), sizes(), faster).seconds["network"] == pytest.approx(two["network"] / 2)


def test_ranks_are_spread_as_asked_or_as_configured():
    values = Job(8, 2)
    assert spread(Job(), ranks=None, nodes=None) == Job(1, 1)
    assert spread(values, ranks=None, nodes=None) == Job(8, 2)
    assert spread(values, ranks=None, nodes=3) == Job(12, 3)
    assert spread(values, ranks=6, nodes=3) == Job(6, 3)
    with pytest.raises(UsageError, match="--ranks 5"):
        spread(values, ranks=5, nodes=2)


def test_a_published_machine_is_one_superchip_of_a_node_and_this_machine_a_whole_one():
    node = node_of(GH200, Job(8, 2))
    assert (node.devices, node.grace, node.of_one_rank(8).grace) == (4, 4 * GH200.grace, GH200.grace)
    this = replace(GH200, name="this", title="here", devices=2)
    assert node_of(this, Job(4, 2)) == this
    with pytest.raises(UsageError, match="here has 2 GPUs"):
        node_of(this, Job(8, 2))


def test_a_node_has_no_more_gpus_than_it_comes_with(tmp_path):
    """Eight H100 a node: sixteen ranks are two nodes of them, whether that is said or not."""
    configured(tmp_path, **FLUX)
    words = (tmp_path / "config.json", "--machine", "h100", "--ranks", 16)
    shown = command(*words).stdout
    assert "2 nodes, 16 ranks" in shown and "1 node, 16 ranks" not in shown
    with pytest.raises(UsageError, match=r"16 ranks a node, and a node of H100 .* has 8 GPUs at most"):
        make_plan(configured(tmp_path, **FLUX), MACHINES["h100"], ranks=16, nodes=1, trace=False)
    crowded = make_plan(configured(tmp_path, **FLUX, num_processes=16), MACHINES["h100"], trace=False)
    assert any("8 GPUs at most" in note for note in crowded.notes)


def test_what_one_node_cannot_hold_more_of_them_can():
    found = list(on_nodes(lambda ranks: facts(ranks=ranks), sizes(), GH200, Job(1, 1)))
    assert [(one.nodes, one.fits) for one in found] == [(1, False), (2, True), (4, True), (8, True)]
    enough = fewest(found)
    assert enough is not None
    assert enough.to_json()["needs"] == {"fsdp_enable": True, "fsdp_version": 2, "optimizer": "torch-adamw"}
    other = on_nodes(lambda ranks: facts(ranks=ranks, optimizer="torch-adamw"), sizes(), GH200, Job(2, 1))
    assert next(other).to_json()["needs"] == {"fsdp_enable": True, "fsdp_version": 2}
    assert found[0].to_json()["needs"] == {}
    used = [one.to_json()["hbm"] for one in found]
    assert used == sorted(used, reverse=True)


def test_the_command_compares_nodes(tmp_path):
    flux = {**FLUX, "validation_disable": False, "optimizer": "torch-adamw", "output_dir": str(tmp_path / "output")}
    configured(tmp_path, **flux, fsdp_enable=True)
    words = (tmp_path / "config.json", "--machine", "gh200-96", "--nodes", 2, "--ranks", 4)
    told = json.loads(command(*words, "--json").stdout)
    assert [(one["nodes"], one["ranks"]) for one in told["nodes"]] == [(1, 2), (2, 4), (4, 8), (8, 16)]
    assert not told["nodes"][0]["fits"]
    assert told["nodes"][2]["fits"]
    shown = command(*words).stdout
    assert "2 nodes, 4 ranks" in shown
    assert "(this run)" in shown
    configured(tmp_path, **flux)
    assert "(this run)" not in command(*words).stdout, "it is not sharded, and those are"
