"""SimpleTuner's page in a real browser, with the extension on: typed, saved, reloaded, trained."""

from __future__ import annotations

import json
import time

import pytest

from simpletuner_gh200.config.form import our_values
from simpletuner_gh200.demo.project import dataset_list, write_tiny_sdxl
from simpletuner_gh200.telemetry.reading import read_run
from tests.unit.operate.browser import Browser
from tests.web_ui.server import (
    STEPS,
    Server,
    click,
    edit_as_json,
    fill,
    open_dataset,
    open_page,
    open_tab,
    put,
    save,
    settled,
    shown,
    start_job,
)

pytestmark = [pytest.mark.real, pytest.mark.one_release("4.")]

CACHES = "gh200_cache_config_"
OURS = "gh200_gh200_optimizations_"
RAMP = ("initial_effective_batch_size", "target_effective_batch_size", "batch_rampup_steps", "ramp_curve")
BLOCKS = {
    "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "slab": "host"},
    "gh200_optimizations": {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 2,
        "target_effective_batch_size": 4,
        "batch_rampup_steps": 2,
    },
}


def test_the_server_says_at_its_start_that_it_is_on(server: Server) -> None:
    (line,) = [line for line in server.log.read_text().splitlines() if "is on in this server" in line]
    for feature in ("in-memory datasets", "unified-memory caches", "batch ramp", "in the Web UI"):
        assert feature in line
    assert "is not the page we know" not in server.log.read_text()


def test_typed_saved_and_shown_again(server: Server, page: Browser) -> None:
    open_tab(page, "hardware")
    assert not any(shown(page, OURS + key) for key in RAMP), "hidden until the ramp is on"
    for block, keys in BLOCKS.items():
        for key, value in keys.items():
            put(page, f"gh200_{block}_{key}", value)
    assert all(shown(page, OURS + key) for key in RAMP)
    assert not shown(page, OURS + "ramp_increment"), "only a stepwise ramp has one"
    save(page)
    page.wait("document.body.innerText.includes('Configuration saved')")
    assert our_values(server.saved()) == BLOCKS
    before = server.config.read_bytes()
    again = open_page(server)
    try:
        open_tab(again, "hardware")
        assert again.ask(f"document.getElementById('{OURS}initial_effective_batch_size').value") == "2"
        assert again.ask(f"document.getElementById('{OURS}enable_batch_size_rampup').checked") is True
        again.ask("Alpine.store('trainer').markFormDirty()")
        save(again)
        again.wait("document.body.innerText.includes('Configuration saved')")
        assert json.loads(server.config.read_bytes()) == json.loads(before)
    finally:
        again.close()


def test_what_is_typed_is_still_there_and_shown_after_another_tab(page: Browser) -> None:
    open_tab(page, "hardware")
    put(page, OURS + "activations", "grace")
    assert shown(page, OURS + "activation_limit_gb")
    page.ask(CHECKED_LATE.replace("NAME", OURS + "activation_limit_gb"))
    put(page, OURS + "activation_limit_gb", "3")
    open_tab(page, "basic")
    page.wait("window.checkedLate")
    settled(page)
    open_tab(page, "hardware")
    page.wait(f"document.getElementById('{OURS}activation_limit_gb').offsetParent !== null")
    assert page.ask(f"document.getElementById('{OURS}activation_limit_gb').value") == "3"
    for key in ("activation_limit_gb", "activations"):
        put(page, OURS + key, "" if key != "activations" else "off")
    assert not shown(page, OURS + "activation_limit_gb")


CHECKED_LATE = """(() => {
    const at = window.setTimeout;
    window.setTimeout = (what, wait, ...rest) => at(what, wait === 500 ? 2000 : wait, ...rest);
    document.getElementById("NAME").addEventListener("debounced-input", () => {
        window.checkedLate = true;
        window.setTimeout = at;
    });
})()"""
"""The page checks a field half a second after the last key: here once another tab is there, however slow that is."""


@pytest.mark.parametrize("tab", ["hardware", "basic"])
def test_blocks_edited_as_text_in_the_page_are_shown_and_saved(server: Server, tab: str) -> None:
    before = server.config.read_bytes()
    page = open_page(server)
    try:
        open_tab(page, tab)
        said = edit_as_json(page, cache_config={"slab": "hots"})
        assert said.startswith("cache_config.slab: 'hots'")
        edited = {"slab": "managed", "memory_limit_gb": 2, "of_tomorrow": 1}
        assert edit_as_json(page, cache_config=edited) == ""
        save(page)
        page.wait("document.body.innerText.includes('Configuration saved')")
        assert server.saved()["cache_config"] == edited
        assert our_values(server.saved())["gh200_optimizations"] == BLOCKS["gh200_optimizations"]
        settled(page)
        open_tab(page, "hardware")
        assert page.ask(f"document.getElementById('{CACHES}slab').value") == "managed"
        put(page, CACHES + "slab", "host")
        save(page)
        page.when(lambda: server.saved()["cache_config"] == {**edited, "slab": "host"})
    finally:
        page.close()
        server.config.write_bytes(before)


def test_what_may_not_be_is_refused_in_the_page(server: Server, page: Browser) -> None:
    open_tab(page, "hardware")
    before = server.config.read_bytes()
    name = CACHES + "memory_limit_gb"
    put(page, name, -1)
    said = page.wait(f"document.getElementById('field-feedback-{name}').textContent.trim()")
    assert said == "cache_config.memory_limit_gb: -1: input should be greater than 0"
    assert page.ask("Alpine.store('trainer').hasValidationErrors") is True, "the button is off"
    click(page, "#validateBtn")
    page.wait(f"document.getElementById('validation-results').innerText.includes({json.dumps(said)})")
    page.ask("Alpine.store('trainer').doSaveConfig({preserveDefaults: true})")
    page.wait(f"document.getElementById('toast-container').innerText.includes({json.dumps(said)})")
    assert server.config.read_bytes() == before
    put(page, name, "")
    page.wait("!Alpine.store('trainer').hasValidationErrors")


def test_what_is_no_number_is_refused_and_not_forgotten(server: Server, page: Browser) -> None:
    """The browser gives no script what was typed here: only that it is no number."""
    open_tab(page, "hardware")
    before = server.config.read_bytes()
    name = CACHES + "memory_limit_gb"
    page.ask(f"document.getElementById('{name}').focus()")
    page.call("Input.insertText", text="1e")
    assert page.ask(f"document.getElementById('{name}').validity.badInput") is True
    page.ask("Alpine.store('trainer').doSaveConfig({preserveDefaults: true})")
    page.wait("document.getElementById('toast-container').innerText.includes('not a number')")
    assert server.config.read_bytes() == before
    put(page, name, "")
    page.wait("!Alpine.store('trainer').hasValidationErrors")


def test_an_in_memory_dataset_by_the_wizard_edited_and_scanned(server: Server, page: Browser) -> None:
    open_tab(page, "datasets")
    add_by_wizard(page, str(server.project.images))
    images, embeds = page.when(server.saved_datasets)
    assert (images["type"], images["instance_data_dir"]) == ("in_memory", str(server.project.images))
    assert images["in_memory"] == {"compression": "lz4", "num_workers": 2}
    assert embeds["dataset_type"] == "text_embeds"
    assert scanned(server, "held") == "completed"


def test_an_in_memory_dataset_is_opened_edited_and_saved(server: Server, page: Browser) -> None:
    held = {"type": "in_memory", "in_memory": {"compression": "lz4", "num_workers": 2}, "of_tomorrow": 1}
    server.datasets.write_text(json.dumps(dataset_list(server.project, held)))
    other = open_page(server)
    try:
        open_dataset(other)
        other.wait(f"{field('compression')}?.value === 'lz4'")
        for key, text in (("compression", "zstd"), ("memory_limit_gb", "1.5"), ("num_workers", "")):
            other.ask(f"(() => {{ const it = {field(key)}; it.value = {json.dumps(text)}; {CHANGED}; }})()")
        other.ask(f"{field('wait')}.click()")
        other.ask("Alpine.store('trainer').saveDatasets({showToast: true, skipConfirmation: true})")
        other.when(lambda: server.saved_datasets()[0]["in_memory"].get("compression") == "zstd")
    finally:
        other.close()
    saved = server.saved_datasets()[0]
    assert saved["in_memory"] == {"compression": "zstd", "memory_limit_gb": 1.5, "wait": True}
    assert (saved["type"], saved["instance_data_dir"]) == ("in_memory", str(server.project.images))
    assert saved["of_tomorrow"] == 1


CHANGED = "['input', 'change'].forEach(kind => it.dispatchEvent(new Event(kind, {bubbles: true})))"


def field(key: str) -> str:
    """The field of a key in the editor that is open; the page has one editor for each way of listing datasets."""
    place = f"[data-gh200-dataset=editingDataset] [data-gh200-key={key}]"
    return f"[...document.querySelectorAll('{place}')].find(it => it.offsetParent)"


@pytest.mark.matrix
def test_a_job_started_from_the_page_ends_with_the_features_on(server: Server, page: Browser) -> None:
    write_tiny_sdxl(server.project.model)
    held = {"type": "in_memory", "in_memory": {"wait": True}}
    server.datasets.write_text(json.dumps(dataset_list(server.project, held)))
    open_tab(page, "hardware")
    assert "Training Starting" in start_job(page)
    status = server.wait_for_job()
    assert status == "completed", server.log.read_text(errors="replace")[-4000:]
    features = read_run(server.project.output).start["features"]
    assert features["caches"] == features["ramp"] == features["store"] == "on"
    page.wait("document.querySelector('[data-gh200=job] .gh200-verdict')?.innerText === 'completed'")
    rows = page.ask("document.querySelector('[data-gh200=job] table').innerText")
    assert f"step\t{STEPS} of {STEPS}" in rows
    assert "data wait" in rows and "cache hits" in rows
    assert "<svg" in server.get("/api/gh200/report")


def test_the_doctor_runs_beside_the_page(page: Browser) -> None:
    open_tab(page, "hardware")
    click(page, "[data-gh200-start=doctor]")
    page.wait("document.querySelector('[data-gh200-running=doctor]') || document.querySelector('[data-gh200-verdict]')")
    assert page.wait("document.querySelector('[data-gh200-verdict]')?.dataset.gh200Verdict", 120) in {
        "pass",
        "warn",
        "fail",
    }


@pytest.mark.matrix
def test_the_plan_runs_beside_the_page_and_draws_its_pools(page: Browser) -> None:
    open_tab(page, "hardware")
    click(page, "[data-gh200-start=plan]")
    assert page.wait("document.querySelector('[data-gh200-fits]')?.dataset.gh200Fits", 300) in {"true", "false"}
    assert page.ask("document.querySelectorAll('[data-gh200-pool]').length") >= 2


def test_where_people_sign_in_a_stranger_is_refused_as_by_upstreams_own_routes(server: Server) -> None:
    """The last one here: from now on the server asks everybody who they are."""
    ours = {"GET": ("/api/gh200/panel", "/api/gh200/report"), "POST": ("/api/gh200/start/doctor",)}
    assert server.status("GET", "/api/gh200/panel") == server.status("GET", "/api/hardware/gpus") == 200
    session = server.sign_up()
    assert server.status("GET", "/api/hardware/gpus") == 401
    assert {path: server.status(method, path) for method, paths in ours.items() for path in paths} == dict.fromkeys(
        (path for paths in ours.values() for path in paths), 401
    )
    assert server.status("GET", "/api/gh200/panel", {"Cookie": session}) == 200


def add_by_wizard(page: Browser, folder: str) -> None:
    """As a person goes through it: a name, the card, the folder, our fields, and on to the end."""
    click(page, r"[\@click\.prevent='openWizard()']")
    fill(page, "input[placeholder='my-training-images']", "held")
    further = "button[aria-label='Continue to next step']:not(:disabled)"
    click(page, further)
    card = "[...document.querySelectorAll('.backend-card')].find(card => card.innerText.startsWith('in memory'))"
    page.wait(f"{card}?.offsetParent != null")
    page.ask(f"{card}.click()")
    click(page, further)
    fill(page, "input[placeholder='/data/training/images']", folder)
    fill(page, "[data-gh200-dataset=currentDataset] [data-gh200-key=compression]", "lz4")
    fill(page, "[data-gh200-dataset=currentDataset] [data-gh200-key=num_workers]", "2")
    last = "button[aria-label='Confirm and save all datasets']"
    while not page.ask(f"document.querySelector({json.dumps(last)}).offsetParent != null"):
        click(page, further)
        page.ask("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")
    click(page, last)


def scanned(server: Server, dataset: str) -> str:
    """How a scan of a dataset ended, as the page asks for it."""
    job = server.post("/api/datasets/scan", {"dataset_id": dataset})["job_id"]
    while True:
        found = json.loads(server.get(f"/api/datasets/scan/status?job_id={job}"))
        if found["status"] not in ("pending", "running", "queued"):
            assert found.get("error") in (None, ""), found
            return str(found["status"])
        time.sleep(0.2)
