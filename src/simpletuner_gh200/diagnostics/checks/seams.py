"""GH105: does the installed SimpleTuner have every place we hook, as we know it?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.upstream.check import check_remembered
from simpletuner_gh200.upstream.source import FolderSource, JoinedSource, Source


def _run(context: Context) -> Finding:
    source = _source(context)
    if source is None:
        return skipped("SimpleTuner is not installed here")
    verdict = check_remembered(source)
    if verdict.ok:
        here = sum(row.status == "ok" for row in verdict.seams)
        return passed(f"{here} seams hold; not in this release: {len(verdict.seams) - here}")
    lost = [name for name, status in verdict.features.items() if not status.on]
    broken = "; ".join(f"{row.name}: {row.found}" for row in verdict.broken)
    return failed(f"{broken}. Off because of it: {', '.join(lost)}", "use a release that `gh200 upstream check` passes")


def _source(context: Context) -> JoinedSource | None:
    """Each package from where an import with this search path would take it."""
    packages: dict[str, Source] = {}
    for package in ("simpletuner", "accelerate"):
        folder = context.package(package)
        if folder is not None:
            packages[package] = FolderSource(folder.parent, f"installed {package}")
    return JoinedSource("installed", packages) if "simpletuner" in packages else None


CHECK = Check(
    code="GH105",
    what="seams",
    why="Each feature hooks SimpleTuner at a few places; where one has changed, what stands on it is off.",
    run=_run,
)
