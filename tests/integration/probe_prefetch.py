"""With what queue SimpleTuner's own prefetching was started, if it was."""

from __future__ import annotations

from typing import Any


def install(record: dict[str, Any]) -> None:
    from simpletuner.helpers.training import trainer

    record["queues"] = []

    class Watched(trainer.BatchFetcher):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            record["queues"].append(kwargs["max_size"])
            super().__init__(*args, **kwargs)

    trainer.BatchFetcher = Watched
