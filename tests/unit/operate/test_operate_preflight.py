"""One preflight: `config check` and `train` find the same problems, in the same words, and import nothing heavy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.cli.main import main
from simpletuner_gh200.config.datasets import Dataset
from simpletuner_gh200.config.environment import PLACEMENT
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.operate.preflight import captions_one_by_one
from simpletuner_gh200.upstream import importing

pytestmark = [
    pytest.mark.usefixtures("few_options"),
    pytest.mark.skipif(find_spec("simpletuner") is None, reason="SimpleTuner is not installed in this environment"),
]

RAMP = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 1}

Write = Callable[..., str]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A sound project with changes in its configuration and its image dataset; returns the file's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for name in ("a", "b"):
        (tmp_path / "images" / f"{name}.png").write_bytes(bytes(1000))
        (tmp_path / "images" / f"{name}.txt").write_text("a caption")

    def change(dataset: dict[str, Any] | None = None, **keys: Any) -> str:
        entry = {
            "id": "cats",
            "type": "in_memory",
            "dataset_type": "image",
            "instance_data_dir": "images",
            "caption_strategy": "textfile",
            **(dataset or {}),
        }
        config = {"model_family": "sdxl", "model_type": "lora", "data_backend_config": "datasets.json"}
        config |= {"train_batch_size": 1, "max_train_steps": 10, **keys}
        (tmp_path / "datasets.json").write_text(json.dumps([entry]))
        (tmp_path / "config.json").write_text(json.dumps({**config, "output_dir": "output"}))
        return "config.json"

    return change


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gh200", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


def refused_alike(run: Run, config: str, *flags: str) -> str:
    """All three ways in say the same, and exit with 2."""
    ways = (("config", "check", config), ("train", "--config", config), ("train", "--config", config, "--dry-run"))
    answers = set()
    for way in ways:
        code, out, err = run(*way, *flags)
        answers.add((code, out, re.sub(r"has [^ ]+ [A-Za-z]+ free", "has some free", err)))  # others write to that disk
    assert len(answers) == 1, answers
    ((code, out, err),) = answers
    assert code == 2 and out == ""
    return err


def test_a_slip_in_a_datasets_entry_is_noted(write: Write, run: Run) -> None:
    """SimpleTuner passes over what it does not read; so do we, but not in silence where it is a near miss."""
    config = write({"caption_stratgy": "filename", "a_note_of_mine": 1, "in_memory": {}})
    code, out, _err = run("config", "check", config, "--json")
    (note,) = json.loads(out)["notes"]
    assert code == 0
    assert note == "dataset 'cats'.caption_stratgy: SimpleTuner reads no such key (did you mean 'caption_strategy'?)"
    assert note in run("train", "--config", config, "--optimizer=x", "--no-plan", "--dry-run")[2]


def test_a_sound_project_passes(write: Write, run: Run) -> None:
    config = write()
    code, out, err = run("config", "check", config)
    assert code == 0 and out.startswith("no problems\n") and err == ""
    assert "cache_config.slab" not in out and "at the default (--all shows them)" in out
    assert "at the default:\n" in (everything := run("config", "check", config, "--all")[1])
    assert '  cache_config.slab = "auto"\n' in everything
    code, out, err = run("train", "--config", config, "--dry-run", "--max_train_steps=3", "learning_rate=1")
    assert code == 0 and "simpletuner_gh200.launch" in out


def test_ranks_are_told_what_memory_auto_decided(write: Write, run: Run) -> None:
    config = write(gh200_optimizations={"memory": "auto", "weights": "hbm"})
    code, out, err = run("train", "--config", config, "--dry-run", "--json")
    assert code == 0 and "memory auto: there is no GPU" in err
    decided = json.loads(json.loads(out)["environment"][PLACEMENT])
    assert decided["settings"] and "gh200_optimizations.weights" not in decided["settings"]
    assert PLACEMENT not in run("train", "--config", config, "--dry-run", "--json", "--no-plan")[1]


def test_an_incomplete_newest_checkpoint_is_said_and_not_resumed_from(write: Write, run: Run, tmp_path: Path) -> None:
    (tmp_path / "output" / "checkpoint-3").mkdir(parents=True)
    config = write(resume_from_checkpoint="latest")
    code, _out, err = run("train", "--config", config, "--dry-run")
    assert (
        code == 0 and "checkpoint-3 is incomplete: it is empty" in err and "this run starts from the beginning" in err
    ), err
    assert (tmp_path / "output" / "checkpoint-3").is_dir(), "a dry run changes nothing"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lerning_rate": 1}, "did you mean 'learning_rate'?"),
        ({"--max_train_step": 3}, "did you mean 'max_train_steps'?"),
        ({"mixed_precision": "fp17"}, "mixed_precision: 'fp17' is not among its values"),
        ({"pretrained_model_name_or_path": "/no/model"}, "'/no/model': no such file or folder"),
        ({"pretrained_vae_model_name_or_path": "./vae"}, "pretrained_vae_model_name_or_path: './vae'"),
        ({"pretrained_model_name_or_path": "~/model"}, "SimpleTuner expands no ~"),
        ({"accelerate_config": "none.yaml"}, "'none.yaml': no such file"),
        ({"num_processes": "0"}, "'0' is not a number of ranks"),
    ],
)
def test_a_key_of_simpletuner(write: Write, run: Run, keys: dict[str, Any], words: str) -> None:
    assert words in refused_alike(run, write(**keys))


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"instance_data_dir": "nowhere"}, "'nowhere': no such folder"),
        ({"instance_data_dir": "empty"}, "'empty': no files in it"),
        ({"instance_data_dir": "texts"}, "'texts': 1 file, none of them an image"),
        ({"instance_data_dir": "bare"}, "1 of 1 files in 'bare' have no .txt caption: sub/c.png"),
        ({"in_memory": {"memory_limit_gb": 1e-6}}, "cats'.in_memory.memory_limit_gb: the dataset needs 1.97 KiB"),
    ],
)
def test_a_dataset(write: Write, run: Run, tmp_path: Path, dataset: dict[str, Any], words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    (tmp_path / "bare" / "sub").mkdir(parents=True)
    (tmp_path / "bare" / "sub" / "c.png").touch()
    assert words in refused_alike(run, write(dataset))


def test_a_flag_that_is_wrong_stops_a_dry_run_too(write: Write, run: Run) -> None:
    shown = refused_alike(run, write(), "--max_train_step", "3", "--learning_rate=fast")
    assert "did you mean '--max_train_steps'?" in shown and "'fast' is not a number" in shown


def test_a_misspelt_flag_of_our_own_is_why_nothing_was_found(write: Write, run: Run) -> None:
    code, _out, err = run("train", "--confg", write())
    assert code == 2 and "did you mean '--config'?" in err and "no training configuration" not in err


def test_everything_that_is_wrong_comes_at_once(write: Write, run: Run) -> None:
    blocks = {"enable_batch_size_rampup": True, "ramp_curve": "cubic", "batch_rampup_step": 4}
    shown = refused_alike(
        run,
        write(
            {"in_memory": {"compression": "rar", "verify": "twice"}, "instance_data_dir": "nowhere"},
            lerning_rate=1,
            gh200_optimizations=blocks,
            cache_config={"fil": "lazy", "slab": "big"},
            pretrained_model_name_or_path="/no/model",
        ),
        "--sed=1",
    )
    assert shown.count("\n  - ") == 11, shown
    for place in ("initial_effective_batch_size: not set", "ramp_curve: 'cubic'"):
        assert f"gh200_optimizations.{place}" in shown


def test_an_env_file(run: Run, write: Write, tmp_path: Path) -> None:
    write()
    lines = ["MODEL_TYPE=lora", "LEARNING_RATE=fast", "MODEL_NAME=/no/model", "TRAINER_EXTRA_ARGS='--sed=1'"]
    (tmp_path / "run.env").write_text("\n".join(lines))
    shown = refused_alike(run, "run.env")
    for words in ("LEARNING_RATE: 'fast' is not a number", "--sed '1': ", "'/no/model': no such file"):
        assert words in shown
    (tmp_path / "run.env").write_text("MODEL_TYPE=lora\nLERNING_RATE=1\n")
    assert "LERNING_RATE: SimpleTuner 9.9 reads no such variable (did you mean 'LEARNING_RATE'?)" in refused_alike(
        run, "run.env"
    )


@pytest.mark.parametrize(
    ("keys", "dataset", "words"),
    [
        (
            {"train_batch_size": 3},
            {},
            "2 samples, and an effective batch of 3: zero usable batches (a smaller batch, ",
        ),
        ({"gradient_accumulation_steps": 8}, {"repeats": 2}, "2 samples x 3, and an effective batch of 8: zero usable"),
        ({"gh200_optimizations": RAMP | {"target_effective_batch_size": 32}}, {}, "an effective batch of 32: zero us"),
        ({}, {"train_batch_size": 4}, "an effective batch of 4: zero usable"),
        ({"max_train_steps": 0, "num_train_epochs": 0}, {}, "max_train_steps: 0, and so is num_train_epochs"),
        ({"lora_rank": 0}, {}, "lora_rank: 0 is below 1"),
        ({"cache_config": {"memory_limit_gb": 1e6}}, {}, "cache_config.memory_limit_gb: 1e+06 GiB, and this machine"),
        ({}, {"in_memory": {"memory_limit_gb": 1e6}}, "dataset 'cats'.in_memory.memory_limit_gb: 1e+06 GiB, and this"),
        ({"resolution": 1e9}, {"cache_dir_vae": "cache/vae"}, "cache_dir_vae: the latents of 'cats' take at least"),
    ],
)
def test_what_data_and_machine_cannot_give(write: Write, run: Run, keys: Any, dataset: Any, words: str) -> None:
    assert words in refused_alike(run, write(dataset, **keys))


def test_what_data_and_machine_can_give(write: Write, run: Run) -> None:
    for keys, dataset in (
        ({"train_batch_size": 3, "allow_dataset_oversubscription": True}, {}),
        ({"train_batch_size": 4}, {"repeats": 1}),
        ({"train_batch_size": 64}, {"skip_file_discovery": "aspect"}),
        ({"max_train_steps": 0, "num_train_epochs": 1}, {"in_memory": {"memory_limit_gb": 0.1}}),
    ):
        assert run("config", "check", write(dataset, **keys))[0] == 0


def test_what_simpletuner_cannot_do_without_is_given_by_file_or_flag(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import replace

    from tests.unit.few_options import TABLE, maker_of

    needed = replace(TABLE, options={**TABLE.options, "seed": replace(TABLE.options["seed"], required=True)})
    monkeypatch.setattr(importing, "PROBE", maker_of(tmp_path, needed))
    config = write()
    assert "seed: not set; SimpleTuner 9.9 needs it" in refused_alike(run, config)
    for way in (("train", "--config", config, "--dry-run"), ("config", "check", config)):
        assert run(*way, "--seed=1")[0] == 0


def test_a_table_that_cannot_be_had_stops_nothing(write: Write, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "PROBE", (sys.executable, "-S", "-c", "raise SystemExit('torn in two')"))
    config = write(lerning_rate=1)
    code, out, err = run("train", "--config", config, "--dry-run")
    assert code == 0 and "simpletuner_gh200.launch" in out
    assert "own options were not checked" in err and "torn in two" in err
    code, out, _err = run("config", "check", config, "--json")
    assert code == 0 and "not checked" in json.loads(out)["notes"][0]


def test_secrets_in_unknown_keys_and_flags_stay_hidden(write: Write, run: Run) -> None:
    shown = refused_alike(
        run, write(api_token="hidden-one"), "--acces_token", "hidden-two", "--my_password=hidden-three"
    )
    assert shown.count("unknown to SimpleTuner") == 3
    assert "hidden-" not in shown.replace("<hidden>", "")


def test_nothing_heavy_is_imported(write: Write, tmp_path: Path) -> None:
    code = (
        "import sys; from simpletuner_gh200.upstream import importing; importing.PROBE = ('none',);"
        "from simpletuner_gh200.operate.preflight import check_run;"
        "check_run(explicit='config.json', env_name=None, flags=(), say=print);"
        "assert not {'torch', 'simpletuner', 'diffusers', 'accelerate'} & set(sys.modules), 'heavy'"
    )
    write()
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_doctor_judges_a_configuration_in_the_same_words(run: Run, write: Write) -> None:
    config = write(gh200_optimizations={"enable_uvm_hint": True})
    said = json.loads(run("config", "check", config, "--json")[1])["problems"]
    report = json.loads(run("doctor", config, "--skip-allocation", "--json")[1])
    (finding,) = [check for check in report["checks"] if check["code"] == "GH401"]
    assert finding["status"] == "fail"
    assert all(problem["message"] in finding["found"] for problem in said)


@pytest.mark.parametrize(
    ("pictures", "values", "entry", "advised"),
    [
        (500, {"text_encoder_batch_size": 1}, {}, True),
        (499, {"text_encoder_batch_size": 1}, {}, False),
        (500, {"text_encoder_batch_size": "8"}, {}, False),
        (500, {"text_encoder_batch_size": 1}, {"text_encoder_batch_size": 4}, False),
        (500, {}, {}, False),
    ],
)
def test_many_captions_one_at_a_time_are_worth_a_word(
    tmp_path: Path, pictures: int, values: dict[str, Any], entry: dict[str, Any], advised: bool
) -> None:
    """Older releases have no such option, so that it has no default."""
    for number in range(pictures):
        (tmp_path / f"{number}.png").touch()
    images = {"id": "a", "type": "local", "dataset_type": "image", "instance_data_dir": str(tmp_path)}
    training = Training("x", defaults=values, datasets=(Dataset(images), Dataset({"id": "b", **entry})))
    assert any("text_encoder_batch_size: 16" in note for note in captions_one_by_one(training)) == advised
