"""One rank of two: a tiny Flux, whole and sharded as an accelerate file says; prints both losses after three steps."""

from __future__ import annotations

import copy
import json

import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from diffusers import FluxTransformer2DModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def tiny_flux() -> FluxTransformer2DModel:
    torch.manual_seed(1)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(9, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def train(model: torch.nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(**inputs(), return_dict=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def shard(model: torch.nn.Module, fsdp: dict[str, object]) -> int:
    """Checkpoint and shard every block of the classes that the file names; returns how many there were."""
    assert fsdp["fsdp_version"] == 2
    names = str(fsdp["fsdp_transformer_layer_cls_to_wrap"]).split(",")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = 0
    for owner in (model.transformer_blocks, model.single_transformer_blocks):
        for index, block in enumerate(owner):
            if type(block).__name__ in names:
                owner[index] = checkpoint_wrapper(block) if fsdp["fsdp_activation_checkpointing"] else block
                fully_shard(owner[index], mesh=mesh, reshard_after_forward=fsdp["fsdp_reshard_after_forward"])
                blocks += 1
    fully_shard(model, mesh=mesh, reshard_after_forward=fsdp["fsdp_reshard_after_forward"])
    return blocks


def main(example: str) -> None:
    dist.init_process_group("gloo")
    fsdp = load_config_from_file(example).fsdp_config
    whole = tiny_flux()
    sharded = copy.deepcopy(whole)
    blocks = shard(sharded, fsdp)
    result = {
        "whole": train(whole),
        "sharded": train(sharded),
        "checkpointed_blocks": blocks,
        "sharded_parameters": sum(isinstance(parameter, DTensor) for parameter in sharded.parameters()),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
