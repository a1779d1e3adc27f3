"""``memory: "auto"`` as a pure decision: the same for the same machine and run, never against what was given."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.plan.deciding import CACHES, decide, moves
from simpletuner_gh200.plan.evaluation import evaluate
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.units import GIB
from tests.unit.plan.plan_samples import facts, sizes

KEYS = ["use_uvm", "weights", "gradients", "activations"]
runs = st.builds(
    lambda optimizer, full, checkpointing, accumulation, batch, ema, unified, explicit: facts(
        optimizer=optimizer,
        full=full,
        checkpointing=checkpointing,
        accumulation=accumulation,
        batch=batch,
        ema=ema,
        unified={"vae": unified, "text": unified},
        memory_auto=True,
        explicit=frozenset(f"gh200_optimizations.{key}" for key in explicit),
    ),
    optimizer=st.sampled_from(["adamw_bf16", "torch-adamw", "bnb-adamw8bit", "soap", "unheard-of"]),
    full=st.booleans(),
    checkpointing=st.booleans(),
    accumulation=st.integers(1, 8),
    batch=st.integers(1, 8),
    ema=st.booleans(),
    unified=st.booleans(),
    explicit=st.sets(st.sampled_from(KEYS)),
)
machines = st.builds(
    lambda name, hbm, grace: replace(MACHINES[name], hbm=int(hbm * MACHINES[name].hbm), grace=int(grace * GIB)),
    st.sampled_from([name for name, machine in MACHINES.items() if not machine.one_pool]),
    st.floats(0.1, 3),
    st.integers(16, 480),
)


@settings(max_examples=60, deadline=None)
@given(runs, machines)
def test_a_decision(run, machine):
    decision, after = decide(run, sizes(), machine)
    assert (decision, after) == decide(run, sizes(), machine)
    assert not decision.settings.keys() & run.explicit
    # What moves is in force or next, and nothing else is.
    possible = {move.feature: move for move in moves(run, machine) if not move.settings.keys() & run.explicit}
    moved = {name for name, move in possible.items() if move.settings.keys() <= decision.settings.keys()}
    assert moved | set(decision.then) == possible.keys()
    assert not moved & set(decision.then)
    # It is never worse than moving nothing, or everything.
    over = over_of(after, machine)
    everything = replace(run, **{key: value for move in possible.values() for key, value in move.changed.items()})
    assert over <= min(over_of(run, machine), over_of(replace(everything, cache_limit=after.cache_limit), machine))
    if over == 0 == over_of(run, machine):
        assert evaluate(after, sizes(), machine).serial <= evaluate(run, sizes(), machine).serial + 1e-6
    # Caches make room where the model needs it, and only there.
    assert CACHES not in decision.settings or evaluate(replace(after, cache_limit=None), sizes(), machine).overflow()
    assert sum(row["bytes"] for row in decision.placement) == sum(
        row["bytes"] for row in evaluate(after, sizes(), machine).placement()
    )


def over_of(run, machine) -> int:
    found = evaluate(run, sizes(), machine).overflow()
    return found.get("hbm", 0) + found.get("grace", 0)
