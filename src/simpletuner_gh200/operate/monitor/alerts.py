"""When to be alarmed: thresholds that mean something physical, over what a run recorded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from simpletuner_gh200.operate.monitor.cache_counts import cache_counts
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import GIB, format_bytes, format_seconds

WINDOW = 20
"""Latest steps that a rate is judged by; one slow step is no news."""
WARM_UP = 5
"""First steps of a run that are left out: they fill caches and compile."""

Level = Literal["warn", "alarm"]


@dataclass(frozen=True)
class Alert:
    level: Level
    code: str
    text: str
    """What is seen, and what to do about it."""


@dataclass(frozen=True)
class Thresholds:
    data_wait_share: float = 0.15
    """The device is idle that share of the time; caches that work leave it near zero."""
    least_host_share: float = 0.05
    least_host_bytes: int = 4 * GIB
    """Below both the next allocation may be the one for which the kernel kills."""
    least_device_share: float = 0.02
    """Fragments alone take more than this; an out-of-memory error is near."""
    least_hit_rate: float = 0.95
    """After the fill everything is in memory; misses mean that the budget is too small."""
    major_faults_per_second: float = 50.0
    """Each reads from disk: the machine is swapping."""
    slowdown: float = 1.5
    silence_steps: float = 20.0
    silence_seconds: float = 120.0
    """No record for both this long and so many usual steps: stuck, or validating for long."""


def alerts(
    run: Recorded,
    now: float,
    thresholds: Thresholds | None = None,
    *,
    gone: str = "",
    others: Sequence[Recorded] = (),
) -> list[Alert]:
    """What is wrong with a run right now, the worst first. ``gone``: that its process is not there any more.

    ``others``: the ranks beside the main one. Of those, what is theirs alone is asked: each GPU's memory, and that of
    each further node.
    """
    limits = thresholds or Thresholds()
    found = [alert for rule in _RULES for alert in rule(run, now, limits)]
    found += _elsewhere(run, others, now, limits)
    if gone:
        found = [alert for alert in found if alert.code != "silence"]
        found.append(Alert("alarm", "gone", f"{gone}; start it again, it resumes from its last checkpoint"))
    return sorted(found, key=lambda alert: alert.level != "alarm")


def _elsewhere(run: Recorded, others: Sequence[Recorded], now: float, limits: Thresholds) -> Iterator[Alert]:
    nodes = {str(run.start.get("host"))}
    for other in others:
        node = str(other.start.get("host"))
        rules = _OF_A_RANK if node in nodes else (*_OF_A_NODE, *_OF_A_RANK)
        nodes.add(node)
        for alert in (alert for rule in rules for alert in rule(other, now, limits)):
            where = f"on {node}" if alert.code in _NODE_CODES else f"rank {other.rank} on {node}"
            yield replace(alert, text=f"{where}: {alert.text}")


def _settled(run: Recorded, name: str) -> list[float]:
    """The latest values of a number, warm-up left out."""
    return run.latest(name, WINDOW, after=WARM_UP)


def _data_wait(run: Recorded, _now: float, limits: Thresholds) -> Iterator[Alert]:
    seconds, waits = _settled(run, "step_seconds"), _settled(run, "data_wait_seconds")
    if not seconds or sum(seconds) <= 0:
        return
    share = sum(waits) / sum(seconds)
    if share > limits.data_wait_share:
        text = f"{share:.0%} of the time goes into waiting for data: serve the caches from memory (cache_config)"
        yield Alert("warn", "data-wait", text)


def _host_memory(run: Recorded, _now: float, limits: Thresholds) -> Iterator[Alert]:
    available, total = _latest(run, "host/available"), _latest(run, "host/total")
    if available is None or total is None:
        return
    if available < limits.least_host_bytes and available < limits.least_host_share * total:
        text = (
            f"{format_bytes(available)} of host memory left: lower memory_limit_gb, or the kernel will choose a victim"
        )
        yield Alert("alarm", "host-memory", text)


def _device_memory(run: Recorded, _now: float, limits: Thresholds) -> Iterator[Alert]:
    free, total = _latest(run, "device/free"), _latest(run, "device/total")
    if free is not None and total and free < limits.least_device_share * total:
        text = f"{format_bytes(free)} of HBM left: lower hbm_limit_gb or train_batch_size, or set use_uvm"
        yield Alert("warn", "device-memory", text)


def _hit_rates(run: Recorded, _now: float, limits: Thresholds) -> Iterator[Alert]:
    """Since the cache has stopped growing: while it is filled, each entry is missed once, whatever the budget is."""
    for name, told in cache_counts(run.steps[-WINDOW:]).items():
        grew = max((n for n, (one, other) in enumerate(pairwise(told), 1) if other.held > one.held), default=0)
        since = told[grew:]
        hits, misses = (getattr(since[-1], what) - getattr(since[0], what) for what in ("hits", "misses"))
        if len(since) > WARM_UP and hits + misses > 0 and hits < limits.least_hit_rate * (hits + misses):
            rate = hits / (hits + misses)
            words = f"memory answers only {rate:.0%} of what is read from the cache {name}"
            yield Alert("warn", "hit-rate", f"{words}: raise cache_config.memory_limit_gb")


def _swapping(run: Recorded, _now: float, limits: Thresholds) -> Iterator[Alert]:
    faults, times = run.series("major_faults")[-WINDOW:], run.series("time")[-WINDOW:]
    if len(faults) < 2 or len(times) < 2 or times[-1][1] <= times[0][1]:
        return
    rate = (faults[-1][1] - faults[0][1]) / (times[-1][1] - times[0][1])
    if rate > limits.major_faults_per_second:
        yield Alert("alarm", "swapping", f"{rate:.0f} page faults a second go to disk: memory is overcommitted")


def _slower(run: Recorded, _now: float, limits: Thresholds) -> Iterator[Alert]:
    """Against the same effective batch: the ramp makes steps longer by design."""
    batch = _latest(run, "effective_batch")
    same = run.curve(
        ("step_seconds at", batch),
        lambda step: step.get("step_seconds") if step.get("effective_batch") == batch is not None else None,
    )
    if len(same) < WARM_UP + 2 * WINDOW:
        return
    ends = same[WARM_UP : WARM_UP + WINDOW], same[-WINDOW:]
    first, last = (median(seconds for _step, seconds in end) for end in ends)
    if last > limits.slowdown * first:
        now, before = format_seconds(last), format_seconds(first)
        yield Alert(
            "warn", "slower", f"a step takes {now}, it took {before}: see gh200 doctor and nvidia-smi -q -d CLOCK"
        )


def _loss(run: Recorded, _now: float, _limits: Thresholds) -> Iterator[Alert]:
    recent = run.steps[-3:]
    if recent and run.series("loss") and all(record.get("loss") is None for record in recent):
        yield Alert(
            "alarm", "loss", "the loss is not a number any more: lower the learning rate, resume from a checkpoint"
        )


def _silence(run: Recorded, now: float, limits: Thresholds) -> Iterator[Alert]:
    last = _latest(run, "time")
    if run.end or last is None:
        return
    usual = median(_settled(run, "step_seconds") or [0.0])
    if now - last > max(limits.silence_seconds, limits.silence_steps * usual):
        yield Alert("warn", "silence", f"no step for {format_seconds(now - last)}: validating, stuck or killed")


def _latest(run: Recorded, name: str) -> float | None:
    return next(iter(run.latest(name, 1)), None)


Rule = Callable[[Recorded, float, Thresholds], Iterator[Alert]]

_OF_A_NODE: tuple[Rule, ...] = (_host_memory, _swapping)
_NODE_CODES = ("host-memory", "swapping")
_OF_A_RANK: tuple[Rule, ...] = (_device_memory,)
_RULES: tuple[Rule, ...] = (*_OF_A_NODE, _loss, _data_wait, *_OF_A_RANK, _hit_rates, _slower, _silence)
