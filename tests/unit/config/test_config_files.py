from __future__ import annotations

import pytest

from simpletuner_gh200.config.files import (
    as_mapping,
    locate_training_config,
    read_datasets,
    read_training_config,
    read_written,
    sourced,
    take,
)
from simpletuner_gh200.errors import ConfigError, UsageError


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_broken_json_names_file_line_and_text(tmp_path):
    file = write(tmp_path / "config.json", '{\n  "a": 1,\n  "b" 2\n}')
    with pytest.raises(ConfigError, match=r"line 3, column 7: not JSON.*\"b\" 2"):
        read_training_config(file)


def test_the_three_formats_agree(tmp_path):
    as_json = write(tmp_path / "c.json", '{"--train_batch_size": 2, "cache_config": {"fill": "lazy"}}')
    as_toml = write(tmp_path / "c.toml", 'train_batch_size = 2\n[cache_config]\nfill = "lazy"\n')
    assert read_training_config(as_json) == read_training_config(as_toml)
    as_env = write(tmp_path / "c.env", '# note\nexport TRAIN_BATCH_SIZE=2\nCACHE_CONFIG=\'{"fill": "lazy"}\'\n')
    assert read_training_config(as_env) == {"train_batch_size": "2", "cache_config": '{"fill": "lazy"}'}


def test_variables_of_an_env_file_are_added_to_and_extra_arguments_are_options(tmp_path):
    text = "MODEL_NAME=x y\nTRAINER_EXTRA_ARGS='--output_dir=out'\nTRAINER_EXTRA_ARGS+=' --resolution 64'\n"
    file = write(tmp_path / "config.env", text)
    assert read_written(file)["MODEL_NAME"] == "x y"
    assert read_training_config(file) == {
        "output_dir": "out",
        "pretrained_model_name_or_path": "x y",
        "resolution": "64",
    }


def test_what_simpletuner_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sourced("mine") == {}
    write(tmp_path / "config" / "config.env", "A=1\nB=2\n")
    write(tmp_path / "config" / "mine" / "config.env", "B=3\n")
    assert (sourced(None), sourced("mine")) == ({"A": "1", "B": "2"}, {"A": "1", "B": "3"})


@pytest.mark.parametrize(("name", "text"), [("c.toml", "a = = 1"), ("c.env", "no equals here"), ("c.json", "[1]")])
def test_what_is_not_a_configuration(tmp_path, name, text):
    with pytest.raises(ConfigError):
        read_training_config(write(tmp_path / name, text))


def test_missing_folder_and_binary_files(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_training_config(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is a folder"):
        read_training_config(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_training_config(tmp_path / "b.json")


def test_datasets_must_be_a_list(tmp_path):
    with pytest.raises(ConfigError, match="not a list"):
        read_datasets(write(tmp_path / "d.json", '{"id": "x"}'))


def test_where_a_configuration_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no training configuration found"):
        locate_training_config({}, explicit=None, env_name=None)
    write(tmp_path / "config" / "config.toml", "")
    assert locate_training_config({}, explicit=None, env_name=None).backend == "toml"
    write(tmp_path / "config" / "mine" / "config.env", "")
    assert locate_training_config({}, explicit=None, env_name="mine").backend == "env"
    assert locate_training_config({"ENV": "mine"}, explicit=None, env_name=None).backend == "env"
    assert locate_training_config({"CONFIG_BACKEND": "cmd"}, explicit=None, env_name=None).path is None
    with pytest.raises(UsageError, match=r"unknown kind of file '.yaml'"):
        locate_training_config({}, explicit="x.yaml", env_name=None)


def test_flags_in_every_spelling():
    flags = ["--a=1", "--b", "2", "--switch", "--c-d=x=y"]
    assert as_mapping(flags) == {"a": "1", "b": "2", "switch": "true", "c_d": "x=y"}
    assert take(flags, "b") == ("2", ["--a=1", "--switch", "--c-d=x=y"])
    assert take(["--config=x", "--config", "y", "z"], "config") == ("y", ["z"])


@pytest.mark.parametrize("flags", [["--num_processes"], ["--num_processes", "--other"]])
def test_a_flag_without_its_value_swallows_nothing(flags):
    with pytest.raises(UsageError, match="--num_processes needs a value"):
        take(flags, "num_processes")
