"""``gh200 init`` and the example files: what is written is accepted by our checks and by accelerate's own loader."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.config.datasets import Survey, shorter_edges, survey
from simpletuner_gh200.config.files import find_package, read_datasets, read_training_config
from simpletuner_gh200.config.legacy import modernise
from simpletuner_gh200.config.settings import resolve, resolve_dataset
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.choices import Decision, Wish, decide
from simpletuner_gh200.operate.models import Model, choose_model
from simpletuner_gh200.operate.preflight import check_configuration
from simpletuner_gh200.operate.project import accelerate_file, files, plan_project, write
from tests.unit.few_options import TABLE

pytestmark = pytest.mark.usefixtures("few_options")

EXAMPLES = Path(__file__).parents[3] / "config"
FLUX = TABLE.families["flux"].blocks

GENERATED = {
    "accelerate_config_gh200.yaml": {"nodes": 1, "gpus_per_node": 1},
    "accelerate_config_gh200_fsdp2.yaml": {"nodes": 1, "gpus_per_node": 4, "blocks": FLUX},
    "accelerate_config_gh200_fsdp2_two_nodes.yaml": {"nodes": 2, "gpus_per_node": 4, "blocks": FLUX},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"x" * 100)
    (folder / "a.txt").write_text("a caption")
    return folder


def load_with_accelerate(path: Path):
    """accelerate's own loader, then its own launcher's parser and merging: what ``accelerate launch`` would do."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = load_config_from_file(str(path))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    merged, _defaults, _mp = _validate_launch_command(arguments)
    return config, merged


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_launch_example_is_what_we_write_and_what_accelerate_takes(name: str) -> None:
    pytest.importorskip("accelerate")
    shape = GENERATED[name]
    assert (EXAMPLES / name).read_text() == accelerate_file(**shape)
    config, merged = load_with_accelerate(EXAMPLES / name)
    assert config.num_processes == shape["nodes"] * shape["gpus_per_node"]
    assert merged.mixed_precision == "bf16"
    if "fsdp" in name:
        assert merged.use_fsdp
        assert str(merged.fsdp_version) == "2"
        assert str(merged.fsdp_activation_checkpointing).lower() == "true"
        assert merged.num_machines == shape["nodes"]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*example.json")))
def test_every_training_example_is_sound(name: str) -> None:
    config = read_training_config(EXAMPLES / name)
    settings = resolve(modernise(config).blocks, {})
    assert settings.any_given
    assert (EXAMPLES.parent / config["accelerate_config"]).is_file()
    entries = read_datasets(EXAMPLES.parent / config["data_backend_config"])
    assert [entry["id"] for entry in entries if entry["type"] == "in_memory"] == ["train_images"]
    resolve_dataset(entries[0]["in_memory"], where="example")


def option_names(package: Path | None) -> set[str]:
    """Every option the registry of the installed release spells; asking its parser takes as long as importing it."""
    assert package is not None
    files = (package / "simpletuner_sdk" / "server" / "services" / "field_registry").rglob("*.py")
    return {name for file in files for name in re.findall(r'"(?:--)?([a-z][a-z0-9_]{2,})"', file.read_text())}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*example.json")))
def test_the_installed_simpletuner_knows_every_option(name: str) -> None:
    known = option_names(find_package("simpletuner"))
    ours = {"cache_config", "gh200_optimizations"}
    assert {key for key in read_training_config(EXAMPLES / name) if key not in known} - ours == set()


def test_no_example_is_left_out() -> None:
    names = {path.name for path in EXAMPLES.iterdir()}
    tested = set(GENERATED) | {path.name for path in EXAMPLES.glob("*example.json")} | {"gh200_in_memory_datasets.json"}
    assert names == tested


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_what_init_writes_passes_the_check(tmp_path: Path, data: Path, nodes: int, gpus: int, full: bool) -> None:
    wish = Wish(
        tmp_path / "run", choose_model("flux", TABLE.families), data, nodes=nodes, gpus_per_node=gpus, full=full
    )
    write(plan_project(wish))
    checked = check_configuration(explicit=str(tmp_path / "run/config/config.json"), env_name=None, flags=())
    assert checked.settings.in_memory_datasets == ("train_images",)
    loaded, merged = load_with_accelerate(tmp_path / "run/config/accelerate.yaml")
    assert loaded.num_processes == nodes * gpus
    sharded = full and nodes * gpus > 1
    assert (checked.training.values.get("fsdp_enable", False), merged.use_fsdp) == (sharded, sharded)
    assert merged.multi_gpu == (nodes * gpus > 1 and not full)


def trained(data: Path, **wishes: Any) -> tuple[dict[str, Any], str]:
    """The training configuration, and the launch file."""
    written = files(plan_project(Wish(data.parent / "run", choose_model("flux", TABLE.families), data, **wishes)))
    return json.loads(written["config/config.json"]), written["config/accelerate.yaml"]


@pytest.mark.parametrize(
    ("wishes", "chosen", "kind"),
    [
        ({}, ("lora", "adamw_bf16", 1e-4), "'NO'"),
        ({"gpus_per_node": 4}, ("lora", "adamw_bf16", 1e-4), "MULTI_GPU"),
        ({"full": True}, ("full", "adamw_bf16", 1e-5), "'NO'"),
        ({"full": True, "gpus_per_node": 2, "cpu": True}, ("full", "optimi-adamw", 1e-5), "MULTI_CPU"),
    ],
)
def test_what_is_whole_on_every_rank(data: Path, wishes: dict[str, Any], chosen: tuple[object, ...], kind: str) -> None:
    """SimpleTuner 4.10.1 neither steps nor saves a LoRA under FSDP2."""
    config, launch = trained(data, **wishes)
    assert (config["model_type"], config["optimizer"], config["learning_rate"]) == chosen
    assert not [key for key in config if key.startswith("fsdp")]
    assert f"distributed_type: {kind}\n" in launch and "fsdp" not in launch


def test_a_lora_on_several_gpus_computes_activations_again_as_on_one(data: Path) -> None:
    wishes = (Wish(data.parent, choose_model("flux", TABLE.families), data, gpus_per_node=gpus) for gpus in (1, 4))
    one, several = ([*decide(wish, survey(data))][-1] for wish in wishes)
    assert several == one
    assert one.training == {"gradient_checkpointing": True}, "what the plan then changes is its own"


def test_all_weights_over_several_gpus_are_sharded_as_the_tried_example_is(data: Path) -> None:
    """That example trains for real in tests/integration/test_fsdp2_training.py."""
    config, launch = trained(data, full=True, gpus_per_node=4)
    example = read_training_config(EXAMPLES / "gh200_fsdp2_example.json")
    ours = {key: value for key, value in config.items() if key.startswith("fsdp")}
    assert ours == {key: value for key, value in example.items() if key.startswith("fsdp")}
    for key in ("model_type", "optimizer", "learning_rate", "mixed_precision", "gradient_checkpointing"):
        assert config[key] == example[key], key
    assert launch == (EXAMPLES / "accelerate_config_gh200_fsdp2.yaml").read_text()


def test_a_family_without_blocks_is_not_sharded_silently(tmp_path: Path, data: Path) -> None:
    model = Model("bare", "x/bare")
    plan_project(Wish(tmp_path / "run", model, data, gpus_per_node=4))
    with pytest.raises(UsageError, match=r"--full over 4 GPUs.*no blocks of bare"):
        plan_project(Wish(tmp_path / "run", model, data, gpus_per_node=4, full=True))


def test_the_ramp_comes_out_even_for_any_number_of_ranks(tmp_path: Path, data: Path) -> None:
    for ranks in (1, 3, 8):
        wish = Wish(tmp_path, choose_model("sdxl", TABLE.families), data, gpus_per_node=ranks, batch=3, ramp=True)
        block = json.loads(files(plan_project(wish))["config/config.json"])["gh200_optimizations"]
        assert block["initial_effective_batch_size"] == 3 * ranks
        assert block["target_effective_batch_size"] % (3 * ranks) == 0


def test_nothing_is_replaced_unless_told_to(tmp_path: Path, data: Path) -> None:
    wish = Wish(tmp_path / "run", choose_model("sdxl", TABLE.families), data)
    write(plan_project(wish))
    (tmp_path / "run/config/config.json").write_text("mine")
    (tmp_path / "run/config/datasets.json").unlink()
    with pytest.raises(UsageError, match="--force"):
        write(plan_project(wish))
    assert (tmp_path / "run/config/config.json").read_text() == "mine"
    assert not (tmp_path / "run/config/datasets.json").exists()
    write(plan_project(wish), force=True)
    assert (tmp_path / "run/config/config.json").read_text() != "mine"


def test_a_local_pipeline_tells_its_family(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    model = choose_model(str(tmp_path), TABLE.families)
    assert (model.family, model.local) == ("sdxl", True)
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtPipeline"}')
    assert choose_model(str(tmp_path), TABLE.families).family == "pixart"
    (tmp_path / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(UsageError, match="OtherPipeline"):
        choose_model(str(tmp_path), TABLE.families)


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_data_that_is_not_there_is_a_usage_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="--data"):
        plan_project(Wish(tmp_path / "run", choose_model("sdxl", TABLE.families), tmp_path / folder))


def said(*words: str) -> str:
    result = CliRunner().invoke(build_app(), ["init", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_init_says_what_it_found_and_what_it_chose_and_why(tmp_path: Path, data: Path) -> None:
    shown = said(str(tmp_path / "run"), "--data", str(data), "--model", "sdxl", "--batch", "2", "--ramp")
    assert "found 1 image, 1 with a caption, 109 B" in shown
    assert "chose captions from .txt files: each image has one" in shown
    assert "chose square crops from the centre: " in shown and '"crop": false' in shown
    assert "chose no validation pictures: " in shown and "validation_prompt" in shown
    assert "grows from 2 to 4 over 50 micro-batches" in shown and "not optimizer steps" in shown
    assert "chose the model's memory placed by the plan when a run starts: " in shown
    assert f"wrote {tmp_path / 'run/config/config.json'}" in shown


def test_blocks_of_several_choices_are_one(tmp_path: Path, data: Path) -> None:
    shown = said(str(tmp_path / "run"), "--data", str(data), "--ramp")
    assert "chose an effective batch that grows" in shown and "BUT" not in shown
    block = json.loads((tmp_path / "run/config/config.json").read_text())["gh200_optimizations"]
    assert block["memory"] == "auto" and block["enable_batch_size_rampup"] is True


def test_what_does_not_fit_in_any_way_is_said(tmp_path: Path, data: Path) -> None:
    words = (str(tmp_path / "run"), "--data", str(data), "--model", "qwen_image", "--full", "--batch", "64")
    assert "BUT by `gh200 plan` this does not fit on gh200-96: HBM: " in said(*words)
    assert "does not fit" in json.loads(said(*words, "--force", "--json"))["doubt"]


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), "a LoRA of rank 16 trained with adamw_bf16: a small adapter"),
        (("--gpus-per-node", "4"), "adamw_bf16, the whole model on each of 4 ranks: .* saves no LoRA that it shards"),
        (("--full",), "all weights trained with adamw_bf16: .* in bf16"),
        (("--full", "--gpus-per-node", "4"), "torch-adamw, sharded over 4 GPUs by FSDP2: .*adamw_bf16 refuses to step"),
    ],
)
def test_init_says_what_is_trained_and_why_so(tmp_path: Path, data: Path, words: Sequence[str], chosen: str) -> None:
    assert re.search(f"chose .*{chosen}", said(str(tmp_path / "run"), "--data", str(data), *words))


def test_a_caption_that_is_missing_is_why_names_are_used(tmp_path: Path, data: Path) -> None:
    wish = Wish(tmp_path, choose_model("sdxl", TABLE.families), data)
    assert json.loads(files(plan_project(wish))["config/datasets.json"])[0]["caption_strategy"] == "textfile"
    (data / "b.png").write_bytes(b"y")
    shown = said(str(tmp_path / "run"), "--data", str(data), "--model", "sdxl")
    assert "found 2 images, 1 with a caption" in shown
    assert "chose file names as captions: only 1 of 2 images have a .txt" in shown
    (entry, _embeds) = json.loads((tmp_path / "run/config/datasets.json").read_text())
    assert entry["caption_strategy"] == "filename"


def test_every_decision_reaches_a_file(tmp_path: Path, data: Path) -> None:
    for wish in (
        Wish(tmp_path, choose_model("flux", TABLE.families), data, gpus_per_node=2, full=True),
        Wish(tmp_path, choose_model("sdxl", TABLE.families), data, cpu=True),
        Wish(tmp_path, choose_model("sdxl", TABLE.families), data, cpu=True, rehearsal=True, ramp=True),
    ):
        project = plan_project(wish)
        written = files(project)
        config, (entry, _embeds) = (json.loads(written[f"config/{name}.json"]) for name in ("config", "datasets"))
        for decision in project.decisions:
            assert decision.training or decision.dataset
            assert decision.training.items() <= config.items()
            assert decision.dataset.items() <= entry.items()


def chosen(**found: Any) -> dict[str, Decision]:
    """What is decided, by the first key that it sets; ``found`` in the data, and wishes."""
    asked = {key: found.pop(key) for key in ("family", "steps", "resolution", "ramp", "rehearsal") if key in found}
    model = choose_model(asked.pop("family", "sdxl"), TABLE.families)
    wish = Wish(Path("run"), model, Path("data"), **asked)
    return {next(iter({**one.training, **one.dataset})): one for one in decide(wish, Survey(**found))}


@pytest.mark.parametrize(
    ("edges", "wished", "pixels", "why"),
    [
        ((1024,) * 9 + (2000,), None, 1024, "made for"),
        ((128,) * 20, None, 128, "larger pictures would help"),
        ((700,) * 10, None, 640, "no less than 700"),
        ((500, *(1024,) * 19), None, 1024, "1 of 20 pictures looked at is enlarged"),
        ((128,) * 20, 1024, 1024, "as asked; 20 of 20 pictures looked at are enlarged"),
        ((), None, 1024, "no picture's size could be read"),
    ],
)
def test_no_picture_is_enlarged_in_silence(edges: tuple[int, ...], wished: int | None, pixels: int, why: str) -> None:
    made = chosen(samples=20, edges=edges, resolution=wished)["resolution"]
    assert made.training["resolution"] == made.dataset["resolution"] == pixels
    assert why in made.why


def test_edges_are_those_of_the_pictures(tmp_path: Path, data: Path) -> None:
    from PIL import Image

    Image.new("RGB", (300, 200)).save(data / "b.png")
    Image.new("RGB", (100, 400)).save(data / "c.webp")
    assert shorter_edges(data) == (100, 200), "a.png is no picture"
    assert "chose 64 x 64 pixels" in said(str(tmp_path / "run"), "--data", str(data), "--model", "sdxl")


def test_no_more_than_a_few_pictures_are_opened(data: Path) -> None:
    from PIL import Image

    for number in range(250):
        Image.new("L", (8, 8)).save(data / f"n{number}.png")
    assert 100 <= len(shorter_edges(data)) <= 200


def test_steps_follow_from_the_number_of_pictures_and_any_set_is_seen_whole() -> None:
    steps = {n: chosen(samples=n)["max_train_steps"].training["max_train_steps"] for n in (1, 40, 100, 10_000, 10**7)}
    assert steps == {1: 25, 40: 1000, 100: 2500, 10_000: 25_000, 10**7: 2_500_000}
    assert "100 times" in chosen(samples=40)["max_train_steps"].why
    asked = chosen(samples=40, steps=20)["max_train_steps"]
    assert asked.training["max_train_steps"] == 20 and "seen about 2 times" in asked.why


def test_a_batch_grows_only_where_that_is_asked_for() -> None:
    plain, ramped = (chosen(samples=20, ramp=ramp)["gh200_optimizations"] for ramp in (False, True))
    assert plain.training == {"gh200_optimizations": {"enable_uvm_hints": True}} and "--ramp" in plain.why
    assert ramped.training["gh200_optimizations"]["target_effective_batch_size"] == 20, "no more than there are"


def test_without_a_gpu_and_a_model_it_is_a_rehearsal(tmp_path: Path, data: Path) -> None:
    """The tiny model is there already; making it takes a process with torch."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    shown = said(str(tmp_path / "run"), "--data", str(data), "--cpu")
    assert "chose 20 optimizer steps: a rehearsal" in shown and "of no use" in shown
    config = read_training_config(tmp_path / "run/config/config.json")
    assert config["pretrained_model_name_or_path"] == str(tmp_path / "run" / "model")
    assert (config["resolution"], config["max_train_steps"]) == (64, 20)
    many = chosen(samples=1000, rehearsal=True)["max_train_steps"]
    assert many.dataset == {"max_num_samples": 64} and "64 of the pictures" in many.why


def test_the_models_are_those_of_the_installed_release(tmp_path: Path, data: Path) -> None:
    model = choose_model("pixart", TABLE.families)
    assert (model.weights, model.flavour, model.blocks) == ("x/b", "b", ("PixBlock",))
    assert choose_model("pixart:a", TABLE.families).weights == "x/a"
    assert choose_model("pixart=my/own", TABLE.families).weights == "my/own"
    assert choose_model("flux", TABLE.families).flavour == "dev", "what most people mean"
    config = json.loads(files(plan_project(Wish(tmp_path / "run", model, data)))["config/config.json"])
    assert (config["model_family"], config["model_flavour"]) == ("pixart", "b")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("wan", "trains on video"),
        ("flux:kontext", "pairs of pictures"),
        ("pixart:c", "no such flavour"),
        ("nonsense", "families: flux, pixart"),
        ("/nowhere", "families: flux, pixart"),
    ],
)
def test_a_model_that_can_not_be_taken_is_refused_with_what_can(model: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        choose_model(model, TABLE.families)
    assert told in str(refused.value)
