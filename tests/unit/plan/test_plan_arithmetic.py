"""The table of a plan: each input changed once, and the right numbers move, no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpletuner_gh200.memory.ceilings import activations_allowance, device_headroom
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.model.optimizer_table import optimizers
from simpletuner_gh200.plan.changes import changes, cheapest, fastest, options
from simpletuner_gh200.plan.deciding import Move, decide, moves
from simpletuner_gh200.plan.evaluation import Evaluated, evaluate
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.placing import place
from simpletuner_gh200.units import GIB
from tests.unit.plan.plan_samples import BILLION, BLOCKS, facts, sizes, trace

MACHINE = MACHINES["gh200-96"]


def table(run=None, known=None, machine=MACHINE) -> Evaluated:
    return evaluate(run or facts(), known or sizes(), machine)


def held(found: Evaluated) -> dict[tuple[str, str, str | None], int]:
    """(what, pool, phase) -> bytes; fragmentation follows from the others."""
    totals: dict[tuple[str, str, str | None], int] = {}
    for row in found.rows:
        if row.what != "fragmentation":
            key = (row.what, row.pool, row.phase)
            totals[key] = totals.get(key, 0) + row.bytes
    return totals


def moved(run=None, known=None, **more) -> dict[tuple[str, str], int]:
    """What a change moves: (what, pool) -> the largest difference over phases."""
    before, after = held(table()), held(table(run, known, **more))
    differences: dict[tuple[str, str], int] = {}
    for key in before.keys() | after.keys():
        difference = after.get(key, 0) - before.get(key, 0)
        if difference and abs(difference) > abs(differences.get(key[:2], 0)):
            differences[key[:2]] = difference
    return differences


def test_the_sum_of_a_full_run():
    found = held(table())
    assert found["weights", "hbm", "train"] == 20 * BILLION
    assert found["gradients", "hbm", "train"] == 20 * BILLION
    assert found["optimizer", "hbm", "train"] == 60 * BILLION, "adamw_bf16 keeps 6 bytes for each parameter"
    assert found["text_encoder", "hbm", "cache"] == 2 * BILLION
    assert found["vae work", "hbm", "cache"] == GIB
    assert found["vae work", "hbm", "validate"] == 2 * GIB
    assert found["datasets", "grace", None] == 3 * GIB
    assert found["checkpoints", "disk", None] == 80 * BILLION


CHECKPOINTS = "checkpoints/disk checkpoint/disk"
CPU_FIRST = {"state_in_grace": True, "state_pattern": "cpu_first"}
MUTATIONS = [
    ("another optimizer", {"optimizer": "torch-adamw"}, f"optimizer/hbm {CHECKPOINTS}"),
    ("ema on the CPU", {"ema": True}, f"ema/grace activations/hbm checkpoint/grace {CHECKPOINTS}"),
    (
        "ema on the device, one by one",
        {"ema": True, "ema_on_device": True, "ema_foreach": False},
        f"ema/hbm checkpoint/grace {CHECKPOINTS}",
    ),
    ("a larger batch", {"batch": 2}, "activations/hbm"),
    ("gradients dropped between steps", {"drops_gradients": True}, "gradients/hbm activations/hbm"),
    ("no checkpointing", {"checkpointing": False}, "activations/hbm"),
    ("state in Grace", CPU_FIRST, "optimizer/hbm optimizer/grace"),
    ("unified caches", {"unified": {"vae": True, "text": True}}, "caches/grace buffers/grace packs/disk"),
    ("no validation", {"validates": False}, "weights/hbm gradients/hbm optimizer/hbm vae/hbm vae-work/hbm"),
    ("text encoded when it is needed", {"encoders_stay": True}, "text_encoder/hbm"),
    ("images encoded when they are needed", {"vae_stays": True}, "vae/hbm"),
    ("a larger VAE batch", {"vae_batch": 4}, "vae-work/hbm"),
    ("more checkpoints kept", {"checkpoints": 3}, "checkpoints/disk"),
    ("checkpoints saved to memory", {"behind": True}, "checkpoints/grace"),
]


@pytest.mark.parametrize(("changed", "rows"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_a_setting_moves_its_rows_and_no_others(changed, rows):
    found = {f"{what.replace(' ', '-')}/{pool}" for what, pool in moved(facts(**changed))}
    assert found == set(rows.split())


def test_a_checkpoint_in_memory_is_there_until_the_disk_has_it_its_weights_twice_while_it_is_saved():
    found = held(table(facts(behind=True)))
    assert found["checkpoints", "grace", "save"] == 80 * BILLION + 20 * BILLION
    assert found["checkpoints", "grace", "train"] == found["checkpoints", "grace", "save"]


def test_state_leaves_room_for_the_context_in_hbm():
    run = facts(state_in_grace=True)
    before = place(run, sizes(), MACHINE).state_in_hbm
    after = place(run, sizes(), replace(MACHINE, context=MACHINE.context + 4 * GIB)).state_in_hbm
    assert 0 < after < before == after + 4 * GIB


@pytest.mark.parametrize(
    ("changed", "copies"),
    [
        ({}, 2),
        ({"ema_foreach": False}, 1),
        ({"ema_on_device": True}, 1),
        (CPU_FIRST, 1),
        ({**CPU_FIRST, "ema_foreach": False}, 0),
    ],
)
def test_an_ema_update_takes_hbm_for_shadows_that_come_and_for_the_copy_of_foreach(changed, copies):
    usual = held(table())["activations", "hbm", "train"]
    found = held(table(facts(ema=True, **changed)))["activations", "hbm", "train"]
    assert found == max(copies * 20 * BILLION, usual)


def test_state_leaves_room_for_the_ema_update():
    run = facts(state_in_grace=True, ema=True)
    alone = place(replace(run, ema=False), sizes(), MACHINE)
    updated = place(run, sizes(), MACHINE)
    assert alone.state_in_hbm == updated.state_in_hbm > 0, "one copy, as the optimizer's own step takes"
    assert evaluate(run, sizes(), MACHINE).held("train", "hbm") <= MACHINE.hbm


def test_gradients_are_there_in_the_next_forward_pass_unless_a_step_drops_them():
    plain = facts(checkpointing=False)
    kept = place(plain, sizes(), MACHINE).step
    dropped = place(replace(plain, drops_gradients=True), sizes(), MACHINE).step
    window = place(replace(plain, drops_gradients=True, accumulation=2), sizes(), MACHINE).step
    saved = BLOCKS * 2 * GIB
    assert kept.gradients + kept.transient == saved + 20 * BILLION, "zeros take as much room as gradients"
    assert dropped.gradients + dropped.transient == saved, "as gradients come, what was saved goes"
    assert window.gradients + window.transient == saved + 20 * BILLION


def test_sizes_move_what_they_stand_for():
    data = replace(sizes().data, held=9 * GIB)
    assert moved(known=sizes(data=data)) == {("datasets", "grace"): 6 * GIB}
    assert moved(known=sizes(vae_work={"encode": 2 * GIB, "decode": 2 * GIB})) == {("vae work", "hbm"): GIB}
    assert moved(known=sizes(encoders=())) == {("text_encoder", "hbm"): -2 * BILLION}
    longer = replace(trace(checkpointed=True).stacks["blocks"], count=BLOCKS + 1)
    deeper = replace(trace(checkpointed=True), stacks={"blocks": longer})
    assert moved(known=sizes(traces={True: deeper}))["weights", "hbm"] == BILLION
    larger = replace(MACHINE, context=4 * GIB)
    assert moved(machine=larger) == {("context", "hbm"): 4 * GIB - MACHINE.context}


def test_a_quantised_base_model_shrinks_the_frozen_weights_alone():
    lora = facts(full=False)
    frozen = trace(checkpointed=True)
    stack = frozen.stacks["blocks"]
    each = replace(stack.each, trained=1000, trained_bytes=2000, gradients=2000)
    adapted = replace(
        frozen,
        base=replace(frozen.base, trained=2000, trained_bytes=4000),
        stacks={"blocks": replace(stack, each=each)},
    )
    known = sizes(traces={True: adapted})
    plain = place(lora, known, MACHINE).step.weights
    small = place(replace(lora, base_precision="int8-quanto"), known, MACHINE).step.weights
    assert 0.5 < small / plain < 0.53


# -- activations in Grace, as the run decides --------------------------------------------------------------------

AWAY = {**CPU_FIRST, "activations": "auto"}


def test_checkpointing_gives_way_to_activations_in_grace_block_by_block():
    found = place(facts(checkpointing=True, **AWAY), sizes(), MACHINE)
    assert found.step.saved == BLOCKS * 2 * GIB, "as without checkpointing"
    assert found.mix is not None
    assert all(block.recomputable for block in found.step.blocks)
    plain = place(facts(checkpointing=False, **AWAY), sizes(), MACHINE)
    assert not any(block.recomputable for block in plain.step.blocks), "SimpleTuner checkpoints nothing then"
    pool = place(facts(checkpointing=True, **AWAY), sizes(), MACHINES["gb10"])
    assert (pool.mix, pool.step.saved) == (None, BLOCKS * GIB // 16), "one pool: checkpointed as ever"


@pytest.mark.parametrize("dropped", [True, False])
def test_what_stays_of_a_forward_pass_has_room_beside_what_is_held_then(dropped):
    tight = replace(MACHINE, hbm=70 * 10**9)
    evaluated = evaluate(facts(checkpointing=False, drops_gradients=dropped, **AWAY), sizes(), tight)
    found = evaluated.placed
    assert found.mix is not None
    held_then = found.step.weights + found.step.gradients * (not dropped)
    room = tight.hbm - device_headroom(tight.hbm) - tight.context
    assert held_then + found.step.forward - found.mix.offloaded <= room
    assert evaluated.held("train", "hbm", certain=True) <= room


def test_activations_take_the_share_of_grace_that_the_run_allows_them():
    small = replace(MACHINE, hbm=45 * 10**9, grace=60 * 10**9)
    found = place(facts(checkpointing=True, **AWAY), sizes(), small).mix
    left = small.grace - sizes().data.held - small.process
    allowed = activations_allowance(None, HostMemory(small.grace, left, left, ""), 1).size
    assert found is not None
    assert allowed - 2 * GIB < found.offloaded <= allowed
    assert found.recomputed > 0, "the rest is computed again"


@pytest.mark.parametrize(
    ("full", "checkpointed", "passes"), [(True, False, 3), (False, False, 2), (True, True, 4), (False, True, 3)]
)
def test_a_blocks_forward_pass_is_its_part_of_the_step(full, checkpointed, passes):
    known = sizes(traces={checkpointed: trace(checkpointed=checkpointed)})
    step = place(facts(full=full, checkpointing=checkpointed), known, MACHINE).step
    assert step.blocks[0].work == pytest.approx(trace(checkpointed=checkpointed).stacks["blocks"].each.flops / passes)


LEAVES = {"weights_in_grace": True, "gradients_in_grace": True}


def test_weights_and_gradients_leave_hbm_for_two_slots_and_come_ahead_of_their_use():
    run, whole = facts(weights_budget=0, **LEAVES), table()
    found = table(run)
    step = whole.placed.step
    there = step.outside + 2 * step.largest_block
    assert held(found)["weights", "hbm", "train"] == there
    assert held(found)["weights", "grace", "train"] == step.weights - step.outside
    assert held(found)["weights", "hbm", "load"] == step.outside + step.largest_block
    assert held(found)["gradients", "grace", "train"] == step.gradients
    assert ("gradients", "hbm", "train") not in held(found)
    assert found.seconds["link"] >= 2 * (step.weights - step.outside) / MACHINE.h2d
    assert found.seconds["state"] > whole.seconds["state"], "the step reaches them over the link"
    some = table(replace(run, weights_budget=there + step.largest_block))
    assert some.placed.weights_in_grace == found.placed.weights_in_grace - step.largest_block
    places = [(one["what"], one["pool"]) for one in found.placement()]
    assert {("weights", "hbm"), ("weights", "grace"), ("gradients", "grace")} <= set(places)
    assert len(places) == len(set(places))


def test_no_more_weights_leave_than_have_to():
    assert table(facts(weights_in_grace=True, **CPU_FIRST)).placed.weights_in_grace == 0
    tight = replace(MACHINE, hbm=24 * 10**9)
    found = table(facts(**LEAVES, **CPU_FIRST), machine=tight)
    assert 0 < found.placed.weights_in_grace < 20 * BILLION
    assert found.held("train", "hbm", certain=True) <= tight.hbm - device_headroom(tight.hbm)
    assert table(facts(**LEAVES), machine=MACHINES["gb10"]).placed.weights_in_grace == 0, "nowhere to go"


def test_a_model_that_fits_in_no_other_way_has_its_weights_moved():
    small = replace(MACHINE, hbm=30 * 10**9)
    best = cheapest(changes(facts(), sizes(), small))
    assert best is not None and best.exact
    assert best.settings == {"gh200_optimizations.memory": "auto"}
    assert {"state", "gradients"} <= leaving(facts(), small)
    tiny = replace(MACHINE, hbm=16 * 10**9)
    assert "weights" in leaving(facts(), tiny)


def test_every_row_has_a_source_and_the_least_is_without_assumptions():
    found = table()
    assert {row.source for row in found.rows} <= {"measured", "computed", "cited", "assumed"}
    assumed = sum(row.bytes for row in found.of("train", "hbm") if row.source == "assumed")
    assert assumed > 0
    assert found.held("train", "hbm", certain=True) == found.held("train", "hbm") - assumed


def test_without_a_trace_weights_and_gradients_remain_and_nothing_is_claimed_of_the_rest():
    found = table(known=sizes(traces={}))
    assert found.held("train", "hbm", certain=True) >= 100 * BILLION
    assert not [row for row in found.rows if row.what == "activations"]


def test_one_pool_holds_everything_once():
    gb10 = MACHINES["gb10"]
    found = table(machine=gb10)
    assert not [row for row in found.rows if row.pool == "hbm"]
    assert found.held("train", "grace") == sum(
        table(machine=replace(gb10, hbm=1)).held("train", pool) for pool in ("hbm", "grace")
    )


def test_ranks_of_one_node_share_its_memory_and_what_it_holds_once():
    node = replace(MACHINE, grace=4 * MACHINE.grace, devices=4)
    run = facts(ranks=4, unified={"vae": True, "text": True})
    rank = node.of_one_rank(4)
    assert (rank.grace, rank.sharing(4), rank.sharing(2), rank.sharing(8)) == (MACHINE.grace, 4, 2, 4)
    shared, whole = held(table(run, machine=rank)), held(table(run))
    assert shared["datasets", "grace", None] == 3 * GIB // 4
    assert shared["caches", "grace", "train"] == 5 * GIB // 4
    assert whole["datasets", "grace", None] == 3 * GIB, "four nodes with one device each hold it four times"
    assert whole["caches", "grace", "train"] == 5 * GIB


# -- bounds and changes ------------------------------------------------------------------------------------------


def test_bounds_follow_their_rates():
    run, known = facts(), sizes()
    before = evaluate(run, known, MACHINE)
    assert before.binding == "compute"
    assert before.seconds["compute"] == pytest.approx(trace(checkpointed=True).whole.flops / 400e12)
    slower = replace(MACHINE, flops=MACHINE.flops / 2)
    assert evaluate(run, known, slower).seconds["compute"] == pytest.approx(2 * before.seconds["compute"])
    assert evaluate(run, known, slower).seconds["hbm"] == before.seconds["hbm"]
    away = facts(**CPU_FIRST)
    link = evaluate(away, known, MACHINE).seconds["link"]
    thin = replace(MACHINE, h2d=MACHINE.h2d / 10, d2h=MACHINE.d2h / 10, in_place=MACHINE.in_place / 10)
    assert evaluate(away, known, thin).seconds["link"] == pytest.approx(10 * link)
    assert evaluate(replace(run, accumulation=3), known, MACHINE).seconds["compute"] == pytest.approx(
        3 * before.seconds["compute"]
    )


def test_a_run_that_does_not_fit_gets_the_cheapest_change_that_makes_it():
    found = changes(facts(), sizes(), MACHINE)
    best = cheapest(found)
    assert best is not None
    assert "gh200_optimizations.memory" in best.settings
    assert best.exact
    fitting = [change for change in found if change.fits and change.exact]
    assert best.cost == min(change.cost for change in fitting)
    assert [change.fits for change in found] == sorted((change.fits for change in found), reverse=True)


def test_the_fastest_setting_of_a_run_that_fits():
    roomy = MACHINES["gb200"]
    best = fastest(changes(facts(), sizes(), roomy))
    assert best is not None
    assert best.settings == {"gradient_checkpointing": False} or "gh200_optimizations.memory" in best.settings
    assert best.cost < 0
    assert fastest(changes(facts(checkpointing=False), sizes(), roomy)) is None


@pytest.mark.parametrize(("batch", "smaller"), [(2, 1), (5, 1), (6, 3), (9, 3)])
def test_a_smaller_micro_batch_keeps_every_sample_and_is_not_called_exact(batch, smaller):
    run = facts(batch=batch, accumulation=2)
    (found,) = (option for option in options(run, sizes(), MACHINE) if "train_batch_size" in option.settings)
    assert found.settings["train_batch_size"] == smaller
    assert found.settings["gradient_accumulation_steps"] * smaller == 2 * batch
    assert not found.exact
    ramped = options(replace(run, ramped=True), sizes(), MACHINE)
    assert not [option for option in ramped if "train_batch_size" in option.settings], "accumulation is the ramp's"


def offered(run, machine=MACHINE) -> dict[str, Move]:
    return {move.feature: move for move in moves(run, machine)}


def leaving(run, machine) -> set[str]:
    decision, _after = decide(replace(run, memory_auto=True), sizes(), machine)
    return {name for name, move in offered(run).items() if move.settings.keys() <= decision.settings.keys()}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"deepspeed_config": "zero2.json"}, ("state", "activations", "weights", "gradients")),
        ({"optimizer_cpu_offload_method": "torchao"}, ("state", "weights", "gradients")),
        ({"ramtorch": True}, ("state", "activations", "weights", "gradients")),
        ({"optimizer_release_gradients": "true"}, ("state", "weights", "gradients")),
        ({"dynamo_backend": "inductor"}, ("activations", "weights", "gradients")),
        ({"musubi_blocks_to_swap": "4"}, ("activations", "weights", "gradients")),
        ({"ramtorch": "false", "optimizer_cpu_offload_method": "none", "dynamo_backend": "no"}, ()),
    ],
    ids=str,
)
def test_what_the_run_refuses_is_not_moved(given, refused):
    assert offered(facts(options=given)).keys() == {"state", "activations", "weights", "gradients"} - set(refused)
    assert offered(facts(full=False)).keys() == {"weights", "activations"}, "the rest of a LoRA is too small"


def test_behind_pcie_the_access_pattern_is_written_down_and_weights_stay():
    behind = offered(facts(), MACHINES["h100"])
    assert "gh200_optimizations.uvm_access_pattern" in behind["state"].settings, "else the run refuses use_uvm there"
    assert behind.keys() == {"state", "activations"}
    assert "gh200_optimizations.uvm_access_pattern" not in offered(facts())["state"].settings


def test_a_single_pool_is_never_told_to_move_bytes():
    for change in changes(facts(), sizes(), MACHINES["gb10"]):
        assert not any("gh200_optimizations" in key for key in change.settings)


def test_parameters_without_a_gradient_have_state_only_where_it_is_made_before_the_first_step():
    whole = trace(checkpointed=True)
    some = replace(whole, base=replace(whole.base, stepped=BILLION), stacks=whole.stacks)
    found = optimizers()
    early = next(name for name, row in found.items() if row.born == "init" and row.bytes_bf16)
    for name, count in (("adamw_bf16", BILLION), (early, 10 * BILLION)):
        placed = place(facts(optimizer=name), sizes(traces={True: some}), MACHINE)
        assert placed.step.trained == 10 * BILLION
        assert placed.state.bytes == round((found[name].bytes_bf16 or 0) * count)


def test_every_optimizer_of_the_table_can_be_planned():
    for name, row in optimizers().items():
        found = place(facts(optimizer=name), sizes(), MACHINE).state
        each = row.bytes_bf16 if row.bytes_bf16 is not None else 8
        assert found.bytes == pytest.approx(each * 10 * BILLION, abs=1)


def test_gradients_stay_for_saving_and_validating_unless_a_step_drops_them():
    """SimpleTuner fills them with zeros: on one pool saving then takes more than training."""
    rows = held(table())
    assert rows["gradients", "hbm", "save"] == rows["gradients", "hbm", "validate"] == 20 * BILLION
    dropped = held(table(facts(drops_gradients=True)))
    assert ("gradients", "hbm", "save") not in dropped
    assert dropped["gradients", "hbm", "train"] == 20 * BILLION


def test_shadows_are_saved_from_a_model_in_fp32():
    assert held(table(facts(ema=True)))["checkpoint", "grace", "save"] == 40 * BILLION
    assert held(table())["checkpoint", "grace", "save"] == 20 * BILLION


def test_encoding_is_a_guess_where_latents_are_cached_already():
    def encoding(cached: str) -> str:
        data = replace(sizes().data, cached=cached)
        rows = table(known=sizes(data=data)).rows
        return next(row.source for row in rows if row.what == "vae work" and row.phase == "cache")

    assert (encoding("computed"), encoding("measured")) == ("computed", "assumed")
