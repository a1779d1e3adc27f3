"""What must be true of a run's notes."""

from __future__ import annotations

from typing import Any

from scripts.feature_matrix.runs import Run


def backend_active(run: Run, backend: str) -> str:
    """Every phase the controller entered was entered with this backend."""
    phases = run.of("phase")
    used = sorted({note["backend"] for note in phases})
    assert used == [backend], f"backends seen: {used}, wanted {backend}"
    return f"{len(phases)} phases, all with {backend}"


def phases_around_evaluation(run: Run) -> str:
    """The controller went to eval before the manual validation and back to train after it."""
    order = [note.get("phase", note["what"]) for note in run.notes]
    assert "validation ran" in order, f"no validation in {order}"
    at = order.index("validation ran")
    around = (order[at - 1], order[at + 1] if at + 1 < len(order) else None)
    assert around == ("eval", "train"), f"phases around the evaluation: {around}"
    return "eval before, train after"


def manual_validation_fired(run: Run) -> dict[str, Any]:
    """Taken once, and images were made."""
    taken, failed = run.of("manual validation taken"), run.of("validation failed")
    assert len(taken) == 1, f"the request was taken {len(taken)} times"
    assert not failed, f"the validation failed: {failed[0]['error'] if failed else ''}"
    made = [note for note in run.of("validation ran") if note["global_step"] == taken[0]["global_step"]]
    assert made, "the request was taken but no validation ran at that step"
    assert made[0]["images"] > 0, "the validation made no image"
    return taken[0]


def at_window_boundary(run: Run) -> str:
    """The request came in mid-window and was taken when the window had closed, with more than one micro-batch."""
    taken = manual_validation_fired(run)
    assert taken["window_closed"], f"taken in mid-window: {taken}"
    assert taken["steps"] > 1, f"the window had {taken['steps']} micro-batch, so nothing was shown"
    return f"at step {taken['global_step']}, window of {taken['steps']} closed"


def ramp_moved(run: Run) -> str:
    changes = run.summary["details"]["ramp"]
    assert changes, "no ramp in the summary"
    return str(changes)


def features_on(run: Run, names: tuple[str, ...]) -> str:
    found = {name: run.summary["features"].get(name) for name in names}
    wrong = {name: value for name, value in found.items() if value != "on"}
    assert not wrong, f"features not on: {wrong}"
    return ", ".join(f"{name} on" for name in names)
