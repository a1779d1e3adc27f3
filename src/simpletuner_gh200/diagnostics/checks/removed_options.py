"""GH402: options in the given configuration that this SimpleTuner no longer has."""

from __future__ import annotations

from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.upstream.options import REMOVED, option_names

_OURS = {*TRAINING_BLOCKS, *OLDER_KEYS, "datasets"}


def _run(context: Context) -> Finding:
    if context.training is None:
        return skipped("no configuration was given")
    package = context.package("simpletuner")
    if package is None:
        return skipped("SimpleTuner is not installed here")
    known = option_names(package)
    gone = [key for key in context.training.values if key not in known and key not in _OURS]
    if not gone:
        return passed("this SimpleTuner knows every option in it")
    shown = ", ".join(f"{key} ({REMOVED[key]})" if key in REMOVED else key for key in sorted(gone))
    return warned(
        f"not known to this SimpleTuner: {shown}",
        "remove them from the configuration: an unknown option is dropped in silence, or stops SimpleTuner's parser",
    )


CHECK = Check(
    code="GH402",
    what="options that SimpleTuner removed",
    why="Between releases options are renamed and removed; an old configuration then does less than it says.",
    run=_run,
)
