"""``gh200 config check`` asks SimpleTuner for its rules: what a run would die of is refused, what trains is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

IN_4: list[Any] = [({"optimizer_config": "fo=1"}, {}, "unexpected keyword argument")]
"""3.1.6 leaves out what its optimizer does not know."""

REFUSED: list[Any] = [
    ({}, {"id": ""}, "unique 'id'"),
    ({}, {"crop_aspect": "sq"}, "crop_aspect must be one of"),
    ({}, {"crop_aspect": "random", "crop_aspect_buckets": None}, "crop_aspect_buckets must be provided"),
    ({}, {"caption_strategy": "parquet", "metadata_backend": "discovery"}, "caption_strategy=parquet"),
    ({}, {"maximum_image_size": 1024}, "target_downsample_size"),
    ({"num_train_epochs": 3}, {}, "num_train_epochs"),
    ({"optimizer_beta1": 0.5}, {}, "optimizer_beta2"),
    ({"resolution": "big"}, {}, "invalid"),
    ({"learning_rate": -1}, {}, "learning rate"),
    ({"lr_scheduler": "cosine_with_restarts"}, {}, "positive integer T_0"),
]
SOUND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"resolution": 1, "resolution_type": "area"}, {"crop": False}),
    ({"lr_scheduler": "polynomial", "lr_warmup_steps": 2}, {"repeats": 3, "crop_style": "random"}),
    ({"max_train_steps": 0, "num_train_epochs": 2, "optimizer": "adamw_bf16", "mixed_precision": "bf16"}, {}),
    ({"webhook_config": "/nowhere.json"}, {}),  # nobody is told of a question
]


def refusals(workbench: Any, values: dict[str, Any], dataset: dict[str, Any]) -> list[dict[str, str]]:
    workbench.configure(dataset=dataset, **values)
    project = workbench.project
    code = (
        "import json; from pathlib import Path; from simpletuner_gh200.seams.rules.configuration import refusals;"
        f"values = json.loads(Path({str(project.config)!r}).read_text());"
        f"datasets = json.loads(Path({str(project.datasets)!r}).read_text());"
        "Path('answer.json').write_text(json.dumps(list(refusals(values, datasets, 1))))"
    )
    run = workbench.execute(code)
    assert run.ok, run.explain()
    found: list[dict[str, str]] = json.loads((project.folder / "answer.json").read_text())
    return found


@pytest.mark.parametrize(
    ("values", "dataset", "words"),
    [*REFUSED, *(pytest.param(*case, marks=pytest.mark.only_release("4.")) for case in IN_4)],
    ids=[words for *_, words in (*REFUSED, *IN_4)],
)
def test_what_simpletuner_refuses_is_refused_in_its_words(workbench, values, dataset, words) -> None:
    assert words in " ".join(refusal["what"] for refusal in refusals(workbench, values, dataset))


@pytest.mark.parametrize(("values", "dataset"), SOUND, ids=[str(number) for number in range(len(SOUND))])
def test_what_trains_is_not_refused_and_nothing_is_written(workbench, values, dataset) -> None:
    before = {path for path in workbench.project.folder.rglob("*") if "answer" not in path.name}
    assert refusals(workbench, values, dataset) == []
    assert {path for path in workbench.project.folder.rglob("*") if "answer" not in path.name} == before
