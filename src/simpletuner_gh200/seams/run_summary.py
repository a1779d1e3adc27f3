"""The summary of a run in its output folder, ``gh200/summary.json``: there once the run has ended, and always whole.

The first rank writes it, where a feature is on. The launcher's lines and the demo's are made from the same summary.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner_gh200.config.environment import rank
from simpletuner_gh200.telemetry.reading import FILE as TELEMETRY
from simpletuner_gh200.telemetry.redact import redact
from simpletuner_gh200.telemetry.sink import write_whole

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime

logger = logging.getLogger("simpletuner_gh200")

FILE = TELEMETRY.with_name("summary.json")


def forget_earlier(runtime: Runtime) -> None:
    """What an earlier run in the same folder left must not be taken for this one's, should this one be killed."""
    path = _path(runtime)
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as refused:
        logger.warning("gh200: the summary of an earlier run stays in %s: %s", path, refused)


def leave(runtime: Runtime) -> None:
    path = _path(runtime)
    try:
        if path is not None:
            write_whole(path, redact(runtime.summary()))
    except OSError as refused:
        logger.warning("gh200: the run's summary could not be written to %s: %s", path, refused)


def _path(runtime: Runtime) -> Path | None:
    """None where there is nothing to write, or where it is not this rank's to write."""
    output = runtime.outcome.output_dir
    first = rank() == 0
    return Path(output) / FILE if output and first and runtime.features_on else None
