"""The features whose fate hangs on the contract: what the user gets, and which builds on which.

Which places of SimpleTuner a feature needs is written once, at those places (``SeamSpec.features``, ``Fact.features``);
the static check, the running process, the support table and the doctor all read it from there. A feature is off on a
release when one of its own places is broken there, or when a feature it builds on is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """On, or off for a reason. JSON and tables show its text, which nobody reads back."""

    reason: str | None = None

    @property
    def on(self) -> bool:
        return self.reason is None

    def text(self, when_on: str = "on") -> str:
        return when_on if self.reason is None else f"off: {self.reason}"

    def __str__(self) -> str:
        return self.text()


ON = Status()


@dataclass(frozen=True)
class FeatureInfo:
    """One line of the support table."""

    title: str
    needs: tuple[str, ...] = ("config",)
    """Features it builds on, each of them above it in the table; theirs need not be named again."""


FEATURES: dict[str, FeatureInfo] = {
    "core": FeatureInfo("starting with SimpleTuner", needs=()),
    "config": FeatureInfo("configuration blocks in JSON, TOML and ENV", needs=("core",)),
    "web_ui": FeatureInfo("a field for every key, in the Web UI"),
    "store": FeatureInfo("in-memory datasets"),
    "caches": FeatureInfo("unified-memory caches"),
    "caching": FeatureInfo("pictures prepared on all cores, ahead of the VAE"),
    "batch_path": FeatureInfo("batches assembled straight from the caches", needs=("caches",)),
    "prefetch": FeatureInfo("batches collated ahead, by SimpleTuner's own prefetching"),
    "hints": FeatureInfo("placement hints on batches"),
    "checkpoints": FeatureInfo("our state in checkpoints"),
    "ramp": FeatureInfo("batch ramp", needs=("checkpoints",)),
    "preemption": FeatureInfo("a checkpoint when a signal asks for one", needs=("core",)),
    "resuming": FeatureInfo("no resuming from a checkpoint that is not whole", needs=("core",)),
    "behind": FeatureInfo("checkpoints saved to memory and drained to disk behind the run"),
    "telemetry": FeatureInfo("our metrics in status events", needs=("core",)),
    "state": FeatureInfo("optimizer state and EMA in Grace"),
    "activations": FeatureInfo("saved activations in Grace instead of recomputing"),
    "loading": FeatureInfo("models loaded block by block to where they live, their files' pages given back"),
    "weights": FeatureInfo("weights of blocks in Grace, in HBM ahead of their use"),
    "gradients": FeatureInfo("gradients in Grace"),
    "pressure": FeatureInfo("a run ends before a machine with one memory freezes"),
    "memory": FeatureInfo("everything placed by one setting, and rehearsed"),
}


def builds_on(name: str) -> set[str]:
    """Every feature without which this one is off."""
    direct = FEATURES[name].needs
    return {*direct, *(further for need in direct for further in builds_on(need))}


def consequences(broken: Mapping[str, str]) -> dict[str, Status]:
    """Every feature's status, given the reasons of those whose own places are broken."""
    found: dict[str, Status] = {}
    for name in FEATURES:
        needed = builds_on(name)
        lost = [need for need, status in found.items() if need in needed and not status.on]
        if name in broken:
            found[name] = Status(broken[name])
        else:
            found[name] = Status(f"needs {lost[0]}, which is off") if lost else ON
    return found
