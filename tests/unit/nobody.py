"""Permission tests mean something only without root's right to everything."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534


def as_nobody(work: Callable[[], object], folder: Path | None = None) -> int:
    """How ``work`` ends in a child that is not root and may look into ``folder``: 0, or its exit code, or 99."""
    for opened in (folder, *folder.parents) if folder is not None else ():
        if opened.stat().st_uid == os.getuid() and Path(tempfile.gettempdir()) in opened.parents:
            opened.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
            code = 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 99
        except BaseException:  # noqa: BLE001 - the child must never return into the test
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
