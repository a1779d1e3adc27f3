"""GH403: the dataset folders of the given configuration."""

from __future__ import annotations

import os

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    if context.training is None:
        return skipped("no configuration was given")
    folders = dict(context.training.local_datasets())
    if not folders:
        return skipped("no dataset in it reads a folder of this machine")
    bad = [f"{name}: {folder}" for name, folder in folders.items() if not folder.is_dir()]
    bad += [
        f"{name}: {folder} (empty)" for name, folder in folders.items() if folder.is_dir() and not os.listdir(folder)
    ]
    if bad:
        return failed(f"missing or empty: {'; '.join(bad)}", "mount the data, or correct instance_data_dir")
    return passed(f"{len(folders)} folder{'s' if len(folders) > 1 else ''} with files")


CHECK = Check(
    code="GH403",
    what="dataset folders",
    why="A folder that is not mounted is found out minutes into the start of a run.",
    run=_run,
)
