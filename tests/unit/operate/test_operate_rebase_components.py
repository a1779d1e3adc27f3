"""What is brought into a tree follows from the package itself."""

from __future__ import annotations

import tomllib
from pathlib import Path

from simpletuner_gh200.operate.rebase import components


def test_the_rooms_of_the_package_come_after_those_they_use_and_say_what_they_are_for() -> None:
    found = [component.name for component in components.all_components()]
    folders = {path.parent.name for path in components.package_folder().glob("*/__init__.py")}
    assert set(found) == {"foundation", *folders}
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [each["layers"] for each in project["tool"]["importlinter"]["contracts"] if each["id"] == "layers"]
    level = {room.strip(): -height for height, layer in enumerate(layers) for room in layer.split("|")}
    rooms = found[1:]
    assert set(rooms) <= set(level), "import-linter does not know this room"
    for room in rooms:
        below = components._used_by(components.package_folder() / room) & set(rooms) - {room}
        assert all(rooms.index(other) < rooms.index(room) and level[other] < level[room] for other in below)
    assert all(component.purpose.endswith(".") for component in components.all_components())


def test_every_file_belongs_to_one_component() -> None:
    package = components.package_folder()
    files = [path for component in components.all_components() for path in components.files_of(component)]
    there = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert len(files) == len(set(files))
    assert {path for path in files if path.suffix != ".pyc"} == there
