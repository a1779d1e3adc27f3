"""Counts, in a real run, what the plan foresees: saved tensors and peak of a micro-batch, gradients, state, weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch


def install(record: dict[str, Any]) -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from simpletuner.helpers.training.trainer import Trainer

    from simpletuner_gh200.seams.trace.modes import LiveBytes, SavedBytes, storages

    record["measured"] = []
    now: dict[str, Any] = {}
    predict, backward, step = Trainer.model_predict, Accelerator.backward, AcceleratedOptimizer.step

    def watched_predict(self: Any, prepared_batch: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model.get_trained_component(unwrap_model=False)
        held = [*model.parameters(), *model.buffers()]
        given = [leaf for leaf in torch.utils._pytree.tree_leaves(prepared_batch) if isinstance(leaf, torch.Tensor)]
        earlier = storages(p.grad for p in model.parameters() if p.grad is not None)
        known = {**storages([*held, *given]), **earlier}
        now.update(model=model, live=LiveBytes(known), saved=SavedBytes(known), hooks=ExitStack(), modes=ExitStack())
        now["weights"], now["earlier"] = sum(storages(held).values()), sum(earlier.values())
        now["modes"].enter_context(now["live"])
        now["hooks"].enter_context(now["saved"].watching())
        return predict(self, prepared_batch, *args, **kwargs)

    def watched_backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        now["hooks"].close()
        forward = now["live"].peak
        result = backward(self, loss, **kwargs)
        now["modes"].close()
        gradients = [p.grad for p in now["model"].parameters() if p.grad is not None]
        record["measured"].append(
            {
                "weights": now["weights"],
                "gradients": sum(storages(gradients).values()),
                "saved": now["saved"].bytes,
                "earlier": now["earlier"],
                "forward": forward,
                "peak": now["earlier"] + now["live"].peak,
            }
        )
        return result

    def watched_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        record["state"] = sum(storages(value for value in states if isinstance(value, torch.Tensor)).values())
        return result

    Trainer.model_predict, Accelerator.backward = watched_predict, watched_backward
    AcceleratedOptimizer.step = watched_step
