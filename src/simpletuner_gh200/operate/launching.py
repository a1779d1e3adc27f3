"""``gh200 train``: the command and environment that start every rank, and a run that is watched to its end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from simpletuner_gh200.config.environment import SWITCH, for_child, switched_off
from simpletuner_gh200.config.files import take
from simpletuner_gh200.config.job import LAUNCH_OPTIONS, NODES, Job
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.held.settling import settle
from simpletuner_gh200.operate import run_lock
from simpletuner_gh200.operate.ending import Outcome
from simpletuner_gh200.operate.supervision import watch
from simpletuner_gh200.seams.preemption import ASKING, job_end
from simpletuner_gh200.telemetry.redact import names_secret, redact_command, redact_text

AFFINITY = "--enable_cpu_affinity"
"""accelerate takes it as a flag alone: the key of that name in its file is read and forgotten."""

LAST_WORDS = 10.0
"""Seconds before the end of a job's time at which the launcher stops waiting for the disk: half of what a rank has."""

_DASHED = tuple("--" + block.replace("_", "-") for block in TRAINING_BLOCKS if "_" in block)


@dataclass(frozen=True)
class LaunchCommand:
    """Exactly what will run: the command, and the variables it adds to the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    notices: tuple[str, ...] = ()
    locks: bool = True
    """Does this launcher keep other jobs out of the output folder? Of those of one job, the first node's does."""

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


def launch_command(training: Training) -> LaunchCommand:
    """Build the launch as SimpleTuner's own CLI would, with our entry point in place of its script."""
    job, located, added = training.job, training.located, dict(training.job.added)
    assert located is not None, "it was read before a run"
    flags = [_our_spelling(flag) for flag in take(training.flags, *LAUNCH_OPTIONS)[1]]
    if located.env_name:
        added["ENV"] = located.env_name
    if located.by_path:
        flags = ["--config", str(located.path), *flags]
    elif located.path is not None and not located.env_name:
        added["CONFIG_BACKEND"] = located.backend
        added["CONFIG_PATH"] = str(located.path.absolute().with_suffix(""))
    notices: tuple[str, ...] = ()
    if job.ranks > 1 and not accelerator_present():
        notices = (
            "no accelerator here: several ranks run on the CPU under torchrun, where accelerate would start one",
        )
        added["ACCELERATE_USE_CPU"] = "true"
        launcher = _torchrun(job)
    else:
        launcher = _accelerate(job)
    command = (sys.executable, *launcher, "-m", "simpletuner_gh200.launch", *flags)
    return LaunchCommand(command, added, notices, job.first_node)


def _our_spelling(flag: str) -> str:
    """SimpleTuner's parser knows our blocks with underscores only."""
    name, separator, value = flag.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + separator + value if name in _DASHED else flag


def _torchrun(job: Job) -> list[str]:
    place = ["--standalone", f"--nproc_per_node={job.ranks}"]
    if job.nodes > 1:
        place = [
            f"--nnodes={job.nodes}",
            f"--node_rank={job.node_rank or 0}",
            f"--nproc_per_node={job.ranks // job.nodes}",
            f"--master_addr={job.address or 'localhost'}",
            f"--master_port={job.port}",
        ]
    return ["-m", "torch.distributed.run", *place, *(word for word in job.other_extra if word != AFFINITY)]


def _accelerate(job: Job) -> list[str]:
    if job.accelerate_file is not None:
        # What was asked for by name outranks the file.
        settings = [f"--config_file={job.accelerate_file}"]
        settings += [f"--num_processes={job.ranks}"] if job.by_name else []
        settings += [f"--num_machines={job.nodes}"] if job.environment.get(NODES) else []
    else:
        settings = [
            f"--mixed_precision={job.environment.get('MIXED_PRECISION', 'bf16')}",
            f"--num_processes={job.ranks}",
            f"--num_machines={job.nodes}",
            f"--dynamo_backend={job.environment.get('TRAINING_DYNAMO_BACKEND', 'no')}",
        ]
    affinity = [AFFINITY] if job.affinity and AFFINITY not in job.extra else []
    return ["-m", "accelerate.commands.launch", *settings, *affinity, *job.extra]


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
    say: Callable[[str], None] = lambda words: None,
) -> Outcome:
    """Start it and watch it to its end.

    ``output``: its output folder, which no other job may use meanwhile. ``checkpoint_on_interrupt``: Ctrl-C asks for a
    checkpoint too. ``once_ours`` is called when the folder is this job's, before anything is started. ``say`` hears
    what is waited for afterwards: what a rank has saved to memory is on the disk before anybody looks for it.
    """
    asking = (*ASKING, signal.SIGINT) if checkpoint_on_interrupt else ASKING
    with ExitStack() as held:
        lock = held.enter_context(run_lock.held(output)) if output is not None and planned.locks else None
        once_ours()
        outcome = watch(planned.command, for_child(planned.environment), lock, checkpoint_on=asking)
        if output is not None:
            end = job_end()
            until = 0.0 if outcome.hurried else None if end is None else end - LAST_WORDS
            for words in settle(output, say, until=until):
                say(words)
        return outcome


def serve(arguments: Sequence[str]) -> NoReturn:
    """Become ``simpletuner server``, with the extension on."""
    command = [sys.executable, "-m", "simpletuner", "server", *arguments]
    os.execve(sys.executable, command, environment_of_server(os.environ, Path(sys.executable)))


def environment_of_server(environment: Mapping[str, str], python: Path) -> dict[str, str]:
    """The extension on, unless ``0`` switches it off, and this Python's own commands found first.

    A job that the page starts calls accelerate by its name.
    """
    own, path = str(python.parent), environment.get("PATH", os.defpath)
    folders = path.split(os.pathsep)
    path = path if own in folders else os.pathsep.join((own, *folders))
    return {**environment, SWITCH: "0" if switched_off(environment) else "1", "PATH": path}
