"""Secrets planted in configuration, flags and environment: in nothing that a command prints or writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("few_options")

SECRETS = {
    "hub": "hf_" + "Lm5" * 11,
    "wandb": "89abcdef" * 5,
    "webhook": "https://discord.com/api/webhooks/998877/TopSecretPath",
    "bucket": "planted/Bucket+Secret/0123456789abcd",
    "password": "correct-horse-battery-staple",
}

CONFIG = {
    "model_family": "sdxl",
    "model_type": "lora",
    "hub_token": SECRETS["hub"],
    "webhook_config": json.dumps([{"webhook_type": "discord", "webhook_url": SECRETS["webhook"]}]),
    "aws_secret_access_key": SECRETS["bucket"],
    "validation_prompt": f"do not print {SECRETS['hub']}",
    "tracker_password": SECRETS["password"],
}


@pytest.fixture
def run(tmp_path, monkeypatch, gh200) -> Callable[..., tuple[int, str]]:
    """Runs ``gh200 ...`` and returns its exit code and everything it printed or left in its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["wandb"])

    def call(*arguments: str) -> tuple[int, str]:
        code, out, err = gh200(*arguments)
        return code, out + err + "".join(path.read_text() for path in tmp_path.glob("*report*"))

    return call


def write_config(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "output_dir": str(folder / "out"), **changes}))
    return str(folder / "config.json")


def assert_clean(text: str) -> None:
    found = [name for name, secret in SECRETS.items() if secret in text]
    assert found == [], text


def test_dry_run(run, tmp_path: Path) -> None:
    if find_spec("simpletuner") is None:
        pytest.skip("SimpleTuner is not installed in this environment")
    flags = [f"--hub_token={SECRETS['hub']}", "--tracker_password", SECRETS["password"]]
    blob = json.dumps({"webhook_url": SECRETS["webhook"], "secret_key": SECRETS["bucket"]})
    code, text = run("train", "--config", write_config(tmp_path), "--dry-run", *flags, f"--publishing_config={blob}")
    assert code == 0, text
    assert "simpletuner_gh200.launch" in text
    assert_clean(text)


def test_config_check(run, tmp_path: Path) -> None:
    code, text = run("config", "check", write_config(tmp_path))
    assert code == 0, text
    assert_clean(text)
    code, text = run("config", "check", write_config(tmp_path), "--json")
    assert_clean(text)


@pytest.mark.parametrize(
    "broken",
    [
        {"gh200_optimizations": {"hub_token": SECRETS["hub"]}},
        {"gh200_optimizations": {"enable_uvm_hints": SECRETS["wandb"]}},
        {"cache_config": {"api_key": SECRETS["bucket"]}},
        {"cache_config": {"vae_cache_type": SECRETS["webhook"]}},
    ],
)
def test_an_error_that_quotes_a_bad_value_does_not_quote_a_secret(
    run, tmp_path: Path, broken: dict[str, object]
) -> None:
    code, text = run("config", "check", write_config(tmp_path, **broken))
    assert code == 2
    assert_clean(text)


def test_a_broken_line_is_quoted_without_its_secret(run, tmp_path: Path) -> None:
    lines = [
        "{",
        f'  "aws_secret_access_key": "{SECRETS["bucket"]}"',
        f'  "tracker_password": "{SECRETS["password"]}"',
        "}",
    ]
    (tmp_path / "config.json").write_text("\n".join(lines))
    code, text = run("config", "check", str(tmp_path / "config.json"))
    assert code == 2
    assert "tracker_password" in text
    assert_clean(text)


def test_doctor(run, tmp_path: Path) -> None:
    _code, text = run(
        "doctor", write_config(tmp_path, cache_config={"cache_dir": 5, "token": SECRETS["hub"]}), "--json"
    )
    assert_clean(text)


def test_env(run, monkeypatch) -> None:
    monkeypatch.setenv("GH200_UVM_ACCESS_PATTERN", SECRETS["hub"])
    code, text = run("env")
    assert code == 2
    assert_clean(text)


@pytest.mark.slow
def test_selftest(run) -> None:
    code, text = run("selftest")
    assert "passed" in text, code
    assert_clean(text)
