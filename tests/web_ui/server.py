"""SimpleTuner's real server in a process of its own, with the tiny project in it, and the page in a real browser."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from scripts.dev.page_libraries import answer
from simpletuner_gh200.demo.project import DemoProject, training_config, write_tiny_images
from simpletuner_gh200.operate.launching import environment_of_server
from tests.unit.operate.browser import Browser

NAME = "tiny"
STEPS = 3
EDITOR = (
    "[...document.querySelectorAll('[x-data]')].map(it => Alpine.$data(it))"
    ".find(it => typeof it?.openDatasetModal === 'function' && it.datasets?.length)"
)


STOCK = f"""
import sys
from importlib.abc import MetaPathFinder

class Never(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "simpletuner_gh200" or name == "simpletuner.gh200":
            raise AssertionError("stock SimpleTuner asked for " + name)

sys.meta_path.insert(0, Never())
sys.path.append({sysconfig.get_path("purelib")!r})
sys.argv[0] = "simpletuner"
import runpy
runpy.run_module("simpletuner", run_name="__main__")
"""
"""With ``python -S``, which reads no ``.pth`` file: a process into which nothing of ours can come."""


class Server:
    """SimpleTuner's server over the project in ``folder``.

    ``kind``: ``on``, as ``gh200 server`` starts it; ``off``, as ``simpletuner server`` does where we are installed;
    ``stock``, as it does where we are not.
    """

    def __init__(self, folder: Path, *, kind: Literal["on", "off", "stock"] = "on", port: int | None = None) -> None:
        self.project = DemoProject(folder, steps=STEPS)
        self.configs = folder / "configs"
        self.config = self.configs / NAME / "config.json"
        self.datasets = self.configs / NAME / "multidatabackend.json"
        self.log = folder / f"server-{kind}.log"
        self.port = port or free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(kind),
                env=self._environment(folder, kind),
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, kind: str) -> list[str]:
        arguments = ["--host", "127.0.0.1", "--port", str(self.port)]
        if kind == "stock":
            return [sys.executable, "-S", "-c", STOCK, "server", *arguments]
        return [sys.executable, "-m", "simpletuner", "server", *arguments]  # as `gh200 server` becomes it

    def _environment(self, folder: Path, kind: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GH200_", "SIMPLETUNER"))}
        home = folder / "home"
        home.mkdir(exist_ok=True)
        places = dict.fromkeys(("HOME", "XDG_HOME", "XDG_CONFIG_HOME", "SIMPLETUNER_WORKSPACE"), str(home))
        places |= {"SIMPLETUNER_CONFIG_DIR": str(self.configs), "SIMPLETUNER_STATE_DIR": str(home)}
        quiet = {"HF_HUB_OFFLINE": "1", "SIMPLETUNER_LOG_LEVEL": "INFO", "SIMPLETUNER_WEBHOOK_PORT": str(self.port)}
        found = environment_of_server({**kept, **places, **quiet}, Path(sys.executable))
        return found if kind == "on" else {name: value for name, value in found.items() if name != "SIMPLETUNER_GH200"}

    def wait(self, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.3)
        raise AssertionError(self.log.read_text(errors="replace")[-4000:])

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=60) as response:
            return response.read().decode()

    def post(self, path: str, document: Any = None, *, method: str = "POST") -> Any:
        body = json.dumps(document).encode() if document is not None else b""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def status(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> int:
        request = urllib.request.Request(self.address + path, headers=dict(headers or {}), method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def sign_up(self) -> str:
        """Make the first account, so that everybody must sign in; the cookie of who did."""
        account = {"email": "somebody@example.org", "username": "somebody", "password": uuid.uuid4().hex}
        body = json.dumps(account).encode()
        address, headers = f"{self.address}/api/auth/setup/first-admin", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as response:
            return str(response.headers["Set-Cookie"]).partition(";")[0]

    def welcome(self) -> None:
        """What a person answers when the page is opened for the first time; then the tiny project is open."""
        answers = {
            "default_configs_dir": str(self.configs),
            "default_output_dir": str(self.project.folder),
            "default_datasets_dir": "",
            "accelerate_defaults": {"mode": "disabled"},
        }
        for step, value in answers.items():
            self.post(f"/api/webui/onboarding/steps/{step}", {"value": value})
        self.post(f"/api/configs/{NAME}/activate")

    def wait_for_job(self, seconds: float = 300) -> str:
        """The status in which the job that runs has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = str(json.loads(self.get("/api/training/status"))["status"])
            if status not in ("starting", "running", "pending"):
                return status
            time.sleep(0.5)
        raise AssertionError(self.log.read_text(errors="replace")[-4000:])

    def saved(self) -> dict[str, Any]:
        return dict(written(self.config))

    def saved_datasets(self) -> list[dict[str, Any]]:
        return list(written(self.datasets))


def written(file: Path, seconds: float = 30) -> Any:
    """What a file holds; the server may be in the middle of writing it."""
    end = time.monotonic() + seconds
    while True:
        try:
            return json.loads(file.read_text())
        except ValueError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_page_project(folder: Path) -> None:
    """The demo's tiny project, where the server keeps configurations; the model is there already."""
    project = DemoProject(folder, steps=STEPS)
    write_tiny_images(project.images, count=8)
    place = folder / "configs" / NAME
    place.mkdir(parents=True)
    lists = str(place / "multidatabackend.json")
    # The page starts no job of less than 256 pixels; those of a dataset are its own.
    for_the_page = {"data_backend_config": lists, "tracker_project_name": NAME, "resolution": 256}
    config = {**training_config(project), **for_the_page}
    (place / "config.json").write_text(json.dumps(config, indent=2))
    Path(lists).write_text("[]")


def open_page(server: Server, *, width: int = 1280, height: int = 900) -> Browser:
    """A browser that has the page open and ready."""
    browser = Browser(answer)
    browser.open(f"{server.address}/web/trainer", width=width, height=height)
    browser.wait("window.Alpine?.store('trainer')?.activeEnvironmentConfig != null")
    return browser


def open_tab(browser: Browser, tab: str) -> None:
    """Open a tab by its entry in the list, and close the introduction that stands before its fields."""
    click(browser, f".tab-btn[data-tab={tab}]")
    browser.wait(f"document.querySelector('#{tab}-tab-content') !== null")
    browser.wait(INTRODUCED)
    settled(browser)


INTRODUCED = r"""(() => {
    const behind = document.querySelector('#tab-content [x-show="!showHeroCTA()"]');
    if (!behind || behind.offsetParent) return true;
    document.querySelectorAll("#tab-content [\\@click='dismissHeroCTA()']").forEach(it => it.click());
    return false;
})()"""


def settled(browser: Browser) -> None:
    """Until the page has put what it remembers back into the fields: what is typed before that is overwritten."""
    browser.wait("!Alpine.store('trainer')._suppressDirtyTracking")


def open_dataset(browser: Browser) -> None:
    """The first dataset in its editor, where it says how the dataset is stored."""
    open_tab(browser, "datasets")
    browser.wait(f"Boolean({EDITOR})")
    browser.ask(f"(() => {{ const it = {EDITOR}; it.openDatasetModal(it.datasets[0]); it.modalTab = 'storage'; }})()")


def start_job(browser: Browser) -> str:
    """Through the page's own button; what the page says to it."""
    click(browser, "#runBtn")
    return str(browser.wait("document.getElementById('training-status').innerText.trim()"))


def click(browser: Browser, selector: str) -> None:
    browser.wait(f"document.querySelector({json.dumps(selector)}) !== null")
    browser.ask(f"document.querySelector({json.dumps(selector)}).click()")


def edit_as_json(browser: Browser, **changes: Any) -> str:
    """Change the whole configuration where the page shows it as text; what the page has against it."""
    store = "Alpine.store('trainer')"
    browser.ask(f"{store}.openConfigJsonModal()")
    document = {**json.loads(browser.ask(f"{store}.configJsonDraft")), **changes}
    browser.ask(f"{store}.configJsonDraft = {json.dumps(json.dumps(document))}")
    return str(browser.ask(f"{store}.applyConfigJsonDraft().then(() => {store}.configJsonError)"))


def put(browser: Browser, name: str, value: Any) -> None:
    """Type into a field, choose from it, or flip it."""
    if isinstance(value, bool):
        field = f"document.getElementById({json.dumps(name)})"
        browser.wait(f"{field} !== null")
        browser.ask(f"{field}.checked !== {json.dumps(value)} && {field}.click()")
    else:
        fill(browser, f"[id={json.dumps(name)}]", str(value))


def fill(browser: Browser, selector: str, text: str) -> None:
    """With the events that a person's hand causes."""
    field = f"document.querySelector({json.dumps(selector)})"
    browser.wait(f"{field} !== null")
    events = "['input', 'change'].forEach(kind => field.dispatchEvent(new Event(kind, {bubbles: true})))"
    browser.ask(f"(() => {{ const field = {field}; field.value = {json.dumps(text)}; {events}; }})()")


def shown(browser: Browser, name: str) -> bool:
    return bool(browser.ask(f"document.getElementById({json.dumps(name)}).offsetParent !== null"))


def save(browser: Browser) -> None:
    """Through the page's own button and the question behind it."""
    click(browser, "button[aria-label='Save configuration']:not(:disabled)")
    click(browser, "#confirmSaveConfigButton")
