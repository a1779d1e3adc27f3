"""GH107: are our environment variables what they can be?"""

from __future__ import annotations

from simpletuner_gh200.config.settings import our_variables, read_variables
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.errors import ConfigError


def _run(context: Context) -> Finding:
    ours = ("SIMPLETUNER_GH200", *(variable for variable, _part, _key in our_variables()))
    given = {name: context.environment[name] for name in ours if name in context.environment}
    if given.get("SIMPLETUNER_GH200") == "0":
        return warned("SIMPLETUNER_GH200=0: the extension is switched off, also for `gh200 train`", "unset it")
    try:
        read_variables(given)
    except ConfigError as invalid:
        return failed("; ".join(str(problem) for problem in invalid.problems), 'unset them, or eval "$(gh200 env)"')
    if not given:
        return passed("none set; defaults hold")
    return passed(", ".join(f"{name}={value}" for name, value in given.items()))


CHECK = Check(
    code="GH107",
    what="environment variables",
    why="A misspelt access pattern or ratio would stop the run at its start.",
    run=_run,
)
