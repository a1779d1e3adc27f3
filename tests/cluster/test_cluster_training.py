"""Real SimpleTuner over two nodes of a real Slurm, with train.sbatch as `gh200 init` writes it.

The same ranks forked on one machine (the workbench's forge) are what each job is compared with, to the bit: a job that
was requeued with a run that nobody stopped, where SimpleTuner keeps what that takes. Before 4.9.3 it keeps the place in
the dataset and the random numbers of the first rank alone (tests/integration/test_resumed_places.py), so that nothing
that was stopped trains what an uninterrupted run does, on a cluster or not. There the ranks on one machine stop at the
same step, and go on.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from simpletuner_gh200.operate.choices import Wish
from simpletuner_gh200.operate.models import choose_model
from simpletuner_gh200.operate.preflight import PLACES_KEPT
from simpletuner_gh200.operate.slurm import train_sbatch
from simpletuner_gh200.telemetry.ranks import rank_table, read_ranks
from simpletuner_gh200.telemetry.reading import read_run
from tests.cluster.cluster import Cluster
from tests.integration.workbench import UNIFIED, JobResult, Workbench, ramp
from tests.unit.few_options import TABLE

pytestmark = [pytest.mark.real, pytest.mark.releases]
NODES = 2
IMAGES = 24
GOES_ON = Version(version("simpletuner")) >= PLACES_KEPT
"""Does a run that was stopped train what an uninterrupted one does?"""
OF_THE_RELEASE = {"find_unused_parameters": True} if GOES_ON else {"ignore_final_epochs": True}
"""torch's DDP sorts its buckets anew after the first backward pass of a process, and four ranks' sums then round
otherwise: one step after each start. Told to look for unused parameters it leaves them as they are. Older releases have
no such option, and need none, since what they are compared with starts as often; in them no rank may count epochs, or
one leaves the others waiting."""
STEPS = 8


class Trial:
    """A project, what its ranks train on one machine, and its job on the cluster."""

    def __init__(self, bench: Workbench, cluster: Cluster, scratch: Path) -> None:
        self.bench, self.cluster, self.scratch = bench, cluster, scratch
        self.ranks = 0

    def configure(self, ranks_per_node: int, *, steps: int, **overrides: object) -> None:
        """Shards in memory, unified caches, and a ramp from one micro-batch to four a window."""
        self.ranks = NODES * ranks_per_node
        self.bench.restore()
        self.bench.configure(
            blocks={"cache_config": UNIFIED, "gh200_optimizations": ramp(2 * self.ranks, 8 * self.ranks, 12)},
            # Repeated, since older releases want a whole window of the target for every rank.
            dataset={"type": "in_memory", "repeats": 1, "in_memory": {"per_node": "shard", "wait": True}},
            max_train_steps=steps,
            num_processes=self.ranks,
            num_machines=NODES,
            allow_dataset_oversubscription=True,
            **overrides,
        )

    def on_one_machine(self) -> JobResult:
        reference = self.bench.known(world=self.ranks)
        assert reference.ok, reference.explain()
        return reference

    def stopped_on_one_machine(self, step: int) -> JobResult:
        """The same ranks, stopped after ``step`` and started again."""
        self.bench.go_on_from(self.on_one_machine())
        for checkpoint in self.bench.project.output.glob("checkpoint-*"):
            if int(checkpoint.name.split("-")[1]) > step:
                shutil.rmtree(checkpoint)
        resumed = self.bench.train(world=self.ranks)
        assert resumed.ok, resumed.explain()
        return resumed

    def submit(self) -> str:
        project = self.bench.project
        (project.folder / "logs").mkdir()
        script = project.folder / "train.sbatch"
        ranks = self.ranks // NODES
        model = choose_model(str(project.model), TABLE.families)
        wish = Wish(project.folder, model, project.images, NODES, ranks, cpu=True, slurm=True)
        script.write_text(train_sbatch(wish))
        return self.cluster.submit(script, environment={"TMPDIR": str(self.scratch)})

    def take_away(self) -> JobResult:
        """What the job trained; the project is as new."""
        project = self.bench.project
        job = JobResult([], Path(tempfile.mkdtemp(dir=project.folder.parent)), project.folder, project.output)
        self.bench.set_aside(job)
        return job

    def stop(self, number: str, node: int) -> int:
        """After which step the job was stopped, as this node's launcher says it."""
        said = self.node_log(number, node)
        stopped = re.search(rf"stopped after a checkpoint while training at step (\d+) of {STEPS}", said)
        assert stopped, said[-6000:]
        assert f"trained: {STEPS} of {STEPS} optimizer steps" in said
        return int(stopped[1])

    def node_log(self, number: str, node: int) -> str:
        return (self.bench.project.folder / "logs" / f"{number}-node{node}.log").read_text(errors="replace")


def assert_one_report_has_every_rank(job: JobResult, ranks: int) -> None:
    """What `gh200 report` and `gh200 monitor` show: each rank on its node, after a requeue too."""
    table = rank_table(read_ranks(read_run(job.output)))
    assert table is not None
    here = ranks // NODES
    assert [(row.rank, row.node) for row in table.rows] == [(rank, f"n{rank // here + 1}") for rank in range(ranks)]
    assert not table.missing


@pytest.fixture(scope="session")
def _bench(forge, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    bench = Workbench(forge, tmp_path_factory.mktemp("shared"))
    bench.prepare()
    return bench


@pytest.fixture
def trial(cluster: Cluster, _bench: Workbench, scratch: Path) -> Iterator[Trial]:
    yield Trial(_bench, cluster, scratch)
    cluster.settle()


@pytest.mark.cluster
@pytest.mark.one_release("4.")
def test_a_job_of_two_nodes_trains_what_one_machine_trains(trial: Trial) -> None:
    """Everything from sbatch to the weights, once."""
    trial.configure(1, steps=3)
    reference = trial.on_one_machine()
    number = trial.submit()
    ended = trial.cluster.end(number)
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0), trial.cluster.output(number)
    for node in range(NODES):
        said = trial.node_log(number, node)
        held = re.search(r"in-memory dataset: tiny-images: (\d+) files", said)
        assert held, said[-4000:]
        assert int(held[1]) == 2 * IMAGES // NODES, "each node holds its own half, images and captions"
        assert "trained: 3 of 3 optimizer steps" in said
    job = trial.take_away()
    assert job.same_lora(reference)
    assert_one_report_has_every_rank(job, trial.ranks)


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["preempted", "requeued by hand", "near its time limit"])
def test_a_job_that_is_requeued_in_the_ramp_trains_the_same_bits(trial: Trial, how: str) -> None:
    settings = {"steps": STEPS, "checkpoints_total_limit": 20, **OF_THE_RELEASE}
    trial.configure(2, checkpoint_step_interval=2, **settings)
    reference = trial.on_one_machine() if GOES_ON else None
    number = trial.submit()
    output = trial.bench.project.output
    trial.cluster.wait(number, (output / "checkpoint-2").is_dir, "the second step")
    if how == "preempted":
        trial.cluster.submit("--partition=urgent", "-N2", "--exclusive", "--wrap", "srun true", "--output=/dev/null")
    elif how == "requeued by hand":
        trial.cluster.run("scontrol", "requeue", number)
    else:
        trial.cluster.run("scancel", "--batch", "--signal=USR1", number)
    ended = trial.cluster.end(number)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), trial.cluster.output(number)
    stops = [trial.stop(number, node) for node in range(NODES)]
    assert stops[0] == stops[1], "all ranks stop after the same window"
    assert 2 <= stops[0] < STEPS, "before its end"
    job = trial.take_away()
    assert_one_report_has_every_rank(job, trial.ranks)
    if reference is None:
        trial.configure(2, checkpoint_step_interval=1, **settings)
        reference = trial.stopped_on_one_machine(stops[0])
    assert job.same_lora(reference)
