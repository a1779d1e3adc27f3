"""All caches together: filled within a budget, reported, saved, and loaded again."""

from __future__ import annotations

import gzip
import io
import logging
from pathlib import Path

import torch

from simpletuner_gh200.cache.listing import cache_files
from simpletuner_gh200.cache.service import Caches, Wanted, statistics
from simpletuner_gh200.cache.table import MISSING
from simpletuner_gh200.memory.sharing import NodeGroup


def alone():
    return NodeGroup.from_environment("test", {})


def make(saved, name, count, size=1000):
    return [saved(torch.full((size,), float(n)), f"{name}/sub/{n}.pt") for n in range(count)]


def test_everything_on_disk_is_filled_and_reported(saved, tmp_path):
    paths = make(saved, "vae", 10)
    caches = Caches([Wanted("vae-x", "vae", str(tmp_path / "vae"))], allowed=None, group=alone())
    caches.fill()
    assert all(float(caches.tables["vae-x"].get(path)[0]) == n for n, path in enumerate(paths))
    report = statistics()["vae-x"]
    assert report["entries"] == 10
    assert report["bytes"] >= 40_000
    assert (report["hits"], report["misses"], report["hit_rate"]) == (10, 0, 1.0)
    assert report["fill_seconds"] > 0
    caches.close()
    assert statistics() == {}


def test_listing_gives_signs_of_life(tmp_path, monkeypatch):
    """A cache of millions on a slow file system takes minutes, in which the other ranks wait for this one."""
    group, beats = alone(), []
    monkeypatch.setattr(group, "beat", lambda: beats.append(True))
    monkeypatch.setattr("simpletuner_gh200.held.bulk.ENTRIES_BYTES", 4096)
    for letter in "abcdefghijklmnopqrst":
        (tmp_path / "many" / letter).mkdir(parents=True)
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(1000):
        (wide / f"{number:020}.pt").touch()
    for name, least in (("many", 20), ("wide", 8)):  # at every folder; at every piece of a large one
        beats.clear()
        Caches([Wanted("vae-x", "vae", str(tmp_path / name))], allowed=None, group=group).close()
        assert len(beats) >= least, name


def test_what_is_still_to_come_is_told_to_others(saved, tmp_path):
    """Model state leaves it alone: what the caches will hold, or may, less what they hold."""
    paths = make(saved, "vae", 10)
    on_disk = sum(Path(path).stat().st_size for path in paths)
    wanted = [Wanted("vae-x", "vae", str(tmp_path / "vae"))]
    for allowed, promised in ((None, on_disk), (20_000, 20_000)):
        caches = Caches(wanted, allowed=allowed, group=alone())
        assert caches.memory_to_come == promised
        caches.fill()
        assert caches.memory_to_come == max(promised - caches.tables["vae-x"].control.held, 0) < promised
        caches.close()


def test_sizes_are_asked_one_by_one_only_where_a_budget_is_near(saved, tmp_path, monkeypatch):
    """And a sample that missed one large entry among many small ones is corrected once they are known."""
    monkeypatch.setattr("simpletuner_gh200.cache.listing.SAMPLES", 4)
    paths = [*make(saved, "vae", 40, size=10), saved(torch.zeros(100_000), "vae/sub/large.pt")]
    exact = sum(Path(path).stat().st_size for path in paths)
    wanted = [Wanted("vae-x", "vae", str(tmp_path / "vae"))]
    for allowed, measured, complete in ((10**9, False, True), (100_000, True, False), (exact - 1, False, False)):
        caches = Caches(wanted, allowed=allowed, group=alone())
        assert caches.files["vae-x"].measured is measured
        caches.fill()
        assert caches.selections["vae-x"].complete is complete
        assert caches.tables["vae-x"].control.held <= allowed
        caches.close()
    listing = cache_files(str(tmp_path))
    listing.measure()
    assert listing.size == exact
    assert dict(listing) == {path: Path(path).stat().st_size for path in paths}
    assert sorted(listing.paths()) == sorted(paths)


def test_progress_in_logs_counts_bytes_that_were_taken_in(saved, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("simpletuner_gh200.telemetry.progress.LINE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    make(saved, "vae", 5, size=100_000)
    wanted = [Wanted("vae-x", "vae", str(tmp_path / "vae"))]
    with caplog.at_level(logging.INFO, "simpletuner_gh200"):
        caches = Caches(wanted, allowed=None, group=alone(), workers=1)
        caches.fill()
        lines = [record.getMessage() for record in caplog.records if "filling cache vae-x" in record.getMessage()]
        assert "5/5, 1.91 MiB" in lines[-1]
        assert not lines[-1].endswith(" 0 B/s")
        caplog.clear()
        caches.files = {"vae-x": cache_files(str(tmp_path))}
        caches.fill()
    assert "filling cache" not in caplog.text, "nothing was left to take in"
    caches.close()


def test_a_small_budget_keeps_a_fixed_subset_and_says_so(saved, tmp_path, caplog):
    paths = make(saved, "vae", 40)
    with caplog.at_level(logging.WARNING, "simpletuner_gh200"):
        first, second = (
            Caches([Wanted("vae-x", "vae", str(tmp_path / "vae"))], allowed=100_000, group=alone()) for _ in range(2)
        )
    assert "expected hit rate" in caplog.text
    assert "would hold all" in caplog.text
    kept = []
    for caches in (first, second):
        caches.fill()
        table = caches.tables["vae-x"]
        kept.append([table.get(path) is not MISSING for path in paths])
        assert table.control.held <= 100_000
        rate = table.statistics.expected_hit_rate
        assert sum(kept[-1]) == round(rate * 40)
        caches.close()
    assert kept[0] == kept[1]
    assert 0 < sum(kept[0]) < 40


def test_packs_are_written_and_read_at_the_next_start(saved, tmp_path):
    paths = make(saved, "vae", 6)
    wanted = [Wanted("vae-x", "vae", str(tmp_path / "vae"))]
    for turn in range(2):
        caches = Caches(wanted, allowed=None, group=alone(), packs=tmp_path / "packs")
        caches.fill()
        assert caches.loaded["vae-x"].entries == 6 * turn
        assert all(caches.tables["vae-x"].get(path) is not MISSING for path in paths)
        caches.save()
        assert caches.report()["vae-x"]["packs"]["damaged"] == 0
        caches.close()


def test_gzipped_files_are_read(tmp_path):
    out = io.BytesIO()
    torch.save({"prompt_embeds": torch.ones(2, 3)}, out)
    (tmp_path / "a.pt").write_bytes(gzip.compress(out.getvalue()))
    caches = Caches([Wanted("text-x", "text", str(tmp_path))], allowed=None, group=alone())
    caches.fill()
    assert torch.equal(caches.tables["text-x"].get(tmp_path / "a.pt")["prompt_embeds"], torch.ones(2, 3))
    caches.close()


def test_an_empty_folder_is_fine(tmp_path):
    caches = Caches([Wanted("vae-x", "vae", str(tmp_path / "none"), expected=5)], allowed=None, group=alone())
    caches.fill()
    assert caches.report()["vae-x"]["entries"] == 0
    caches.close()
