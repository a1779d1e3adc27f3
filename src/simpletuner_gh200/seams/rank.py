"""One rank of a run: the extension activated, SimpleTuner's own ``train.py`` run under it, and a truthful end.

Nothing is printed here: what a person is to read goes to ``say``, at the moment it is known.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from simpletuner_gh200.config.files import locate_training_config, take
from simpletuner_gh200.errors import GH200Error, RunFailed, UsageError
from simpletuner_gh200.seams.bootstrap import activate
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.telemetry.redact import redact_text

KILL_SWITCH = "SIMPLETUNER_GH200"
"""0: stock SimpleTuner, also under ``gh200 train``."""

SUMMARY_FOLDER = "SIMPLETUNER_GH200_SUMMARY_DIR"
"""Where each rank leaves its summary for ``gh200 train`` to read."""


Say = Callable[[str], None]


def run_rank(arguments: Sequence[str], say: Say) -> int:
    """Train; the exit code is truthful whatever SimpleTuner makes of its own exceptions."""
    try:
        config, flags = take(list(arguments), "config")
        script = train_script()
        _point_at(config)
    except GH200Error as failure:
        say(_spoken(failure))
        return failure.exit_code
    if os.environ.get(KILL_SWITCH) == "0":
        _run_script(script, flags)
        return 0
    return _train(script, activate(Launch(config_path=config, flags=tuple(flags))), flags, say)


def _train(script: Path, runtime: Runtime, flags: list[str], say: Say) -> int:
    try:
        _run_script(script, flags)
    except SystemExit as stopped:
        _note_stop(runtime, stopped)
    except GH200Error as failure:
        say(_spoken(failure))
        runtime.outcome.fail(failure)
    except Exception as failure:  # noqa: BLE001 - said in full, as an unhandled one would be
        say(traceback.format_exc().rstrip())
        runtime.outcome.status, runtime.outcome.reason = "failed", f"{type(failure).__name__}: {failure}"
    finally:
        runtime.close()
    return _conclude(runtime, say)


def train_script() -> Path:
    """SimpleTuner's train.py, found without importing SimpleTuner."""
    spec = importlib.util.find_spec("simpletuner")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("SimpleTuner is not installed in this environment", remedy="pip install simpletuner")
    return Path(next(iter(spec.submodule_search_locations))) / "train.py"


def _point_at(config: str | None) -> None:
    """Tell SimpleTuner in its own variables which file is meant."""
    if config is not None:
        located = locate_training_config(os.environ, explicit=config, env_name=None)
        os.environ["CONFIG_BACKEND"] = located.backend
        os.environ["CONFIG_PATH"] = str(located.path)


def _run_script(script: Path, flags: list[str]) -> None:
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def _note_stop(runtime: Runtime, stopped: SystemExit) -> None:
    outcome = runtime.outcome
    if outcome.status in {"not started", "training"}:
        outcome.status, outcome.reason = "failed", f"SimpleTuner left with exit code {stopped.code}"
    if isinstance(stopped.code, int) and stopped.code:
        outcome.exit_code = stopped.code


def _conclude(runtime: Runtime, say: Say) -> int:
    outcome = runtime.outcome
    if outcome.status == "not started" and not runtime.seams["trainer.train"].ok:
        outcome.status = "completed"
        outcome.reason = "the seam trainer.train is off, so this is SimpleTuner's own word for it"
    if outcome.status == "not started":
        outcome.status = "failed"
        outcome.reason = outcome.reason or "SimpleTuner stopped before training began; its own message is above"
    if outcome.status == "completed" and outcome.global_step < (outcome.max_train_steps or 0):
        outcome.reason = f"ended at step {outcome.global_step} of {outcome.max_train_steps}"
    if outcome.status == "completed" and outcome.reason:
        say(f"gh200: {outcome.reason}")
    _leave_summary(runtime)
    if outcome.status == "completed":
        return 0
    if outcome.exit_code == 1 or outcome.reason is None:
        say(_spoken(RunFailed(f"training {outcome.status}: {outcome.reason}")))
    return outcome.exit_code


def _leave_summary(runtime: Runtime) -> None:
    folder = os.environ.get(SUMMARY_FOLDER)
    if folder:
        rank = os.environ.get("RANK", "0")
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(runtime.summary(), default=str), encoding="utf-8")


def _spoken(failure: GH200Error) -> str:
    return f"gh200: {redact_text(str(failure))}"
