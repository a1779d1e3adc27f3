"""Hearing of the moment at which torch has no device memory left, before it raises.

torch calls its observers after it has freed its own cached blocks in vain and let go of its allocator's lock, so what
is given up in there is free for whoever catches the error, or for the next allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable


def on_out_of_memory(act: Callable[[], object]) -> bool:
    """Have a bound method called each time, as long as its object lives. False where this torch tells nobody."""
    import torch

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return False
    method = weakref.WeakMethod(act)

    def hear(*_facts: int) -> None:
        alive = method()
        if alive is not None:
            alive()

    attach(hear)  # for ever: torch can't be told to forget one
    return True
