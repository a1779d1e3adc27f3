"""SimpleTuner's methods are called as a start calls them, and what they raise is its judgement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from simpletuner_gh200.seams.outcome import REFUSING, refusal

logger = logging.getLogger("simpletuner_gh200")

Refusal = dict[str, str]


class Nothing:
    """Stands for a cache: whatever is asked of it is answered, and nothing happens."""

    def __getattr__(self, _name: str) -> Nothing:
        return self

    def __call__(self, *_arguments: object, **_named: object) -> Nothing:
        return self


class Enough(BaseException):
    """All that can be asked has been asked."""


def judged(where: str, judge: Callable[..., Any], *arguments: Any) -> Iterator[Refusal]:
    """What is raised by a stand-in of ours, that lacks what the real one has, is no answer."""
    try:
        judge(*arguments)
    except Enough:
        return
    except REFUSING as refused:
        yield from named(where, refused)
    except Exception as unable:  # noqa: BLE001
        logger.info("not judged: %r", unable)


def named(where: str, refused: BaseException) -> Iterator[Refusal]:
    words = refusal(refused)
    if words is not None:
        yield {"where": where, "what": words}
