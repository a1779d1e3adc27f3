"""A test in a child that is ended when it waits for ever: a thread in ``open`` or in a read can't be told to stop."""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE = 60


def bounded(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def in_child(*args: Any, **fixtures: Any) -> None:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE)
            code = 1
            try:
                test(*args, **fixtures)
                code = 0
            except BaseException:  # noqa: BLE001 - the child must never return into the test
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return in_child
