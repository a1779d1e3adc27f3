"""The rules of a dataset entry, which are SimpleTuner's wherever it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.config.datasets import Dataset, survey, with_in_memory_for_all
from simpletuner_gh200.errors import ConfigError


def told(**entry) -> list[str]:
    return [str(problem) for problem in Dataset({"id": "cats", **entry}).problems()]


def test_what_is_not_said_is_a_local_image_dataset_that_is_on():
    dataset = Dataset({"id": "cats"})
    assert (dataset.type, dataset.kind, dataset.enabled, dataset.in_memory) == ("local", "image", True, False)


@pytest.mark.parametrize("switch", ["disabled", "disable"])
def test_both_spellings_switch_it_off(switch):
    assert not Dataset({switch: True}).enabled
    assert Dataset({switch: False}).enabled


@pytest.mark.parametrize(("written", "kind"), [(None, "image"), (" Video ", "video"), ("text_embeds", "text_embeds")])
def test_kinds_are_read_as_simpletuner_reads_them(written, kind):
    assert Dataset({"dataset_type": written}).kind == kind


@pytest.mark.parametrize(
    ("entry", "folder"),
    [
        ({"instance_data_dir": " data/cats/ "}, "data/cats"),
        ({"instance_data_root": "data/cats"}, "data/cats"),
        ({"instance_data_dir": "~/cats"}, "~/cats"),
        ({"instance_data_dir": "data/{model_family}"}, "data/sdxl"),
        ({"instance_data_dir": " "}, None),
        ({}, None),
    ],
)
def test_a_folder_is_what_simpletuner_takes_it_for(entry, folder):
    assert Dataset(entry, "sdxl").folder == (Path(folder) if folder else None)


@pytest.mark.parametrize(
    "entry",
    [
        {"instance_data_dir": "{output_dir}/cats"},
        {"instance_data_dir": "cats", "type": "aws"},
        {"instance_data_dir": "cats", "dataset_type": "text_embeds"},
    ],
)
def test_folders_that_nobody_can_look_for_here(entry):
    assert Dataset(entry).local_folder is None
    assert Dataset(entry).missing() == []


def test_a_missing_folder_is_named_and_a_tilde_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.png").touch()
    assert Dataset({"id": "a", "instance_data_dir": str(tmp_path / "cats")}).missing() == []
    (missing,) = Dataset({"id": "a", "instance_data_dir": "no/cats"}).missing()
    assert str(missing) == "dataset 'a'.instance_data_dir: 'no/cats': no such folder (create it or correct the path)"
    (tilde,) = Dataset({"id": "a", "instance_data_dir": "~/cats"}).missing()
    assert "SimpleTuner expands no ~" in str(tilde)


def test_what_is_held_is_the_data_or_else_the_cache():
    assert Dataset({"instance_data_dir": "data", "cache_dir": "cache"}).held_folder == Path("data")
    assert Dataset({"cache_dir": "cache"}).held_folder == Path("cache")
    assert any("name the folder to hold" in problem for problem in told(type="in_memory"))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"type": "inmemory"}, "did you mean 'in_memory'?"),
        ({"in_memroy": {}}, "did you mean 'in_memory'?"),
        ({"in_memory": {}}, "has no effect on type 'local'"),
        ({"type": "in_memory", "instance_data_dir": "x", "in_memory": {"verify": "twice"}}, "'header', 'decode'"),
        ({"type": "in_memory", "instance_data_dir": "x", "in_memory": ["lz4"]}, "is not a block"),
    ],
)
def test_what_was_meant_to_hold_it_in_memory_and_would_not(entry, says):
    (problem,) = told(**entry)
    assert problem.startswith("dataset 'cats'.") and says in problem


def test_entries_of_others_are_none_of_our_business():
    assert told(type="aws", aws_bucket_name="b") == told(type="csv", memory="x") == told(instance_data_dir="x") == []


def test_upstream_sees_a_local_entry_and_nothing_of_ours():
    entry = {"id": "a", "type": "in_memory", "in_memory": {"verify": "none"}, "crop": True}
    assert Dataset(entry).as_local() == {"id": "a", "type": "local", "crop": True}
    assert Dataset(entry).settings().verify == "none"
    with pytest.raises(ConfigError):
        Dataset({**entry, "in_memory": {"verify": 3}}).settings()


def test_in_memory_for_all_reaches_local_images_only():
    entries = [
        {"id": "a"},
        {"id": "b", "type": "local", "dataset_type": " Image "},
        {"id": "c", "dataset_type": "text_embeds"},
        {"id": "d", "type": "aws"},
    ]
    block = {"compression": "lz4"}
    held = [Dataset(entry) for entry in with_in_memory_for_all(entries, block)]
    assert [dataset.id for dataset in held if dataset.in_memory] == ["a", "b"]
    assert held[0].entry["in_memory"] == block
    assert with_in_memory_for_all(entries, None) == entries


# -- what lies in the folder -----------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "a.txt", "b.JPG", "sub/c.mp4", "sub/c.txt", "notes.json", "d.xyz"):
        (tmp_path / name).write_text("four")
    (tmp_path / "sub" / "again").symlink_to(tmp_path)
    return tmp_path


def test_samples_captions_and_bytes_are_counted_once(pictures: Path) -> None:
    found = survey(pictures, sizes=True)
    assert (found.files, found.samples, found.captioned, found.others) == (7, 3, 2, 1)
    assert (found.bytes, found.without_caption) == (28, ("b.JPG",))
    assert survey(pictures).bytes == 0


def missing(folder: Path, run: dict[str, Any] | None = None, **entry: Any) -> list[str]:
    whole = {"id": "a", "instance_data_dir": str(folder), **entry}
    return [str(problem) for problem in Dataset(whole, None, run or {}).missing()]


def test_a_sample_without_a_caption_is_named_where_simpletuner_would_stop_at_it(pictures: Path) -> None:
    (problem,) = missing(pictures, caption_strategy="textfile")
    assert "1 of 3 files" in problem and "no .txt caption: b.JPG (write the captions" in problem
    assert missing(pictures, {"caption_strategy": "textfile"}) == [problem]
    assert missing(pictures, {"caption_strategy": "textfile"}, caption_strategy="filename") == []
    assert missing(pictures) == []
    assert missing(pictures, caption_strategy="textfile", only_instance_prompt=True) == []
    assert missing(pictures, {"only_instance_prompt": "true"}, caption_strategy="textfile") == []
    assert missing(pictures, caption_strategy="textfile", skip_file_discovery="vae") == []
    assert missing(pictures, {"skip_file_discovery": "aspect,vae,text"}, caption_strategy="textfile") == []
    assert missing(pictures, caption_strategy="textfile", dataset_type="conditioning") == []
    (pictures / "b.txt").touch()
    assert missing(pictures, caption_strategy="textfile") == []


@pytest.mark.parametrize("name", [".zfs", ".ipynb_checkpoints", ".Trashes"])
def test_folders_that_simpletuner_passes_over_are_not_looked_at(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "old.png").touch()
    assert "no files in it" in missing(tmp_path)[0]
    for file in ("a.png", "a.txt"):
        (tmp_path / file).touch()
    assert missing(tmp_path, caption_strategy="textfile") == []


def test_a_folder_without_samples_is_refused_and_one_of_an_unknown_kind_is_not(tmp_path: Path) -> None:
    assert "no files in it" in missing(tmp_path)[0]
    (tmp_path / "a.txt").touch()
    assert "1 file, none of them an image or a video" in missing(tmp_path)[0]
    assert missing(tmp_path, dataset_type="audio") == []
    (tmp_path / "a.heic").touch()
    assert missing(tmp_path) == []
