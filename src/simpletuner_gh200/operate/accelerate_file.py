"""The file for ``accelerate launch``: one process, or FSDP2 over the GPUs of one or several nodes."""

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


def accelerate_file(*, nodes: int, gpus_per_node: int, blocks: Sequence[str], cpu: bool = False) -> str:
    """The content of the file. ``blocks`` are the classes that FSDP wraps."""
    ranks = nodes * gpus_per_node
    sharded = ranks > 1 and not cpu
    text = HEADER.format(
        what=_described(nodes, gpus_per_node, sharded=sharded),
        kind="FSDP" if sharded else "MULTI_CPU" if ranks > 1 else "'NO'",
        # Keeps each rank on the cores, and so the memory, next to its own GPU.
        affinity=str(gpus_per_node > 1 and not cpu).lower(),
        precision="'no'" if cpu else "bf16",
        nodes=nodes,
        ranks=ranks,
        cpu=str(cpu).lower(),
    )
    if nodes > 1:
        text += SEVERAL_NODES
    return text + FSDP2.format(blocks=",".join(blocks)) if sharded else text


def _described(nodes: int, gpus_per_node: int, *, sharded: bool) -> str:
    machines = "one node" if nodes == 1 else f"{nodes} nodes"
    devices = "one process" if gpus_per_node == 1 else f"{gpus_per_node} processes"
    return f"{machines}, {devices} each" + (", sharded by FSDP2." if sharded else ".")
