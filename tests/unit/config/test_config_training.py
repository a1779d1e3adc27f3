"""One reading, before the run and in the rank: the same settings, the same rules, the same words."""

from __future__ import annotations

import json

import pytest

from simpletuner_gh200.config.blocks import CacheSettings, InMemorySettings
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training, training_from
from simpletuner_gh200.errors import ConfigError

BLOCKS = {"cache_config": {"fill": "lazy"}, "gh200_optimizations": {"prefetch_depth": 2}}


@pytest.fixture
def written(tmp_path):
    """Write a configuration and its dataset list; returns what was written, and where it is."""

    def write(entries=(), **values):
        listed = tmp_path / "datasets.json"
        listed.write_text(json.dumps(list(entries)))
        config = {"data_backend_config": str(listed), "output_dir": str(tmp_path / "out"), **values}
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        return config, Located.at(file)

    return write


def both(config, located, environment=None):
    """The reading of the launcher, and that of a rank, to which our blocks travel as text."""
    ours = {key: value for key, value in config.items() if key in {*BLOCKS, "data_backend", "batch_rampup_steps"}}
    given = {key: json.dumps(value) if key in BLOCKS else value for key, value in ours.items()}
    parsed = {key: value for key, value in config.items() if key not in ours}
    environment = environment or {}
    return read_training(located, environment), training_from(parsed, given, environment)


def test_launcher_and_rank_agree_on_settings_and_datasets(written, tmp_path):
    (tmp_path / "a.png").touch()
    entries = [
        {"id": "a", "instance_data_dir": str(tmp_path), "type": "in_memory", "in_memory": {"verify": "none"}},
        {"id": "b", "instance_data_dir": str(tmp_path), "type": "in_memory", "disabled": True},
        {"id": "c", "instance_data_dir": str(tmp_path)},
    ]
    before, rank = both(*written(entries, **BLOCKS), {"GH200_USE_UVM": "1"})
    assert before.raise_if_bad(here=True).parts == rank.raise_if_bad().parts
    assert before.settings.part(CacheSettings).fill == "lazy"
    assert before.settings.in_memory_datasets == rank.settings.in_memory_datasets == ("a",)
    assert list(before.in_memory()) == list(rank.in_memory()) == [("a", tmp_path, InMemorySettings(verify="none"))]


@pytest.mark.parametrize(
    "change",
    [
        {"cache_config": {"fil": "lazy"}, "gh200_optimizations": {"ramp_curve": "cubic"}},
        {"data_backend": {"type": "in_memroy"}},
        {"data_backend": {"type": "in_memory", "config": {"compresion": "lz4"}}},
        {"cache_config": {"fill": 1}, "data_backend": {"type": "in_memory", "config": {"in_memory_limit_gb": -1}}},
    ],
)
def test_launcher_and_rank_find_the_same_problems_in_the_same_words(written, tmp_path, change):
    entries = [
        {"id": "a", "instance_data_dir": str(tmp_path), "type": "inmemory"},
        {"id": "b", "type": "in_memory"},
        {"id": "c", "instance_data_dir": str(tmp_path)},
    ]
    before, rank = both(*written(entries, **change))
    assert before.problems == rank.problems
    assert len(before.problems) > 2
    with pytest.raises(ConfigError) as refused:
        before.raise_if_bad()
    assert refused.value.problems == before.problems


def test_problems_of_every_kind_come_at_once(written):
    entries = [{"id": "a", "type": "in_memory", "instance_data_dir": "nowhere", "in_memory": {"verify": "twice"}}]
    _config, located = written(entries, cache_config={"fil": 1}, cache_confg={}, data_backend=3)
    training = read_training(located, {"GH200_USE_UVM": "perhaps"}, flags=["--output_dir", str(located.path)])
    with pytest.raises(ConfigError) as refused:
        training.raise_if_bad(here=True)
    places = {problem.where for problem in refused.value.problems}
    assert places == {
        "cache_confg",
        "cache_config.fil = 1",
        "data_backend",
        "GH200_USE_UVM",
        "dataset 'a'.in_memory.verify",
        "dataset 'a'.instance_data_dir",
        "output_dir",
    }
    assert training.settings is None


def test_what_this_machine_lacks_is_told_only_where_the_run_will_be(written):
    _config, located = written([{"id": "a", "instance_data_dir": "nowhere"}])
    training = read_training(located, {})
    training.raise_if_bad()
    with pytest.raises(ConfigError, match="no such folder"):
        training.raise_if_bad(here=True)


def test_flags_lie_on_top_of_the_file(written):
    _config, located = written(train_batch_size=2, cache_config={"fill": "start"})
    training = read_training(located, {}, flags=["--train_batch_size=4", '--cache-config={"fill": "lazy"}'])
    assert training.values["train_batch_size"] == "4"
    assert training.raise_if_bad().part(CacheSettings).fill == "lazy"
    assert training.settings.origins["cache_config.fill"] == str(located.path)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_an_unreadable_file_is_the_only_problem(tmp_path, text):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    training = read_training(Located.at(file), {})
    assert len(training.problems) == 1
    assert (training.settings, training.datasets, dict(training.values)) == (None, (), {})


@pytest.mark.parametrize("content", ["{", '{"id": "a"}', None])
def test_an_unreadable_dataset_list_hides_no_other_problem(written, tmp_path, content):
    _config, located = written(cache_config={"fil": 1})
    listed = tmp_path / "datasets.json"
    listed.write_text(content) if content is not None else listed.unlink()
    assert len(read_training(located, {}).problems) == 2


@pytest.mark.parametrize("stand_in", [None, object(), "nowhere.json", 3])
def test_in_a_rank_what_is_no_dataset_list_is_simpletuners_to_refuse(stand_in):
    training = training_from({"data_backend_config": stand_in}, {}, {})
    assert training.raise_if_bad().in_memory_datasets == ()


def test_datasets_may_stand_in_the_configuration_itself(written):
    _config, located = written(datasets=[{"id": "a", "type": "in_memory", "instance_data_dir": "x"}, "dogs"])
    training = read_training(located, {})
    assert [dataset.id for dataset in training.datasets] == ["a"]
    assert [str(problem) for problem in training.problems] == ["datasets: 'dogs' is not an entry"]


def test_the_model_family_in_a_path_is_filled_in(written, tmp_path):
    (tmp_path / "sdxl").mkdir()
    (tmp_path / "sdxl" / "a.png").touch()
    entries = [{"id": "a", "instance_data_dir": str(tmp_path / "{model_family}")}]
    _config, located = written(entries, model_family="sdxl")
    read_training(located, {}).raise_if_bad(here=True)
    _config, located = written(entries, model_family="flux")
    with pytest.raises(ConfigError, match="flux': no such folder"):
        read_training(located, {}).raise_if_bad(here=True)
