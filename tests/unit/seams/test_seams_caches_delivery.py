"""The prefetch keys decide how batches are delivered. The device stands at the boundary: there is none here."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, FeatureUnavailable
from simpletuner_gh200.held import bulk
from simpletuner_gh200.held.batch import DeviceDelivery
from simpletuner_gh200.memory.lane import Copier, Lane
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.seams.features.caches import feature as caches
from simpletuner_gh200.seams.features.caches.feature import CachesFeature
from simpletuner_gh200.seams.features.prefetch import PrefetchFeature
from simpletuner_gh200.seams.runtime import Launch, RunOutcome, Runtime
from simpletuner_gh200.units import GIB


def delivery(**keys):
    feature = CachesFeature()
    feature.runtime = Runtime(Launch())
    feature.runtime.settings = resolve({"gh200_optimizations": keys}, {})
    return feature._delivery()


@pytest.mark.parametrize(
    "block", [{"vae_cache_type": "standard"}, {"vae_cache_type": "unified_memory", "hints": False}], ids=str
)
def test_standard_caches_and_no_hints_return_to_upstream(block):
    hints = {"enable_uvm_hints": False} if "hints" in block else {}
    chosen = {"cache_config": {"vae_cache_type": block["vae_cache_type"]}, "gh200_optimizations": hints}
    assert CachesFeature().request(resolve(chosen, {}), {}) == "off"


def test_without_a_device_batches_stay_on_the_cpu_and_an_explicit_wish_is_answered(caplog):
    assert not isinstance(delivery(), DeviceDelivery)
    assert caplog.text == ""
    assert not isinstance(delivery(enable_prefetch=True), DeviceDelivery)
    assert "no effect here" in caplog.text


def test_with_a_device_batches_are_copied_there_and_false_keeps_them_away(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(caches, "CudaLane", lambda device: str(device))
    monkeypatch.setattr(caches, "Copier", made.append)
    assert isinstance(delivery(prefetch_depth=3), DeviceDelivery)
    assert isinstance(delivery(), DeviceDelivery)
    assert made == ["cuda:0", "cuda:0"]
    assert not isinstance(delivery(enable_prefetch=False), DeviceDelivery)
    assert len(made) == 2


def test_prefetch_without_caches_is_said(caplog):
    feature = CachesFeature()
    feature.runtime = Runtime(Launch())
    feature.runtime.features = (feature,)
    feature.runtime.configure(resolve({"gh200_optimizations": {"enable_prefetch": True}}, {}))
    assert not feature.runtime.feature_on("caches")
    assert "none are on" in caplog.text


def test_without_a_compiler_simpletuner_s_own_caches_are_used_and_that_is_said(monkeypatch, tmp_path, caplog):
    feature = CachesFeature()
    feature.runtime = Runtime(Launch())
    feature.runtime.settings = resolve({"cache_config": {"vae_cache_type": "unified_memory"}}, {})
    monkeypatch.setattr(caches, "find_caches", lambda _served: [SimpleNamespace(wanted=None)])
    monkeypatch.setattr(bulk.CSource, "shipped", tmp_path / "none.so")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bulk.library.cache_clear()
    bulk.inflating_library.cache_clear()
    feature.data_ready(SimpleNamespace())
    assert feature.batch_path is None
    assert "SimpleTuner's own caches are used" in caplog.text and "needs a C compiler" in caplog.text


@pytest.mark.parametrize("depth", [0, -1, "deep"])
def test_nonsense_depths_are_refused(depth):
    with pytest.raises(ConfigError, match="prefetch_depth"):
        resolve({"gh200_optimizations": {"prefetch_depth": depth}}, {})


@pytest.mark.parametrize(("threshold", "kept"), [("50G", 50 * GIB), (None, 0)])
def test_what_simpletuner_wants_free_on_its_disk_is_left_by_packs(monkeypatch, tmp_path, threshold, kept):
    feature, made = CachesFeature(), {}
    feature.runtime = Runtime(Launch())
    feature.runtime.settings = resolve({"cache_config": {"vae_cache_type": "unified_memory"}}, {})
    monkeypatch.setattr(caches, "find_caches", lambda _served: [SimpleNamespace(wanted=None)])
    monkeypatch.setattr(caches, "Caches", lambda *_wanted, **options: made.update(options))
    monkeypatch.setattr(CachesFeature, "_attach", lambda *_: pytest.fail("there are no caches to attach"))
    config = SimpleNamespace(output_dir=str(tmp_path), disk_low_threshold=threshold)
    with pytest.raises(pytest.fail.Exception, match="no caches to attach"):
        feature.data_ready(SimpleNamespace(config=config))
    assert made["keep_free"] == kept
    assert made["packs"] == tmp_path / "gh200" / "cache"


class Ending:
    """A part of the caches that is closed at the end, and what was done to it."""

    def __init__(self, done, name, *, failing=False):
        self._done, self._name, self._failing = done, name, failing

    def close(self):
        self._done.append(self._name)
        if self._failing:
            raise RuntimeError("the device is gone")

    def save(self):
        self._done.append("saved")

    def stop_saving(self):
        self._done.append("stopped")

    def report(self):
        return {"held": 1}


@pytest.mark.parametrize(
    ("status", "packs"), [("completed", "saved"), ("failed", "stopped"), ("interrupted", "stopped")]
)
def test_packs_of_a_completed_run_are_written_whatever_else_fails_at_the_end(status, packs):
    """After a failure somebody waits: then nothing more is written."""
    feature, done = CachesFeature(), []
    feature.runtime = SimpleNamespace(outcome=RunOutcome(status=status))
    feature._copier = Ending(done, "copier", failing=True)
    feature._caches = Ending(done, "caches")
    with pytest.raises(RuntimeError, match="the device is gone"):
        feature.close()
    assert done == ["copier", packs, "caches"]
    assert feature.summary() == {"held": 1}


def test_memory_that_was_given_back_is_not_kept_by_copies_that_are_done():
    feature = CachesFeature()
    feature._copier = Copier(Lane(torch.device("cpu")))
    slab = Slab.anonymous(4096)
    gone = weakref.ref(slab.region)
    feature._copier.copy([slab.bytes_at(0, 64)])
    slab.close()
    gc.collect()
    assert gone() is not None
    feature.batch_prepared(None, {})
    gc.collect()
    assert gone() is None


def test_device_copies_of_embeds_are_refused_with_the_remedy_where_caches_are_on():
    for on in (False, True):
        settings = resolve({"cache_config": {"hbm_limit_gb": 3}, "gh200_optimizations": {"enable_prefetch": False}}, {})
        feature = CachesFeature()
        feature.runtime = SimpleNamespace(settings=settings, feature_on=lambda _name, on=on: on)
        if not on:
            feature.configured()
            continue
        with pytest.raises(FeatureUnavailable) as refused:
            feature.configured()
        assert "remove cache_config.hbm_limit_gb" in str(refused.value)


# -- SimpleTuner's own prefetching ------------------------------------------------------------------------------


def test_auto_leaves_simpletuners_prefetching_and_a_number_switches_it_on_with_that_queue():
    feature = PrefetchFeature()
    for keys in ({}, {"prefetch_depth": "auto"}):
        assert feature.request(resolve({"gh200_optimizations": keys}, {}), {}) == "off"
    feature.runtime = Runtime(Launch())
    feature.runtime.settings = resolve({"gh200_optimizations": {"prefetch_depth": 3}}, {})
    assert feature.request(feature.settings, {}) == "requested"
    trainer = SimpleNamespace(config=SimpleNamespace(dataloader_prefetch=False, dataloader_prefetch_qlen=10))
    feature.start(trainer)
    assert (trainer.config.dataloader_prefetch, trainer.config.dataloader_prefetch_qlen) == (True, 3)
    assert feature.summary() == {"depth": 3}
