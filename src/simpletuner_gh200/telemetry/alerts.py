"""When to be alarmed: thresholds that mean something physical, over what a run recorded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from simpletuner_gh200.telemetry.numbers import cache_reads, hit_rate
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import GIB, format_bytes, format_seconds

WINDOW = 20
"""Latest steps that a rate is judged by; one slow step is no news."""
WARM_UP = 5
"""First steps of a run that are left out: they fill caches and compile."""

MOST_DATA_WAIT = 0.15
"""Share of the time that the device is idle; caches that work leave it near zero."""
LEAST_HOST_SHARE, LEAST_HOST_BYTES = 0.05, 4 * GIB
"""Below both the next allocation may be the one for which the kernel kills."""
LEAST_DEVICE_SHARE = 0.02
"""Fragments alone take more than this; an out-of-memory error is near."""
LEAST_HIT_RATE = 0.95
"""After the fill everything is in memory; misses mean that the budget is too small."""
SILENT_STEPS, SILENT_SECONDS = 20.0, 120.0
"""No record for both this long and so many usual steps: stuck, or validating for long."""


@dataclass(frozen=True)
class Alert:
    level: Literal["warn", "alarm"]
    code: str
    text: str
    """What is seen, and what to do about it."""


def alerts(run: Recorded, now: float, *, gone: str = "", others: Sequence[Recorded] = ()) -> list[Alert]:
    """What is wrong with a run right now, the worst first. ``gone``: that its process is not there any more.

    ``others``: the ranks other than the main one. Of those, what is theirs alone counts: each GPU's memory, and that
    of each further node.
    """
    found = [alert for rule in _RULES for alert in rule(run, now)]
    found += _of_others(run, others, now)
    if gone:
        found = [alert for alert in found if alert.code != "silence"]
        found.append(Alert("alarm", "gone", f"{gone}; start it again, it resumes from its last checkpoint"))
    return sorted(found, key=lambda alert: alert.level != "alarm")


def _of_others(run: Recorded, others: Sequence[Recorded], now: float) -> Iterator[Alert]:
    nodes = {str(run.start.get("host"))}
    for other in others:
        node = str(other.start.get("host"))
        if node not in nodes:
            yield from (replace(alert, text=f"on {node}: {alert.text}") for alert in _host_memory(other, now))
        nodes.add(node)
        for alert in _device_memory(other, now):
            yield replace(alert, text=f"rank {other.rank} on {node}: {alert.text}")


def _data_wait(run: Recorded, _now: float) -> Iterator[Alert]:
    seconds, waits = (run.latest(name, WINDOW, after=WARM_UP) for name in ("step_seconds", "data_wait_seconds"))
    if sum(seconds) > 0 and (share := sum(waits) / sum(seconds)) > MOST_DATA_WAIT:
        text = f"{share:.0%} of the time goes into waiting for data: serve the caches from memory (cache_config)"
        yield Alert("warn", "data-wait", text)


def _host_memory(run: Recorded, _now: float) -> Iterator[Alert]:
    available, total = run.last("host/available"), run.last("host/total")
    if available is None or total is None:
        return
    if available < LEAST_HOST_BYTES and available < LEAST_HOST_SHARE * total:
        left = f"{format_bytes(available)} of host memory left"
        yield Alert("alarm", "host-memory", f"{left}: lower memory_limit_gb, or the OOM killer may end the run")


def _device_memory(run: Recorded, _now: float) -> Iterator[Alert]:
    free, total = run.last("device/free"), run.last("device/total")
    if free is not None and total and free < LEAST_DEVICE_SHARE * total:
        text = f"{format_bytes(free)} of HBM left: lower hbm_limit_gb or train_batch_size, or set use_uvm"
        yield Alert("warn", "device-memory", text)


def _hit_rates(run: Recorded, _now: float) -> Iterator[Alert]:
    """Since the cache has stopped growing: while it is filled, each entry is missed once, whatever the budget is."""
    steps = [cache_reads(step) for step in run.steps[-WINDOW:]]
    for name in steps[-1] if steps else ():
        counts = [found[name] for found in steps if name in found]
        grew = max((n for n, (one, other) in enumerate(pairwise(counts), 1) if other.held > one.held), default=0)
        since = counts[grew:]
        rate = hit_rate(since[0], since[-1])
        if len(since) > WARM_UP and rate is not None and rate < LEAST_HIT_RATE:
            words = f"memory answers only {rate:.0%} of what is read from the cache {name}"
            yield Alert("warn", "hit-rate", f"{words}: raise cache_config.memory_limit_gb")


def _loss(run: Recorded, _now: float) -> Iterator[Alert]:
    recent = run.steps[-3:]
    if recent and run.series("loss") and all(record.get("loss") is None for record in recent):
        text = "the loss is not a number any more: lower the learning rate, resume from a checkpoint"
        yield Alert("alarm", "loss", text)


def _silence(run: Recorded, now: float) -> Iterator[Alert]:
    last = run.last("time")
    if run.end or run.caching or last is None:
        return
    usual = median(run.latest("step_seconds", WINDOW, after=WARM_UP) or [0.0])
    if now - last > max(SILENT_SECONDS, SILENT_STEPS * usual):
        yield Alert("warn", "silence", f"no step for {format_seconds(now - last)}: validating, stuck or killed")


_Rule = Callable[[Recorded, float], Iterator[Alert]]
_RULES: tuple[_Rule, ...] = (_host_memory, _loss, _data_wait, _device_memory, _hit_rates, _silence)
