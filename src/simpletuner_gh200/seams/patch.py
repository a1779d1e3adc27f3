"""The one way to change something of SimpleTuner's: a patch, owned, that comes out as it went in.

A patch replaces an attribute of a class, a module or a single object, or an entry of a registry mapping. It remembers
what was there (or that nothing was), is installed at most once, and is taken out only where it is still the one in
place. ``Patches`` keeps those that belong together.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import wrapt

from simpletuner_gh200.errors import OwnershipError

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's shape: (wrapped, instance, args, kwargs) -> result."""

_ABSENT = object()


class Patch:
    """Replaces ``owner.attribute``, or ``owner[attribute]`` where the owner is a mapping."""

    def __init__(self, owner: Any, attribute: Any, make: Callable[[Any], Any]) -> None:
        """``make`` gets what is there now, None where nothing is, and returns what is to be there instead."""
        self.owner = owner
        self.attribute = attribute
        self._make = make
        self._original: Any = _ABSENT
        self._ours: Any = _ABSENT

    @property
    def installed(self) -> bool:
        return self._ours is not _ABSENT

    @property
    def in_place(self) -> bool:
        """Installed, and nobody has put something else over it."""
        return self.installed and self._entries().get(self.attribute, _ABSENT) is self._ours

    def install(self) -> None:
        if self.installed:
            return
        # The owner's own entry, so that a staticmethod stays one and an inherited attribute is known as inherited.
        self._original = self._entries().get(self.attribute, _ABSENT)
        ours = self._make(self._current())
        self._put(ours)
        self._ours = ours

    def uninstall(self) -> None:
        """Put back what was there; OwnershipError where somebody replaced ours meanwhile."""
        if not self.installed:
            return
        if not self.in_place:
            owner = getattr(self.owner, "__name__", type(self.owner).__name__)
            raise OwnershipError(
                f"{owner}.{self.attribute} was replaced by someone else after us",
                remedy="take the other patch out first, in the reverse order of installation",
            )
        self._put(self._original)
        self._ours = self._original = _ABSENT

    def give_up(self) -> None:
        """Somebody has wrapped ours: it stays underneath, and what ``wrap_method`` made passes on from now on."""
        self._ours = self._original = _ABSENT

    def _entries(self) -> Any:
        return self.owner if isinstance(self.owner, MutableMapping) else vars(self.owner)

    def _current(self) -> Any:
        if self._original is not _ABSENT:
            return self._original
        return None if isinstance(self.owner, MutableMapping) else getattr(self.owner, self.attribute, None)

    def _put(self, value: Any) -> None:
        mapping = isinstance(self.owner, MutableMapping)
        if value is _ABSENT:
            (operator.delitem if mapping else delattr)(self.owner, self.attribute)
        else:
            (operator.setitem if mapping else setattr)(self.owner, self.attribute, value)


def wrap_method(owner: Any, attribute: str, wrapper: Wrapper) -> Patch:
    """A patch that calls ``wrapper`` around the original; introspection still sees the original's signature."""
    if inspect.isclass(owner) or inspect.ismodule(owner):
        return Patch(owner, attribute, lambda original: wrapt.FunctionWrapper(original, wrapper))

    def on_the_object(original: Callable[..., Any]) -> Callable[..., Any]:
        # A plain function: objects of a run may be copied by others, which wrapt's proxies refuse. A copy then still
        # calls the method of the object that it was copied from.
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, owner, args, kwargs) if patch.installed else original(*args, **kwargs)

        return call

    patch = Patch(owner, attribute, on_the_object)
    return patch


def put(owner: Any, attribute: Any, value: Any) -> Patch:
    """A patch that puts ``value`` there: something upstream does not have, or an entry of one of its registries."""
    return Patch(owner, attribute, lambda _original: value)


class Patches:
    """Patches that belong together: installed all or none, taken out newest first.

    >>> patches = Patches()
    >>> patches.install(wrap_method(trainer, "train", around), put(registry, "key", value))
    >>> patches.remove()
    """

    def __init__(self) -> None:
        self._installed: list[Patch] = []

    def install(self, *patches: Patch) -> None:
        done: list[Patch] = []
        try:
            for patch in patches:
                patch.install()
                done.append(patch)
        except BaseException:
            uninstall_all(reversed(done))
            raise
        self._installed += done

    def uninstall(self) -> None:
        taken, self._installed = self._installed, []
        uninstall_all(reversed(taken))

    def remove(self) -> None:
        """For objects of one run: take out what is still ours. Who wrapped ours since keeps his, and calls through."""
        while self._installed:
            patch = self._installed.pop()
            if patch.in_place:
                patch.uninstall()
            else:
                patch.give_up()


def uninstall_all(installed: Iterable[Any]) -> None:
    """Take out all, patches or seams; one OwnershipError at the end for those that others have replaced."""
    failures: list[OwnershipError] = []
    for each in installed:
        try:
            each.uninstall()
        except OwnershipError as failure:
            failures.append(failure)
    if failures:
        raise OwnershipError("; ".join(failure.message for failure in failures), remedy=failures[0].remedy)
