"""Which model a configuration means, and how large it is: files, repositories, flavours, and what is only a guess."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.models import PUBLISHED, ModelPart, model_of, published_model, read_parts
from simpletuner_gh200.plan.planning import Plan, make_plan
from simpletuner_gh200.plan.text import refusal, whole_line
from simpletuner_gh200.upstream import flavours
from tests.unit.plan.plan_samples import FLUX, command, configured

SMALL = replace(MACHINES["gh200-96"], hbm=24 * 10**9)


@pytest.fixture(autouse=True)
def a_simpletuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of three families, as releases write them down; and no hub but the test's."""
    package = tmp_path / "simpletuner"
    write = {
        "wan": """
LARGE = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
class Base: ...
class Wan(Base):
    DEFAULT_MODEL_FLAVOUR = "small"
    HUGGINGFACE_PATHS: dict = {"small": "some/small", "large": LARGE, "odd": Base.path()}
ModelRegistry.register("wan", Wan)
""",
        "flux": """
class Flux:
    HUGGINGFACE_PATHS = {"dev": "black-forest-labs/flux.1-dev"}
ModelRegistry.register("flux", Flux)
""",
        "kolors": "class Kolors: ...\nModelRegistry.register('kolors', Kolors)\n",
    }
    for name, text in write.items():
        file = package / "helpers" / "models" / name / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    listed = {"kolors2": {"module_path": "simpletuner.helpers.models.kolors.model", "class_name": "Kolors"}}
    (package / "helpers" / "models" / "model_metadata.json").write_text(json.dumps(listed))
    monkeypatch.setattr(flavours, "find_package", lambda _name: package)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    forget()
    yield package
    forget()


def forget() -> None:
    flavours._classes.cache_clear()
    flavours.flavours_of.cache_clear()


def planned(tmp_path: Path, **values: object) -> Plan:
    given = {**FLUX, "pretrained_model_name_or_path": None, **values}
    return make_plan(configured(tmp_path, **given), SMALL, trace=False)


def run(tmp_path: Path, **values: object) -> str:
    configured(tmp_path, **values)
    result = command(tmp_path / "config.json", "--machine", "gh200-96")
    assert isinstance(result.exception, UsageError), result.output
    return str(result.exception)


# -- files ---------------------------------------------------------------------------------------------------------


def safetensors(path: Path, **tensors: list[int]) -> None:
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_parameters_are_counted_from_headers_alone(tmp_path):
    safetensors(tmp_path / "transformer" / "a-00001-of-00002.safetensors", x=[10, 20])
    safetensors(tmp_path / "transformer" / "a-00002-of-00002.safetensors", y=[5])
    safetensors(tmp_path / "transformer" / "a.fp16.safetensors", x=[10, 20])
    safetensors(tmp_path / "vae" / "v.safetensors", z=[7, 7])
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text('{"model_type": "clip_text_model"}')
    found = read_parts(str(tmp_path), "flux")
    assert {name: (part.parameters, part.source, part.kind) for name, part in found.items()} == {
        "transformer": (205, "measured", "denoiser"),
        "vae": (49, "measured", "vae"),
        "text_encoder": (0, "computed", "encoder"),
    }


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        b"\x10",
        struct.pack("<Q", 99) + b'{"x": {"dty',
        struct.pack("<Q", 9) + b'{"x": {}}',
    ],
    ids=["pointer", "nothing", "truncated", "no-dtype"],
)
def test_weights_that_cannot_be_read_are_not_here(tmp_path, content):
    safetensors(tmp_path / "transformer" / "a-00001-of-00002.safetensors", x=[10, 20])
    (tmp_path / "transformer" / "a-00002-of-00002.safetensors").write_bytes(content)
    (tmp_path / "transformer" / "config.json").write_text('{"num_layers": 2}')
    part = read_parts(str(tmp_path), "flux")["transformer"]
    assert (part.parameters, part.source, part.note) == (0, "computed", "its weights are not here")


def test_a_repository_is_found_in_the_hubs_cache_else_its_size_is_cited(tmp_path, monkeypatch):
    name = "some/model"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    safetensors(tmp_path / "hub" / "models--some--model" / "snapshots" / "abc" / "unet" / "u.safetensors", x=[3, 3])
    assert read_parts(name, "sdxl")["unet"].parameters == 9
    cited = read_parts("stabilityai/stable-diffusion-xl-base-1.0", "sdxl")
    assert cited["unet"].source == "cited"
    assert published_model("nobody/nothing", "no such family") is None
    named = published_model("black-forest-labs/FLUX.1-dev", "")
    assert published_model("BLACK-forest-labs/flux.1-DEV", "flux") == named


def test_a_part_that_no_run_loads_is_not_counted(tmp_path):
    for name in ("transformer", "transformer_2", "safety_checker", "text_encoder", "image_encoder", "vae"):
        safetensors(tmp_path / "model" / name / "a.safetensors", x=[2])
    found = read_parts(str(tmp_path / "model"), "wan")
    kinds = {name: part.kind for name, part in found.items()}
    assert [name for name, kind in kinds.items() if kind == "other"] == ["safety_checker", "transformer_2"]
    assert [name for name, kind in kinds.items() if kind == "encoder"] == ["image_encoder", "text_encoder"]


def test_a_denoiser_of_its_own_takes_the_place_of_the_pipelines(tmp_path):
    safetensors(tmp_path / "mine" / "transformer" / "a.safetensors", x=[10, 10])
    safetensors(tmp_path / "plain" / "a.safetensors", x=[7])
    key = "pretrained_transformer_model_name_or_path"

    def denoiser(**values: object) -> ModelPart:
        return planned(tmp_path, **FLUX, **values).sizes.denoiser

    assert denoiser().source == "cited"
    assert denoiser(**{key: str(tmp_path / "mine")}).parameters == 100
    plain = {key: str(tmp_path / "plain"), "pretrained_transformer_subfolder": "none"}
    assert denoiser(**plain).parameters == 7
    away = denoiser(**{key: "somebody/else"})
    assert (away.source, away.parameters) == ("assumed", 11901408320)
    assert "somebody/else is not here" in away.note


# -- flavours and families -----------------------------------------------------------------------------------------


def test_a_flavour_names_its_repository_and_a_family_has_a_usual_one():
    assert model_of({"model_family": "wan"}) == "some/small"
    assert model_of({"model_family": "wan", "model_flavour": "large"}) == "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    assert model_of({"model_family": "flux"}) == ""
    own = {"model_family": "wan", "model_flavour": "large", "pretrained_model_name_or_path": "my/own"}
    assert model_of(own) == "my/own"
    for unread in ({"model_family": "wan", "model_flavour": "odd"}, {"model_family": "nothing"}, {}):
        assert model_of(unread) == ""
    assert flavours.families() == {"wan", "flux", "kolors", "kolors2"}


def test_without_simpletuner_no_flavour_is_known(monkeypatch):
    monkeypatch.setattr(flavours, "find_package", lambda _name: None)
    forget()
    assert model_of({"model_family": "wan"}) == ""
    assert not flavours.families()


def test_a_model_that_is_only_of_a_known_family_is_a_guess_and_never_refused(tmp_path):
    known = planned(tmp_path, model_family="wan", model_flavour="large")
    assert refusal(known) is not None
    assert {row.source for row in known.evaluated.rows if row.what == "optimizer"} == {"measured"}
    guessed = planned(tmp_path, model_family="wan", model_flavour="small")
    assert not guessed.fits
    assert refusal(guessed) is None
    of_the_model = ("weights", "gradients", "optimizer", "activations", "checkpoint", "checkpoints", "text_encoder")
    assert {row.source for row in guessed.evaluated.rows if row.what in of_the_model} == {"assumed"}
    assert any("some/small" in note and "of the same family" in note for note in guessed.notes)


def test_of_what_nothing_is_known_nothing_is_said(tmp_path):
    told = run(tmp_path, model_family="kolors", pretrained_model_name_or_path="some/model")
    assert "nothing is known of the size of some/model" in told
    assert "hf download some/model" in told
    assert "did you mean flux?" in run(tmp_path, model_family="fluks")


def test_caches_are_as_large_as_the_model_makes_them(tmp_path):
    def each(family: str, name: str) -> tuple[int, int]:
        sizes = planned(tmp_path, model_family=family, pretrained_model_name_or_path=name).sizes
        return sizes.latent_bytes, sizes.embed_bytes

    latent = 128 * 128 * 4
    assert each("sdxl", "stabilityai/stable-diffusion-xl-base-1.0") == (4 * latent, 77 * 2048 * 2)
    assert each("flux", "black-forest-labs/FLUX.1-dev") == (16 * latent, 512 * 4096 * 2)
    assert each("kolors", "nobody/knows") == (16 * latent, 256 * 4096 * 2)


def test_the_remedy_is_one_that_helps(tmp_path):
    """A family is no repository, and what lies here need not be downloaded."""
    assert "hf download" not in (told := run(tmp_path, model_family="kolors"))
    assert "pretrained_model_name_or_path" in told
    assert "hf download" not in run(tmp_path, model_family="kolors", pretrained_model_name_or_path="/nowhere/model")
    place = tmp_path / "model" / "unet"
    place.mkdir(parents=True)
    local = {"model_family": "kolors", "pretrained_model_name_or_path": str(tmp_path / "model")}
    assert "hf download" not in (told := run(tmp_path, **local))
    assert f"{tmp_path / 'model'} has no transformer or unet" in told
    (place / "config.json").write_text('{"in_channels": 4}')
    assert "hf download" not in (told := run(tmp_path, **local))
    assert "plan without --no-trace" in told


def test_a_family_without_a_usual_flavour_names_those_it_has(tmp_path, a_simpletuner):
    file = a_simpletuner / "helpers" / "models" / "wan" / "model.py"
    file.write_text(file.read_text().replace("DEFAULT_MODEL_FLAVOUR", "OTHER").replace('"wan"', '"odd"'))
    flavours._classes.cache_clear()
    told = run(tmp_path, model_family="odd")
    assert "hf download" not in told
    assert "model_flavour" in told and "small, large" in told


@pytest.mark.parametrize("given", ["none", "", True, "-3", "1e999", [77]])
def test_a_length_of_text_that_is_no_number_is_none(tmp_path, given):
    unset = planned(tmp_path, **FLUX).sizes.embed_bytes
    assert planned(tmp_path, **FLUX, tokenizer_max_length=given).sizes.embed_bytes == unset
    assert planned(tmp_path, **FLUX, tokenizer_max_length="256").sizes.embed_bytes == unset // 2


def test_sizes_that_were_counted_agree_with_what_their_makers_state():
    """They are renewed by scripts/dev/published_sizes.py, which counts the class in diffusers again."""
    stated = [model for model in json.loads(PUBLISHED.read_text())["models"] if "stated" in model]
    families = {model["family"] for model in stated}
    assert families >= {"flux2", "hidream", "ltxvideo2", "kandinsky5_video", "kandinsky5_image"}
    for model in stated:
        assert model["parameters"] / 1e9 == pytest.approx(model["stated"], rel=0.06), model["names"][0]
        assert model["source"] and model["names"] and model["config"]["_class_name"]


def test_a_plan_of_a_model_of_which_nothing_was_known(tmp_path):
    asked = {"model_family": "flux2", "model_type": "lora", "train_batch_size": 1, "max_train_steps": 9}
    held = {}
    for name in ("dev", "klein-base-4B"):
        training = configured(tmp_path, **asked, pretrained_model_name_or_path=f"black-forest-labs/FLUX.2-{name}")
        plan = make_plan(training, MACHINES["gh200-96"], trace=False)
        held[name] = plan.sizes.denoiser
        assert "computing is not in it" in " ".join(whole_line(plan)), "nothing was traced"
        assert held[name].source == "cited" and plan.fits
    assert held["dev"].parameters > 8 * held["klein-base-4B"].parameters
    assert "32 billion by bfl.ai" in held["dev"].note
