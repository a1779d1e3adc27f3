"""Planted secrets in every carrier that text takes on its way out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.telemetry.redact import HIDDEN, redact, redact_command, redact_text

SHAPES = {
    "hub token": "hf_" + "aB3" * 11,
    "openai": "sk-proj-" + "aB3" * 8,
    "github": "ghp_" + "aB3" * 12,
    "github fine": "github_pat_" + "aB3" * 12,
    "gitlab": "glpat-" + "aB3" * 7,
    "slack": "xoxb-" + "123-" * 5 + "abc",
    "aws id": "AKIA" + "A1B2" * 4,
    "google": "AIza" + "aB3_" * 9,
    "replicate": "r8_" + "aB3" * 9,
    "telegram": "bot123456789:" + "aB3_" * 8,
    "wandb": "0123456789abcdef" * 2 + "01234567",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "discord": "https://discord.com/api/webhooks/123456/aB3aB3aB3",
    "slack hook": "https://hooks.slack.com/services/T0/B0/aB3aB3",
}
CARRIERS = [
    "{}",
    "loading {} failed",
    "value='{}'",
    '{{"note": "{}"}}',
    "at line 3: {}, expected a comma",
    "https://example.org/path?x={}",
    "['--flag', '{}']",
]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_secret_is_known_by_its_shape(kind: str, carrier: str) -> None:
    shown = redact_text(carrier.format(SHAPES[kind]))
    assert SHAPES[kind] not in shown
    assert HIDDEN in shown


NAMED = [
    'hub_token="{}"',
    "hub_token = {}",
    "HF_TOKEN={}",
    "export WANDB_API_KEY='{}'",
    '"aws_secret_access_key": "{}"',
    "'aws_secret_access_key': '{}'",
    '{{\\"api_key\\": \\"{}\\"}}',
    "--hub_token {}",
    "--hub-token={}",
    "password: {}",
    "at line 3: hub_token={}",
    "--push --hub_token {}",
    "where: note: password = {}",
    "Authorization: {}",
    "x-api-key: {}",
    "s3://key:{}@bucket/path",
    "https://:{}@host/",
    "https://blob.example/x?sv=1&sig={}&se=2",
]


@pytest.mark.parametrize("carrier", NAMED)
@given(secret=st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789+/", min_size=12, max_size=40))
def test_a_secret_is_known_by_its_name(carrier: str, secret: str) -> None:
    if carrier.startswith(("s3:", "https:")):
        secret = secret.replace("/", "+")
    assert secret not in redact_text(carrier.format(secret))


def test_a_value_with_blanks_is_hidden_whole() -> None:
    assert redact_text('{"password": "correct horse battery"}') == f'{{"password": {HIDDEN}}}'


def test_a_bearer_header_keeps_its_scheme() -> None:
    assert redact_text("sent Bearer abcdefgh12345678== to it") == f"sent Bearer {HIDDEN} to it"


@pytest.mark.parametrize(
    "text",
    [
        "unknown key (value 5)",
        "cache_dir: /data/cache, 3 files",
        "tokenizer_max_length=77",
        "torch 2.9.1 rejects PYTORCH_CUDA_ALLOC_CONF: use_uvm, uvm_access_pattern",
        "step 10: loss 0.5; effective batch: 16",
        "https://huggingface.co/black-forest-labs/FLUX.1-dev",
        "caption_strategy: textfile",
        "/home/someone/secret_project/config.json",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text


def test_numbers_and_switches() -> None:
    given = {"push_to_hub_token": True, "password": 1234, "num_tokens": 77, "hub_token": None}
    assert redact(given) == {"push_to_hub_token": True, "password": HIDDEN, "num_tokens": 77, "hub_token": None}


def test_a_tally_of_checks_is_none() -> None:
    tally = {"pass": 17, "warn": 1, "fail": 0, "ok": True}
    assert redact({"summary": tally}) == {"summary": tally}
    assert redact({"pass": 1234, "user": "somebody"})["pass"] == HIDDEN
    assert redact({"pass": 1234, "fail": "over"})["pass"] == HIDDEN


def test_a_secret_as_a_key_of_a_mapping() -> None:
    assert SHAPES["hub token"] not in json.dumps(redact({SHAPES["hub token"]: {"a": 1}}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=12,
    )
)
def test_redacting_twice_changes_nothing_more(value: object) -> None:
    once = redact(value)
    assert redact(once) == once


def test_secrets_in_commands_however_they_are_written() -> None:
    secret = "plantedplanted"
    words = ["train", "--hub_token", secret, f"--webhook_config={json.dumps({'url': secret, 'webhook_url': secret})}"]
    assert secret not in " ".join(redact_command(words))
    assert secret not in " ".join(redact_command([f"hub_token={secret}", "env=x"]))
