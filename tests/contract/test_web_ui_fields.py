"""Our fields in SimpleTuner's own server, through its real routes: shown, validated, saved, found."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("simpletuner", reason="needs SimpleTuner")

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.form import form_fields
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.seams import bootstrap
from tests.contract.web_page import Project, fields_of

pytestmark = pytest.mark.real

SERVICES = "simpletuner.simpletuner_sdk.server.services"
CACHES = "gh200_cache_config_"
OURS = "gh200_gh200_optimizations_"
NAMES = {field.name for field in form_fields()}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server under test keeps its configurations."""
    return tmp_path_factory.mktemp("configs")


@pytest.fixture(scope="module")
def new_server(configs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any]]:
    """Makes SimpleTuner's own server in this process, with the extension where that is active by then."""
    from simpletuner.simpletuner_sdk.server import app as application
    from simpletuner.simpletuner_sdk.server.services.field_registry_wrapper import lazy_field_registry
    from starlette.testclient import TestClient

    def make() -> Any:
        lazy_field_registry.clear_cache()
        app = application.create_app(application.ServerMode.TRAINER)
        with contextlib.suppress(ModuleNotFoundError):  # releases that know no users
            users = importlib.import_module(f"{SERVICES}.cloud.auth.middleware")
            app.dependency_overrides[users.get_current_user] = lambda: None
        return TestClient(app)

    with pytest.MonkeyPatch.context() as patched:
        home = tmp_path_factory.mktemp("home")
        for name in ("HOME", "XDG_HOME", "XDG_CONFIG_HOME", "SIMPLETUNER_WORKSPACE"):
            patched.setenv(name, str(home))
        patched.setenv("SIMPLETUNER_CONFIG_DIR", str(configs))
        yield make


@pytest.fixture(scope="module")
def plain_page(new_server: Callable[[], Any], configs: Path) -> str:
    """Before the extension is in the process."""
    return Project(new_server(), configs).opened().page()


@pytest.fixture(scope="module")
def client(new_server: Callable[[], Any], configs: Path, plain_page: str) -> Iterator[Any]:
    runtime = bootstrap.activate()
    pages = {name: seam for name, seam in runtime.seams.items() if name.startswith("web_ui")}
    for seam in pages.values():  # some of the server's modules are imported by its first job only
        with contextlib.suppress(ModuleNotFoundError):  # releases that have no queue
            importlib.import_module(seam.spec.module)
    off = {name: str(seam.status) for name, seam in pages.items() if not seam.ok and seam.spec.module in sys.modules}
    assert not off, off
    yield new_server()
    bootstrap.deactivate()
    assert Project(new_server(), configs).opened().page() == plain_page, "taken out without a trace"


@pytest.fixture
def project(client: Any, configs: Path) -> Project:
    return Project(client, configs)


def words_of_config_check(project: Project) -> list[str]:
    located = Located("json", project.file)
    return [str(problem) for problem in read_training(located, {}).block_problems]


def test_without_the_extension_the_page_has_none_of_it(plain_page: str) -> None:
    assert "gh200" not in plain_page.lower()


def test_every_key_is_a_field_and_the_blocks_are_not(project: Project) -> None:
    project.write()
    sent = fields_of(project.page())
    assert set(sent) >= NAMES
    assert not {"cache_config", "gh200_optimizations", "gh200_older_spellings"} & set(sent)
    for title in ("Caches", "Memory: model state", "Memory: activations", "Prefetch and hints", "Batch ramp"):
        assert title in project.page()


def test_blocks_written_by_hand_are_shown_and_come_back_as_they_were(project: Project) -> None:
    ours = {
        "cache_config": {"vae_cache_type": "unified_memory", "memory_limit_gb": 5, "of_tomorrow": {"deep": [1]}},
        "gh200_optimizations": {"enable_uvm_hints": True, "uvm_oversubscription_ratio": 5.0, "prefetch_depth": 2},
        "initial_effective_batch_size": 4,
        "use_gh200_trainer": True,
    }
    project.write(**ours)
    before = project.ours()
    form = project.form()
    assert form[CACHES + "vae_cache_type"] == "unified_memory"
    assert form[OURS + "enable_batch_size_rampup"] == "true"
    answer = project.send("config", form)
    assert answer.status_code == 200 and "Configuration saved" in answer.text
    assert project.ours() == before == ours


def test_a_page_that_never_opened_the_tab_keeps_the_blocks(project: Project) -> None:
    project.write(cache_config={"slab": "host"}, gh200_optimizations={"use_uvm": True})
    before = project.ours()
    assert project.send("config", {"--learning_rate": "0.001"}).status_code == 200
    assert project.ours() == before


def test_what_is_typed_is_what_gh200_train_reads(project: Project) -> None:
    project.write()
    typed = {
        CACHES + "vae_cache_type": "unified_memory",
        CACHES + "memory_limit_gb": "1.5",
        OURS + "enable_batch_size_rampup": "true",
        OURS + "initial_effective_batch_size": "4",
        OURS + "ramp_curve": "linear",
    }
    assert project.send("config", project.form(**typed)).status_code == 200
    saved = project.ours()
    assert saved["cache_config"] == {"vae_cache_type": "unified_memory", "memory_limit_gb": 1.5}
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4, "ramp_curve": "linear"}
    assert saved["gh200_optimizations"] == ramp
    assert not NAMES & set(project.saved())
    assert words_of_config_check(project) == []
    again = project.form()
    assert {name: again[name] for name in typed} == typed


def test_a_whole_configuration_that_is_sent_replaces_the_blocks(project: Project) -> None:
    project.write(cache_config={"slab": "host"}, gh200_optimizations={"use_uvm": True})
    whole = {"__replace_active_config__": "true", "--gh200_optimizations": '{"use_uvm": false}'}
    kept = {"--output_dir": str(project.file.parent / "out"), "--model_family": "sdxl"}
    assert project.send("config", {**whole, **kept}).status_code == 200
    assert project.ours() == {"gh200_optimizations": {"use_uvm": False}}


@pytest.mark.parametrize(
    ("name", "text", "block"),
    [
        (CACHES + "memory_limit_gb", "-1", {"cache_config": {"memory_limit_gb": -1}}),
        (OURS + "prefetch_depth", "<b>many", {"gh200_optimizations": {"prefetch_depth": "<b>many"}}),
        (OURS + "enable_batch_size_rampup", "true", {"gh200_optimizations": {"enable_batch_size_rampup": True}}),
    ],
)
def test_what_may_not_be_is_refused_in_the_words_of_config_check(
    project: Project, name: str, text: str, block: dict[str, Any]
) -> None:
    project.write(**block)
    (words,) = [word.replace("<", "&lt;").replace(">", "&gt;") for word in words_of_config_check(project)]
    project.write()
    before = project.file.read_bytes()
    form = project.form(**{name: text})
    refused = project.send("config", form)
    assert (refused.status_code, refused.text) == (422, words)
    assert project.file.read_bytes() == before
    assert f"<li>{words}</li>" in project.send("validate", form).text
    assert words in project.send("start", form).text
    field = name if "batch_size_rampup" not in name else OURS + "initial_effective_batch_size"
    alone = project.client.post(f"/api/validate/{field}", data={**form, "value": form[field]})
    assert alone.text.strip('"') == words


def test_an_unknown_key_is_kept_by_save_and_refused_by_validate(project: Project) -> None:
    project.write(gh200_optimizations={"enable_batch_size_rampp": 1})
    form = project.form(**{CACHES + "slab": "host"})
    assert project.send("config", form).status_code == 200
    assert project.saved()["gh200_optimizations"] == {"enable_batch_size_rampp": 1}
    (words,) = words_of_config_check(project)
    assert "did you mean 'enable_batch_size_rampup'?" in words
    assert words in project.send("validate", form).text


def test_search_finds_our_fields_and_not_the_internal_one(client: Any) -> None:
    def found(query: str) -> list[str]:
        answer = client.get("/web/trainer/search", params={"q": query}).json()
        return [field["name"] for field in answer["results"]["fields"]]

    assert OURS + "initial_effective_batch_size" in found("effective batch")
    assert OURS + "activations" in found("saved activations")
    assert not {"gh200_older_spellings", "cache_config"} & set(found("older spellings") + found("cache_config"))


def test_no_field_of_the_page_is_a_flag_of_training(client: Any) -> None:
    from simpletuner.helpers.configuration import cmd_args

    cmd_args._ARG_PARSER_CACHE = None
    flags = {flag for action in cmd_args.get_argument_parser()._actions for flag in action.option_strings}
    cmd_args._ARG_PARSER_CACHE = None
    assert "--cache_config" in flags
    assert not {f"--{name}" for name in NAMES} & flags
