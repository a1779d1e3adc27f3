"""What a module may contribute, and that one which contributes nothing sound is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.registry import contributions


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """A package of modules with the given sources; returns its numbers."""
    name = f"family_{abs(hash(request.node.nodeid))}"
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()

    def numbers(**modules: str) -> list[int]:
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        return list(contributions(name, "NUMBERS", int))

    return numbers


def test_tuples_and_bare_values_come_in_the_order_of_the_modules_names(family) -> None:
    assert family(b="NUMBERS = 3", a="NUMBERS = (2, 1)", c="NUMBERS = (4,)") == [2, 1, 3, 4]


def test_private_modules_contribute_nothing(family) -> None:
    assert family(_shared="NUMBERS = 7", a="NUMBERS = 1") == [1]


@pytest.mark.parametrize("source", ["", "NUMBERS = ()", "NUMBERS = (1, 'two')", "NUMBERS = [1]", "NUMBERS = None"])
def test_a_module_without_sound_contributions_is_named(family, source: str) -> None:
    with pytest.raises(TypeError, match=r"family_\d+\.wrong must define NUMBERS: int"):
        family(wrong=source)
