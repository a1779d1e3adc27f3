"""``gh200 prove``: what counts as on, rounds within the time, the report, what plans learn from it. Nothing trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.bench.prove import page, trials
from simpletuner_gh200.bench.prove.arms import Arm, arms, left_out
from simpletuner_gh200.bench.prove.earlier import against, calibrate, read_earlier
from simpletuner_gh200.bench.prove.page import as_html
from simpletuner_gh200.bench.prove.proving import Proof, machine_json, prove
from simpletuner_gh200.bench.prove.rounds import compare
from simpletuner_gh200.bench.prove.subject import configured_subject
from simpletuner_gh200.bench.prove.trials import Trial, trial
from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.selftest.bench import QUESTIONS
from simpletuner_gh200.errors import ConfigError, UsageError
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.plan.calibration import calibrated, constants_for
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.upstream.importing import ImportVerdict
from tests.unit.bench.prove_runs import BY_NAME, TINY, TOKEN, subject, summary, training


def proof(tmp_path: Path, *, train: trials.Train | None = None, minutes: float = 60, **values: Any) -> Proof:
    context = Context(root=tmp_path, allocate=False, check_import=lambda: ImportVerdict(None))
    context.__dict__["driver"] = NullDriver("no CUDA driver")
    return prove(lambda: subject(**values), tmp_path, minutes=minutes, train=train or training(), context=context)


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
    assert left_out(arm, options={"enable_group_offload"}, gpu=True) is None
    assert left_out(arm, options={"enable_group_offload"}, gpu=False) == "needs a GPU"
    assert left_out(arm, options={"another"}, gpu=True) == "this SimpleTuner has no enable_group_offload"
    assert left_out(BY_NAME["state"], options={"another"}, gpu=False) is None
    swap, there = BY_NAME["upstream-blocks"], {"musubi_blocks_to_swap"}
    assert left_out(swap, options=there, gpu=True, family="flux") is None
    assert left_out(swap, options=there, gpu=True, family="sdxl") == "sdxl has no row of transformer blocks"


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
    assert [row["status"] for row in found.to_json()] == ["ok", "skip", "skip"]


def test_an_arm_that_failed_is_not_tried_again():
    clock = Clock()

    def run(arm: Arm) -> Trial:
        found = clock.run(arm)
        return replace(found, ok=arm.name != "b", told="broken")

    found = compare(THREE, {}, run, seconds=1000, clock=clock)
    assert clock.order.count("b") == 1
    rows = {row["name"]: row for row in found.to_json()}
    assert (rows["b"]["status"], rows["b"]["told"], rows["b"]["vs_stock"]) == ("failed", "broken", None)
    assert rows["c"]["vs_stock"] is not None


def test_an_arm_that_fails_later_is_not_tried_again_either():
    clock = Clock()

    def run(arm: Arm) -> Trial:
        found = clock.run(arm)
        return replace(found, ok=arm.name != "b" or clock.order.count("b") == 1)

    found = compare(THREE, {}, run, seconds=1000, clock=clock)
    assert clock.order.count("b") == 2
    assert clock.order.count("c") == found.rounds == 5


def test_where_every_arm_failed_time_is_not_to_blame():
    clock = Clock()
    found = compare(THREE, {}, lambda arm: replace(clock.run(arm), ok=False), seconds=1000, clock=clock)
    assert found.notes == ["1 of at most 5 rounds: every arm that was tried has failed"]


# -- one run -------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, arm: Arm) -> Path:
    return subject().write(arm, tmp_path / arm.name, steps=8)


def test_a_trial_is_the_median_of_its_steps_without_the_first(tmp_path):
    found = trial(BY_NAME["state"], written(tmp_path, BY_NAME["state"]), 8, training())
    assert (found.ok, found.step, found.data_wait, found.peak_hbm, found.steps) == (True, 1.0, 0.1, 1007, 8)


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
    assert told in found.told


# -- what is trained -----------------------------------------------------------------------------------------------


def test_a_configuration_is_taken_without_anything_of_ours(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    entry = {"id": "mine", "type": "in_memory", "instance_data_dir": str(tmp_path / "pictures"), "in_memory": {}}
    embeds = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "text"}
    (tmp_path / "data.json").write_text(json.dumps([entry, embeds]))
    config = tmp_path / "config.json"
    values = {"model_family": "sdxl", "data_backend_config": str(tmp_path / "data.json"), "push_to_hub": True}
    values |= {"gh200_optimizations": {"use_uvm": True}, "output_dir": str(tmp_path / "mine")}
    config.write_text(json.dumps(values))
    found = configured_subject(config, {})
    assert found.datasets[0]["type"] == "local"
    assert "in_memory" not in found.datasets[0]
    stock = json.loads(found.write(BY_NAME["stock"], tmp_path / "stock", steps=4).read_text())
    assert "gh200_optimizations" not in stock
    assert stock["push_to_hub"] is False
    assert stock["output_dir"] == str(tmp_path / "stock" / "output"), "never that of the configuration"
    caches = json.loads(found.write(BY_NAME["caches"], tmp_path / "caches", steps=4).read_text())
    assert caches["cache_config"]["cache_dir"] == str(tmp_path / "caches" / "packs")
    config.write_text(json.dumps({**values, "gh200_optimizations": {"use_uwm": True}}))
    with pytest.raises(ConfigError, match="use_uvm"):
        configured_subject(config, {})


def test_a_trial_runs_no_program_of_the_users_and_sends_nothing_away(tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    entry = {"id": "mine", "type": "local", "instance_data_dir": str(tmp_path / "pictures")}
    embeds = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "text"}
    (tmp_path / "data.json").write_text(json.dumps([entry, embeds]))
    sending = {"post_upload_script", "post_checkpoint_script", "validation_external_script", "disk_low_script"}
    sending |= {"publishing_config", "webhook_config", "hub_model_id", "push_checkpoints_to_hub", "dynamo_hub_repo_id"}
    values = {"model_family": "sdxl", "data_backend_config": str(tmp_path / "data.json"), "seed": 7}
    values |= dict.fromkeys(sending, "mine") | {"disk_low_action": "script", "validation_method": "external-script"}
    values |= {"initial_effective_batch_size": 4, "target_effective_batch_size": 8, "batch_rampup_steps": 10}
    values |= {"enable_batch_size_rampup": True, "output_dir": str(tmp_path / "out")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    kept = configured_subject(tmp_path / "config.json", {}).values
    gone = {*sending, *OLDER_KEYS, "disk_low_action", "validation_method"}
    assert not gone & kept.keys()
    assert kept["seed"] == 7

    seen: dict[str, str] = {}
    monkeypatch.setattr(trials.subprocess, "run", lambda _command, env, **_options: seen.update(env))
    monkeypatch.setenv("SIMPLETUNER_PUBLISH_FINAL_ARTIFACTS", "true")
    monkeypatch.setenv("SIMPLETUNER_WEBHOOK_CONFIG", "{}")
    assert trials.by_command(tmp_path / "config.json", tmp_path / "log") is None
    assert seen
    assert not {"SIMPLETUNER_PUBLISH_FINAL_ARTIFACTS", "SIMPLETUNER_WEBHOOK_CONFIG"} & seen.keys()


# -- the report ----------------------------------------------------------------------------------------------------


def test_the_report_has_every_arm_and_names_nobody(tmp_path):
    told = proof(tmp_path, hub_model_id="somebody/secret").to_json()
    rows = {row["name"]: row for row in told["ab"]}
    assert [name for name, row in rows.items() if row["status"] == "ok"] == [
        "stock",
        "caches",
        "state",
        "activations",
        "recompute",
    ]
    assert rows["caches"]["vs_stock"] == 0.5
    assert len(rows["caches"]["runs"]) == told["rounds"] == 5
    assert rows["upstream-groups"]["told"] == "needs a GPU"
    assert told["link"] == {"h2d": None, "d2h": None}
    assert (told["ok"], told["complete"], told["emulated"]) == (True, True, False)
    text = json.dumps(told) + as_html(told)
    for hidden in (TOKEN, "somebody", str(tmp_path), "pci_address"):
        assert hidden not in text
    assert any("no GPU" in note for note in told["notes"])
    for part, checks in ((told["doctor"], told["doctor"]["checks"]), (told["selftest"], told["selftest"]["checks"])):
        assert part["summary"]["pass"] == sum(check["status"] == "pass" for check in checks) > 0
    assert f"self-test {told['selftest']['summary']['pass']} passed" in as_html(told)


def test_the_last_words_of_a_run_do_not_tell_whose_machine_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "nid0042.cluster.example.org")
    monkeypatch.setenv("USER", "ada")
    said = "cannot reach nid0042.cluster.example.org (nid0042) for ada; adamw is fine"
    failing = training(lambda arm, told: {**told, "status": "failed", "reason": said} if arm.name == "state" else told)
    context = Context(root=tmp_path, allocate=False, check_import=lambda: ImportVerdict(None))
    context.__dict__["driver"] = NullDriver()
    told = prove(subject, tmp_path, minutes=60, train=failing, context=context).to_json()
    assert "nid0042" not in json.dumps(told)
    row = next(row for row in told["ab"] if row["name"] == "state")
    assert row["told"].endswith("cannot reach <name> (<name>) for <name>; adamw is fine")


def test_answers_are_told_as_a_person_would(tmp_path):
    told = proof(tmp_path).to_json()
    told["questions"] |= {"1": {"host": {"copy_gb_per_s": 340.00000659, "location": None}, "vmm": {"refused": True}}}
    text = as_html(told)
    assert "<td>host (copy gb per s 340); vmm (refused yes)</td>" in text
    assert "{" not in text[text.index("<main>") :].replace("&#x27;", "'"), "no dictionary is printed as one"


def test_every_question_is_told_in_words():
    assert page.QUESTIONS.keys() == {str(number) for number in QUESTIONS}


def test_a_machine_is_a_kind_not_one_of_it():
    gpu = {"name": "GH200 480GB", "memory_bytes": 96, "pci_address": "0009:01:00.0", "pci_device": "0x2342"}
    seen = {"host": "node17", "date": "now", "architecture": "aarch64", "cores": 72, "gpus": [gpu], "memory": None}
    told = machine_json(seen)
    assert not {"host", "date"} & told.keys()
    assert "pci_address" not in told["gpus"][0]
    assert told["kind"] == machine_json({**seen, "host": "node18", "date": "then"})["kind"]
    assert told["kind"] != machine_json({**seen, "cores": 144})["kind"]


def test_a_failed_arm_fails_the_proof_and_is_named(tmp_path):
    def broken(arm: Arm, told: dict[str, Any]) -> dict[str, Any]:
        return {**told, "details": {}} if arm.name == "activations" else told

    found = proof(tmp_path, train=training(broken))
    told = found.to_json()
    assert not told["ok"]
    assert "failed: activations" in as_html(told)


def test_where_the_first_run_fails_no_arm_is_tried(tmp_path):
    told = proof(tmp_path, train=training(lambda _arm, _told: None)).to_json()
    assert not told["ok"]
    assert {row["name"]: row["status"] for row in told["ab"]}["caches"] == "skip"
    assert told["notes"][0] == "the first run failed: no arm was tried"


def test_words_from_outside_are_escaped(tmp_path):
    told = proof(tmp_path).to_json()
    told["ab"][0]["told"] = "<script>alert(1)</script>"
    assert "<script>" not in as_html(told)


# -- earlier reports, and plans ------------------------------------------------------------------------------------


def test_reruns_are_compared_number_by_number(tmp_path):
    now = proof(tmp_path).to_json()
    before = json.loads(json.dumps(now))
    now["link"], before["link"] = {"h2d": 300.0, "d2h": None}, {"h2d": 400.0, "d2h": 200.0}
    found = against(now, before)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["link/h2d"]["ratio"] == 0.75
    assert "link/d2h" not in rows, "one of the two has it not"
    assert rows["ab/caches/step_s"]["ratio"] == 1.0
    assert found["notes"] == []
    other = {**before, "machine": {"kind": "x"}, "model": {"title": "another"}}
    assert len(against(now, other)["notes"]) == 2


@pytest.mark.parametrize(("content", "said"), [("{", "is not JSON"), ("{}", "is no report"), (None, "cannot read")])
def test_what_is_no_earlier_report_is_refused(tmp_path, content, said):
    file = tmp_path / "earlier.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=said):
        read_earlier(file)


def test_plans_for_this_machine_use_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = replace(MACHINES["gh200-96"], name="this", title="GH200 480GB")
    told = proof(tmp_path).to_json()
    told["link"] = {"h2d": 401.0, "d2h": 160.0}
    told["questions"] = {"2": {"host": {"read": 310.0, "write": 1.0}, "error": "x"}, "5": {"beside_torch_bytes": 2**30}}
    assert calibrate({**told, "emulated": True}, here) == []
    assert calibrated(here).h2d == here.h2d
    assert calibrate(told, here) == ["h2d", "d2h", "in_place", "context"]
    plans = calibrated(here)
    assert (plans.h2d, plans.d2h, plans.in_place) == (401e9, 160e9, 310e9)
    assert plans.sources["h2d"] == "measured: gh200 prove"
    assert constants_for(here).context == 2**30


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_both_reports_and_ends_with_what_came_of_it(tmp_path, monkeypatch):
    from simpletuner_gh200.bench.prove import proving
    from simpletuner_gh200.bench.prove import subject as subjects

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(subjects, "tiny_subject", lambda _folder: subject())
    monkeypatch.setattr(proving.prove, "__kwdefaults__", {**proving.prove.__kwdefaults__, "train": training()})
    folder = tmp_path / "out"
    first = CliRunner().invoke(build_app(), ["prove", "--folder", str(folder), "--json"], catch_exceptions=False)
    told = json.loads(first.stdout.splitlines()[-1])
    assert first.exit_code == (0 if told["ok"] else 1)
    assert told == json.loads((folder / "gh200_prove.json").read_text())
    assert "Runs" in (folder / "gh200_prove.html").read_text()
    again = ["prove", "--folder", str(tmp_path / "again"), "--against", str(folder / "gh200_prove.json")]
    second = CliRunner().invoke(build_app(), again, catch_exceptions=False)
    assert "ab/stock/step_s" in second.stdout
    assert "not measured" not in second.stdout, "what was not measured is left out, and a note says why"
    assert "…" not in second.stdout, "no reason is cut short"
    assert "to send back" in second.stdout
