"""What a reader should know first about a run: how it ended, what was lost, what was wrong while it ran. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from simpletuner_gh200.operate.liveness import Liveness
from simpletuner_gh200.operate.monitor.alerts import alerts
from simpletuner_gh200.operate.ranks import RankTable
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import counted

Weight = Literal["bad", "warn", "note"]

IMBALANCE = 0.05
"""Share of the time lost to unequal waits that is worth a line."""


@dataclass(frozen=True)
class Finding:
    weight: Weight
    text: str


def findings(
    run: Recorded,
    ranks: RankTable | None = None,
    alive: Liveness | None = None,
    others: Sequence[Recorded] = (),
) -> list[Finding]:
    """The worst first; those of the run's own records, whatever else lies in the folder it is looked at from.

    ``others``: the ranks beside the main one, which may have seen what it did not.
    """
    gone = alive.words if alive is not None and alive.state == "gone" else ""
    found = [
        *(*_ending(run), *_ended_elsewhere(run, others), *_features(run)),
        *(*_alerts(run, others, gone), *_ranks(ranks), *_records(run)),
    ]
    return sorted(found, key=lambda finding: ("bad", "warn", "note").index(finding.weight))


def rank_words(ranks: RankTable) -> str:
    """Who is slow and what it costs, in a sentence."""
    slow = ranks.slowest
    where = f" on {slow.node}" if len(ranks.nodes) > 1 else ""
    missing = f"; nothing was found here of {', '.join(map(str, ranks.missing))}" if ranks.missing else ""
    return (
        f"slowest is rank {slow.rank}{where}, which waited longest for data in {slow.held_up} of "
        f"{counted(ranks.steps, 'step')}; unequal waits cost {ranks.imbalance:.1%} of the time{missing}"
    )


def _ending(run: Recorded) -> Iterator[Finding]:
    status = run.end.get("status")
    if run.end and status != "completed":
        yield Finding("warn" if status == "interrupted" else "bad", _ended(run))


def _ended(run: Recorded) -> str:
    status = run.end.get("status")
    # "training" is what a process was doing when it was made to close its records.
    how = "ended midway" if status in (None, "training") else status
    return f"training {how}" + (f": {run.end['reason']}" if run.end.get("reason") else "")


def _ended_elsewhere(run: Recorded, others: Sequence[Recorded]) -> Iterator[Finding]:
    """A rank that fails takes the others with it, and those can only say that they were ended."""
    told = {str(run.end.get("reason") or _ended(run))} if run.end else set()
    for other in others:
        cause = str(other.end.get("reason") or _ended(other))
        if not other.end or other.end.get("status") in ("completed", "interrupted") or cause in told:
            continue
        told.add(cause)
        where = f" on {other.start['host']}" if other.start.get("host") else ""
        yield Finding("bad", f"rank {other.rank}{where}: {_ended(other)}")


def _features(run: Recorded) -> Iterator[Finding]:
    features = run.start.get("features")
    for name, status in features.items() if isinstance(features, Mapping) else ():
        if isinstance(status, str) and status.startswith("off") and status != "off: not asked for":
            yield Finding("warn", f"{name} is {status}")


def _alerts(run: Recorded, others: Sequence[Recorded], gone: str) -> Iterator[Finding]:
    """As they were when the last step was recorded: a report is read long after."""
    last: Any = run.steps[-1].get("time") if run.steps else None
    for alert in alerts(run, last if isinstance(last, int | float) else 0.0, gone=gone, others=others):
        yield Finding("bad" if alert.level == "alarm" else "warn", alert.text)


def _ranks(ranks: RankTable | None) -> Iterator[Finding]:
    if ranks is not None and (ranks.imbalance > IMBALANCE or ranks.missing):
        yield Finding("warn" if ranks.imbalance > IMBALANCE else "note", rank_words(ranks))


def _records(run: Recorded) -> Iterator[Finding]:
    if run.unreadable:
        yield Finding("note", f"{counted(run.unreadable, 'record')} could not be read: torn by a full disk or a kill")
    dropped = run.end.get("dropped")
    if isinstance(dropped, int) and dropped > 0:
        yield Finding("note", f"{counted(dropped, 'record')} could not be written")
