"""``gh200 prove``: what counts as on, rounds within the time, the report, what plans learn from it. Nothing trains."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.bench.prove import comparing
from simpletuner_gh200.bench.prove import proof as proofs
from simpletuner_gh200.bench.prove.arms import Arm, arms, configured_subject
from simpletuner_gh200.bench.prove.comparing import Train, Trial, compare, trial
from simpletuner_gh200.bench.prove.proof import calibrate, machine_json, prove
from simpletuner_gh200.bench.prove.words import verdict
from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.selftest.run import selftest
from simpletuner_gh200.errors import ConfigError
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.plan.calibration import calibrated
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.upstream.importing import ImportVerdict
from tests.unit.bench.prove_runs import BY_NAME, TINY, TOKEN, subject, summary, training


@pytest.fixture(scope="module")
def tested():
    """The self-test, once for all proofs."""
    return selftest(NullDriver("no CUDA driver"))


@pytest.fixture
def proof(tmp_path, tested, monkeypatch):
    monkeypatch.setattr(proofs, "selftest", lambda _driver: tested)

    def make(*, train: Train | None = None, **values: Any) -> dict[str, Any]:
        context = Context(root=tmp_path, allocate=False, check_import=lambda: ImportVerdict(None))
        context.__dict__["driver"] = NullDriver("no CUDA driver")
        return prove(lambda: subject(**values), tmp_path, minutes=60, train=train or training(), context=context)

    return make


# -- arms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", TINY, ids=lambda arm: arm.name)
def test_an_arm_that_did_what_it_says_says_what_shows_it(arm):
    on, told = arm.verdict(summary(arm))
    assert on
    assert told


@pytest.mark.parametrize("name", ["caches", "state", "activations"])
def test_an_arm_that_was_silently_off_has_failed(name):
    arm = BY_NAME[name]
    asleep = summary(arm)
    asleep["details"] = {name: {}}
    assert arm.verdict(asleep) == (False, f"{name} was on and did nothing")
    off = summary(BY_NAME["stock"])
    assert arm.verdict(off) == (False, f"{name} is off: not asked for")
    assert BY_NAME["stock"].verdict(summary(arm)) == (False, f"also on: {name}")


def test_state_and_activations_leave_nothing_in_place_on_a_tiny_model():
    blocks = {name: BY_NAME[name].settings["gh200_optimizations"] for name in ("state", "activations")}
    assert blocks["state"] == {"use_uvm": True, "uvm_access_pattern": "cpu_first", "uvm_min_tensor_kb": 0}
    assert blocks["activations"] == {"activations": "grace", "activation_min_tensor_kb": 0}
    large = {arm.name: arm for arm in arms(tiny=False, full=True)}
    assert "uvm_min_tensor_kb" not in large["state"].settings["gh200_optimizations"]


def test_upstreams_offloaders_need_their_option_and_a_gpu():
    arm = BY_NAME["upstream-groups"]
    assert arm.left_out(options={"enable_group_offload"}, gpu=True) is None
    assert arm.left_out(options={"enable_group_offload"}, gpu=False) == "needs a GPU"
    assert arm.left_out(options={"another"}, gpu=True) == "this SimpleTuner has no enable_group_offload"
    assert BY_NAME["state"].left_out(options={"another"}, gpu=False) is None
    swap, there = BY_NAME["upstream-blocks"], {"musubi_blocks_to_swap"}
    assert swap.left_out(options=there, gpu=True, family="flux") is None
    assert swap.left_out(options=there, gpu=True, family="sdxl") == "sdxl has no row of transformer blocks"


# -- rounds --------------------------------------------------------------------------------------------------------


class Clock:
    """Every run takes ten seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def run(self, arm: Arm) -> Trial:
        self.now += 10
        self.order.append(arm.name)
        return Trial(True, "", 10, step=self.now)

    def __call__(self) -> float:
        return self.now


THREE = [Arm(name, name) for name in ("stock", "b", "c")]


def test_rounds_are_interleaved_and_begin_with_another_arm_each():
    clock = Clock()
    found = compare(THREE, {}, clock.run, seconds=1000, clock=clock)
    assert clock.order == [
        *["stock", "b", "c"],
        *["b", "c", "stock"],
        *["c", "stock", "b"],
        *["stock", "b", "c", "b", "c", "stock"],
    ]
    assert (found.rounds, found.notes) == (5, [])


def test_few_minutes_make_fewer_rounds_and_say_so():
    clock = Clock()
    found = compare(THREE, {}, clock.run, seconds=75, clock=clock)
    assert found.rounds == 2, "a third would have ended after 90 seconds"
    assert clock.now == 60
    assert "2 of at most 5 rounds" in found.notes[0]
    assert found.step("stock") == 35.0, "of 10 and 60"


def test_an_arm_for_which_there_is_no_time_is_not_begun():
    clock = Clock()
    found = compare(THREE, {"c": "needs a GPU"}, clock.run, seconds=15, longest=10, clock=clock)
    assert clock.order == ["stock"]
    assert found.out_of_time == ["b"]
    assert found.skipped["c"] == "needs a GPU"
    assert [found.row(arm)["status"] for arm in THREE] == ["ok", "skip", "skip"]


@pytest.mark.parametrize("good", [0, 1])
def test_an_arm_that_failed_is_not_tried_again(good):
    clock = Clock()

    def run(arm: Arm) -> Trial:
        found = clock.run(arm)
        return replace(found, ok=arm.name != "b" or clock.order.count("b") <= good, reason="broken")

    found = compare(THREE, {}, run, seconds=1000, clock=clock)
    assert clock.order.count("b") == good + 1
    assert clock.order.count("c") == found.rounds == 5
    failed = found.row(THREE[1])
    assert (failed["status"], failed["told"], failed["vs_stock"] is None) == ("failed", "broken", not good)
    assert found.row(THREE[2])["vs_stock"] is not None


# -- one run -------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, arm: Arm) -> Path:
    return subject().write(arm, tmp_path / arm.name, steps=8)


def test_a_trial_is_the_median_of_its_steps_without_the_first(tmp_path):
    found = trial(BY_NAME["state"], written(tmp_path, BY_NAME["state"]), 8, training())
    assert (found.ok, found.step, found.data_wait, found.peak_hbm) == (True, 1.0, 0.1, 1007)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda _arm, _told: None, "the run left no summary"),
        (lambda _arm, told: {**told, "global_step": 3}, "reached step 3 of 8"),
        (lambda _arm, told: {**told, "status": "failed", "reason": "out of memory"}, "out of memory"),
        (lambda _arm, told: {**told, "details": {}}, "state was on and did nothing"),
    ],
)
def test_a_run_that_did_not_do_it_does_not_count(tmp_path, change, told):
    found = trial(BY_NAME["state"], written(tmp_path, BY_NAME["state"]), 8, training(change))
    assert not found.ok
    assert told in found.reason


# -- what is trained -----------------------------------------------------------------------------------------------


def configured(folder: Path, values: dict[str, Any], **entry: Any) -> Path:
    """A configuration over one picture and a cache of text embeds."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "a.png").write_bytes(b"x")
    images = {"id": "mine", "type": "local", "instance_data_dir": str(folder / "pictures"), **entry}
    embeds = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "text"}
    (folder / "data.json").write_text(json.dumps([images, embeds]))
    given = {"model_family": "sdxl", "data_backend_config": str(folder / "data.json"), **values}
    (folder / "config.json").write_text(json.dumps({"output_dir": str(folder / "mine"), **given}))
    return folder / "config.json"


def test_a_configuration_is_taken_without_anything_of_ours(tmp_path):
    values = {"push_to_hub": True, "gh200_optimizations": {"use_uvm": True}}
    found = configured_subject(configured(tmp_path, values, type="in_memory", in_memory={}), {})
    assert found.datasets[0]["type"] == "local"
    assert "in_memory" not in found.datasets[0]
    stock = json.loads(found.write(BY_NAME["stock"], tmp_path / "stock", steps=4).read_text())
    assert "gh200_optimizations" not in stock
    assert stock["push_to_hub"] is False
    assert stock["output_dir"] == str(tmp_path / "stock" / "output"), "never that of the configuration"
    caches = json.loads(found.write(BY_NAME["caches"], tmp_path / "caches", steps=4).read_text())
    assert caches["cache_config"]["cache_dir"] == str(tmp_path / "caches" / "packs")
    with pytest.raises(ConfigError, match="use_uvm"):
        configured_subject(configured(tmp_path, {"gh200_optimizations": {"use_uwm": True}}), {})


def test_a_trial_runs_no_program_of_the_users_and_sends_nothing_away(tmp_path, monkeypatch):
    sending = {"post_upload_script", "post_checkpoint_script", "validation_external_script", "disk_low_script"}
    sending |= {"publishing_config", "webhook_config", "hub_model_id", "push_checkpoints_to_hub", "dynamo_hub_repo_id"}
    values = dict.fromkeys(sending, "mine") | {"disk_low_action": "script", "validation_method": "external-script"}
    values |= {"initial_effective_batch_size": 4, "target_effective_batch_size": 8, "batch_rampup_steps": 10}
    config = configured(tmp_path, {**values, "enable_batch_size_rampup": True, "seed": 7})
    kept = configured_subject(config, {}).values
    assert not {*sending, *OLDER_KEYS, "disk_low_action", "validation_method"} & kept.keys()
    assert kept["seed"] == 7

    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nenv\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setenv("SIMPLETUNER_PUBLISH_FINAL_ARTIFACTS", "true")
    monkeypatch.setenv("SIMPLETUNER_WEBHOOK_CONFIG", "{}")
    assert comparing.by_command(config, tmp_path / "log") is None
    seen = (tmp_path / "log").read_text()
    assert "TOKENIZERS_PARALLELISM=false" in seen
    assert not re.search("SIMPLETUNER_PUBLISH_FINAL_ARTIFACTS|SIMPLETUNER_WEBHOOK_CONFIG", seen)


# -- the report ----------------------------------------------------------------------------------------------------


def test_the_report_has_every_arm_and_names_nobody(proof, tmp_path):
    found = proof(hub_model_id="somebody/secret")
    rows = {row["name"]: row for row in found["ab"]}
    trained = [name for name, row in rows.items() if row["status"] == "ok"]
    assert trained == ["stock", "caches", "state", "activations", "recompute"]
    assert rows["caches"]["vs_stock"] == 0.5
    assert len(rows["caches"]["runs"]) == found["rounds"] == 5
    assert rows["upstream-groups"]["told"] == "needs a GPU"
    assert found["link"] == {"h2d": None, "d2h": None}
    assert (found["ok"], found["complete"], found["emulated"]) == (True, True, False)
    text = json.dumps(found)
    for hidden in (TOKEN, "somebody", str(tmp_path)):
        assert hidden not in text
    assert any("no GPU" in note for note in found["notes"])
    for part in (found["doctor"], found["selftest"]):
        assert part["summary"]["pass"] == sum(check["status"] == "pass" for check in part["checks"]) > 0
    assert f"self-test {found['selftest']['summary']['pass']} passed" in verdict(found)


def test_the_last_words_of_a_run_do_not_tell_whose_machine_it_was(proof, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "nid0042.cluster.example.org")
    monkeypatch.setenv("USER", "ada")
    words = "cannot reach nid0042.cluster.example.org (nid0042) for ada; adamw is fine"
    found = proof(
        train=training(lambda arm, left: {**left, "status": "failed", "reason": words} if arm.feature else left)
    )
    assert "nid0042" not in json.dumps(found)
    row = next(row for row in found["ab"] if row["name"] == "state")
    assert row["told"].endswith("cannot reach <name> (<name>) for <name>; adamw is fine")


def test_a_machine_is_a_kind_not_one_of_it():
    seen = {"host": "node17", "date": "now", "architecture": "aarch64", "cores": 72, "gpus": [], "memory": None}
    kind = machine_json(seen)
    assert not {"host", "date"} & kind.keys()


def test_where_the_first_run_fails_no_arm_is_tried(proof):
    found = proof(train=training(lambda _arm, _left: None))
    assert not found["ok"]
    assert {row["name"]: row["status"] for row in found["ab"]}["caches"] == "skip"
    assert found["notes"][0] == "the first run failed: no arm was tried"


# -- plans -----------------------------------------------------------------------------------------------------------


def test_plans_for_this_machine_use_what_was_measured(proof, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = replace(MACHINES["gh200-96"], name="this", title="GH200 480GB")
    told = proof()
    told["link"] = {"h2d": 401.0, "d2h": 160.0}
    told["questions"] = {"2": {"host": {"read": 310.0, "write": 1.0}, "error": "x"}, "5": {"beside_torch_bytes": 2**30}}
    assert calibrate({**told, "emulated": True}, here) == []
    assert calibrated(here).h2d == here.h2d
    assert calibrate(told, here) == ["h2d", "d2h", "in_place", "context"]
    plans = calibrated(here)
    assert (plans.h2d, plans.d2h, plans.in_place) == (401e9, 160e9, 310e9)
    assert plans.sources["h2d"] == "measured: gh200 prove"
    assert calibrated(here).context == 2**30


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_its_report_and_ends_with_what_came_of_it(tested, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("simpletuner_gh200.bench.prove.arms.tiny_subject", lambda _folder: subject())
    monkeypatch.setattr(proofs, "selftest", lambda _driver: tested)
    monkeypatch.setattr(prove, "__kwdefaults__", {**prove.__kwdefaults__, "train": training()})
    folder = tmp_path / "out"
    first = CliRunner().invoke(build_app(), ["prove", "--folder", str(folder), "--json"], catch_exceptions=False)
    found = json.loads(first.stdout.splitlines()[-1])
    assert first.exit_code == (0 if found["ok"] else 1)
    assert found == json.loads((folder / "gh200_prove.json").read_text())
    second = CliRunner().invoke(build_app(), ["prove", "--folder", str(tmp_path / "again")], catch_exceptions=False)
    assert "not measured" not in second.stdout, "what was not measured is left out, and a note says why"
    assert "…" not in second.stdout, "no reason is cut short"
    assert "to send back" in second.stdout
