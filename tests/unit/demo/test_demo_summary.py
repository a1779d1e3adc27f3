from __future__ import annotations

import pytest

from simpletuner_gh200.demo.summary import Progress, progress_in, summary_lines

RESULT = {
    "simpletuner": "4.10.1",
    "python": "3.13.0",
    "torch": "2.14.1",
    "seconds": {"prepare": 20.0, "train": 2.5},
    "seams": {
        "trainer.train": "ok",
        "trainer.init_hooks": "off: changed",
        "web_ui.page": "off: its module was not imported",
    },
}
SUMMARY = {"output_dir": "/somewhere/output", "global_step": 24, "max_train_steps": 24, "seconds": {"train": 2.5}}


def test_people_see_what_ran_and_where_the_time_went_and_no_seam_that_is_in_place() -> None:
    lines = summary_lines(RESULT, SUMMARY)
    said = dict(lines)
    assert "SimpleTuner 4.10.1, torch 2.14.1, Python 3.13.0" in said["ran"]
    assert said["trained"] == "24 of 24 optimizer steps"
    assert said["time"] == "making the project 20.0 s, training 2.5 s"
    assert [label for label, _text in lines].count("seam") == 1
    assert said["seam"] == "trainer.init_hooks is off: changed"
    assert "trainer.train" not in str(lines)


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("[INFO] Loading data backend config from x.json", Progress("filling datasets and caches")),
        ("[INFO] Loading diffusion model from model", Progress("loading the model")),
        ("Epoch 1/3, Steps:  25%|##5  | 6/24 [00:09<00:23,  3.9s/it, lr=0.001]", Progress("training", 6)),
        ("Epoch 1/3 Steps: 0%| | 0/8 [00:00<?] Epoch 1/3, Steps: 12%|#| 1/8 [00:09<01:04]", Progress("training", 1)),
        ("Loading captions:   0%|   | 0/24 [00:00<?, ?it/s]", Progress()),
    ],
)
def test_the_log_says_how_far_training_is(line: str, progress: Progress) -> None:
    assert progress_in(line) == progress
