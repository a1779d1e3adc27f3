"""The report: what is on it, that nothing hostile gets through, and how it looks in a real Chromium."""

from __future__ import annotations

import html
import json
import math
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simpletuner_gh200.config.blocks import PARTS
from simpletuner_gh200.operate.report.page import build, findings, page
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.sink import JsonLines
from simpletuner_gh200.telemetry.view import RunView
from tests.unit.operate.browser import CHROMIUM, Browser

HOSTILE = "</title></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"
GIB = 1 << 30


def unbroken(text: str) -> str:
    """Without the places where a line may be broken."""
    return text.replace("<wbr>", "")


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
                "features": {"caches": {name: {"hits": 3 * step, "misses": step, "held_bytes": GIB}}},
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
        assert word in unbroken(text)
    assert text.count('class="mark ') == 13
    assert text.count('class="raw ') == 2


def test_model_state_and_its_reserve_are_in_the_report(tmp_path: Path) -> None:
    folder = record_run(tmp_path, steps=3)
    sink = JsonLines(folder / "gh200" / "telemetry.jsonl")
    state = {"bytes": 66 * GIB, "hbm_bytes": 5 * GIB, "oom_reserve": {"used": GIB, "most": 3 * GIB, "times": 2}}
    for step in (4, 5):
        sink.write({"kind": "step", "step": step, "step_seconds": 1.0, "features": {"state": state}})
    sink.close()
    text = build(folder)
    assert "<h2>Model state</h2>" in text
    for words in ("66 GiB", "most reserve in use", "3 GiB", "times the reserve was in use"):
        assert words in text


def test_what_was_chosen_for_activations_and_what_it_gained(tmp_path: Path) -> None:
    told = {"chosen": "are moved to Grace: a step takes 21.0% less time", "moved_bytes": 3 * GIB}
    steps = [{"kind": "step", "step": 1, "step_seconds": 1.0, "features": {"activations": told}}]
    shown = page(RunView(Recorded(tmp_path, {}, {}, steps, 0)), title="Run")
    assert "are moved to Grace: a step takes 21.0% less time" in shown and "3 GiB" in shown
    for other in ("broken", {"activations": 3}, {"activations": {"chosen": 4}}):
        assert "Grace" not in page(
            RunView(Recorded(tmp_path, {}, {}, [{**steps[0], "features": other}], 0)), title="Run"
        )


def test_nothing_on_the_page_runs_or_is_fetched(tmp_path: Path) -> None:
    found = Tags(build(record_run(tmp_path, name=HOSTILE)))
    assert not {"script", "img", "iframe", "link", "object", "embed", "form", "a"} & set(found.tags)
    assert not [name for name, _value in found.attributes if name.startswith("on") or name in {"src", "href"}]


def test_hostile_names_arrive_as_text(tmp_path: Path) -> None:
    text = build(record_run(tmp_path, name=HOSTILE))
    assert HOSTILE not in text
    assert html.escape(HOSTILE) in unbroken(text)


def test_a_hostile_folder_name_is_text_too(tmp_path: Path) -> None:
    found = Tags(build(record_run(tmp_path / "<b>run<script>")))
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
    recorded = Recorded(Path("telemetry.jsonl"))
    for record in records:
        recorded.add(json.dumps(record).encode())
    assert page(RunView(recorded), title="t").startswith("<!DOCTYPE html>")


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: scripts/dev/install_test_programs.sh installs Debian's"
)


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
    assert browser.ask(VISIBLE_MARKS) == 13
    assert browser.ask("document.querySelectorAll('svg').length") == 8
    assert browser.ask("document.title").startswith("Run ")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.problems == []
    assert browser.requests == [path.as_uri()]
    assert browser.picture().startswith(b"\x89PNG")
    assert browser.pdf().startswith(b"%PDF")


VISIBLE_MARKS = """
    [...document.querySelectorAll('.mark')].filter(mark => {
        const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
        return box.width > 20 && (style.stroke !== 'none' || style.fill !== 'none');
    }).length
"""

CONTRASTS = """
    (() => {
        const channels = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const linear = value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const light = text => {
            const [r, g, b] = channels(text).map(linear);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const behind = node => {
            for (; node; node = node.parentElement) {
                const colour = getComputedStyle(node).backgroundColor;
                if (colour !== 'rgba(0, 0, 0, 0)') return colour;
            }
        };
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const found = (query, property) => [...document.querySelectorAll(query)].map(node =>
            ratio(light(getComputedStyle(node)[property]), light(behind(node))));
        return {
            lines: Math.min(...found('path.mark, path.level', 'stroke'), ...found('rect.mark', 'fill'),
                            ...found('.swatch', 'backgroundColor').map(() => 21)),
            words: Math.min(...found('dt, dd, h1, h2, figcaption, li, td, th, summary, p', 'color'),
                            ...found('svg text', 'fill')),
            paper: light(behind(document.querySelector('main')))
        };
    })()
"""
"""As WCAG computes them: 3 to 1 is the least for lines, 4.5 to 1 for words."""


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "tallest"), [(1200, 5000), (375, 9000)])
def test_how_it_looks(browser: Browser, tmp_path: Path, long_page: str, width: int, tallest: int, scheme: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(long_page)
    browser.problems.clear()
    browser.open(path, width=width, height=900, scheme=scheme)
    assert browser.problems == []
    closed = browser.ask("document.documentElement.scrollHeight")
    assert closed < tallest
    assert browser.ask("document.documentElement.scrollWidth") <= width
    contrasts = browser.ask(CONTRASTS)
    assert contrasts["lines"] >= 4.5 and contrasts["words"] >= 4.5, contrasts
    assert (contrasts["paper"] < 0.1) is (scheme == "dark")
    browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert closed < browser.ask("document.documentElement.scrollHeight") < 2 * tallest, "even with everything unfolded"
    assert browser.ask("document.documentElement.scrollWidth") <= width
    if (kept := os.environ.get("GH200_KEEP_PICTURES")) is not None:
        Path(kept, f"report-{width}-{scheme}.png").write_bytes(browser.picture())


KEYS_CUT = """
    [...document.querySelectorAll('td:first-child')].filter(cell => {
        const text = cell.textContent, walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        for (let node; (node = walker.nextNode());) {
            const range = document.createRange();
            range.selectNodeContents(node);
            if (walker.currentNode !== cell.lastChild && !/[._/=,:-]$/.test(node.data)) return true;
            if (range.getClientRects().length > 1 && !/\\s/.test(node.data)) return true;
        }
        return false;
    }).map(cell => cell.textContent)
"""
"""First cells that may be broken elsewhere, or of which a piece without a place to break stands on two lines."""


@needs_chromium
@pytest.mark.slow
def test_keys_wrap_at_dots_and_underscores_only(browser: Browser, tmp_path: Path, long_page: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(long_page)
    browser.open(path, width=375, height=900)
    browser.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.ask(KEYS_CUT) == []
    longest = "gh200_optimizations.activation_hbm_reserve_gb"
    lines = f"""[...document.querySelectorAll('td')].filter(cell => cell.textContent === {longest!r})
                .map(cell => cell.getBoundingClientRect().height)"""
    (height,) = browser.ask(lines)
    assert height > 40, "the key is on several lines"


# -- what it says --------------------------------------------------------------------------------------


def record_long_run(folder: Path) -> Path:
    """Two nodes with two ranks each, a ramp, a slow checkpoint, every setting, a plan, a whole configuration."""
    steps, sinks = 300, {}
    settings = {
        f"{part.block}.{name}": {"value": field.default, "origin": "default"}
        for part in PARTS
        for name, field in part.model.model_fields.items()
    }
    settings["cache_config.cache_dir"] = {"value": "/a/long/path/to/a/folder/that/has/packs", "origin": "config"}
    training = {f"an_option_of_simpletuner_{number}": "a value of some length, as they are" for number in range(400)}
    for rank in range(4):
        name = f"telemetry.rank{rank}.jsonl" if rank else "telemetry.jsonl"
        sinks[rank] = JsonLines(folder / "gh200" / name)
        start = {"kind": "start", "step": 0, "max_steps": steps, "time": 1.7e9, "ranks": 4, "rank": rank}
        more = {"settings": settings, "training": training, "features": {"ramp": "on", "prefetch": "off: no GPU here"}}
        sinks[rank].write({**start, **more, "host": f"node{rank // 2}", "seams": {"trainer.train": "ok"}})
    for step in range(1, steps + 1):
        for rank, sink in sinks.items():
            wait, save = 0.02 + 0.1 * (rank == 3), 30.0 * (step == 100)
            times = {"step_seconds": 1.2 + save, "data_wait_seconds": wait, "compute_seconds": 1.1 - wait}
            loss = 1 / step**0.5 + 0.2 * math.sin(step * 1.7)
            memory = {"host": {"available": 300 * GIB, "resident": (80 + rank) * GIB}}
            device = {"device": {"used": 70 * GIB, "free": 26 * GIB}}
            rates = {"learning_rate": min(step, 50) / 50 * 1e-4, "samples_per_second": 13.0}
            record = {"kind": "step", "step": step, "time": 1.7e9 + step, "save_seconds": save, "loss": loss}
            sink.write({**record, **times, **memory, **device, **rates, "effective_batch": 2 ** (step // 60)})
    seconds = {"import": 20.0, "models": 30.0, "data": 60.0, "model load": 12.0, "train": 330.0, "save": 30.0}
    sinks[0].write({"kind": "end", "status": "completed", "step": steps, "seconds": {**seconds, "finish": 9.0}})
    plan = {"phases": {"train": {"hbm": 75 * GIB, "grace": 60 * GIB}}}
    step_plan = {"bounds": {"compute": 1.0}, "binding": "compute"}
    (folder / "gh200" / "plan.json").write_text(json.dumps({**plan, "step": step_plan, "bytes": []}))
    return folder


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(record_long_run(tmp_path_factory.mktemp("long")))


def part(text: str, title: str, end: str = "</figure>") -> str:
    """From a heading to the end of what it stands above."""
    return text[text.index(f"<h2>{title}</h2>") :].partition(end)[0]


def test_findings_of_the_run_come_first(tmp_path: Path, long_page: str) -> None:
    text = unbroken(long_page)
    told = text[text.index('class="findings"') : text.index("<dl>")]
    assert "prefetch is off: no GPU here" in told
    assert "slowest is rank 3 on node1, which waited longest for data in 299 of 299 steps" in told
    quiet = page(RunView(Recorded(tmp_path / "x", {}, {"status": "completed"}, [])), title="t")
    assert "Nothing was found wrong" in quiet
    failed = page(RunView(Recorded(tmp_path / "x", {}, {"status": "failed", "reason": "no space"}, [], 2)), title="t")
    assert failed.index("training failed: no space") < failed.index("2 records could not be read")


def test_what_another_rank_failed_of_is_told(tmp_path: Path) -> None:
    """A failing rank takes the others with it; the main one knows only that it was ended."""
    main = Recorded(tmp_path / "telemetry.jsonl", {"host": "n1"}, {"status": "interrupted", "reason": "SIGTERM"}, [])
    failed = {"status": "failed", "reason": "out of memory, hf_abcdefghijklmnopqrstuvwxyz1234567890"}
    ranks = [Recorded(tmp_path / f"telemetry.rank{n}.jsonl", {"host": f"n{n}"}, failed, []) for n in (2, 3)]
    ranks.append(Recorded(tmp_path / "telemetry.rank4.jsonl", {"host": "n2"}, main.end, []))
    text = unbroken(page(RunView(main, ranks), title="t"))
    told = text[text.index('class="findings"') : text.index("</ul>")]
    assert "rank 2 on n2: training failed: out of memory" in told
    assert told.index("rank 2") < told.index("training interrupted: SIGTERM"), "the cause comes first"
    assert "rank 3" not in told and "rank 4" not in told, "once"
    assert "hf_abc" not in text


def test_one_page_for_ranks_of_nodes_that_share_no_folder(tmp_path: Path) -> None:
    whole = record_long_run(tmp_path / "a")
    (tmp_path / "b" / "gh200").mkdir(parents=True)
    for rank in (2, 3):
        name = f"telemetry.rank{rank}.jsonl"
        (whole / "gh200" / name).rename(tmp_path / "b" / "gh200" / name)
    assert "nothing was found here of 2, 3" in build(whole)
    text = build(whole, other_nodes=[tmp_path / "b"])
    assert "4 ranks on 2 nodes: slowest is rank 3 on node1" in text
    assert "<h2>Data wait by rank</h2>" in text


def test_settings_that_differ_come_first_and_long_tables_are_folded(long_page: str) -> None:
    text = unbroken(long_page)
    differing = part(text, "Settings that differ from the defaults", "Settings at their defaults</summary>")
    assert "cache_config.cache_dir" in differing and "cache_config.fill" not in differing
    assert "cache_config.fill" in text.partition("Settings at their defaults</summary>")[2]
    assert text.count("<details>") == text.count("<details") >= 5, "none is open"
    assert "an_option_of_simpletuner_7" in text[text.index("Training configuration</summary>") :]


def test_the_ramp_is_drawn_in_steps_and_the_loss_smoothed_over_the_raw_line(long_page: str) -> None:
    (path,) = re.findall(r'<path class="mark c0"[^>]* d="([^"]*)"', part(long_page, "Effective batch"))
    assert set(re.findall("[A-Z]", path)) == {"M", "H", "V"}
    assert path.count("V") == 5, "one for each change"
    loss = part(long_page, "Loss")
    assert loss.index('class="raw c0"') < loss.index('class="mark c0"'), "the raw line is behind"
    wiggly, smooth = (re.findall(r"[ML][\d.]+,([\d.]+)", found) for found in re.findall(r' d="([^"]*)"', loss))
    travelled = [sum(abs(float(a) - float(b)) for a, b in pairwise(line)) for line in (wiggly, smooth)]
    assert travelled[1] < travelled[0] / 4


def test_one_slow_step_does_not_flatten_the_others(long_page: str) -> None:
    figure = part(long_page, "Step time")
    assert "1 step took longer than is drawn, up to 31.2 s." in figure
    whole = [float(y) for y in re.findall(r"[ML][\d.]+,([-\d.]+)", re.findall(r' d="([^"]*)"', figure)[0])]
    assert max(whole) - min(whole) > 1 and sorted(whole)[len(whole) // 2] < 160, "the usual step is well above the axis"


def test_planned_memory_stands_beside_what_was_measured(long_page: str) -> None:
    assert long_page.count('class="level ') == 2
    rows = part(long_page, "Planned against measured", "</section>")
    assert "75 GiB" in rows and "70 GiB" in rows and "-7%" in rows


@pytest.mark.parametrize("plan", ["{", "{}", '{"phases": {"train": {"hbm": "much"}}}', "[]"])
def test_a_plan_that_is_none_is_passed_over(tmp_path: Path, plan: str) -> None:
    run = record_long_run(tmp_path)
    (run / "gh200" / "plan.json").write_text(plan)
    text = build(run)
    assert "Planned against measured" not in text and "<h2>Loss</h2>" in text


def test_the_time_line_has_saving_by_itself(long_page: str) -> None:
    bar = part(long_page, "Where the time went", "</section>")
    for words in ("loading 42.0 s", "training 5 min 30 s", "checkpoints 30.0 s", "final weights 9.0 s"):
        assert words in bar


@pytest.mark.parametrize("main_end", [{}, {"status": "interrupted"}, {"status": "failed", "reason": "no space"}])
def test_a_rank_that_failed_without_a_reason_is_told_without_one(tmp_path: Path, main_end: dict[str, str]) -> None:
    main = Recorded(tmp_path / "telemetry.jsonl", {}, main_end, [])
    ranks = [Recorded(tmp_path / f"telemetry.rank{n}.jsonl", {"host": "n2"}, {"status": "failed"}, []) for n in (2, 3)]
    told = [finding.text for finding in findings(RunView(main, ranks))]
    assert "rank 2 on n2: training failed" in told
    assert "None" not in " ".join(told) and "rank 3" not in " ".join(told)


def test_that_all_ranks_failed_without_a_reason_is_told_once(tmp_path: Path) -> None:
    failed = [
        Recorded(tmp_path / name, {}, {"status": "failed"}, []) for name in ("telemetry.jsonl", "telemetry.rank1.jsonl")
    ]
    assert [finding.text for finding in findings(RunView(failed[0], failed[1:]))] == ["training failed"]
    midway = Recorded(tmp_path / "telemetry.rank1.jsonl", {}, {"status": "training", "reason": None}, [])
    assert "rank 1: training ended midway" in [finding.text for finding in findings(RunView(failed[0], [midway]))]
    unknown = Recorded(tmp_path / "telemetry.jsonl", {}, {}, [])
    assert "rank 1: training failed" in [finding.text for finding in findings(RunView(unknown, failed[1:]))]


def test_the_page_lies_beside_the_records(tmp_path: Path, gh200) -> None:
    code, out, shown = gh200("report", record_run(tmp_path / "run"), "--json")
    page = tmp_path / "run" / "gh200" / "report.html"
    assert code == 0 and json.loads(out) == {"report": str(page)} and page.is_file(), shown
