"""The report: what is on it, that nothing hostile gets through, and how it looks in a real Chromium."""

from __future__ import annotations

import html
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.report.marks import MOST_POINTS, Line, plot, thin, ticks
from simpletuner_gh200.operate.report.page import build, page
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.sink import JsonLines
from tests.unit.operate.browser import CHROMIUM, Browser

HOSTILE = "</title></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"
GIB = 1 << 30


def record_run(folder: Path, *, steps: int = 60, name: str = "plain", secret: str = "") -> Path:
    """A run of made-up numbers, recorded as a real one is."""
    sink = JsonLines(folder / "gh200" / "telemetry.jsonl")
    sink.write(
        {
            "kind": "start",
            "step": 0,
            "max_steps": steps,
            "time": 1.7e9,
            "settings": {"cache_config.cache_dir": {"value": name, "origin": "config"}},
            "training": {"output_dir": name, "hub_token": secret, "validation_prompt": f"{name} {secret}"},
            "features": {"caches": "on", name: "off: " + name},
            "seams": {"trainer.train": "ok"},
            "versions": {"torch": "2.14.1"},
        }
    )
    for step in range(1, steps + 1):
        wait = 0.02 if step % 7 else 0.3
        sink.write(
            {
                "kind": "step",
                "step": step,
                "step_seconds": 1.0 + wait,
                "data_wait_seconds": wait,
                "compute_seconds": 0.9,
                "effective_batch": 4 if step < steps // 2 else 16,
                "samples_per_second": 4.0,
                "loss": 1.0 / step,
                "slab_bytes": 60 * GIB,
                "host": {"available": 300 * GIB - step * GIB, "resident": 90 * GIB},
                "device": {"used": 70 * GIB, "free": 26 * GIB},
                "metrics": {f"gh200/cache/{name}/hit_rate": 1 - 1 / step},
            }
        )
    sink.write({"kind": "end", "status": "completed", "reason": None, "step": steps, "seconds": {"train": 61.5}})
    sink.close()
    return folder


class Tags(HTMLParser):
    """Collects tags and attributes, to see that text stayed text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_everything_asked_for_is_on_the_page(tmp_path: Path) -> None:
    text = build(record_run(tmp_path))
    for title in ("Loss", "Step time", "Data wait", "Host memory", "Device memory", "Effective batch", "Hit rates"):
        assert f"<h2>{title}</h2>" in text
    for word in ("completed", "60 of 60", "cache_config.cache_dir", "config", "trainer.train", "2.14.1", "61.5"):
        assert word in text
    assert text.count('class="mark"') == 12


def test_model_state_and_its_reserve_are_in_the_report(tmp_path: Path) -> None:
    folder = record_run(tmp_path, steps=3)
    sink = JsonLines(folder / "gh200" / "telemetry.jsonl")
    state = {"bytes": 66 * GIB, "hbm_bytes": 5 * GIB, "oom_reserve": {"used": GIB, "most": 3 * GIB, "times": 2}}
    for step in (4, 5):
        sink.write({"kind": "step", "step": step, "step_seconds": 1.0, "features": {"state": state}})
    sink.close()
    text = build(folder)
    assert "<h2>Model state</h2>" in text
    for words in ("66 GiB", "most of the reserve in use", "3 GiB", "times the reserve was in use"):
        assert words in text


def test_what_was_chosen_for_activations_and_what_it_gained(tmp_path: Path) -> None:
    told = {"chosen": "are moved to Grace: a step takes 21.0% less time", "moved_bytes": 3 * GIB}
    steps = [{"kind": "step", "step": 1, "step_seconds": 1.0, "features": {"activations": told}}]
    shown = page(Recorded(tmp_path, {}, {}, steps, 0), title="Run")
    assert "are moved to Grace: a step takes 21.0% less time (3 GiB moved)" in shown
    for other in ("broken", {"activations": 3}, {"activations": {"chosen": 4}}):
        assert "Grace" not in page(Recorded(tmp_path, {}, {}, [{**steps[0], "features": other}], 0), title="Run")


def test_nothing_on_the_page_runs_or_is_fetched(tmp_path: Path) -> None:
    found = Tags(build(record_run(tmp_path, name=HOSTILE)))
    assert not {"script", "img", "iframe", "link", "object", "embed", "form", "a"} & set(found.tags)
    assert not [name for name, _value in found.attributes if name.startswith("on") or name in {"src", "href"}]


def test_hostile_names_arrive_as_text(tmp_path: Path) -> None:
    text = build(record_run(tmp_path, name=HOSTILE))
    assert HOSTILE not in text
    assert html.escape(HOSTILE) in text


def test_a_hostile_doctor_report_and_folder_name_are_text_too(tmp_path: Path) -> None:
    run = record_run(tmp_path / "<b>run<script>")
    findings = [{"code": HOSTILE, "what": HOSTILE, "found": HOSTILE, "fix": HOSTILE, "status": HOSTILE}, "no check"]
    (tmp_path / "doctor.json").write_text(json.dumps({"checks": findings}))
    found = Tags(build(run, doctor=tmp_path / "doctor.json"))
    assert "script" not in found.tags
    assert "b" not in found.tags


def test_planted_secrets_stay_out(tmp_path: Path) -> None:
    secret = "hf_" + "Wq3" * 11
    text = build(record_run(tmp_path, secret=secret))
    assert secret not in text
    assert "&lt;hidden&gt;" in text


def test_a_run_without_steps_or_end_still_gives_a_page(tmp_path: Path) -> None:
    JsonLines(tmp_path / "telemetry.jsonl").write({"kind": "start", "step": 0})
    text = build(tmp_path)
    assert "still running, or killed" in text
    assert "No step was recorded" in text


@given(
    st.lists(
        st.fixed_dictionaries(
            {"kind": st.sampled_from(["start", "step", "end"])},
            optional={
                "step": st.integers(0, 99) | st.text(max_size=3),
                "loss": st.floats() | st.text(max_size=3) | st.none(),
                "step_seconds": st.floats() | st.lists(st.integers(), max_size=1),
                "host": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2) | st.text(max_size=3),
                "metrics": st.dictionaries(st.text(max_size=3), st.floats(), max_size=2) | st.none(),
                "settings": st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.none()),
                "seconds": st.text(max_size=3) | st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
            },
        ),
        max_size=6,
    )
)
@example([{"kind": "step", "step": number, "loss": loss} for number, loss in enumerate((0.0, 1.72e308))])
@example([{"kind": "step", "step": 0, "loss": 1e300}])
@example([{"kind": "step", "step": number, "loss": loss} for number, loss in enumerate((0.0, 5e-324))])
def test_no_record_breaks_the_page(records: list[dict[str, object]]) -> None:
    from simpletuner_gh200.telemetry.reading import add

    recorded = Recorded(Path("telemetry.jsonl"))
    for record in records:
        add(recorded, record)
    assert page(recorded, title="t").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_a_broken_doctor_report_is_a_usage_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "doctor.json").write_text(content)
    with pytest.raises(UsageError, match=r"doctor\.json"):
        build(record_run(tmp_path / "run"), doctor=tmp_path / "doctor.json")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thin(points)
    assert len(kept) <= max(MOST_POINTS, 2)
    assert {min(values), max(values)} <= {y for _x, y in kept}


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_lie_in_the_range(low: float, width: float) -> None:
    values = ticks(low, low + width)
    assert len(values) <= 12
    slack = width * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= value <= low + width + slack for value in values)


def test_a_plot_of_nothing_is_nothing() -> None:
    assert plot([Line("a", [])], label="a", unit=str) == ""
    assert "circle" in plot([Line("a", [(1, 2.0)])], label="a", unit=str)


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: scripts/dev/install_test_programs.sh installs Debian's"
)

VISIBLE_MARKS = """
    [...document.querySelectorAll('.mark')].filter(mark => {
        const box = mark.getBoundingClientRect();
        return box.width > 20 && getComputedStyle(mark).stroke !== 'none';
    }).length
"""


@pytest.fixture(scope="module")
def browser():
    running = Browser()
    yield running
    running.close()


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_in_a_real_browser(browser: Browser, tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(build(record_run(tmp_path / HOSTILE.replace("/", "_")[:40], name=HOSTILE)))
    browser.problems.clear()
    browser.requests.clear()
    browser.open(path, width=width, height=height)
    assert browser.ask(VISIBLE_MARKS) == 12
    assert browser.ask("document.querySelectorAll('svg').length") == 7
    assert browser.ask("document.title").startswith("Run ")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.problems == []
    assert browser.requests == [path.as_uri()]
    assert browser.picture().startswith(b"\x89PNG")
    assert browser.pdf().startswith(b"%PDF")
