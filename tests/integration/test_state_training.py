"""Model state in Grace in real SimpleTuner: the same catching, with host memory standing in, and no number changed."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from simpletuner_gh200.model.optimizer_table import optimizers
from tests.integration.workbench import ramp

MEASURE = Path(__file__).resolve().parents[2] / "scripts" / "dev" / "measure_optimizers.py"
WRITE_DOWN = """
from pathlib import Path
Path(os.environ["SIMPLETUNER_GH200_SUMMARY_DIR"], "rank-0.json").write_text(json.dumps(measured()))
"""
SHARDED = Path(__file__).with_name("probe_state_sharded.py")
UVM = {"use_uvm": True, "uvm_min_tensor_kb": 0}
FULL = {"model_type": "full", "lora_type": None, "lora_rank": None, "optimizer": "torch-adamw", "learning_rate": 1e-4}


def state_of(run, rank: int = 0) -> dict:
    assert run.ok, run.explain()
    found = run.summaries[rank]["details"]["state"]
    assert found["mechanism"] == "host memory standing in"
    assert found["tensors"] > 0
    assert found["bytes"] > 0
    assert found["pool"]["held"] == found["bytes"], "what is counted is what is held"
    return found


@pytest.mark.one_release("3.")
def test_optimizer_state_and_ema_of_a_lora_live_in_the_pool(workbench):
    workbench.configure(use_ema=True, max_train_steps=4)
    stock = workbench.known(stock=True)
    assert stock.ok, stock.explain()
    workbench.configure(blocks={"gh200_optimizations": UVM}, use_ema=True, max_train_steps=4)
    run = workbench.train()
    found = state_of(run)
    assert run.losses == stock.losses
    assert run.same_lora(stock)
    lora = sum(tensor.numel() * 4 for tensor in run.lora().values())
    assert found["of"]["optimizer"]["bytes"] >= 2 * lora, "two moments for each trained weight"
    assert found["of"]["ema"]["bytes"] >= lora
    left = json.loads((run.output / "gh200" / "summary.json").read_text())
    assert left["status"] == "completed"
    assert left["details"]["state"] == found, "what the ranks tell the launcher is what is left in the output folder"


@pytest.mark.one_release("4.")
def test_a_full_fine_tune_streams_its_state_and_resumes(workbench):
    """Bit for bit against stock, over the first steps and over those after a resume."""
    runs = {}
    for name, blocks in (("stock", {}), ("ours", {"gh200_optimizations": UVM | {"uvm_streaming": "on"}})):
        workbench.configure(blocks=blocks, max_train_steps=3, checkpoint_step_interval=3, **FULL)
        first = workbench.train(stock=name == "stock")
        assert first.ok, first.explain()
        workbench.set_aside(first)
        workbench.configure(blocks=blocks, max_train_steps=5, checkpoint_step_interval=3, **FULL)
        workbench.go_on_from(first)
        second = workbench.train(stock=name == "stock")
        assert second.ok, second.explain()
        runs[name] = (first, second)
        workbench.restore()
    assert runs["ours"][0].losses == runs["stock"][0].losses
    assert runs["ours"][1].losses == runs["stock"][1].losses
    assert len(runs["ours"][1].losses[0]) == 2, "it did resume"
    first, second = (state_of(run) for run in runs["ours"])
    assert first["streamed_steps"] == 2, "all but the one that made the state"
    assert second["streamed_steps"] == 2, "all: what was loaded is in the pool"
    assert second["of"]["optimizer"]["bytes"] == first["of"]["optimizer"]["bytes"]


@pytest.mark.matrix
@pytest.mark.one_release("4.")
def test_two_ranks_with_a_ramp_resume_into_the_pool(workbench):
    runs = {}
    for name, block in (("plain", ramp(4, 8, 3)), ("pooled", ramp(4, 8, 3, **UVM))):
        for steps in (2, 4):
            workbench.configure(
                blocks={"gh200_optimizations": block}, max_train_steps=steps, checkpoint_step_interval=2
            )
            if steps == 4:
                workbench.go_on_from(runs[name, 2])
            run = workbench.train(world=2)
            assert run.ok, run.explain()
            workbench.set_aside(run)
            runs[name, steps] = run
    for steps in (2, 4):
        assert runs["pooled", steps].losses == runs["plain", steps].losses
        for rank in range(2):
            assert state_of(runs["pooled", steps], rank)["of"]["optimizer"]["tensors"] > 0
    assert runs["pooled", 4].same_lora(runs["plain", 4])


@pytest.mark.one_release("4.")
def test_sharded_states_of_fsdp2_are_caught_by_their_local_tensors(workbench):
    run = workbench.execute(SHARDED.read_text(), world=2)
    assert run.ok, run.explain()
    for rank in range(2):
        found = run.summaries[rank]
        for kind, steps in (("caught", 0), ("streamed", 3)):
            expected = {"same": True, "dtensors": True, "in_pool": 8, "beside": 0, "streamed_steps": steps}
            assert found[kind] == expected, (rank, kind)


def test_every_optimizer_of_the_table_keeps_its_bits(workbench):
    """Plain, caught, streamed and resumed; with accumulation, clipping and a late first gradient."""
    release = importlib.metadata.version("simpletuner")
    run = workbench.execute(MEASURE.read_text() + WRITE_DOWN)
    assert run.ok, run.explain()
    rows = run.summaries[0]
    table = optimizers()
    assert rows.keys() <= table.keys(), "an optimizer that the table does not know: generate it anew"
    for name, row in rows.items():
        facts = table[name]
        assert ("fails" not in row) == (release in facts.releases), (name, row)
        if "fails" in row:
            continue
        assert row["same"], name
        assert row["plain_dicts"], name
        assert not row["unaccounted"], (name, row["unaccounted"])
        assert row["resumes"] is not False, name
        assert row["streams"] or not facts.streamable, name
        assert row["bf16"]["bytes"] == pytest.approx(facts.bytes_bf16), name
        assert row["bf16"]["passes"] == pytest.approx([facts.reads, facts.writes], abs=0.2), name
    ran = sum("fails" not in row for row in rows.values())
    assert ran >= 29, rows
