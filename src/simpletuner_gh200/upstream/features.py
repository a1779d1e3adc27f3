"""The features whose fate hangs on the contract, and which of them needs which other.

A feature is off on a SimpleTuner release when one of its own seams is broken there, or when a feature it builds on is
off. The names are those of ``SeamSpec.features``, of the run summary and of the support table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FeatureInfo:
    """One line of the support table: what the user gets, and what it builds on."""

    title: str
    needs: tuple[str, ...] = ("core", "config")


FEATURES: dict[str, FeatureInfo] = {
    "core": FeatureInfo("starting with SimpleTuner", needs=()),
    "config": FeatureInfo("configuration blocks in JSON, TOML, ENV and the Web UI", needs=("core",)),
    "store": FeatureInfo("in-memory datasets"),
    "caches": FeatureInfo("unified-memory caches"),
    "batch_path": FeatureInfo("batches assembled straight from the caches", needs=("core", "config", "caches")),
    "hints": FeatureInfo("placement hints on batches"),
    "ramp": FeatureInfo("batch ramp"),
    "checkpoints": FeatureInfo("our state in checkpoints"),
    "telemetry": FeatureInfo("our metrics in status events", needs=("core",)),
    "oversubscription": FeatureInfo("training state beyond HBM"),
}


def consequences(broken: dict[str, str]) -> dict[str, str]:
    """``"on"`` or ``"off: reason"`` per feature, given the reasons of those whose own seams are broken."""
    verdicts: dict[str, str] = {}
    for name, info in FEATURES.items():
        lost = [need for need in info.needs if verdicts[need] != "on"]
        if name in broken:
            verdicts[name] = f"off: {broken[name]}"
        elif lost:
            verdicts[name] = f"off: needs {lost[0]}, which is off"
        else:
            verdicts[name] = "on"
    return verdicts
