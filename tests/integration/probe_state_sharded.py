"""Two ranks of FSDP2: a small sharded model trained plain, caught and streamed; each rank writes down what it found."""

import json
import os
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from simpletuner_gh200.memory.lane import lanes
from simpletuner_gh200.model.catching import CaughtOptimizer, HostPool, Keeper
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.streaming import StreamedOptimizer


def sharded(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def train(mesh, kind):
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    caught = CaughtOptimizer(optimizer, Keeper(HostPool(1 << 30), Placement("cpu_first", 1)))
    streamed = StreamedOptimizer(caught, lanes(torch.device("cpu")), room=1024)
    original = optimizer.step
    steps = {"plain": original, "caught": lambda: caught.step(original), "streamed": lambda: streamed.step(original)}
    torch.manual_seed(5 + torch.distributed.get_rank())
    for _ in range(4):
        model(torch.randn(4, 64)).square().mean().backward()
        steps[kind]()
        optimizer.zero_grad()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    local = [tensor.to_local().clone() for tensor in (*model.parameters(), *moments)]
    return local, caught, streamed, all(isinstance(moment, DTensor) for moment in moments)


torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
plain, *_ = train(mesh, "plain")
found = {}
for kind in ("caught", "streamed"):
    local, caught, streamed, are_dtensors = train(mesh, kind)
    found[kind] = {
        "same": all(mine.equal(theirs) for mine, theirs in zip(local, plain, strict=True)),
        "dtensors": are_dtensors,
        "in_pool": caught.tally.tensors,
        "beside": caught.tally.hbm_tensors,
        "streamed_steps": streamed.steps,
    }
Path(os.environ["SIMPLETUNER_GH200_SUMMARY_DIR"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
