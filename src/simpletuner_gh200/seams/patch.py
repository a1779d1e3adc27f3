"""A patch: one attribute or mapping entry replaced, owned, and restored only if it is still ours."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import wrapt

from simpletuner_gh200.errors import OwnershipError

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's shape: (wrapped, instance, args, kwargs) -> result."""

_ABSENT = object()


class Patch:
    """Replaces ``owner.attribute``. Installing twice is the same as once."""

    def __init__(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.attribute = attribute
        self._make = make
        self._original: Any = _ABSENT
        self._ours: Any = _ABSENT

    @property
    def installed(self) -> bool:
        return self._ours is not _ABSENT

    def install(self) -> None:
        if self.installed:
            return
        # Through __dict__, so that a staticmethod stays one and an inherited attribute is known as inherited.
        self._original = vars(self.owner).get(self.attribute, _ABSENT)
        current = self._original if self._original is not _ABSENT else getattr(self.owner, self.attribute, None)
        ours = self._make(current)
        setattr(self.owner, self.attribute, ours)
        self._ours = ours

    def uninstall(self) -> None:
        if not self.installed:
            return
        if vars(self.owner).get(self.attribute, _ABSENT) is not self._ours:
            raise OwnershipError(
                f"{self._where()} was replaced by someone else after us",
                remedy="take the other patch out first, in the reverse order of installation",
            )
        if self._original is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self._original)
        self._ours = self._original = _ABSENT

    def _where(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)!s}.{self.attribute}"


class EntryPatch:
    """Adds or replaces one entry of a registry mapping."""

    def __init__(self, owner: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        self.owner = owner
        self.key = key
        self._value = value
        self._original: Any = _ABSENT
        self.installed = False

    def install(self) -> None:
        if self.installed:
            return
        self._original = self.owner.get(self.key, _ABSENT)
        self.owner[self.key] = self._value
        self.installed = True

    def uninstall(self) -> None:
        if not self.installed:
            return
        if self.owner.get(self.key, _ABSENT) is not self._value:
            raise OwnershipError(f"registry entry {self.key!r} was replaced by someone else after us")
        if self._original is _ABSENT:
            del self.owner[self.key]
        else:
            self.owner[self.key] = self._original
        self.installed = False


AnyPatch = Patch | EntryPatch


def wrap_method(owner: Any, attribute: str, wrapper: Wrapper) -> Patch:
    """A patch that calls ``wrapper`` around the original; introspection still sees the original's signature."""
    return Patch(owner, attribute, lambda original: wrapt.FunctionWrapper(original, wrapper))


def add_attribute(owner: Any, attribute: str, value: Any) -> Patch:
    """A patch that adds something upstream does not have."""
    return Patch(owner, attribute, lambda _original: value)
