"""A Slurm of a test's own (see inside.py), and its jobs as a user sees them: through sbatch, squeue and scontrol."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.workbench import clean_environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "unshare", "nsenter")
APART = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork")
PATIENCE = 900.0
"""A job that takes longer hangs. It says nothing about how long something should take."""
ANSWER = 180.0
"""So does a command of Slurm's."""
MOST_RESUMED = 5
"""Nodes that Slurm takes out of service more often than that are broken, not busy."""
OUT_OF_SERVICE = ("drain", "down", "fail", "unknown")
"""How sinfo's long states begin, or what they hold: `drained`, `draining`, `down*`."""

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"})


def missing() -> str | None:
    """Why no cluster can be here, for a skip; None where one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (scripts/dev/install_test_programs.sh)"
    tried = subprocess.run([*APART, "true"], capture_output=True)
    return "this container forbids namespaces" if tried.returncode else None


@dataclass(frozen=True)
class Job:
    """What the controller says of a job."""

    state: str
    restarts: int
    exit_code: int
    text: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def _out_of_service(line: str) -> bool:
    return any(word in line.split()[1] for word in OUT_OF_SERVICE)


class Cluster:
    """Two nodes, n1 and n2, that share every folder but ``private``."""

    def __init__(self, folder: Path, private: Sequence[Path] = ()) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for each in private:
            each.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("inside.py")
        with (folder / "daemons.log").open("wb") as log:
            self._outer = subprocess.Popen(
                [*APART, "--kill-child", "--mount-proc", sys.executable, str(script), str(folder), *map(str, private)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment(),
            )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != b"ready\n":
            raise AssertionError(f"Slurm did not start\n{self.log()}")
        self._resumed = 0
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        self._first = int(children.split()[0])

    def close(self) -> None:
        self._outer.send_signal(signal.SIGKILL)  # and with it, the namespace's first process, and so every other
        self._outer.wait()

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))

    def run(self, *words: str | Path, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        """A command on the cluster's front end."""
        inside = ["nsenter", f"--target={self._first}", "--net", "--mount", "--uts", "--pid", "--", *map(str, words)]
        variables = {**clean_environment(), **(environment or {}), "SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            done = subprocess.run(
                inside, capture_output=True, text=True, env=variables, cwd=self.folder, timeout=ANSWER
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{words}: no answer in {ANSWER:.0f} s\n{self.log()}") from None
        assert not check or done.returncode == 0, f"{words}: {done.stderr}\n{self.log()}"
        return done.stdout + done.stderr

    def resume_nodes(self) -> None:
        """Put nodes that Slurm took out of service back into it: a machine that stalls is not what a test is about."""
        lost = {line for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines() if _out_of_service(line)}
        if not lost:
            return
        self._resumed += 1
        why = self.run("sinfo", "-h", "-R", check=False)
        assert self._resumed <= MOST_RESUMED, f"Slurm takes its nodes out of service: {lost}\n{why}\n{self.log()}"
        for name in {line.split()[0] for line in lost}:
            # Refused where the node has come back by itself meanwhile.
            self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)

    def settle(self) -> None:
        """Nothing of a job before is left, and every node is free."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--user=root", check=False)
        deadline = time.monotonic() + PATIENCE
        while set(self.run("sinfo", "-h", "-N", "-o", "%T").split()) != {"idle"}:
            self.resume_nodes()
            assert time.monotonic() < deadline, f"never idle:\n{self.run('scontrol', 'show', 'node')}\n{self.log()}"
            time.sleep(0.5)

    def submit(self, *words: str | Path, environment: Mapping[str, str] | None = None) -> str:
        """The number of the job."""
        return self.run("sbatch", "--parsable", *words, environment=environment).strip()

    def job(self, number: str) -> Job:
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        code = re.search(r" ExitCode=(\d+):", text)
        restarts = re.search(r" Restarts=(\d+)", text)
        state = re.search(r" JobState=(\w+)", text)
        assert code and restarts and state, text
        return Job(state[1], int(restarts[1]), int(code[1]), text)

    def wait(self, number: str, happened: Callable[[], object], what: str) -> None:
        """Until ``happened()`` is true; fails where the job ends before."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            job = self.job(number)
            if job.state == "PENDING" and "Reason=BeginTime" in job.text:
                # Slurm starts a requeued job two minutes later; nothing here is about those. Within the same second a
                # node would take the new start for the one that it has just ended, and fail it.
                time.sleep(4)
                self.run("scontrol", "update", f"JobId={number}", "StartTime=now")
            elif job.state == "PENDING":
                self.resume_nodes()
            assert not job.ended or happened(), f"job {number} ended before {what}\n{job.text}\n{self.output(number)}"
            assert time.monotonic() < deadline, f"never: {what}\n{job.text}\n{self.output(number)}"
            time.sleep(0.3)

    def end(self, number: str) -> Job:
        self.wait(number, lambda: self.job(number).ended, "its end")
        return self.job(number)

    def output(self, number: str) -> str:
        """The end of every log of a job, for messages: the script's own and those of its nodes."""
        named = re.search(r" StdOut=(\S+)", self.job(number).text)
        logs = sorted(Path(named[1]).parent.glob(f"*{number}*")) if named else []
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-5000:]}" for path in logs)
