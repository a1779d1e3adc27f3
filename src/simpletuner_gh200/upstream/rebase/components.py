"""The parts of the package, in the order they are brought in: each is one commit with a purpose and a risk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import simpletuner_gh200

HOME = "simpletuner/gh200"
VENDOR = f"{HOME}/vendor"
PACKAGE = "simpletuner_gh200"


@dataclass(frozen=True)
class Component:
    """``rooms`` are folders or files directly in the package."""

    name: str
    purpose: str
    risk: str
    rooms: tuple[str, ...]


COMPONENTS = (
    Component("settings", "configuration blocks, records, what is relied on in SimpleTuner", "none: new files",
              ("config", "telemetry", "upstream")),
    Component("memory", "slabs, placement, hints, the driver", "none: new files", ("memory",)),
    Component("store", "in-memory datasets", "none: new files", ("store",)),
    Component("cache", "unified-memory caches", "none: new files", ("cache",)),
    Component("ramp", "the batch ramp's schedule and windows", "none: new files", ("ramp",)),
    Component("seams", "the wrapped places of SimpleTuner", "none: new files", ("seams",)),
    Component("operation", "commands, doctor, benchmarks, demo", "none: new files",
              ("operate", "diagnostics", "bench", "demo", "cli")),
)  # fmt: skip
FOUNDATION = Component("foundation", "what everything else uses", "none: new files", ())
"""Whatever no other component names: so that a new file of ours is never left behind."""

ALL = (FOUNDATION, *COMPONENTS)


def package_folder() -> Path:
    return Path(next(iter(simpletuner_gh200.__path__)))


def files_of(component: Component) -> list[Path]:
    """Paths relative to the package, sorted; no bytecode."""
    claimed = {room for other in COMPONENTS for room in other.rooms}
    found = []
    for path in sorted(package_folder().rglob("*")):
        relative = path.relative_to(package_folder())
        if not path.is_file() or "__pycache__" in relative.parts:
            continue
        room = relative.parts[0]
        if room in component.rooms or (component is FOUNDATION and room not in claimed):
            found.append(relative)
    return found
