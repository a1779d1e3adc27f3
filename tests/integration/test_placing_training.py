"""``memory: "auto"`` in real SimpleTuner, host memory on both sides: the same bits, wherever memory runs out."""

from __future__ import annotations

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.operate import planned
from simpletuner_gh200.telemetry.reading import read_run
from tests.integration.test_weights_training import FULL
from tests.integration.workbench import JobResult, probe
from tests.telemetry_page import undescribed

SMALL = {"uvm_min_tensor_kb": 0, "activation_min_tensor_kb": 0}
AUTO = {"gh200_optimizations": {"memory": "auto", **SMALL}}
MOVED = {"state": "bytes", "gradients": "moved", "weights": "streamed", "activations": "moved"}
EVERYTHING = list(MOVED)
CASES = [
    pytest.param(1, FULL, EVERYTHING),
    pytest.param(2, {}, ["weights", "activations"], marks=pytest.mark.one_release("4.")),
]
"""State and gradients of a LoRA are below what is worth placing."""


def at_work(details: dict, features: list[str]) -> None:
    assert {name for name in MOVED if details.get(name, {}).get(MOVED[name])} == set(features)


def same_bits(run: JobResult, stock: JobResult) -> None:
    assert run.weights() == stock.weights()
    for rank, (ours, theirs) in enumerate(zip(run.losses, stock.losses, strict=True)):
        rehearsed = run.summaries[rank]["details"]["memory"]["rehearsals"]
        assert len(ours) >= len(theirs) + 1
        assert ours[-len(theirs) :] == theirs
        assert set(ours[: -len(theirs)]) == {theirs[0]}, "the same random numbers in every attempt"
        assert rehearsed == 1 or run.summaries[rank]["details"]["memory"]["moved"]


@pytest.mark.parametrize(("world", "kind", "decided"), CASES)
def test_what_the_launcher_decided_is_what_every_rank_does(workbench, world: int, kind: dict, decided: list) -> None:
    workbench.configure(**kind)
    stock = workbench.known(stock=True, world=world)
    workbench.configure(blocks=AUTO, **kind)
    plan = planned.check(read_training(Located.at(workbench.project.config), {}))
    run = workbench.train(world=world, env=dict(plan.environment))
    assert run.ok, run.explain()
    same_bits(run, stock)
    found = run.summaries[0]["details"]
    assert {row["what"] for row in found["memory"]["placement"]} >= {"weights", "process"}
    assert len(found["memory"]["settings"]) == len(decided)
    at_work(found, decided)
    assert "memory auto: there is no GPU" in run.log()
    assert [undescribed(record) for record in read_run(run.output).steps] == [[]] * run.summaries[0]["global_step"]


@pytest.mark.parametrize(("world", "kind"), [(1, FULL), pytest.param(2, {}, marks=pytest.mark.one_release("4."))])
def test_memory_that_runs_out_in_the_first_step_is_made(workbench, world: int, kind: dict) -> None:
    """Four times, in forward and backward: one thing after the other moves, and the run is stock's."""
    workbench.configure(**kind)
    stock = workbench.known(stock=True, world=world)
    workbench.configure(blocks=AUTO, **kind)
    run = workbench.train(world=world, probe=probe("out_of_memory"))
    assert run.ok, run.explain()
    same_bits(run, stock)
    for summary in run.summaries:
        found = summary["details"]
        assert [move["what"] for move in found["memory"]["moved"]] == EVERYTHING
        assert found["memory"]["moved"][0]["why"] == "planted: 3 to come"
        at_work(found, EVERYTHING)
    assert "memory auto: moved to Grace: state (planted" in run.log()


@pytest.mark.one_release("4.")
def test_what_was_given_stays_and_the_error_is_torchs_own_in_the_end(workbench) -> None:
    given = {"memory": "auto", "weights": "hbm", "activations": "off", **SMALL}
    workbench.configure(blocks={"gh200_optimizations": given}, **FULL)
    run = workbench.train(probe=probe("never_enough_memory"))
    assert not run.ok
    assert "nothing is left that could leave HBM: planted" in run.log()
    assert "OutOfMemoryError: planted" in run.log()
    assert [move["what"] for move in run.summaries[0]["details"]["memory"]["moved"]] == ["state", "gradients"]
