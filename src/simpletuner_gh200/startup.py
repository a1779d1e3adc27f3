"""What the ``.pth`` file runs at every interpreter start: nothing, unless SIMPLETUNER_GH200=1 asks for us.

The .pth line itself tests the variable, and whether this is SimpleTuner's ``train.py``, so that any other start does
not even import this module. Here nothing but a place in Python's import is taken; torch and SimpleTuner are imported by
whoever wants them, or not at all. What we depend on may not be found yet: an environment over another one (``venv
--system-site-packages``, ``pip install --user``) runs its .pth files before the other one's folder is on the path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from simpletuner_gh200.config.environment import SWITCH, local_rank, switched_off, switched_on

IGNORED = (
    "gh200: the extension is off, and SimpleTuner alone takes no notice of --config: it trains what lies in config/. "
    f"To train the file you named, with the extension: {SWITCH}=1, which scripts/setup_gh200_env.sh and "
    f"`gh200 env` set, or `gh200 train --config FILE`. {SWITCH}=0 trains without it, and without this line.\n"
)


NOT_HERE = (
    "gh200: no {} here: that file is in a clone of SimpleTuner, whose folder to start this in. Anywhere else, "
    "`gh200 train --config FILE` trains the same; docs/compat/migration.md says what became of the guides' names.\n"
)


def begin() -> None:
    """Called by the .pth line."""
    script = next(iter(getattr(sys, "argv", ())), "")
    if script.endswith("simpletuner/train.py") and not os.path.exists(script):
        sys.stderr.write(NOT_HERE.format(script) if local_rank() == 0 else "")
    elif switched_on():
        on_interpreter_start()
    elif not switched_off() and _names_a_file(sys.orig_argv):
        sys.stderr.write(IGNORED)


def _names_a_file(words: Sequence[str]) -> bool:
    """Is this the launch line of the earlier guides? A tree that has the package in it reads the file it names."""
    script = next((word for word in words[1:4] if word.endswith("simpletuner/train.py")), None)
    if script is None or os.path.exists(os.path.join(os.path.dirname(script), "gh200")):
        return False
    return any(word.split("=")[0] == "--config" for word in words) and local_rank() == 0


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
        import wrapt  # where it is missing, every attempt shall say so

        sys.meta_path.remove(self)
        wrapt.register_post_import_hook(_activate, name)
        # Python goes through its finders already: the one that wrapt has put in front would be asked too late.
        return importlib.util.find_spec(name)


def _activate(_module: object) -> None:
    import logging

    from simpletuner_gh200.errors import GH200Error
    from simpletuner_gh200.seams.bootstrap import activate

    try:
        if sys.argv[0].endswith("simpletuner/train.py"):
            from simpletuner_gh200.launch import plain

            plain()
        else:
            activate()
    except GH200Error as refused:
        logging.getLogger("simpletuner_gh200").error("gh200: %s", refused)
        raise SystemExit(refused.exit_code) from None
