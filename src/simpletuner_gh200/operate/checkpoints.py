"""What is to be said about checkpoints before a run starts that is to go on from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.seams.resuming import resumption
from simpletuner_gh200.upstream.checkpoints import checkpoints

PLACES_KEPT = Version("4.9.3")
"""The first release in which every rank of a data-parallel run saves its place in the dataset and its randomness."""
PLACES_FOUND = Version("4.5.2")
"""Where all ranks had to save before (FSDP, DeepSpeed), the first in which each finds its own again."""


def passed_over(config: Mapping[str, Any]) -> str | None:
    """What the ranks of ``config`` will not resume from. Raises for a checkpoint that was named and is not whole."""
    asked, output = config.get("resume_from_checkpoint"), config.get("output_dir")
    return resumption(str(asked), Path(str(output))).notice() if asked and output else None


def forgotten_positions(config: Mapping[str, Any], release: str) -> str | None:
    """What to say before several ranks resume with a release that keeps the place of the first one alone.

    In older ones only the first rank of a data-parallel run saves anything; under FSDP and DeepSpeed all do, but look
    for it under another name. The others then begin their epoch anew with other random numbers, so that ranks count
    epochs differently, and one that has had all of its epochs leaves the others waiting.
    """
    asked, output, ranks = (config.get(key) for key in ("resume_from_checkpoint", "output_dir", "num_processes"))
    several = str(ranks or 1).isdecimal() and int(str(ranks or 1)) > 1
    if not (asked and output and several) or config.get("ignore_final_epochs") or not checkpoints(Path(str(output))):
        return None
    mended = PLACES_FOUND if config.get("fsdp_enable") or config.get("deepspeed_config") else PLACES_KEPT
    try:
        if Version(release) >= mended:
            return None
    except InvalidVersion:  # a checkout's own version text
        return None
    return (
        f"SimpleTuner {release} forgets where ranks after the first were in the dataset: after a resume in the middle "
        f"of an epoch they may wait for each other for ever. Use {mended} or later, or set ignore_final_epochs"
    )
