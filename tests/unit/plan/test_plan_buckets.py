"""Activations per bucket: both ends are asked for, the others lie between them, and every reader is shown them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from simpletuner_gh200.plan import sizes as reading
from simpletuner_gh200.plan import traces
from simpletuner_gh200.plan.data import SampleShape
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.models import ModelPart
from simpletuner_gh200.plan.pictures import as_html, as_svg
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.plan.variants import between, buckets, usual_flops
from tests.unit.plan.plan_samples import configured, facts, sizes, trace

SMALL, MIDDLE, LARGE = SampleShape(512, 512), SampleShape(768, 768), SampleShape(1024, 1024)
COUNTS = {SMALL: 10, LARGE: 5, MIDDLE: 25}
MACHINE = MACHINES["gh200-144"]


def half(found: traces.Trace) -> traces.Trace:
    """A step that keeps half as much and computes a quarter; weights are what they are."""
    less = {"saved": 2, "forward": 2, "peak": 2, "flops": 4}
    base = replace(found.base, **{name: getattr(found.base, name) // by for name, by in less.items()})
    stack = found.stacks["blocks"]
    each = replace(stack.each, **{name: getattr(stack.each, name) // by for name, by in less.items()})
    return traces.Trace(base, {"blocks": replace(stack, each=each)})


def found(low: traces.Trace | None = None, **changed):
    known = sizes(shapes=COUNTS, smallest=low, **changed)
    return buckets(facts(checkpointing=False), known, MACHINE)


def test_a_bucket_lies_on_the_line_between_the_smallest_and_the_largest():
    low, high = half(trace(checkpointed=False)), trace(checkpointed=False)
    large, middle, small = found(low)
    assert (large.shape, middle.shape, small.shape) == (LARGE, MIDDLE, SMALL), "from the largest down"
    assert (large.flops, small.flops) == (high.whole.flops, pytest.approx(low.whole.flops))
    share = (MIDDLE.area - SMALL.area) / (LARGE.area - SMALL.area)
    assert middle.flops == pytest.approx(low.whole.flops + share * (high.whole.flops - low.whole.flops))
    assert middle.hbm == pytest.approx(small.hbm + share * (large.hbm - small.hbm), abs=100)
    assert [bucket.note for bucket in (large, middle, small)][1].startswith("on a line")
    assert {bucket.source for bucket in (large, middle, small)} == {"computed"}
    assert [bucket.samples for bucket in (large, middle, small)] == [5, 25, 10]


def test_weights_are_the_same_on_the_whole_line():
    low, high = half(trace(checkpointed=False)), trace(checkpointed=False)
    assert between(low, high, 0.3).whole.weights == high.whole.weights
    cut = replace(high, rows={64: 10}, stacks={"blocks": replace(high.stacks["blocks"], rows={32: 5})})
    assert between(low, cut, 0.3).all_rows == cut.all_rows, "parameters have their shapes whatever a latent's is"


def test_without_the_smallest_the_others_are_scaled_and_that_is_a_guess():
    large, middle, _small = found()
    assert (large.source, middle.source) == ("computed", "assumed")
    assert middle.hbm == pytest.approx(large.hbm * MIDDLE.area / LARGE.area, rel=0.01)
    assert found(traces={}) == ()


def test_the_usual_step_counts_each_bucket_as_often_as_it_comes():
    low = half(trace(checkpointed=False))
    all_of_them = found(low)
    whole = sum(bucket.flops * bucket.samples for bucket in all_of_them) / 40
    assert usual_flops(all_of_them) == pytest.approx(whole)
    assert usual_flops(()) is None


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A plan of a dataset with three buckets; the tracing child's questions are kept, and answered by area."""
    data = tmp_path / "data"
    data.mkdir()
    index = {"1.0": ["a", "b"], "1.5": ["c"], "2.0": ["d"]}
    (data / "aspect_ratio_bucket_indices_x.json").write_text(json.dumps({"aspect_ratio_bucket_indices": index}))
    entry = {"id": "x", "type": "local", "instance_data_dir": str(data), "resolution": 512, "resolution_type": "pixel"}
    config = {"model_family": "flux", "model_type": "full", "train_batch_size": 1, "datasets": [entry]}
    asked = []

    def answer(requests, **_more):
        asked.extend(requests)
        return [
            {"base": {"saved": 10 * area, "forward": 10 * area, "peak": 10 * area, "flops": area}, "stacks": {}}
            for request in requests
            for area in [request["latent"][0] * request["latent"][1]]
        ]

    monkeypatch.setattr(traces, "ask", answer)
    part = ModelPart("transformer", 10, "measured", config={"_class_name": "Any"})
    monkeypatch.setattr(reading, "read_parts", lambda *_arguments: {"transformer": part})

    def make(machine="gh200-96", **values):
        asked.clear()
        training = configured(tmp_path, **config, gradient_checkpointing=True, **values)
        return make_plan(training, MACHINES[machine]), asked

    return make


def test_both_ends_are_traced_the_smallest_the_way_the_run_takes_its_steps(planned):
    _plan, asked = planned()
    small = [request for request in asked if request["latent"] == [64, 64]]
    assert [request["options"]["gradient_checkpointing"] for request in small] == [True]
    assert [request["latent"] for request in asked] == [[64, 128], [64, 128], [64, 64]]
    _plan, asked = planned(gh200_optimizations={"activations": "auto"})
    assert asked[-1]["options"]["gradient_checkpointing"] is False, "blocks are not checkpointed then"
    _plan, asked = planned("gb10", gh200_optimizations={"activations": "auto"})
    assert asked[-1]["options"]["gradient_checkpointing"] is True, "one pool: nothing goes to Grace"


def test_buckets_are_in_the_json_and_in_the_pictures(planned):
    plan, _asked = planned()
    told = plan.to_json()["buckets"]
    assert [(bucket["width"], bucket["height"], bucket["samples"]) for bucket in told] == [
        (1024, 512, 1),
        (768, 512, 1),
        (512, 512, 2),
    ]
    assert [bucket["hbm"] for bucket in told] == [10 * 64 * 128, 10 * 64 * 96, 10 * 64 * 64]
    assert plan.to_json()["step"]["flops"] == (64 * 128 + 64 * 96 + 2 * 64 * 64) / 4
    for picture in (as_svg(plan), as_html(plan)):
        assert "768 x 512" in picture
    assert "on a line between two that were traced" in as_html(plan)


def test_parts_without_weights_are_counted_by_the_same_child(planned, monkeypatch):
    parts = [
        ModelPart("transformer", 10, "measured", config={"_class_name": "Any"}),
        ModelPart("text_encoder", 0, "computed", config={"model_type": "clip_text_model"}),
        ModelPart("vae", 0, "computed", config={"latent_channels": 16}),
    ]
    monkeypatch.setattr(reading, "read_parts", lambda *_arguments: {part.name: part for part in parts})
    children = []

    def answer(requests, **_more):
        children.append([request["kind"] for request in requests])
        step = {"base": {"saved": 1, "forward": 1, "peak": 1, "flops": 1}, "stacks": {}}
        sizes = {"clip_text_model": 7}
        told = {"step": lambda _request: step, "vae": lambda _request: {"error": "too small"}}
        counted = {"count": lambda request: {"parameters": sizes.get(request["model"].get("model_type"), 5)}}
        return [{**told, **counted}[request["kind"]](request) for request in requests]

    monkeypatch.setattr(traces, "ask", answer)
    sizes = planned()[0].sizes
    assert children == [["step", "step", "step", "vae", "count", "count"]]
    assert [(part.name, part.parameters) for part in sizes.encoders] == [("text_encoder", 7)]
    assert (sizes.vae.name, sizes.vae.parameters) == ("vae", 5)
