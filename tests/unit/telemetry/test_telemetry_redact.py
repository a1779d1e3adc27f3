"""Tokens as their issuers shape them, names that hold secrets, and what looks a little like either and is neither.

Every token here is made up; a prefix is joined to its rest at run time, so that no scanner takes it for a leak.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.telemetry.redact import HIDDEN, names_secret, redact, redact_command, redact_text

MIXED, HEX, DIGITS = "aB3xY9kLm2" * 8, "0123456789abcdef" * 4, "1234567890" * 4

TOKENS = {
    "hugging face": "hf_" + MIXED[:34],
    "hugging face organisation": "api_org_" + MIXED[:34],
    "weights and biases": HEX[:40],
    "weights and biases, new": "wandb_" + "v1_" + MIXED[:40],
    "kaggle": "KGAT_" + HEX[:32],
    "neptune": "eyJ" + "hcGlfYWRkcmVzcyI6Imh0dHBzOi8vYXBwLm5lcHR1bmUuYWkiLCJhcGlfa2V5Ijoi" + "MTIzIn0=",
    "openai": "sk-" + MIXED[:48],
    "openai project": "sk-" + "proj-" + MIXED[:20] + "-" + MIXED[:20] + "_x",
    "anthropic": "sk-" + "ant-api03-" + MIXED[:60] + "-AA",
    "openrouter": "sk-" + "or-v1-" + HEX,
    "nvidia": "nvapi-" + MIXED[:30] + "_" + MIXED[:20],
    "replicate": "r8_" + MIXED[:37],
    "groq": "gsk_" + MIXED[:52],
    "together": "tgp_v1_" + MIXED[:40],
    "fireworks": "fw_" + MIXED[:24],
    "runpod": "rpa_" + MIXED[:44],
    "xai": "xai-" + MIXED[:70],
    "perplexity": "pplx-" + MIXED[:48],
    "github classic": "ghp_" + MIXED[:36],
    "github oauth": "gho_" + MIXED[:36],
    "github user": "ghu_" + MIXED[:36],
    "github server": "ghs_" + MIXED[:36],
    "github refresh": "ghr_" + MIXED[:36],
    "github fine-grained": "github_" + "pat_11ABCDEFG0_" + MIXED[:50],
    "gitlab": "glpat-" + MIXED[:20],
    "gitlab deploy": "gldt-" + MIXED[:20],
    "gitlab runner": "glrt-" + MIXED[:20],
    "bitbucket": "ATBB" + MIXED[:32],
    "atlassian": "ATATT3x" + MIXED[:60] + "=1A2B3C4D",
    "npm": "npm_" + MIXED[:36],
    "pypi": "pypi-" + "AgEIcHlwaS5vcmc" + MIXED[:60],
    "rubygems": "rubygems_" + HEX[:48],
    "docker": "dckr_pat_" + MIXED[:27],
    "circleci": "CCIPAT_" + MIXED[:22] + "_" + HEX[:40],
    "aws": "AKIA" + "A1B2" * 4,
    "aws temporary": "ASIA" + "A1B2" * 4,
    "google api": "AIza" + MIXED[:35],
    "google oauth": "ya29." + "a0Af_" + MIXED[:60],
    "google refresh": "1//0" + "gA3_" + MIXED[:60],
    "google client": "GOCSPX-" + MIXED[:28],
    "alibaba": "LTAI" + MIXED[:20],
    "digitalocean": "dop_v1_" + HEX,
    "vault": "hvs." + MIXED[:40],
    "terraform": MIXED[:14] + ".atlasv1." + MIXED[:60],
    "tailscale": "tskey-auth-" + MIXED[:11] + "-" + MIXED[:20],
    "doppler": "dp.pt." + MIXED[:40],
    "slack bot": "xoxb-" + "123456789012-" * 2 + MIXED[:24],
    "slack user": "xoxp-" + "123456789012-" * 3 + HEX[:32],
    "slack rotated": "xoxe.xoxp-1-" + MIXED[:60],
    "slack app": "xapp-1-A012-" + DIGITS[:13] + "-" + HEX[:40],
    "sendgrid": "SG." + MIXED[:22] + "." + MIXED[:43],
    "mailgun": "key-" + HEX[:32],
    "stripe": "sk_" + "live_" + MIXED[:24],
    "stripe restricted": "rk_" + "live_" + MIXED[:24],
    "stripe hook": "whsec_" + MIXED[:32],
    "shopify": "shpat_" + HEX[:32],
    "telegram": DIGITS[:10] + ":" + "AA" + MIXED[:33],
    "discord bot": "M" + MIXED[:25] + ".Gabc12." + MIXED[:38],
    "grafana": "glsa_" + MIXED[:32] + "_" + HEX[:8],
    "new relic": "NRAK-" + "A1B2C3D4E5" * 3,
    "sentry": "sntrys_" + MIXED[:60],
    "linear": "lin_api_" + MIXED[:40],
    "notion": "ntn_" + MIXED[:46],
    "age": "AGE-SECRET-KEY-1" + "A1B2C3D4E5" * 5,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "discord hook": "https://discord.com/api/webhooks/123456/" + MIXED[:30],
    "slack hook": "https://hooks.slack.com/services/T0/B0/" + MIXED[:24],
    "mattermost hook": "https://chat.example.org/hooks/" + MIXED[:26],
    "ifttt": "https://maker.ifttt.com/trigger/done/with/key/" + MIXED[:22],
}
CARRIERS = ["{}", "loading {} failed", '{{"note": "{}"}}', "got '{}', expected a comma", "/some/where: {},", "at=({})"]


@pytest.mark.parametrize("issuer", TOKENS)
def test_a_token_is_hidden_wherever_it_stands(issuer: str) -> None:
    for carrier in CARRIERS:
        shown = redact_text(carrier.format(TOKENS[issuer]))
        assert TOKENS[issuer] not in shown and TOKENS[issuer][-16:] not in shown, shown
        assert HIDDEN in shown
        before, after = carrier.format("\0").split("\0")
        assert shown.startswith(before) and shown.endswith(after), "what is around it stays"


IN_ADDRESSES = {
    "password": ("https://user:{}@host.example/x", "horse"),
    "password with @": ("https://user:{}@host.example/x", "ho@rse"),
    "password with /": ("https://user:{}@host.example/x", "ho/rse"),
    "password with both": ("postgres://user:{}@host.example:5432/db", "p@ss/wo:rd"),
    "no user": ("redis://:{}@host.example/0", "horse"),
    "token as user": ("https://{}@host.example/x.git", MIXED[:20]),
    "token as user of git": ("git+https://{}@github.com/a/b.git", "0a1b2c3d4e5f"),
    "token and dummy": ("https://{}:x-oauth-basic@github.com/a/b.git", MIXED[:20]),
    "signed": ("https://blob.example/x?sv=1&sig={}&se=2", "abc%2Fdef"),
    "storage": ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=x", MIXED[:40] + "=="),
    "netrc": ("machine api.wandb.ai login user password {}", "horse-battery"),
    "curl": ("curl -u user:{} https://host.example", "ho:rse"),
    "header": ("Authorization: Token {}", "a1b2c3d4"),
    "header of another scheme": ("Authorization: Something {}", "battery staple"),
    "cookies": ("Cookie: a=1; session={}", "battery"),
}


@pytest.mark.parametrize("kind", IN_ADDRESSES)
def test_a_secret_in_an_address_or_a_header_is_hidden(kind: str) -> None:
    carrier, secret = IN_ADDRESSES[kind]
    shown = redact_text(carrier.format(secret))
    assert HIDDEN in shown
    for part in (secret, *(piece for piece in secret.replace("/", "@").split("@") if len(piece) > 2)):
        assert part not in shown, shown


def test_a_key_is_hidden_to_its_end_and_beyond_a_cut() -> None:
    begun = "-----BEGIN " + "OPENSSH PRIVATE KEY-----\n" + f"{MIXED}\n" * 3
    assert MIXED not in redact_text(f"before {begun}")
    ended = begun + "-----END " + "OPENSSH PRIVATE KEY-----"
    assert redact_text(f"before {ended} after") == f"before {HIDDEN} after"


VARIABLES = [
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DB_PASS", "SMTP_PASS", "MYSQL_PWD"),
    *("REGISTRY_CREDS", "PGPASSWORD", "REDISCLI_AUTH", "NPM_AUTH", "GOOGLE_CREDENTIALS", "GIT_CREDENTIALS", "GH_PAT"),
    *("AZURE_STORAGE_KEY", "AZURE_CLIENT_SECRET", "SLACK_HOOK", "SLACK_WEBHOOK_URL", "TEAMS_HOOK_URL", "SENTRY_DSN"),
    *("SSH_PASSPHRASE", "SESSION_COOKIE", "APP_JWT", "AZURE_SAS", "DJANGO_SECRET_KEY", "SIGNING_KEY", "APIKEY"),
    *("RABBITMQ_DEFAULT_PASS", "VNC_PW", "ENCRYPTION_KEY", "LICENSE_KEY", "NETRC", "DEPLOY_KEY"),
    *("AZURE_CONNECTION_STRING", "MY_OTP", "HTPASSWD", "JUPYTER_TOKEN", "COMET_API_KEY", "BASIC_AUTH"),
    "PASSWORD_SALT",
]


@pytest.mark.parametrize("name", VARIABLES)
def test_what_a_variable_of_this_name_holds_is_hidden(name: str) -> None:
    secret = "correct,horse;battery)staple"
    assert names_secret(name)
    assert secret not in redact_text(f"export {name}={secret} OTHER=1")
    assert "staple" not in redact_text(f"export {name}={secret} OTHER=1"), "a comma is part of it"
    assert redact({name: secret, name.lower(): secret}) == {name: HIDDEN, name.lower(): HIDDEN}
    assert secret not in " ".join(redact_command([f"--{name.lower().replace('_', '-')}", secret]))


INNOCENT = [
    "unknown key (value 5)",
    "cache_dir: /data/cache, 3 files",
    "tokenizer_max_length=77",
    "torch 2.9.1 rejects PYTORCH_CUDA_ALLOC_CONF: use_uvm, uvm_access_pattern",
    "step 10: loss 0.5; effective batch: 16",
    "https://huggingface.co/black-forest-labs/FLUX.1-dev",
    "caption_strategy: textfile",
    "/home/someone/secret_project/config.json",
    "the token was missing, key by path",
    "PWD=/home/someone OLDPWD=/data",
    "model revision: " + HEX[:40],
    '"revision": "' + HEX[:40] + '"',
    "hub/models--a--b/snapshots/" + HEX[:40] + "/unet/config.json",
    "https://github.com/a/b/commit/" + HEX[:40],
    "a/b@" + HEX[:40],
    "HEAD is now at " + HEX[:40],
    "sha256: " + HEX,
    "md5 " + HEX[:32],
    "sk-learn-contrib, sk-image and sk-large-model-training",
    "hf_transfer and hf_hub_download of hf_dataset_name",
    "pypi-mirror, npm_config_cache, key-frames, key-value",
    "https://alice@host.example/path and ssh://git@github.com/a/b.git",
    "https://host.example:8080/path/@user/file and http://localhost:8001/@id",
    "user@example.org, git@github.com:a/b.git",
    "s3://bucket/a:b/c@2x.png",
    "datasets/SG.city/photos-of-tokens/secret_garden/pass.png",
    "12:30:45 epoch 3: loss 0.25",
    "glass-pat-pending gold-standard-architecture-with-long-names",
    "cache_dir=/data/ya29/cache, output_dir=/data/AKIA/out",
    "basic settings, a bearer of news, token by token",
    "mask_token=[MASK] pad_token=<pad> num_vision_tokens=256 tokenizer_max_length=77",
    "webhook_reporting_interval=10, cache_signature: v3, author: someone",
    "black-forest-labs/FLUX.1-dev stabilityai/stable-diffusion-3.5-large",
    "a photo of a key-shaped-cookie-cutter, by the author",
]


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_like_one_stays(text: str) -> None:
    assert redact_text(text) == text


def test_a_commit_in_a_configuration_stays_and_a_key_beside_it_goes() -> None:
    given = {"revision": HEX[:40], "model_commit": HEX[:40], "note": HEX[:40], "unconditional_pass": "cfg"}
    assert redact(given) == {**given, "note": HIDDEN}


@pytest.mark.parametrize("length", [20, 600, 5000])
def test_a_password_in_an_address_is_hidden_whatever_its_length(length: int) -> None:
    password = ("Zq7-x." * length)[:length]
    shown = redact_text(f"PIP_INDEX_URL https://aws:{password}@registry.example/simple and https://other.example/a:b")
    assert "Zq7" not in shown
    assert shown.endswith("@registry.example/simple and https://other.example/a:b")


@pytest.fixture
def patience() -> Iterator[None]:
    """A test that hangs fails; it says nothing about how long something should take."""

    def give_up(*_: object) -> None:
        pytest.fail("it does not come to an end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "word", ["a", "a-", "0123456789abcdef", "://", "://a:b", "http://", "sk-", "eyJ", "key='", "token ", "-u ", "b@"]
)
def test_a_long_word_is_gone_through_once(word: str, patience: None) -> None:
    """An image as text in a setting, a list of all files in an error: a walk per letter would take hours."""
    text = word * (100_000 // len(word))
    assert redact_text(f"{text}\n password=hunter2").endswith(f"\n password={HIDDEN}")


# -- secrets by the name they go by, in every carrier that text takes on its way out -------------------------

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


def test_numbers_and_switches() -> None:
    given = {"push_to_hub_token": True, "password": 1234, "num_tokens": 77, "hub_token": None}
    assert redact(given) == {"push_to_hub_token": True, "password": HIDDEN, "num_tokens": 77, "hub_token": None}


def test_a_tally_of_checks_is_none() -> None:
    tally = {"pass": 17, "warn": 1, "fail": 0, "ok": True}
    assert redact({"summary": tally}) == {"summary": tally}
    assert redact({"pass": 1234, "user": "somebody"})["pass"] == HIDDEN
    assert redact({"pass": 1234, "fail": "over"})["pass"] == HIDDEN


def test_a_nested_value_is_rebuilt_without_its_secrets_and_the_original_is_left_alone() -> None:
    given = {
        "webhook_config": {"webhook_type": "discord", "webhook_url": "https://discord.example/api/webhooks/1/planted"},
        "nested": [{"api_key": "planted-key"}, "https://user:planted@host/path", "sk-plantedplantedplanted"],
        "link": "https://bucket.example/x?X-Amz-Signature=planted&other=1",
        TOKENS["hugging face"]: {"a": 1},
        "model_family": "sdxl",
    }
    before = json.dumps(given)
    shown = json.dumps(redact(given))
    assert "planted" not in shown and TOKENS["hugging face"] not in shown
    assert '"model_family": "sdxl"' in shown
    assert json.dumps(given) == before


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


@pytest.mark.parametrize("name", ["tokenizer", "max_tokens", "keyword", "author", "caption_strategy", "batch_size"])
def test_innocent_names(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", "planted"],
        ["--hub_token=planted"],
        ["hub_token=planted", "env=x"],
        ['--webhook_config={"url": "https://x.example/hooks/planted", "webhook_url": "planted"}'],
        ['--publishing_config={"secret_key": "planted", "bucket": "b"}'],
    ],
)
def test_secrets_in_commands_however_they_are_written(words: list[str]) -> None:
    shown = " ".join(redact_command(words))
    assert "planted" not in shown and HIDDEN in shown
