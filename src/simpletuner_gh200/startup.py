"""What the ``.pth`` file runs at every interpreter start: nothing, unless SIMPLETUNER_GH200=1 asks for us.

The .pth line itself tests the variable, so that a start without it does not even import this module. Here nothing but a
place in Python's import is taken; torch and SimpleTuner are imported by whoever wants them, or not at all. What we
depend on may not be found yet: an environment over another one (``venv --system-site-packages``, ``pip install
--user``) runs its .pth files before the other one's folder is on the path.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def on_interpreter_start() -> None:
    """Arrange for the extension to be active if and when this interpreter imports SimpleTuner."""
    sys.meta_path.insert(0, _Before("simpletuner"))


class _Before:
    """Asked for every module that is imported, finds none itself; at ours it lets wrapt take over from here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        import wrapt

        wrapt.register_post_import_hook(_activate, name)
        # Python goes through its finders already: the one that wrapt has put in front would be asked too late.
        return importlib.util.find_spec(name)


def _activate(_module: object) -> None:
    import logging

    from simpletuner_gh200.errors import GH200Error
    from simpletuner_gh200.seams.bootstrap import activate

    try:
        activate()
    except GH200Error as refused:
        logging.getLogger("simpletuner_gh200").error("gh200: %s", refused)
        raise SystemExit(refused.exit_code) from None
