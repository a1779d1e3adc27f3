from __future__ import annotations

from simpletuner_gh200.demo.summary import summary_lines

RESULT = {
    "simpletuner": "4.10.1",
    "python": "3.13.0",
    "torch": "2.14.1",
    "global_step": 24,
    "checkpoint": "/somewhere/output/checkpoint-24",
    "seconds": {"train": 2.5},
    "seams": {"trainer.train": "ok", "trainer.init_hooks": "off: changed"},
    "features": {"ramp": "on", "store": "off: not asked for"},
    "ramp": {"changes": [{"step": 0, "effective": 2}, {"step": 9, "effective": 8}], "samples": 70},
}


def test_people_see_what_ran_where_the_time_went_and_what_is_off():
    lines = dict(summary_lines(RESULT))
    assert "SimpleTuner 4.10.1" in lines["ran"]
    assert lines["seconds"] == "train 2.5 s"
    assert lines["seams"].startswith("1 of 2 in place")
    assert lines["seam"] == "trainer.init_hooks is off: changed"
    assert lines["features"] == "on: ramp"
    assert lines["feature"] == "store is off: not asked for"
    assert lines["ramp"] == "effective batch 2 (step 0) → 8 (step 9); 70 samples"
    assert lines["checkpoint"].endswith("checkpoint-24")


def test_features_that_were_not_on_bring_no_line():
    assert not {"dataset", "cache"} & {label for label, _ in summary_lines(RESULT)}
