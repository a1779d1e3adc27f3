"""train.sbatch under a real Slurm, with a stand-in for gh200: who is told what, and what becomes of the job."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from simpletuner_gh200.operate.choices import Wish
from simpletuner_gh200.operate.models import choose_model
from simpletuner_gh200.operate.slurm import train_sbatch
from tests.unit.few_options import TABLE

STAND_IN = Path(__file__).with_name("stand_in.sh")
NODES = ("n1", "n2")


@dataclass
class Submitted:
    """A job of the script's."""

    cluster: object
    number: str
    project: Path
    notes: Path

    def heard(self, node: str) -> list[str]:
        path = self.notes / node
        return path.read_text().splitlines() if path.is_file() else []

    def signals(self, node: str) -> list[str]:
        return [line for line in self.heard(node) if line.startswith("SIG")]

    def trains(self) -> bool:
        return all(any(line.startswith("train") for line in self.heard(node)) for node in NODES)

    def wait_until_it_trains(self) -> None:
        self.cluster.wait(self.number, self.trains, "every node trains")

    def log(self) -> str:
        return (self.project / "logs" / f"{self.number}.log").read_text()


@pytest.fixture
def submit(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project, notes = tmp_path / "run", tmp_path / "notes"
    for folder in (project / "logs", notes):
        folder.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(STAND_IN))
        script = train_sbatch(Wish(project, choose_model("sdxl", TABLE.families), tmp_path, nodes=2, gpus_per_node=2))
    (project / "train.sbatch").write_text(script)

    def begin(*options: str, tell: tuple[str, ...] = ()) -> Submitted:
        for name in tell:
            (notes / name).touch()
        number = cluster.submit(*options, project / "train.sbatch", environment={"STAND_IN": str(notes)})
        return Submitted(cluster, number, project, notes)

    yield begin
    cluster.settle()


def test_every_node_gets_its_place_after_the_doctor(cluster, submit) -> None:
    job = submit()
    job.wait_until_it_trains()
    config = job.project / "config" / "config.json"
    for place, node in enumerate(NODES):
        examined, trained = job.heard(node)
        assert examined == f"doctor {config}"
        port = 20000 + int(job.number)
        words = f"--machine_rank={place} --main_process_ip=n1 --main_process_port={port} "
        assert trained == f"train --config {config} --again-file node {place} {words}"
    cluster.run("scancel", job.number)
    ended = cluster.end(job.number)
    assert ended.state == "CANCELLED", "a job that somebody cancelled is not requeued"
    assert [job.signals(node) for node in NODES] == [["SIGTERM"]] * 2, "each launcher is told, once"
    assert "stopped, to go on; the job is COMPLETING" in job.log()


def test_a_time_limit_that_comes_near_is_a_checkpoint_and_a_requeue(cluster, submit) -> None:
    """What --signal=B:USR1@... does when its time has come, done now."""
    job = submit()
    job.wait_until_it_trains()
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), cluster.output(job.number)
    assert [job.signals(node) for node in NODES] == [["SIGUSR1"]] * 2
    assert "stopped, to go on; requeued" in job.log()
    assert "start 1, on n1 n2" in job.log(), "in the same log"
    assert not list((job.project / "output").glob(".*")), "and nothing of it is left"


def test_a_requeue_by_somebody_else_is_left_to_slurm(cluster, submit) -> None:
    """scontrol requeue, which is also what preemption with PreemptMode=REQUEUE does."""
    job = submit()
    job.wait_until_it_trains()
    cluster.run("scontrol", "requeue", job.number)
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), cluster.output(job.number)
    assert [job.signals(node) for node in NODES] == [["SIGTERM"]] * 2
    assert "requeued" not in job.log(), "twice would start it twice"


@pytest.mark.parametrize(
    ("partition", "requeued_by"), [("test", "Slurm"), ("patient", "the script")], ids=["at once", "after a grace time"]
)
def test_a_job_that_makes_room_for_an_urgent_one_comes_back(cluster, submit, partition: str, requeued_by: str) -> None:
    """Real preemption. Within a grace time the job runs on, and ends before Slurm would end it: it requeues itself.

    Without one Slurm says SIGTERM twice within milliseconds, which `gh200 train` takes for one request.
    """
    job = submit(f"--partition={partition}")
    job.wait_until_it_trains()
    urgent = cluster.submit("--partition=urgent", "-N2", "--exclusive", "--wrap", "srun true", "--output=/dev/null")
    cluster.wait(job.number, lambda: job.signals("n1") and job.signals("n2"), "each launcher is told")
    assert cluster.end(urgent).state == "COMPLETED", "the urgent one had its turn"
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), cluster.output(job.number)
    assert [set(job.signals(node)) for node in NODES] == [{"SIGTERM"}] * 2
    assert ("stopped, to go on; requeued" in job.log()) == (requeued_by == "the script")


def test_a_preemption_with_a_grace_time_brings_the_end_forward_that_a_run_reckons_with(cluster, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.touch()
    ask = "from simpletuner_gh200.seams.preemption import job_end; print(job_end())"
    loop = f"while :; do {sys.executable} -c '{ask}' >> {said}; done"
    options = ("--exclusive", "-N2", "--output=/dev/null", "--wrap")
    number = cluster.submit("--partition=patient", "--time=30", *options, loop)
    cluster.wait(number, said.read_text, "it has asked")
    urgent = cluster.submit("--partition=urgent", *options, "srun true")
    ends = lambda: [float(line) for line in said.read_text().splitlines()]  # noqa: E731
    cluster.wait(number, lambda: ends()[-1] < ends()[0] - 900, "ten minutes of grace in place of half an hour")
    cluster.run("scancel", number, urgent)
    cluster.settle()


def test_a_site_that_forbids_requeueing_is_told_of(cluster, submit) -> None:
    job = submit("--no-requeue")
    job.wait_until_it_trains()
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    ended = cluster.end(job.number)
    assert (ended.state, ended.exit_code, ended.restarts) == ("FAILED", 75, 0), cluster.output(job.number)
    assert "Slurm refuses to requeue it: submit it again to go on" in job.log()


def test_a_node_that_is_not_ready_ends_the_job_before_it_trains(cluster, submit) -> None:
    job = submit(tell=("doctor-fails-n2",))
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("FAILED", 0)
    assert "a node is not ready" in job.log()
    assert not any(line.startswith("train") for node in NODES for line in job.heard(node))


def test_a_node_that_fails_takes_the_others_with_it(cluster, submit) -> None:
    job = submit(tell=("train-fails-n2",))
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("FAILED", 0), "and nothing is requeued"
    assert job.signals("n1") == ["SIGTERM"]


def test_a_time_limit_that_is_near_at_the_start_is_refused(cluster, submit) -> None:
    job = submit(tell=("doctor-waits",))
    cluster.wait(job.number, lambda: job.heard("n1"), "the doctor")
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    (job.notes / "doctor-waits").unlink()
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("FAILED", 0)
    assert "too near to begin" in job.log()


def test_a_node_that_does_not_see_the_output_folder_is_named(cluster, submit, scratch: Path) -> None:
    job = submit("--hold")
    cluster.run("scancel", job.number)
    script = job.project / "train.sbatch"
    script.write_text(script.read_text().replace(f"output={job.project}/output", f"output={scratch}/output"))
    job = submit()
    ended = cluster.end(job.number)
    assert ended.state == "FAILED"
    said = (job.project / "logs" / f"{job.number}-node1.log").read_text()
    assert f"n2 does not see {scratch}/output/.job-{job.number}: every node needs the same output folder" in said
    assert not job.heard("n2"), "nothing else is tried there"


@pytest.mark.cluster
def test_slurm_keeps_its_word_about_the_time_limit(cluster, submit) -> None:
    """A minute and more of waiting: with a real limit, the script hears of it early enough."""
    job = submit("--time=2", "--signal=B:USR1@60")
    ended = cluster.end(job.number)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), cluster.output(job.number)
    assert [job.signals(node) for node in NODES] == [["SIGUSR1"]] * 2
