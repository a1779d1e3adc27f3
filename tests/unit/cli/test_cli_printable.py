"""Names and values that would steer a terminal: escaped wherever a command shows or writes them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.cli.main import main
from simpletuner_gh200.cli.tables import paragraph, show_table
from simpletuner_gh200.cli.terminal import screen
from simpletuner_gh200.telemetry.redact import keep_log_printable, printable

HOSTILE = {
    "colour": "\x1b[31mred",
    "window title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x1b\\",
    "one-byte CSI": "\x9b2J",
    "one-byte OSC": "\x9d0;owned\x9c",
    "back over the line": "good\x08\x08\x08\x08evil\r",
    "turned around": "gpj.\u202egnp.exe\u2066",
    "no text": "\udcff\udc9b2J",
    "line ends": "a\u2028b\u2029c\x85d",
    "deleted": "\x7f",
}
EVIL = "".join(HOSTILE.values())
PLAIN = frozenset("\n\t")


def assert_harmless(text: str, *, styled: bool = False) -> None:
    """Nothing that doesn't print; ``styled`` leaves out the colours that we ourselves put there."""
    found = {char for char in text if not char.isprintable() and char not in PLAIN}
    assert not found - ({"\x1b"} if styled else set()), (found, text)


@pytest.mark.parametrize("kind", HOSTILE)
def test_everything_that_does_not_print_is_escaped(kind: str) -> None:
    assert printable(HOSTILE[kind]).isprintable()
    assert printable(printable(HOSTILE[kind])) == printable(HOSTILE[kind])
    assert_harmless(printable(HOSTILE[kind] + "\n\t", lines=True))


def test_what_prints_stays_as_it_is() -> None:
    for name in ("größe_東京_🙂.png", r"C:\x1b", "a b"):
        assert printable(name) == name
    assert printable(b"\xff\n") == r"\udcff\n"


def test_paragraphs_and_tables_have_our_styles_and_nobody_elses(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    paragraph(screen(), EVIL, style="red")
    show_table(screen(), ("a",), [(EVIL,)], title=EVIL)
    shown = capsys.readouterr().out
    assert r"\x1b[31mred" in shown
    assert_harmless(shown, styled=True)


def test_our_own_log_is_printable(caplog) -> None:
    keep_log_printable()
    keep_log_printable()
    logging.getLogger("simpletuner_gh200").warning("gh200: cache %s: %d entries", EVIL, 3)
    assert_harmless(caplog.records[-1].getMessage())
    assert caplog.records[-1].getMessage().endswith("3 entries")


@pytest.fixture
def run(tmp_path, monkeypatch, gh200) -> Callable[..., str]:
    """Runs ``gh200 ...`` in a folder with a hostile name and returns all that it showed."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: str) -> str:
        _code, out, err = gh200(*arguments)
        assert out + err, "it says something"
        return out + err

    return call


def hostile_folder(where: Path) -> Path:
    folder = where / EVIL.replace("/", "")
    folder.mkdir()
    for number, (kind, name) in enumerate(HOSTILE.items()):
        (folder / f"{number}{name.replace('/', '')}.png").write_bytes(b"no image" if number % 2 else b"")
        (folder / f"{kind}.{name.replace('/', '')}").write_bytes(b"x")
    return folder


def test_stage(run, tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path)
    shown = run("stage", str(folder))
    assert "empty image" in shown and r"\x1b" in shown
    assert_harmless(shown)
    assert_harmless(run("stage", str(folder), "--json"))
    assert_harmless(run("stage", str(folder / "missing")))
    assert_harmless(run("stage", str(folder), str(folder))), "one word too many"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    data = hostile_folder(tmp_path)
    safe = EVIL.encode("utf-8", "replace").decode()  # JSON files hold text
    entry = {
        "id": safe,
        "type": "in_memory",
        "dataset_type": "image",
        "instance_data_dir": os.fsencode(data).decode("utf-8", "replace"),
    }
    (tmp_path / "backend.json").write_text(json.dumps([entry]), encoding="utf-8")
    values = {
        "model_family": "sdxl",
        "output_dir": str(tmp_path / "out"),
        "data_backend_config": str(tmp_path / "backend.json"),
        "validation_prompt": safe,
        safe: safe,
        "cache_config": {"vae_cache_type": "unified_memory", "cache_dir": str(tmp_path / safe.replace("/", ""))},
    }
    path = tmp_path / f"{safe.replace('/', '')}.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_config_check(run, config: Path) -> None:
    shown = run("config", "check", str(config))
    assert r"\x1b" in shown or r"\u001b" in shown
    assert_harmless(shown)
    assert_harmless(run("config", "check", str(config), "--json"))
    broken = json.loads(config.read_text())
    broken["cache_config"] = {"vae_cache_type": EVIL.encode("utf-8", "replace").decode(), EVIL[:5]: 1}
    config.write_text(json.dumps(broken))
    assert_harmless(run("config", "check", str(config)))


def test_doctor(run, config: Path) -> None:
    shown = run("doctor", str(config), "--skip-allocation", "--root", str(config.parent))
    assert r"\x1b" in shown
    assert_harmless(shown)
    assert_harmless(Path("gh200_diagnostic_report.json").read_text(encoding="utf-8"))


def test_report_and_monitor(run, tmp_path: Path) -> None:
    output = tmp_path / EVIL.replace("/", "")
    (output / "gh200").mkdir(parents=True)
    start = {
        "kind": "start",
        "time": 1.0,
        "training": {EVIL: EVIL},
        "settings": {EVIL: {"value": EVIL, "origin": EVIL}},
    }
    step = {"kind": "step", "step": 1, "loss": 0.5, "time": 2.0, "metrics": {f"{EVIL}hit_rate": 0.5}}
    end = {"kind": "end", "status": EVIL, "reason": EVIL, "seconds": {EVIL: 1.0}}
    lines = "".join(json.dumps(record) + "\n" for record in (start, step, end))
    (output / "gh200" / "telemetry.jsonl").write_text(lines)
    (output / "gh200" / "doctor.json").write_text(
        json.dumps({"checks": [{"status": EVIL, "found": EVIL, "fix": EVIL}]})
    )
    assert_harmless(run("monitor", str(output), "--once"))
    assert_harmless(run("monitor", str(output), "--json"))
    assert_harmless(run("report", str(output), "-o", "page.html"))
    page = Path("page.html").read_text(encoding="utf-8")
    assert r"\x1b[31mred" in page
    assert_harmless(page)


def test_no_command_has_another_way_to_the_terminal() -> None:
    """JSON is ASCII by itself; what ``gh200 env`` and ``constraints`` print is for a program to read, to the letter."""
    to_the_letter = {"print(commands)", 'print(pins, end="")'}
    folder = Path(main.__code__.co_filename).parent / "commands"
    for file in sorted(folder.glob("*.py")):
        for line in file.read_text().splitlines():
            direct = re.search(r"(?<![\w.])(print|Console)\(", line)
            assert not direct or "json.dumps" in line or line.strip() in to_the_letter, f"{file.name}: {line}"
