"""Lets accelerate shard on a CPU: it turns FSDP on for accelerators only, so several CPU ranks pass for several GPUs.

For tests; everything after that question, the preparation of the model, checkpoints and resuming, is accelerate's own.
``PROBE_WINDOWS=1,2,2``: a stock run accumulates so many micro-batches for each optimizer step, then as the last.
"""

from __future__ import annotations

import os


def install(record):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    if os.environ.get("PROBE_WINDOWS"):
        accumulate_by_hand([int(length) for length in os.environ["PROBE_WINDOWS"].split(",")])

    original = PartialState.__init__

    def passing_for_gpus(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = passing_for_gpus
    prepare = Accelerator.prepare

    def prepare_and_look(self, *args, **kwargs):
        made = prepare(self, *args, **kwargs)
        look(self, made if isinstance(made, (list, tuple)) else (made,), record)
        return made

    Accelerator.prepare = prepare_and_look


def accumulate_by_hand(windows):
    """At the start of each window: its length, and a count from nothing."""
    from accelerate import Accelerator

    accumulate = Accelerator.accumulate
    lengths = iter(windows)
    left = 0

    def accumulating(self, *models):
        nonlocal left
        if left == 0:
            left = self.gradient_accumulation_steps = next(lengths, windows[-1])
            self.step = 0
        left -= 1
        return accumulate(self, *models)

    Accelerator.accumulate = accumulating


def look(accelerator, prepared, record):
    import torch
    from torch.distributed.tensor import DTensor

    from simpletuner_gh200.seams.trace.build import rows

    record["distributed_type"] = str(accelerator.distributed_type)
    for model in prepared:
        if isinstance(model, torch.nn.Module):
            parameters = list(model.parameters())
            record["parameters"] = len(parameters)
            record["sharded_parameters"] = sum(isinstance(one, DTensor) for one in parameters)
            record["dtypes"] = sorted({str(one.dtype) for one in parameters})
            record["local_bytes"] = sum(
                one.to_local().untyped_storage().nbytes() for one in parameters if isinstance(one, DTensor)
            )
            record["rows"] = rows(model)
            record["checkpointed_blocks"] = sum(
                type(one).__name__.endswith("CheckpointWrapper") for one in model.modules()
            )
