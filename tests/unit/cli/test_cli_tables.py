"""On screens of any width no path, key or word is broken in the middle, and nothing is left out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from simpletuner_gh200.cli.tables import column_widths, paragraph, show_table
from simpletuner_gh200.units import counted

LONG = "/a/path/that/goes/on/and/on/for/longer/than/any/narrow/screen/could/hold/in/one/line/pack.bin"

words = st.text(st.sampled_from("abc_./"), min_size=1, max_size=30)
cells = st.lists(words, min_size=1, max_size=5).map(" ".join)


def console(width: int, *, terminal: bool = True) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)


def shown(screen: Console) -> str:
    return screen.file.getvalue()  # type: ignore[attr-defined]


@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=4), st.integers(30, 120))
def test_every_word_is_whole_at_every_width(rows: list[tuple[str, str, str]], width: int) -> None:
    screen = console(width)
    show_table(screen, ("key", "value", "from"), rows)
    found = shown(screen).replace("│", " ").split()
    assert {word for row in rows for cell in row for word in cell.split()} <= set(found)
    widths = column_widths(("key", "value", "from"), rows, width)
    if widths is not None:
        assert max(len(line) for line in shown(screen).splitlines()) <= width


def test_a_row_that_can_not_fit_becomes_lines_with_its_headings() -> None:
    screen = console(60)
    show_table(
        screen, ("key", "value", "from"), [("cache_config.cache_dir", LONG, "config"), ("b", "", "x")], title="T"
    )
    assert shown(screen).splitlines() == [
        "T",
        "cache_config.cache_dir",
        f"    value: {LONG}",
        "    from: config",
        "b",
        "    from: x",
    ]


def test_a_paragraph_is_wrapped_for_people_and_whole_for_a_pipe() -> None:
    text = f"fix: look into {LONG} and then go on with the rest of what there is to do"
    narrow = console(40)
    paragraph(narrow, text, indent="  ")
    assert len(shown(narrow).splitlines()) > 3
    assert f"  {LONG}" in shown(narrow).splitlines()
    piped = console(40, terminal=False)
    paragraph(piped, text, indent="  ")
    assert shown(piped) == text + "\n"


@pytest.mark.usefixtures("few_options")
@pytest.mark.parametrize("width", ["60", "80", "200"])
def test_config_check_keeps_keys_and_paths_whole(tmp_path: Path, monkeypatch, gh200, width: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cat.png").write_bytes(b"a cat")
    datasets = [{"id": "cats", "type": "local", "dataset_type": "image", "instance_data_dir": str(tmp_path / "images")}]
    (tmp_path / "datasets.json").write_text(json.dumps(datasets))
    config = {"data_backend_config": str(tmp_path / "datasets.json"), "output_dir": str(tmp_path / "out")}
    more = {
        "model_family": "sdxl",
        "model_type": "lora",
        "train_batch_size": 1,
        "max_train_steps": 1,
        "cache_config": {"cache_dir": LONG},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    monkeypatch.setenv("COLUMNS", width)
    code, out, _err = gh200("config", "check", tmp_path / "config.json", "--all")
    assert code == 0, out
    assert f'"{LONG}"' in out
    assert "gh200_optimizations.uvm_oversubscription_ratio" in out and "cache_config.distillation_cache_type" in out


def test_counts_are_grammar() -> None:
    assert [counted(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert [counted(number, "entry", "entries") for number in (1, 3)] == ["1 entry", "3 entries"]
