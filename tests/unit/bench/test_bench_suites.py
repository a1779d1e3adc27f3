"""Suites are found by name, measure fairly, give the keys of the contract, and their references do what they say."""

from __future__ import annotations

import io
import os
from pathlib import Path

import lz4.frame
import pytest

from simpletuner_gh200.bench import suite as suites
from simpletuner_gh200.bench.filling import KINDS, measure_fill, measure_packs, measure_scaling, measure_step_slowdown
from simpletuner_gh200.bench.runs import FIRST_STEP, STEP, Timed
from simpletuner_gh200.bench.samples import jpeg_head, make_files
from simpletuner_gh200.bench.sharing import measure_cache, measure_dataset
from simpletuner_gh200.bench.slow_disk import SlowDisk, slow_disk
from simpletuner_gh200.bench.suite import Suite, all_suites, find_suite, measure
from simpletuner_gh200.bench.suites.activations import measure_activations
from simpletuner_gh200.bench.suites.cache import measure_memory, measure_warm_start
from simpletuner_gh200.bench.suites.checkpoints import ON_DISK, _compared, _loss
from simpletuner_gh200.bench.suites.start import DATA_BEGINS, DATA_ENDS, data_phase, ratio
from simpletuner_gh200.bench.suites.store import (
    measure_index,
    measure_reading,
    measure_staging,
    measure_walk,
    thread_lz4_dict,
)
from simpletuner_gh200.bench.suites.weights import measure_weights
from simpletuner_gh200.demo.project import write_tiny_images
from simpletuner_gh200.errors import UsageError


def test_every_suite_says_what_it_measures_and_an_unknown_one_is_refused_with_those_that_are_known():
    found = all_suites()
    assert set(found) >= {"activations", "cache", "checkpoints", "hooks", "start", "store", "weights"}
    assert all(suite.help.endswith(".") for suite in found.values())
    with pytest.raises(UsageError, match="'nope'") as refused:
        find_suite("nope")
    assert ", ".join(found) in str(refused.value)


def test_what_a_suite_prints_is_not_in_the_json(monkeypatch, capfd):
    """SimpleTuner prints while it caches."""
    from simpletuner_gh200.cli.commands import bench
    from simpletuner_gh200.cli.main import main

    loud = Suite("loud", "", lambda quick, samples: {"length": os.write(1, b"said by another")})
    monkeypatch.setattr(bench, "find_suite", lambda name: loud)
    monkeypatch.setattr("sys.argv", ["gh200", "bench", "loud", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert capfd.readouterr().out == '{"length": 15}\n'


def test_samples_can_be_requested_of_the_suite_that_has_them():
    assert find_suite("start").takes_samples
    plain = Suite("plain", "", lambda quick, samples: {"quick": quick, "samples": samples})
    assert plain.run(True, None) == {"quick": True, "samples": None}
    with pytest.raises(UsageError, match="no --samples"):
        plain.run(True, 5)


def test_subjects_take_turns_and_the_median_counts_without_what_comes_before_and_after(monkeypatch):
    now, turns = 0.0, []
    costs = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 30.0])}

    class Kept:
        def close(self) -> None:
            nonlocal now
            now += 100

    def subject(name: str):
        def work() -> Kept:
            nonlocal now
            turns.append(name)
            now += next(costs[name])
            return Kept()

        return work

    def before(name: str) -> None:
        nonlocal now
        turns.append(f"before {name}")
        now += 1000

    monkeypatch.setattr(suites, "clocks", lambda: (now, now / 2, now / 4))
    taken = measure({name: subject(name) for name in costs}, repeats=3, before=before)
    assert turns == ["before a", "a", "before b", "b"] * 3
    assert taken.wall == {"a": 2.0, "b": 5.0}
    assert (taken.cpu["b"], taken.thread["b"]) == (2.5, 1.25)


def test_ratios_of_starts_are_between_neighbours():
    """A machine that is twice as slow in the second round slows both sides: the ratio is what it was."""
    stock, ours = ([Timed({DATA_BEGINS: 1.0, DATA_ENDS: 1 + s}, {}) for s in row] for row in ((1, 2, 1), (0.5, 1, 0.5)))
    assert ratio(ours, stock, data_phase) == 0.5


def every_part(folder: Path) -> dict[str, tuple[dict[str, float], set[str]]]:
    """What a part of a suite gives, and which of its keys the contract names."""
    batch, hit = measure_memory(folder / "memory", "32KB", 32, 1)
    staging = measure_staging(folder / "staging", 5000, 6, 1)
    rates = {"gb_per_s", "vs_read_limit", "vs_thread_lz4_dict"}
    reading = {"view_vs_local", "view_vs_memcpy", "bytes_vs_local"}
    found = {
        "batch16": (batch, {"vs_torch_load", "vs_memcpy"}),
        "hit": (hit, {"us", "vs_memcpy"}),
        "warm_start": (measure_warm_start(folder / "warm", 4, 1), {"vs_read_limit", "vs_pt_files"}),
        "staging": (staging, rates),
        "read": (measure_reading(folder / "read", 5000, 6, 1), reading),
        "walk": (measure_walk(folder / "walk", 20, 1), {"vs_rglob"}),
        "index": (measure_index(20_000, 1), {"bytes_per_key", "lookup_us"}),
        "packs": (measure_packs(folder / "packs", 6, 1), {"us_per_entry"}),
        "scaling": ({"scaling": measure_scaling(folder / "scaling", 4, 1)}, {"scaling"}),
    }
    found["read, beyond the cache"] = (found["read"][0].pop("beyond_cache"), reading)
    found |= {kind: (measure_fill(folder / kind, kind, 4, 1), {"vs_limit", "vs_torch_load"}) for kind in KINDS}
    return found


def test_every_part_gives_what_the_contract_names(tmp_path):
    found = every_part(tmp_path)
    assert {part: named - given.keys() for part, (given, named) in found.items() if named - given.keys()} == {}
    assert {part: given for part, (given, _named) in found.items() if min(given.values()) <= 0} == {}
    assert found["index"][0]["bytes_per_key"] <= 300, "of fewer keys it is the pages that the process had free"
    assert measure_step_slowdown(tmp_path / "steps", 8, 1, steps=1) > -1


def test_activations_give_what_the_contract_names():
    found = measure_activations(True, None)
    assert found.keys() >= {"us_per_tensor", "us_per_tensor_doing_nothing", "vs_upstream"}
    assert 0 < found["moved"] < found["tensors"], "some of them only stay"
    assert 0.5 < found["moved_vs_saved"] <= 1.5
    assert found["vs_save_on_cpu"] > 0


def test_weights_are_brought_once_ahead_of_each_use():
    found = measure_weights(True, None)
    assert found.keys() >= {"us_per_block", "step_vs_plain", "vs_ramtorch", "vs_block_swap"}
    assert found["moved_vs_needed"] == 1.0
    assert found["step_vs_plain"] > 0


def test_the_reference_holds_every_file_compressed(tmp_path):
    paths = make_files(tmp_path, 5000, 3)
    held = thread_lz4_dict(tmp_path)
    assert {str(path): lz4.frame.decompress(packed) for path, packed in held.items()} == {
        path: Path(path).read_bytes() for path in paths
    }


def test_made_images_open_and_have_captions_of_their_own(tmp_path):
    from PIL import Image

    assert Image.open(io.BytesIO(jpeg_head() + b"noise")).size == (512, 512)
    write_tiny_images(tmp_path / "images", count=3)
    captions = {path.read_text() for path in (tmp_path / "images").glob("*.txt")}
    assert len(captions) == len(list((tmp_path / "images").glob("*.png"))) == 3


@pytest.mark.skipif(os.environ.get("GH200_SLOW_TESTS") != "1", reason="slow: set GH200_SLOW_TESTS=1")
def test_ranks_hold_one_copy(tmp_path):
    assert measure_dataset(tmp_path / "dataset", 2_000_000, 150)["pss_ratio"] < 1.6, "300 MB once, four interpreters"
    found = measure_cache(tmp_path / "cache", 64)
    assert found["held_ratio"] < 1.6
    assert found["sharing"]["pss_ratio"] < 1.6, "32 MB once, and what two ranks need to find it"


def test_what_a_checkpoint_costs_is_read_off_the_times_of_the_steps():
    """A step takes a second; after every third one training waits four, and its next two steps are slowed by half."""
    done = [1.0, 2.0, 3.0, 8.0, 9.5, 11.0, 16.0, 17.5, 18.5]
    run = Timed({}, {}, {FIRST_STEP: done[:1], STEP: done[1:], ON_DISK: [11.0, 17.5]}, 20.0)
    found = _loss(run, 3)
    assert found.stalls == [4.0, 4.0] and found.plain == 1.0
    assert found.draining == [1.5, 1.5, 1.5]
    assert found.whole == 19.0
    told = [{"behind": 2, "drain_s": 4.0}]
    compared = _compared(
        [found._replace(stalls=[8.0], whole=38.0)], [found], told, 10**9, SlowDisk(Path(), "how", None)
    )
    assert compared["stall_vs_stock"] == compared["run_vs_stock"] == 0.5
    assert compared["steps_after_vs_plain"] == 1.5
    assert (compared["drain_gb_per_s"], compared["bytes"], compared["disk"]) == (0.5, 10**9, "how")


def test_where_no_disk_can_be_slowed_down_the_writers_are_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with slow_disk(tmp_path / "disk", 300e6, 1 << 20) as disk:
        assert disk.rate == 300e6 and disk.folder.is_dir()
        assert disk.how == "no loop device here: stock's saving and our drainer are held to 300 MB/s"
    assert not (tmp_path / "disk.img").exists()
