"""The file for ``accelerate launch``: one process, or several on one or more nodes, data parallel or FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = """\
# For accelerate launch, made by gh200 init. {what}
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
enable_cpu_affinity: {affinity}
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: {nodes}
num_processes: {ranks}
rdzv_backend: static
same_network: true
use_cpu: {cpu}
"""

SEVERAL_NODES = """\
# Every node starts the same way, with its own rank, and all name the first one:
#   ACCELERATE_EXTRA_ARGS="--machine_rank=1 --main_process_ip=FIRST_NODE" gh200 train --config ...
main_process_port: 29500
"""

# limit_all_gathers has no flag in accelerate's launcher, and FSDP2 limits them by itself: the training configuration
# says it, as fsdp_limit_all_gathers.
FSDP2 = """\
# These settings trained all weights of a tiny Flux on two CPU ranks over gloo. GPUs and NCCL were never tried.
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {blocks}
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_cpu_ram_efficient_loading: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def accelerate_file(*, nodes: int, gpus_per_node: int, blocks: Sequence[str] = (), cpu: bool = False) -> str:
    """The content of the file. ``blocks`` are the classes that FSDP wraps; without them every rank holds the whole."""
    ranks = nodes * gpus_per_node
    text = HEADER.format(
        what=_described(nodes, gpus_per_node, sharded=bool(blocks)),
        kind=_engine(ranks, sharded=bool(blocks), cpu=cpu),
        # Keeps each rank on the cores, and so the memory, next to its own GPU.
        affinity=str(gpus_per_node > 1 and not cpu).lower(),
        precision="'no'" if cpu else "bf16",
        nodes=nodes,
        ranks=ranks,
        cpu=str(cpu).lower(),
    )
    if nodes > 1:
        text += SEVERAL_NODES
    return text + FSDP2.format(blocks=",".join(blocks)) if blocks else text


def _engine(ranks: int, *, sharded: bool, cpu: bool) -> str:
    if ranks == 1:
        return "'NO'"
    return "FSDP" if sharded else "MULTI_CPU" if cpu else "MULTI_GPU"


def _described(nodes: int, gpus_per_node: int, *, sharded: bool) -> str:
    machines = "one node" if nodes == 1 else f"{nodes} nodes"
    devices = "one process" if gpus_per_node == 1 else f"{gpus_per_node} processes"
    return f"{machines}, {devices} each" + (", sharded by FSDP2." if sharded else ".")
