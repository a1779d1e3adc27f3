"""``gh200 train``: the command and environment that start every rank, and a truthful end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import KEEP_SUMMARY, switched_off, text
from simpletuner_gh200.config.files import Located, env_variables, read_env_variables, take
from simpletuner_gh200.config.job import (
    ACCELERATE_FILE,
    LAUNCH_OPTIONS,
    NODES,
    Job,
    accelerate_file,
    accelerate_text,
    job_of,
    launch_variables,
)
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate import run_lock
from simpletuner_gh200.operate.nodes import AFFINITY, place_of, wants_affinity
from simpletuner_gh200.operate.run_lock import locks_for_its_job
from simpletuner_gh200.operate.supervision import rank_order, watch
from simpletuner_gh200.seams.preemption import ASKING, TRY_AGAIN
from simpletuner_gh200.telemetry.redact import names_secret, redact_command, redact_text

_DASHED = tuple("--" + block.replace("_", "-") for block in TRAINING_BLOCKS if "_" in block)


@dataclass(frozen=True)
class LaunchCommand:
    """Exactly what will run: the command, and the variables it adds to the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    notices: tuple[str, ...] = ()
    problem: UsageError | None = None
    """Why it can't be started from here, although nothing is wrong with the configuration."""

    def to_json(self) -> dict[str, Any]:
        return {
            "command": redact_command(self.command),
            "environment": {name: shown_value(name, value) for name, value in self.environment.items()},
        }

    def shown(self) -> str:
        """For ``--dry-run``: one variable a line, then the command; secrets hidden."""
        lines = [f"{name}={shlex.quote(shown_value(name, value))}" for name, value in sorted(self.environment.items())]
        return "\n".join([*lines, shlex.join(redact_command(self.command))])


def shown_value(name: str, value: str) -> str:
    return "<hidden>" if names_secret(name) else redact_text(value)


@dataclass
class Ended:
    """How a run ended: the exit code to return, and each rank's summary."""

    exit_code: int
    summaries: list[dict[str, Any]] = field(default_factory=list)
    signal: int | None = None
    """What stopped it, where something did."""
    phase: str | None = None
    """What it was at last, in words; None if no rank got as far as to say so."""


def launch_command(
    located: Located,
    flags: Sequence[str],
    environment: Mapping[str, str],
    *,
    explicit: bool,
    env_name: str | None,
    config: Mapping[str, Any],
) -> LaunchCommand:
    """Build the launch as SimpleTuner's own CLI would, with our entry point in place of its script."""
    flags = list(flags)
    taken: dict[str, str] = {}
    for name in LAUNCH_OPTIONS:
        value, flags = take(flags, name)
        taken |= {name: value} if value is not None else {}
    environment = {**environment, **env_variables(located)}
    added = launch_variables(taken, config, environment)
    environment = {**environment, **sourced(env_name or environment.get("ENV"))}
    job = job_of(added, environment)
    if env_name:
        added["ENV"] = env_name
    flags = [_our_spelling(flag) for flag in flags]
    if explicit:
        flags = ["--config", str(located.path), *flags]
    elif located.path is not None and not env_name:
        added["CONFIG_BACKEND"] = located.backend
        added["CONFIG_PATH"] = str(located.path.absolute().with_suffix(""))
    launcher, notices, extra, problem = _launcher({**environment, **added}, job)
    return LaunchCommand((*launcher, "-m", "simpletuner_gh200.launch", *flags), {**added, **extra}, notices, problem)


def sourced(env_name: str | None) -> dict[str, str]:
    """SimpleTuner's CLI sources ``config/config.env`` and that of the named environment before it launches."""
    variables = read_env_variables(Path("config", "config.env"))
    if env_name and env_name != "default":
        variables.update(read_env_variables(Path("config", env_name, "config.env")))
    return variables


def _our_spelling(flag: str) -> str:
    """SimpleTuner's parser knows our blocks with underscores only."""
    name, separator, value = flag.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + separator + value if name in _DASHED else flag


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as broken:
        raise UsageError(f"accelerate_extra_args: {text!r}: {broken}", remedy="close the quotation") from None


def _launcher(
    environment: Mapping[str, str], job: Job
) -> tuple[list[str], tuple[str, ...], dict[str, str], UsageError | None]:
    """accelerate, as SimpleTuner starts it; several ranks without a GPU need torchrun instead."""
    extra_arguments = _words(environment.get("ACCELERATE_EXTRA_ARGS", ""))
    config_file, said = accelerate_file(environment), accelerate_text(environment)
    if config_file is not None and not config_file.is_file():
        named = environment[ACCELERATE_FILE]
        raise UsageError(f"accelerate_config: {named!r}: no such file", remedy="correct the path, or leave it out")
    place, others = place_of(job, extra_arguments, said)
    if job.ranks > 1 and not accelerator_present():
        notice = "no accelerator here: several ranks run on the CPU under torchrun, where accelerate would start one"
        command = [sys.executable, "-m", "torch.distributed.run", *place.for_torchrun()]
        others = [word for word in others if word != AFFINITY]
        return [*command, *others], (notice,), {"ACCELERATE_USE_CPU": "true"}, place.problem()
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if wants_affinity(said) and AFFINITY not in extra_arguments:
        extra_arguments = [AFFINITY, *extra_arguments]
    if config_file is not None:
        # What was asked for by name outranks the file.
        asked = [f"--num_processes={job.ranks}"] if job.asked else []
        if environment.get(NODES):
            asked.append(f"--num_machines={place.nodes}")
        return [*command, f"--config_file={config_file}", *asked, *extra_arguments], (), {}, place.problem()
    return (
        [
            *command,
            f"--mixed_precision={environment.get('MIXED_PRECISION', 'bf16')}",
            f"--num_processes={job.ranks}",
            f"--num_machines={place.nodes}",
            f"--dynamo_backend={environment.get('TRAINING_DYNAMO_BACKEND', 'no')}",
            *extra_arguments,
        ],
        (),
        {},
        place.problem(),
    )


def accelerator_present(root: Path = Path("/")) -> bool:
    """Is there a GPU device node? Asked without torch, whose import would double the start-up time."""
    folder = root / "dev"
    return sys.platform == "darwin" or any(
        any(folder.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg", "nvhost-gpu", "dri/renderD*")
    )


def run(
    planned: LaunchCommand,
    output: Path | None = None,
    *,
    checkpoint_on_interrupt: bool = False,
    once_ours: Callable[[], None] = lambda: None,
) -> Ended:
    """Start it, watch it to its end, and judge by what the ranks say, not by 0 alone.

    ``output``: its output folder, which no other job may use meanwhile. ``checkpoint_on_interrupt``: Ctrl-C asks for a
    checkpoint too. ``once_ours`` is called when the folder is this job's, before anything is started.
    """
    asking = (*ASKING, signal.SIGINT) if checkpoint_on_interrupt else ASKING
    environment = {**os.environ, **planned.environment}
    with ExitStack() as held:
        lock = None
        if output is not None and locks_for_its_job(planned.command, environment):
            lock = held.enter_context(run_lock.held(output))
        once_ours()
        watched = watch(planned.command, environment, lock, checkpoint_on=asking)
    summaries = [watched.summaries[rank] for rank in sorted(watched.summaries, key=rank_order)]
    keep = text(KEEP_SUMMARY)
    for rank, summary in watched.summaries.items() if keep else ():
        Path(str(keep), f"rank-{rank}.json").write_text(json.dumps(summary), encoding="utf-8")
    code = _exit_code(watched.returned, watched.signal, summaries, heard=len(watched.phases))
    return Ended(code, summaries, watched.signal, watched.phase)


def said_through(file: Path, exit_code: int) -> int:
    """For a scheduler that ends the other nodes at any code but 0: "try again" is a file instead."""
    if exit_code != TRY_AGAIN:
        return exit_code
    try:
        file.touch()
    except OSError as refused:
        raise UsageError(
            f"--again-file {file}: {refused}", remedy="name a file in a folder that is there, on a shared file system"
        ) from None
    return 0


def _exit_code(
    returned: int, interrupted: int | None, summaries: Sequence[Mapping[str, Any]], *, heard: int = 0
) -> int:
    """``heard``: how many ranks said anything at all."""
    completed = bool(summaries) and all(summary["status"] == "completed" for summary in summaries)
    failed = any(summary["status"] == "failed" for summary in summaries)
    if any(summary.get("exit_code") == TRY_AGAIN for summary in summaries):
        return TRY_AGAIN
    if interrupted in ASKING and completed and len(summaries) >= heard:
        return 0  # asked for a checkpoint and an end when both were there already
    if interrupted == signal.SIGUSR1 and failed:
        returned, interrupted = 1, None  # a checkpoint that failed would fail again, as often as it is requeued
    if interrupted == signal.SIGUSR1:
        return TRY_AGAIN
    if interrupted is not None:
        return 128 + interrupted
    if returned < 0:
        return 128 - returned
    if returned == 0 and completed:
        return 0
    # A rank's own code is truer than the launcher's, which knows only that something failed.
    if any(summary.get("exit_code") == 2 for summary in summaries):
        return 2
    if returned == 0 and not summaries and switched_off():
        return 0  # the kill switch is on: stock SimpleTuner, which leaves no summary
    return returned or 1
