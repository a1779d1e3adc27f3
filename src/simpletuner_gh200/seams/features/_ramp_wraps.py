"""Attributes of this run's objects, replaced while the loop runs."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Wraps:
    """Takes back in reverse order what is still ours; what someone else has wrapped since is left to pass through."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._put)

    def put(self, owner: Any, name: str, wrapper: Any) -> None:
        self._put.append((owner, name, vars(owner).get(name, _ABSENT), wrapper))
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        while self._put:
            owner, name, before, wrapper = self._put.pop()
            if vars(owner).get(name) is not wrapper:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
