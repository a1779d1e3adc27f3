"""Nothing is left out on narrow screens, and a pipe gets whole lines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from simpletuner_gh200.cli.tables import paragraph, show_table
from simpletuner_gh200.units import counted

LONG = "/a/path/that/goes/on/and/on/for/longer/than/any/narrow/screen/could/hold/in/one/line/pack.bin"


def console(width: int, *, terminal: bool = True) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)


def shown(screen: Console) -> str:
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_folds_on_a_terminal_and_has_whole_lines_for_a_pipe() -> None:
    rows = [("cache_config.cache_dir", LONG, "config")]
    narrow = console(60)
    show_table(narrow, ("key", "value", "from"), rows)
    assert max(map(len, shown(narrow).splitlines())) <= 60
    cells = "".join(line.split("│")[2].strip() for line in shown(narrow).splitlines() if line.count("│") == 4)
    assert LONG in cells
    piped = console(60, terminal=False)
    show_table(piped, ("key", "value", "from"), rows, title="T")
    (line,) = [line for line in shown(piped).splitlines() if LONG in line]
    assert line.split() == ["│", "cache_config.cache_dir", "│", LONG, "│", "config", "│"]


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
