from __future__ import annotations

import json

import pytest

from simpletuner_gh200.telemetry.redact import HIDDEN, names_secret, redact, redact_command, redact_text

PLANTED = {
    "hub_token": "hf_PlantedPlantedPlanted",
    "webhook_config": {"webhook_type": "discord", "webhook_url": "https://discord.example/api/webhooks/123/planted"},
    "aws_secret_access_key": "planted/planted+planted",
    "aws_access_key_id": "AKIAPLANTEDPLANTED12",
    "nested": [{"api_key": "planted-key"}, "https://user:planted@host/path", "sk-plantedplantedplanted"],
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "link": "https://bucket.example/x?X-Amz-Signature=planted&other=1",
}


def test_planted_secrets_are_gone_and_the_rest_stays():
    shown = json.dumps(redact({**PLANTED, "model_family": "sdxl", "tokenizer_max_length": 77, "seed": 42}))
    for secret in ("Planted", "planted", "PLANTED", "0123456789abcdef"):
        assert secret not in shown
    assert '"model_family": "sdxl"' in shown and '"seed": 42' in shown and '"tokenizer_max_length": 77' in shown


def test_the_original_is_left_alone():
    before = json.dumps(PLANTED)
    redact(PLANTED)
    assert json.dumps(PLANTED) == before


@pytest.mark.parametrize("name", ["hub_token", "HF_TOKEN", "api-key", "WEBHOOK_URL", "secret_access_key", "password"])
def test_secret_names(name):
    assert names_secret(name.replace("-", "_"))


@pytest.mark.parametrize("name", ["tokenizer", "max_tokens", "keyword", "author", "caption_strategy", "batch_size"])
def test_innocent_names(name):
    assert not names_secret(name)


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", "planted"],
        ["--hub_token=planted"],
        ['--webhook_config={"webhook_url": "planted"}'],
        ['--publishing_config={"secret_key": "planted", "bucket": "b"}'],
    ],
)
def test_commands(words):
    shown = " ".join(redact_command(words))
    assert "planted" not in shown and HIDDEN in shown


def test_prose_stays_readable():
    assert redact_text("the token was missing, key by path") == "the token was missing, key by path"
    assert redact_text("token: planted") == f"token: {HIDDEN}"
