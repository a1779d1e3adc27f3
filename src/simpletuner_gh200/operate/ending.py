"""The last line of a run that did not complete: what happened, what is kept, how to go on."""

from __future__ import annotations

from pathlib import Path

from simpletuner_gh200.operate.outcome import Outcome
from simpletuner_gh200.seams.preemption import TRY_AGAIN
from simpletuner_gh200.upstream.checkpoints import newest_whole

TRAINING = "training"
"""The phase in which steps are lost that no checkpoint has."""


def closing_line(outcome: Outcome, *, output: Path | None, again: str, resumes: bool) -> str | None:
    """None for a run that completed. ``again``: the command that was given; ``resumes``: it asks for the checkpoint."""
    failed = next((summary for summary in outcome.summaries if summary["status"] == "failed"), None)
    if outcome.signal is not None and (failed is None or outcome.exit_code not in (1, 2)):
        return _interrupted(outcome, output, again, resumes=resumes)
    failed = failed or next((summary for summary in outcome.summaries if summary["status"] != "completed"), None)
    if failed is not None:
        return f"training {failed['status']}: {_hanging(str(failed['reason']))}"
    if outcome.exit_code:
        return f"training failed: a rank ended without a word while {outcome.phase or 'starting'}{_killed(outcome)}"
    return None


def _interrupted(outcome: Outcome, output: Path | None, again: str, *, resumes: bool) -> str:
    summary = outcome.summary
    if summary.get("status") == "completed":
        return f"interrupted while {outcome.phase}; training had completed and nothing of it is lost"
    training = outcome.phase == TRAINING
    checkpoint = newest_whole(output) if output is not None else None
    step, steps = summary.get("global_step"), summary.get("max_train_steps")
    stopped = "stopped after a checkpoint" if summary.get("exit_code") == TRY_AGAIN else "interrupted"
    parts = [
        f"{stopped} while {outcome.phase or 'starting'}"
        + (f" at step {step} of {steps}" if training and steps else ""),
        *([] if training else ["nothing lost"]),
        *(
            [f"the last checkpoint is {checkpoint}"]
            if checkpoint
            else ["there is no checkpoint yet"]
            if training
            else []
        ),
        f"resume with: {again}" + (" --resume_from_checkpoint=latest" if checkpoint and not resumes else ""),
    ]
    return "; ".join(parts)


def _hanging(reason: str) -> str:
    """Some libraries give a page for a reason: its first line is ours, the others hang below it."""
    return "\n  ".join(line.strip() for line in reason.splitlines() if line.strip())


def _killed(outcome: Outcome) -> str:
    """137 is what a shell and the kernel's OOM killer leave."""
    return " (killed; the kernel does so when memory runs out: see dmesg)" if outcome.exit_code == 137 else ""
