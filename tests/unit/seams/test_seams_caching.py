from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.caching.workers import WorkerPool
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.seams.features.caching import turns
from simpletuner_gh200.seams.features.caching.feature import CachingFeature, _nothing_cached
from simpletuner_gh200.seams.features.caching.jobs import companions_of, weight_of
from simpletuner_gh200.seams.features.caching.turns import STAGES, Turns


@pytest.mark.parametrize("threads", [32, 2, 1])
def test_stages_that_were_started_together_run_last_first(threads: int) -> None:
    """As far as there are threads for all; with one it is the order in which they were started, as in stock."""
    order: list[str] = []
    given = Turns(threads)

    def stage(name: str) -> Any:
        taken = given.taken_by(STAGES.index(name))
        return lambda: taken(lambda: order.append(name), None, (), {})

    with ThreadPoolExecutor(threads) as executor:
        futures = [executor.submit(stage(name)) for name in reversed(STAGES)]
        given.given(lambda futures: wait(futures), None, (futures,), {})
    assert (
        order
        == {
            32: list(STAGES),
            2: [STAGES[2], STAGES[3], STAGES[0], STAGES[1]],
            1: list(reversed(STAGES)),
        }[threads]
    )


def test_a_long_stage_does_not_lose_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A video's encoding takes longer than the others wait for SimpleTuner."""
    monkeypatch.setattr(turns, "PATIENCE", 0.2)
    order: list[str] = []
    given = Turns(8)

    def stage(name: str) -> Any:
        def work() -> None:
            time.sleep(0.5 if name == STAGES[0] else 0.0)
            order.append(name)

        return lambda: given.taken_by(STAGES.index(name))(work, None, (), {})

    with ThreadPoolExecutor(8) as executor:
        futures = [executor.submit(stage(name)) for name in reversed(STAGES)]
        given.given(lambda futures: wait(futures), None, (futures,), {})
    assert order == list(STAGES)


def test_a_stage_that_nobody_waits_for_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    assert Turns(4).taken_by(0)(lambda: "done", None, (), {}) == "done"


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([((8, 8), (4, 4))], ["none"]),
        ([((8, 8), (4, 4)), ((8, 8), [4, 4])], ["to be resized", "to be resized"]),
        ([((8, 8), (4, 4)), ((4, 4), (4, 4))], ["fits", "to be resized"]),
        ([((8, 8), (4, 4)), ((8, 8), None)], ["none", "none"]),
    ],
)
def test_what_a_picture_is_processed_together_with(sizes: list[Any], found: list[str]) -> None:
    assert companions_of(sizes) == found


def test_a_picture_weighs_what_a_worker_needs_for_it() -> None:
    metadata = {"original_size": [3000, 3000], "intermediary_size": [512, 512], "num_frames": None}
    cache = SimpleNamespace(metadata_backend=SimpleNamespace(get_metadata_by_filepath=lambda path: metadata))
    assert weight_of(cache, "any") == 9_000_000 * 10 + 512 * 512 * 12


@pytest.mark.parametrize(
    ("cache", "datasets", "asked"),
    [
        ({}, (), "off"),
        ({}, ("pictures",), "auto"),
        ({"vae_cache_type": "unified_memory"}, (), "auto"),
        ({"caching": "parallel"}, (), "requested"),
        ({"caching": "stock"}, ("pictures",), "off"),
    ],
)
def test_when_it_is_on(cache: dict[str, Any], datasets: tuple[str, ...], asked: str) -> None:
    settings = replace(resolve({"cache_config": cache}, {}), in_memory_datasets=datasets)
    assert CachingFeature().request(settings, {}) == asked


def test_what_workers_need_is_imported_early_only_where_there_is_much_to_do(tmp_path: Path) -> None:
    pictures, latents = tmp_path / "pictures", tmp_path / "latents"
    pictures.mkdir()
    entry = {"id": "a", "type": "local", "instance_data_dir": str(pictures), "cache_dir_vae": str(latents)}
    assert not _nothing_cached(entry), json.dumps(entry)
    for number in range(64):
        (pictures / f"{number}.png").touch()
    assert _nothing_cached(entry)
    latents.mkdir()
    (latents / "one.pt").touch()
    assert not _nothing_cached(entry)


@pytest.mark.parametrize(
    ("ranks", "here", "asked", "started"),
    [(1, 1, None, True), (2, 2, None, True), (2, 1, None, False), (2, 1, "parallel", True)],
)
def test_nothing_is_started_early_that_several_nodes_will_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, here: int, asked: str | None, started: bool
) -> None:
    for number in range(64):
        (tmp_path / f"{number}.png").touch()
    entry = {"id": "a", "type": "local", "instance_data_dir": str(tmp_path), "cache_dir_vae": str(tmp_path / "not")}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    starts: list[str] = []
    monkeypatch.setattr(WorkerPool, "start", lambda pool: starts.append("started"))
    feature = CachingFeature()
    block = {"caching": asked} if asked else {}
    feature.runtime = SimpleNamespace(settings=resolve({"cache_config": block}, {}))
    feature.start(None)
    feature.dataset_entries([entry])
    assert bool(starts) == started
