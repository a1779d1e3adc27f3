"""``prefetch_depth`` is SimpleTuner's own prefetching."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.seams.features.prefetch import PrefetchFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime


def feature(**keys):
    made = PrefetchFeature()
    made.runtime = Runtime(Launch())
    made.runtime.settings = resolve({"gh200_optimizations": keys}, {})
    return made


@pytest.mark.parametrize(("keys", "request_"), [({}, "off"), ({"prefetch_depth": "auto"}, "off")])
def test_auto_leaves_simpletuner_as_it_is_set(keys, request_):
    made = feature(**keys)
    assert made.request(made.settings, {}) == request_


def test_a_number_switches_simpletuners_prefetching_on_with_that_queue():
    made = feature(prefetch_depth=3)
    assert made.request(made.settings, {}) == "requested"
    trainer = SimpleNamespace(config=SimpleNamespace(dataloader_prefetch=False, dataloader_prefetch_qlen=10))
    made.start(trainer)
    assert (trainer.config.dataloader_prefetch, trainer.config.dataloader_prefetch_qlen) == (True, 3)
    assert made.summary() == {"depth": 3}
