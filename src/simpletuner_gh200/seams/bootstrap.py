"""Activation: register post-import hooks, so that each seam is wrapped the moment SimpleTuner imports its module.

Nothing heavy is imported here. A process activates once; ``deactivate`` takes every patch out again.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit hook has to be registered before ours
import functools
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import wrapt

from simpletuner_gh200.config import allocator
from simpletuner_gh200.config.files import locate_training_config, take
from simpletuner_gh200.memory.numa import stay_on_cpu_nodes
from simpletuner_gh200.seams.patch import uninstall_all
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.seams.seam import InstalledSeam
from simpletuner_gh200.telemetry.redact import keep_log_printable

logger = logging.getLogger("simpletuner_gh200")

_active: Runtime | None = None


def activate(launch: Launch | None = None) -> Runtime:
    """Activate the extension in this process; calling it again returns the same runtime."""
    global _active
    if _active is None:
        # Before torch's first CUDA use, which keys it doesn't know would crash.
        allocator.activate(os.environ)
        keep_log_printable()
        # Before torch allocates and files are read: what is there stays where it is.
        if (policy := stay_on_cpu_nodes()) is not None:
            logger.info("gh200: %s", policy)
        _active = Runtime(launch or plain_launch(sys.argv))
        # Plain SimpleTuner processes have no other end; where launch closes it, this finds it closed.
        _close_at_exit(_active)
        for seam in _active.seams.values():
            hook = functools.partial(_on_import, _active, seam)
            wrapt.register_post_import_hook(hook, seam.spec.module)
    return _active


def plain_launch(argv: Sequence[str]) -> Launch:
    """How a plain SimpleTuner process was started.

    ``train.py --config PATH --flag ...``, as the earlier guides launch it, means that file and those flags, where
    SimpleTuner alone would train whatever lies in ``config/``. Without ``--config`` everything is left to SimpleTuner.
    """
    if not argv or Path(argv[0]).name != "train.py":
        return Launch()
    config, flags = take(argv[1:], "config")
    if config is None:
        return Launch()
    point_at(config)
    return Launch(config_path=config, flags=tuple(flags))


def point_at(config: str) -> None:
    """Tell SimpleTuner in its own variables which file is meant; UsageError where there is none."""
    located = locate_training_config(os.environ, explicit=config, env_name=None)
    os.environ["CONFIG_BACKEND"] = located.backend
    os.environ["CONFIG_PATH"] = str(located.path)


def _close_at_exit(runtime: Runtime) -> None:
    """Stop our quiet work before Python waits for it: at exit it joins every pool, and calls ``atexit`` after that.

    The earlier hooks run newest first: so ours, which stops what the pools are at, comes before the pools' own. Should
    a thread still be training then, Python waits for it, and closing waits for ``atexit``.
    """
    atexit.register(runtime.close)
    early = getattr(threading, "_register_atexit", None)
    if early is not None:
        early(lambda: None if runtime.outcome.status == "training" else runtime.close())


def active() -> Runtime | None:
    """The runtime of this process, if the extension is active in it."""
    return _active


def deactivate() -> None:
    """Take out every patch, newest first. Hooks that have not fired yet do nothing when they do."""
    global _active
    runtime, _active = _active, None
    if runtime is None:
        return
    runtime.close()
    atexit.unregister(runtime.close)
    uninstall_all(reversed(list(runtime.seams.values())))


def _on_import(runtime: Runtime, seam: InstalledSeam, module: ModuleType) -> None:
    if runtime is _active and not seam.ok:
        seam.install(module, runtime)
