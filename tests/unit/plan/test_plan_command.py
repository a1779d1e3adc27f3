"""``gh200 plan`` as people and scripts call it, and what it reads: without torch, without tracing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.dev.plan_table import rows
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.plan import calibration, planning, text, traces
from simpletuner_gh200.plan.changes import in_words
from simpletuner_gh200.plan.data import SampleShape, read_data, shapes_of
from simpletuner_gh200.plan.facts import read_facts
from simpletuner_gh200.plan.machines import MACHINES, RATES, machine, this_machine
from simpletuner_gh200.plan.models import PUBLISHED, PUBLISHED_TRACES, plain
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.plan.rows import PHASES, POOLS
from simpletuner_gh200.units import GIB
from simpletuner_gh200.upstream.flavours import families
from simpletuner_gh200.upstream.source import installed_version
from simpletuner_gh200.upstream.tested import tested_releases
from tests.unit.machine_driver import MachineDriver
from tests.unit.plan.plan_samples import FLUX, command, configured


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FLUX))
    return file


def run(*words: object, code: int) -> str:
    result = command(*words, *([] if "--machine" in words else ["--machine", "gh200-96"]))
    assert result.exit_code == code, result.output
    return result.stdout


def training_of(path: Path, **changed: object) -> Training:
    return configured(path.parent, **{**json.loads(path.read_text()), **changed})


def test_json_has_what_the_contract_names(config):
    told = json.loads(run(config, "--json", code=1))
    assert told["fits"] is False
    assert told["machine"] == "gh200-96"
    assert set(told["pools"]) == set(POOLS)
    assert set(told["phases"]) == set(PHASES)
    assert {"what", "pool", "phase", "bytes", "source"} <= set(told["bytes"][0])
    assert {"weights", "gradients", "optimizer", "context"} <= {row["what"] for row in told["bytes"]}
    assert told["step"]["binding"] in told["step"]["bounds"]
    assert {"what", "key", "value", "fits", "cost"} <= set(told["changes"][0])
    hbm = told["pools"]["hbm"]
    assert hbm["free"] == hbm["capacity"] - hbm["used"] < 0
    assert hbm["used"] == max(told["phases"][phase]["hbm"] for phase in PHASES)
    assert any("FLUX.1-dev" in note for note in told["notes"]), "its files are not here"
    sources = {(row["what"], row["phase"]): row["source"] for row in told["bytes"] if row["pool"] == "hbm"}
    assert sources["activations", "train"] == "assumed", "scaled from another shape: never a reason to refuse"


def test_exit_code_and_words_say_whether_it_fits(config):
    assert "does not fit" in run(config, code=1)
    training_of(config, model_type="lora")
    assert "fits" in run(config, "--machine", "gh200-144", code=0)


def test_a_page_and_a_drawing_need_nothing_from_elsewhere(config, tmp_path):
    for name in ("plan.html", "plan.svg"):
        run(config, "-o", tmp_path / name, code=1)
        text = (tmp_path / name).read_text()
        assert "optimizer: 66.5 GiB, measured" in text, "every piece says what it is"
        assert not re.search(r"(src|href)=|url\(|@import|<script", text)
        assert [found for found in re.findall(r"https?://[^\"'< ]+", text) if "w3.org" not in found] == []
    assert ".html or .svg" in str(command(config, "-o", tmp_path / "plan.png").exception)


# -- the cheap part --------------------------------------------------------------------------------------------


def test_training_is_refused_only_on_a_device_and_only_for_what_is_certain(config, tmp_path):
    training = training_of(config)
    host = tmp_path / "host"
    (host / "proc").mkdir(parents=True)
    memory = host / "proc" / "meminfo"
    memory.write_text("MemTotal: 480000000 kB\nMemFree: 460000000 kB\nMemAvailable: 470000000 kB\n")
    with pytest.raises(RunFailed, match=r"does not fit: HBM has 89\.4 GiB") as refused:
        planning.check_fit(training, driver=MachineDriver(MACHINES["gh200-96"]), root=host)
    assert "--no-plan" in str(refused.value)
    assert "gh200_optimizations.memory=auto" in str(refused.value)
    roomy = replace(MACHINES["gh200-96"], hbm=120 * 10**9)
    assert planning.check_fit(training, driver=MachineDriver(roomy), root=host), "over only by what is assumed"
    nothing = replace(MACHINES["gh200-96"], has_device=False)
    memory.write_text("MemTotal: 8000000 kB\nMemFree: 8000000 kB\nMemAvailable: 8000000 kB\n")
    assert planning.check_fit(training, driver=MachineDriver(nothing), root=host) is not None


@pytest.mark.parametrize(
    "moved",
    [
        {"deepspeed_config": "zero3.json"},
        {"fsdp_cpu_offload": True},
        {"ramtorch": True},
        {"optimizer_cpu_offload_method": "torchao"},
        {"optimizer": "bnb-adamw-paged"},
        {"musubi_blocks_to_swap": 20, "optimizer_release_gradients": True},
        {"enable_group_offload": True},
        {"controlnet": True},
    ],
    ids=lambda moved: next(iter(moved)),
)
def test_no_refusal_rests_on_what_another_setting_keeps_elsewhere(config, moved):
    tight = replace(MACHINES["gh200-96"], hbm=80 * 10**9)
    assert make_plan(training_of(config), tight, trace=False).evaluated.overflow(certain=True)["hbm"] > 0
    plan = make_plan(training_of(config, **moved), tight, trace=False)
    assert "hbm" not in plan.evaluated.overflow(certain=True)
    assert not plan.fits, "it may still be close"
    assert ("controlnet: not followed, a plain step is counted" in plan.notes) == ("controlnet" in moved)


AUTO = {"gh200_optimizations": {"memory": "auto"}}


def test_memory_auto_places_what_does_not_fit_and_the_plan_shows_it(config):
    assert not make_plan(training_of(config), MACHINES["gh200-96"], trace=False).fits
    plan = make_plan(training_of(config, **AUTO), MACHINES["gh200-96"], trace=False)
    assert plan.fits
    found = plan.to_json()
    settings = {"gh200_optimizations.use_uvm": True, "gh200_optimizations.activations": "auto"}
    assert found["decision"]["settings"] == settings
    assert found["decision"]["then"] == ("gradients", "weights")
    (moved,) = (row for row in found["placement"] if (row["what"], row["pool"]) == ("optimizer", "grace"))
    assert moved["why"] == "each byte is used 2 times a step" and moved["bytes"] > 40 * GIB
    (line,) = text.decision_line(plan)
    assert line.startswith("memory auto: HBM lacks ") and line.endswith(": " + in_words(settings))


def test_memory_auto_leaves_what_was_given(config):
    given = {"gh200_optimizations": {"memory": "auto", "use_uvm": False}}
    decision = make_plan(training_of(config, **given), MACHINES["gh200-96"], trace=False).decision
    assert "gh200_optimizations.use_uvm" not in decision.settings
    assert decision.settings["gh200_optimizations.weights"] == "auto"


def test_memory_auto_on_one_pool_moves_nothing_and_says_what_helps(config):
    plan = make_plan(training_of(config, **AUTO), replace(MACHINES["gb10"], grace=100 * GIB), trace=False)
    assert plan.decision.settings == {} and plan.decision.then == ()
    (line,) = text.decision_line(plan)
    assert "nowhere to move anything to: nothing is moved; what helps: " in line and "optimizer=ao-adamw8bit" in line


def test_what_fits_in_no_way_is_said_with_what_may_help():
    large = {**FLUX, "train_batch_size": 4096, "gradient_checkpointing": True}
    said = planning.too_much(large, MACHINES["gh200-96"])
    assert said is not None
    assert "HBM: " in said and " of 89.4 GiB in train; most of it " in said
    unheard = {**FLUX, "model_family": "unheard-of", "pretrained_model_name_or_path": "no/where"}
    assert planning.too_much(unheard, MACHINES["gh200-96"]) is None


def test_a_plan_is_kept_beside_the_run(config, tmp_path):
    plan = planning.quick_plan(training_of(config), MACHINES["gh200-96"])
    planning.keep(plan, tmp_path)
    kept = planning.kept(tmp_path)
    assert kept is not None
    assert kept["phases"]["train"]["hbm"] == plan.evaluated.held("train", "hbm")


def test_what_a_run_measured_replaces_what_was_assumed(private_cache):
    here = replace(MACHINES["gh200-96"], name="this")
    assert calibration.calibrated(here) == here
    moments = [(42 * GIB, 40 * GIB), (43 * GIB, 41 * GIB), (43 * GIB, 40 * GIB)]
    assert calibration.learned_context(moments) == 2 * GIB
    assert calibration.learned_context([(39 * GIB, 40 * GIB)]) is None, "less than torch's is no context"
    assert calibration.learned_context([(80 * GIB, 40 * GIB)]) is None, "somebody else's"
    assert calibration.learned_context([]) is None
    calibration.remember(here, {"context": 2 * GIB, "h2d": None}, "run my-run")
    learned = calibration.calibrated(here)
    assert (learned.context, learned.rate_sources["context"]) == (2 * GIB, "measured: run my-run")
    assert calibration.calibrated(MACHINES["gh200-96"]) == MACHINES["gh200-96"]


# -- what is read ------------------------------------------------------------------------------------------------


def test_a_link_that_leads_nowhere_is_not_counted(config, tmp_path):
    data, cache = tmp_path / "data", tmp_path / "vae"
    for folder in (data, cache):
        folder.mkdir()
        (folder / "here.png").write_bytes(b"12345")
        (folder / "gone.png").symlink_to(tmp_path / "nowhere.png")
    entry = {"id": "x", "type": "local", "instance_data_dir": str(data), "cache_dir_vae": str(cache)}
    found = read_data(training_of(config, datasets=[entry]), latent_bytes=1, embed_bytes=1)
    assert (found.latents, found.embeds) == (5, 1), "one sample"


def shapes(tmp_path: Path, entry: dict, index: dict | None = None, **values: object) -> tuple[SampleShape, ...]:
    return tuple(counted(tmp_path, entry, index, **values))


def counted(tmp_path: Path, entry: dict, index: dict | None = None, **values: object) -> dict[SampleShape, int]:
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    if index is not None:
        (data / "aspect_ratio_bucket_indices_x.json").write_text(json.dumps({"aspect_ratio_bucket_indices": index}))
    entry = {"id": "x", "type": "local", "instance_data_dir": str(data), **entry}
    return shapes_of(configured(tmp_path, **{"model_family": "flux", "datasets": [entry], **values}))


def test_shapes_come_from_buckets_crops_and_resolution(tmp_path):
    assert shapes(tmp_path, {"resolution": 512}) == (SampleShape(512, 512, 0, "assumed"),)
    cropped = {"crop": True, "crop_aspect": "square", "resolution": 768, "resolution_type": "pixel"}
    assert shapes(tmp_path, cropped) == (SampleShape(768, 768, 0, "computed"),)
    assert shapes(tmp_path, {"resolution": 1.0, "resolution_type": "area"})[0].height == 1024
    wide = {"1.5": ["a.png"], "1.0": ["b.png"], "2.0": []}
    by_edge = shapes(tmp_path, {"resolution": 1024, "resolution_type": "pixel"}, wide)
    assert by_edge == (SampleShape(1024, 1024), SampleShape(1024, 1536))
    finer = {"resolution": 1024, "resolution_type": "pixel"}
    many = {"1.52": ["a.png", "c.png"], "1.0": ["b.png"]}
    assert counted(tmp_path, finer, many, aspect_bucket_alignment=8) == {
        SampleShape(1024, 1024): 1,
        SampleShape(1024, 1560): 2,
    }
    by_area = shapes(tmp_path, {"resolution": 1024, "resolution_type": "pixel_area"}, wide)
    assert max(shape.area for shape in by_area) < 1.05 * 1024**2
    film = {"dataset_type": "video", "resolution": 480, "video": {"num_frames": 49}}
    assert shapes(tmp_path, film, {}, model_family="wan") == (SampleShape(480, 480, 49, "assumed"),)
    for family in ("kandinsky5-video", "kandinsky5_video", "one_of_tomorrow"):
        assert shapes(tmp_path, film, {}, model_family=family)[0].frames == 49
    assert shapes(tmp_path, {**film, "dataset_type": "image"}, {}, model_family="flux")[0].frames == 0
    assert SampleShape(480, 832, 81).latent(8, 4) == (21, 60, 104)


def test_facts_are_read_as_simpletuner_would(config):
    facts = read_facts(training_of(config, use_ema=True, ema_device="accelerator", gradient_accumulation_steps=2))
    assert (facts.full, facts.weights, facts.accumulation, facts.checkpointing) == (True, "bf16", 2, True)
    assert facts.ema_on_device
    assert not facts.drops_gradients
    assert read_facts(training_of(config, set_grads_to_none=True)).drops_gradients
    facts = read_facts(training_of(config, model_type="lora", mixed_precision="no", base_model_precision="int8-quanto"))
    assert (facts.full, facts.weights) == (False, "fp32")
    assert facts.quantised == pytest.approx(1.03)
    ramp = {"initial_effective_batch_size": 2, "target_effective_batch_size": 16, "batch_rampup_steps": 8}
    block = {"enable_batch_size_rampup": True, **ramp, "activations": "auto"}
    facts = read_facts(training_of(config, train_batch_size=2, gh200_optimizations=block), ranks=2)
    assert (facts.accumulation, facts.ranks, facts.activations) == (4, 2, "auto")
    assert facts.ramped
    facts = read_facts(training_of(config, text_cache_ondemand=True, vae_cache_ondemand=True, vae_enable_tiling=True))
    assert (facts.encoders_stay, facts.vae_stays, facts.placed_by_others) == (True, True, {"vae work"})
    off = {"vae_enable_tiling": "false", "optimizer_cpu_offload_method": "none", "musubi_blocks_to_swap": 0}
    assert read_facts(training_of(config, ramtorch=False, deepspeed_config=None, **off)).placed_by_others == frozenset()


def test_the_same_question_has_the_same_key_and_another_has_another(private_cache):
    asked = {"batch": 1, "latent": (16, 16), "checkpointing": True}
    options = {"model_family": "flux", "lora_rank": 8, "output_dir": "/a", "hub_token": "secret"}
    first = traces.step_request(options, {"num_layers": 3}, **asked)
    assert "secret" not in json.dumps(first)
    assert traces.step_request({**options, "output_dir": "/b"}, {"num_layers": 3}, **asked) == first
    traces._store(first, {"base": {}, "stacks": {}})
    assert traces.remembered(first) is not None
    for other in (
        traces.step_request({**options, "lora_rank": 16}, {"num_layers": 3}, **asked),
        traces.step_request(options, {"num_layers": 4}, **asked),
        traces.step_request(options, {"num_layers": 3}, **{**asked, "batch": 2}),
        traces.step_request(options, {"num_layers": 3}, **asked, like="cpu"),
    ):
        assert traces.remembered(other) is None


def test_nothing_is_traced_twice_and_what_failed_is_tried_again_some_day(private_cache, monkeypatch):
    asked = []

    def child(requests, _timeout):
        asked.append(len(requests))
        return [{"error": "ValueError: no"} for _request in requests]

    monkeypatch.setattr(traces, "_run_child", child)
    one, other = ({"kind": "count", "model": {"width": width}} for width in (1, 2))
    assert [found["error"] for found in traces.ask([one, one, other])] == ["ValueError: no"] * 3
    assert traces.ask([other, one])[0]["error"] == "ValueError: no"
    assert asked == [2], "the same model twice in a pipeline, and a second plan"
    monkeypatch.setattr(traces, "REMEMBERED_FAILURE", -1)
    traces.ask([one])
    assert asked == [2, 1]


def test_why_a_model_is_not_traced_is_said_once_and_in_words_of_its_user(config, monkeypatch):
    failed = {"error": f"OSError: {traces.NOT_NEEDED} does not appear to have\n a file named config.json"}
    monkeypatch.setattr(traces, "ask", lambda requests, **_more: [failed for _request in requests])
    notes = make_plan(training_of(config), MACHINES["gh200-96"]).notes
    assert [note for note in notes if traces.NOT_NEEDED in note] == []
    (why,) = [note for note in notes if "could not be traced" in note]
    assert why.startswith("checkpointed, plain") and "besides its configuration" in why
    failed["error"] = "KeyError: 't5_prompt_embeds'"
    plan = make_plan(training_of(config), MACHINES["gh200-96"])
    assert not any("KeyError" in note for note in plan.notes)
    assert plan.to_json()["untraced"]["plain"] == failed["error"], "for whoever mends it"


def test_how_long_the_whole_run_is(config, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(20):
        (pictures / f"{number}.png").write_bytes(b"x")
    datasets = [{"id": "a", "type": "local", "dataset_type": "image", "instance_data_dir": str(pictures)}]
    (tmp_path / "datasets.json").write_text(json.dumps(datasets))
    data = {"data_backend_config": str(tmp_path / "datasets.json"), "train_batch_size": 2}

    def whole(**values):
        return make_plan(training_of(config, **data, **values), MACHINES["h100"], ranks=2, trace=False).whole

    fixed = whole(max_train_steps=10, gradient_accumulation_steps=3)
    assert (fixed.steps, fixed.samples, fixed.passes) == (10, 120, 6.0)
    epochs = whole(num_train_epochs=2, max_train_steps=0, gradient_accumulation_steps=1)
    assert (epochs.steps, epochs.samples, epochs.passes) == (10, 40, 2.0)
    ramp = {"initial_effective_batch_size": 4, "target_effective_batch_size": 16, "batch_rampup_steps": 8}
    grown = whole(max_train_steps=10, gh200_optimizations={"enable_batch_size_rampup": True, **ramp})
    assert 40 < grown.samples < 160, "between ten of the first and ten of the last"
    assert whole(max_train_steps=0, num_train_epochs=0) is None
    training_of(config, max_train_steps=20, gh200_optimizations={})
    shown = " ".join(run(config, "--machine", "h100", code=1).split())
    assert " of training, " in shown and " before its first step; " in shown
    assert "; 20 steps, 40 samples, 2 passes over the data" in shown
    assert " free here in " in shown, "the disk of the output folder, though the machine is another"
    noted = make_plan(training_of(config, **data), MACHINES["h100"], trace=False).notes
    assert not any("is not here: its bytes" in note for note in noted)
    pictures.rename(tmp_path / "moved")
    noted = make_plan(training_of(config, **data), MACHINES["h100"], trace=False).notes
    assert any(f"{str(pictures)!r} is not here: its bytes" in note for note in noted)


def test_an_h100_is_not_told_of_grace(config):
    shown = run(config, "--machine", "h100", code=1)
    assert "grace" not in shown.lower()
    assert "what would help, what fits first" in shown
    assert "fits: what the model keeps placed by one setting (gh200_optimizations.memory=auto)" in " ".join(
        shown.split()
    )


def test_this_machine_is_what_the_driver_says():
    found = this_machine(driver=MachineDriver(MACHINES["gh200-144"]))
    assert (found.name, found.hbm, found.has_device) == ("this", 144 * 10**9, True)
    assert found.h2d == MACHINES["gh200-144"].h2d
    pool = this_machine(driver=MachineDriver(MACHINES["gb10"]))
    assert (pool.one_pool, pool.rate_sources["grace"]) == (True, "measured: read here")
    assert this_machine(driver=MachineDriver(MACHINES["h100"])).h2d == MACHINES["h100"].h2d
    with pytest.raises(UsageError, match="gh200-96"):
        machine("gh300")


def test_a_rate_that_is_another_machines_has_a_source_of_its_own():
    first = MACHINES["gh200-96"]
    for one in MACHINES.values():
        borrowed = [
            name
            for name in RATES
            if getattr(one, name) != getattr(first, name) and one.rate_sources[name] == first.rate_sources[name]
        ]
        assert borrowed == [], one.name


def test_a_model_family_is_needed(tmp_path):
    with pytest.raises(UsageError, match="model_family"):
        make_plan(configured(tmp_path), MACHINES["gh200-96"], trace=False)


def test_the_page_has_the_table_that_the_script_prints():
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    for line in rows(json.loads(PUBLISHED_TRACES.read_text())["models"]):
        assert line in page


def test_families_are_those_of_the_newest_release():
    """`python scripts/dev/published_sizes.py` renews them, `make docs` the page that names them."""
    known = json.loads(PUBLISHED.read_text())
    assert known["release"] == max(tested_releases(), key=Version)
    if installed_version("simpletuner") == known["release"]:
        assert set(known["families"]) == families()
    assert {plain(model["family"]) for model in known["models"]} <= set(map(plain, known["families"]))


# -- N pictures of M pixels, model X, machine Y ----------------------------------------------------------------------


def asked(*words: object) -> dict:
    return json.loads(command("--model", "flux=black-forest-labs/FLUX.1-dev", *words, "--json").stdout)


@pytest.mark.usefixtures("few_options")
def test_a_question_without_a_configuration_has_an_answer_with_and_without_us():
    found = asked("--pictures", 1000, "--machine", "gh200-96")
    without, with_us = found["without"], found["with"]
    assert found["pictures"] == 1000 and without["fits"] and with_us["fits"]
    assert without["start"]["pictures"] > with_us["start"]["pictures"] > 0
    assert without["start"]["scan"] == with_us["start"]["scan"] == pytest.approx(1.5)
    assert without["a_pass"] > with_us["a_pass"] > 0, "blocks are not computed again where HBM has room"
    assert with_us["rates"]["flops"].startswith("assumed")
    twice = asked("--pictures", 2000, "--machine", "gh200-96")["with"]
    assert twice["a_pass"] == pytest.approx(2 * with_us["a_pass"])
    smaller = asked("--pictures", 1000, "--pixels", 512, "--machine", "gh200-96")["with"]
    assert smaller["a_pass"] < with_us["a_pass"] / 3
    assert smaller["start"]["models"] == with_us["start"]["models"] > 0


@pytest.mark.usefixtures("few_options")
def test_what_does_not_fit_has_no_time():
    found = asked("--pictures", 1000, "--full", "--machine", "gh200-96")
    assert (found["without"]["fits"], found["without"]["a_pass"]) == (False, None)
    assert found["with"]["fits"] and found["with"]["a_pass"] > 0
    shown = command("--model", "flux=black-forest-labs/FLUX.1-dev", "--pictures", 9, "--full", "--machine", "gh200-96")
    assert "does not fit" in shown.stdout and "nothing of this was measured on that machine" in shown.stdout


@pytest.mark.usefixtures("few_options")
def test_a_question_needs_pictures_and_a_family_that_there_is():
    both = ("config.json", "--pictures", 9)
    unknown = ("--pictures", 9, "--model", "nowhere")
    for words, named in (((), "--pictures"), (both, "together"), (unknown, "'nowhere'")):
        refused = command(*words).exception
        assert isinstance(refused, UsageError) and named in f"{refused} {refused.remedy}"
