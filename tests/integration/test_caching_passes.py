"""The caching pass with workers leaves what stock leaves, to the bit, whatever the pictures are and whoever dies."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.telemetry.reading import FILE
from tests.integration.workbench import Workbench, probe
from tests.telemetry_page import undescribed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def beside(forge, tmp_path_factory):
    """Runs a function of ``caching_passes`` beside an imported SimpleTuner; what it said, line by line."""
    bench = Workbench(forge, tmp_path_factory.mktemp("passes"))
    bench.project.folder.mkdir()

    def run(function: str, *arguments: object) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(function)
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.integration import caching_passes as it\n"
        done = bench.execute(f"{code}it.{function}({str(folder)!r}, *{arguments!r})")
        assert done.ok, done.explain()
        return [json.loads(line) for line in done.log().splitlines() if line.startswith("{")]

    return run


def test_what_a_pass_leaves_is_stocks_to_the_bit(beside) -> None:
    found = beside("compare", [])
    assert len(found) == 19
    for case in found:
        assert case["differences"] == {}, case["case"]
        if case["case"] != "faces":  # an older release's own scan fails on them
            assert 2 * case["written"] > case["pictures"] > 0, case["case"]


def test_random_crops_are_as_large_and_as_many_as_stocks(beside) -> None:
    assert beside("loose") == [{"differences": {}, "written": 17}]


def test_nothing_is_seen_of_workers_that_die_hang_or_lack_memory(beside) -> None:
    killed, stopped, without_server = beside("disturbed")
    bomb = 6000 * 6000 * 10
    for found in (killed, stopped, without_server):
        assert found["differences"] == {}
        assert bomb <= found["most"] < bomb + (1 << 20), "alone, since it is above the ceiling by itself"


def test_an_interrupted_pass_goes_on_and_a_file_that_never_ends_costs_itself_alone(beside) -> None:
    first, second, whole = beside("interrupted")
    assert first["killed"]
    assert second["killed"]
    assert 0 <= first["written"] <= second["written"] < 23
    assert whole == {"written": 23, "left_out": True, "there": True}


PARALLEL = {"cache_config": {"vae_cache_type": "unified_memory", "caching": "parallel"}}


def from_empty_caches(workbench, *, ours: bool, **how: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    workbench.restore()
    latents = workbench.project.folder / "cache" / "vae"
    shutil.rmtree(latents)
    workbench.configure(max_train_steps=3, **({"blocks": PARALLEL, "dataset": {"type": "in_memory"}} if ours else {}))
    run = workbench.train(stock=not ours, **how)
    assert run.ok, run.explain()
    return run, {path.name: torch.load(gzip.open(path)) for path in sorted(latents.rglob("*.pt"))}


def read_records(telemetry: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in telemetry.read_text().splitlines()]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_fills_its_caches_trains_as_stock_does(workbench, world: int) -> None:
    """With two ranks, as stock's ranks do where none of them encodes pictures of the other before it has done so."""
    import torch

    stock, theirs = from_empty_caches(workbench, ours=False, world=world, probe=probe("own_share_alone"))
    shares = [record["share"] for record in stock.records]
    assert sum(len(set(share)) for share in shares) == len(theirs), "each by one rank"
    ours, mine = from_empty_caches(workbench, ours=True, world=world)
    assert theirs.keys() == mine.keys() != set()
    assert [name for name in theirs if not torch.equal(theirs[name], mine[name])] == []
    assert stock.losses == ours.losses
    pictures = [summary["details"]["caching"]["pictures"] for summary in ours.summaries]
    assert pictures == list(map(len, shares))
    assert "gh200: dataset" in ours.log()
    records = read_records(ours.output / FILE)
    kinds = [record["kind"] for record in records]
    told = kinds[: kinds.index("start")]
    assert [undescribed(record) for record in records] == [[]] * len(records)
    assert set(told) == {"caching"} and len(told) >= 2 and "caching" not in kinds[len(told) :]
