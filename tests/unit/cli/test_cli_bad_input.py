"""Bad input: one screen, the value and the remedy, exit 2, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from simpletuner_gh200 import launch
from simpletuner_gh200.cli.main import main
from simpletuner_gh200.config.files import NO_SUCH_FILE
from tests.unit.nobody import as_nobody

pytestmark = pytest.mark.usefixtures("few_options")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A sound configuration without a model; tests break one thing each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cat.png").write_bytes(b"a cat")
    datasets = [{"id": "cats", "type": "local", "dataset_type": "image", "instance_data_dir": "images"}]
    (tmp_path / "datasets.json").write_text(json.dumps(datasets))
    config = {
        "data_backend_config": "datasets.json",
        "output_dir": "output",
        "model_family": "sdxl",
        "model_type": "lora",
        "train_batch_size": 1,
        "max_train_steps": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def change(**keys):
        (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
        return tmp_path

    return change


def gh200(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["gh200", *words])
    before = {path for path in os.listdir() if path != "__pycache__"}
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    assert {path for path in os.listdir() if path != "__pycache__"} == before
    assert len(shown.err.splitlines()) < 25
    return stopped.value.code, shown.err


@pytest.mark.parametrize("command", [("train", "--config", "config.json"), ("config", "check", "config.json")])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cache_config": {"vae_cache_typ": "unified_memory"}}, "did you mean 'vae_cache_type'?"),
        ({"cache_config": "unified"}, "'unified' is not JSON"),
        ({"gh200_optimizations": ["ramp"]}, "['ramp'] is not a block"),
        ({"data_backend_config": "nowhere.json"}, "'nowhere.json': no such file"),
        ({"output_dir": "config.json/below"}, "is not a folder"),
        ({"cache_confg": {"fill": "lazy"}}, "did you mean 'cache_config'?"),
        ({"gh200_optimization": {}}, "did you mean 'gh200_optimizations'?"),
        ({"data_backend": {"type": "in_memroy"}}, "is not understood"),
        ({"datasets": ["cats"]}, "'cats' is not an entry"),
        ({"datasets": [{"id": "a", "type": "inmemory", "instance_data_dir": "images"}]}, "did you mean 'in_memory'?"),
        ({"datasets": [{"id": "a", "instance_data_dir": "images", "in_memory": {}}]}, "has no effect on type 'local'"),
        ({"datasets": [{"id": "a", "type": "in_memory"}]}, "name the folder to hold in memory"),
    ],
)
def test_bad_configuration(project, capsys, monkeypatch, command, change, expected):
    project(**change)
    code, shown = gh200(capsys, monkeypatch, *command)
    assert code == 2
    assert expected in shown


def test_broken_json(project, capsys, monkeypatch):
    (project() / "config.json").write_text("{")
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "config.json")
    assert code == 2
    assert "line 1, column 2" in shown


def test_missing_dataset_folder(project, capsys, monkeypatch):
    shutil.rmtree(project() / "images")
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "config.json")
    assert code == 2
    assert "dataset 'cats'.instance_data_dir: 'images': no such folder" in shown


def test_problems_of_different_kinds_come_together(project, capsys, monkeypatch):
    folder = project(cache_config={"nonsense": 1}, output_dir="config.json/below")
    shutil.rmtree(folder / "images")
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "config.json")
    assert code == 2
    assert shown.count("\n  - ") == 3


def test_no_configuration_at_all(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, shown = gh200(capsys, monkeypatch, "train")
    assert code == 2
    assert "no training configuration found" in shown and "remedy:" in shown


def test_old_simpletuner(project, tmp_path_factory, capsys, monkeypatch):
    fake = tmp_path_factory.mktemp("site")
    (fake / "simpletuner-2.2.0.dist-info").mkdir()
    (fake / "simpletuner-2.2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: simpletuner\nVersion: 2.2.0\n"
    )
    monkeypatch.syspath_prepend(str(fake))
    project()
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "config.json")
    assert code == 2
    assert "SimpleTuner 2.2.0 is older than 3.1.0" in shown and "remedy:" in shown


def test_output_folder_that_is_not_writable(project, tmp_path_factory, capfd, monkeypatch):
    """As another user: root may write anywhere, so as root this test would pass without meaning anything."""
    locked = tmp_path_factory.mktemp("locked")
    folder = project(output_dir=str(locked / "output"))
    locked.chmod(0o555)
    monkeypatch.setattr(sys, "argv", ["gh200", "train", "--config", "config.json"])
    assert as_nobody(main, folder) == 2
    assert "no permission to write in" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--num_processes", "two"), "--num_processes: 'two' is not a whole number"),
        (("--num_processes",), "--num_processes: needs a value"),
        (("--accelerate_extra_args", "'abc"), "close the quotation"),
        (("--accelerate_config", "none.yaml"), "'none.yaml': no such file"),
        (("other.json",), "did you mean --config other.json?"),
    ],
)
def test_slips_on_the_command_line(project, capsys, monkeypatch, words, expected):
    project()
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "config.json", *words)
    assert code == 2
    assert expected in shown


def test_a_switch_that_is_none(project, capsys, monkeypatch):
    monkeypatch.setenv("SIMPLETUNER_GH200_TELEMETRY", "maybe")
    project()
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "config.json", "--dry-run")
    assert code == 2
    assert "SIMPLETUNER_GH200_TELEMETRY: 'maybe'" in shown


def test_with_the_kill_switch_our_blocks_are_not_looked_at(project, capsys, monkeypatch):
    monkeypatch.setenv("SIMPLETUNER_GH200", "0")
    project(cache_config={"nonsense": 1})
    monkeypatch.setattr(sys, "argv", ["gh200", "train", "--config", "config.json", "--dry-run"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert "stock SimpleTuner" in capsys.readouterr().err
    (project() / "run.toml").write_text("")
    code, shown = gh200(capsys, monkeypatch, "train", "--config", "run.toml")
    assert code == 2
    assert "SIMPLETUNER_GH200=0" in shown


def test_config_check_says_in_json_what_is_wrong(project, capsys, monkeypatch):
    project(cache_config={"hf_token_file": "x", "fill": "hf_PlantedPlantedPlanted"})
    monkeypatch.setattr(sys, "argv", ["gh200", "config", "check", "config.json", "--json"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr()
    answer = json.loads(shown.out.splitlines()[-1])
    assert answer["ok"] is False
    assert len(answer["problems"]) == 2
    assert "Planted" not in shown.out + shown.err


def test_the_demo_touches_no_folder_that_is_not_its_own(project, capsys, monkeypatch):
    folder = project()
    (folder / "output").mkdir()
    (folder / "output" / "checkpoint").write_text("precious")
    code, shown = gh200(capsys, monkeypatch, "demo", "--folder", ".")
    assert code == 2
    assert "not the demo's" in shown
    assert (folder / "output" / "checkpoint").read_text() == "precious"


def test_a_rank_that_finds_no_configuration_says_so_without_a_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch.main(["--config", "none.json"]) == 2
    assert capsys.readouterr().err == f"gh200: none.json: no such file\n  remedy: {NO_SUCH_FILE}\n"


def test_unknown_command_is_a_usage_error(capsys, monkeypatch):
    code, _ = gh200(capsys, monkeypatch, "trian")
    assert code == 2
