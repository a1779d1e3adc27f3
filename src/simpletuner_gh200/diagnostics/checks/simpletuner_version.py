"""GH104: is there a SimpleTuner that we know how to work with?"""

from __future__ import annotations

import sys
from importlib.metadata import distributions

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context

OLDEST = Version("3.1.0")


def _run(context: Context) -> Finding:
    where = list(context.search_path) if context.search_path is not None else sys.path
    found = [item.version for item in distributions(name="simpletuner", path=where)]
    if not found:
        return failed("SimpleTuner is not installed here", "pip install simpletuner, as its own guide says")
    try:
        version = Version(found[0])
    except InvalidVersion:
        return warned(f"SimpleTuner {found[0]}: not a release number", "gh200 upstream check tells what holds")
    if version < OLDEST:
        return failed(f"SimpleTuner {version} is older than {OLDEST}", "pip install --upgrade simpletuner")
    return passed(f"SimpleTuner {version}")


CHECK = Check(
    code="GH104",
    what="SimpleTuner version",
    why="The extension knows SimpleTuner from 3.1 on.",
    run=_run,
)
