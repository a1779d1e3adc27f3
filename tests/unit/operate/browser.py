"""A real Chromium, driven over its debugging pipe: open a page, ask it things, take a picture."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

Answer = Callable[[str], tuple[str, bytes] | None]
"""Address -> content type and content; None: there is no such thing."""


class Browser:
    """One headless browser with one page. ``problems`` collects errors of the console, the page and the network."""

    def __init__(self, answer: Answer | None = None) -> None:
        """``answer``: content for addresses on other machines, none of which is reached; None: nothing is held up."""
        assert CHROMIUM is not None
        self._answer = answer
        self._profile = tempfile.TemporaryDirectory(prefix="gh200-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{to_browser} 4>&{from_browser}',
                "bash",
                CHROMIUM,
                *flags,
                "--remote-debugging-pipe",
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        if answer is not None:
            self.call("Fetch.enable", patterns=[{"urlPattern": "https://*"}])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, **parameters)
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path | str, *, width: int, height: int, scheme: str = "light") -> None:
        """A file, or an address."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.size(width, height)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        """What the expression gives once that is true."""
        return self.when(lambda: self.ask(expression), seconds, expression)

    def when(self, question: Callable[[], Any], seconds: float = 60, what: str = "") -> Any:
        """The answer once there is one; the page goes on meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ask("1")  # what it asks of the network is answered here
            found = question()
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"nothing in {seconds} s: {what or question}; problems: {self.problems[-5:]}")

    def picture(self, *, beyond: bool = True, clip: dict[str, float] | None = None) -> bytes:
        """The whole page, a part of it, or just what the window shows."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": beyond, **({"clip": clip} if clip else {})}
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        # Its helpers, which it does not wait for, still write to the profile.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for member in self._helpers():
            member.wait(timeout=20)
        self._profile.cleanup()

    def _helpers(self) -> list[psutil.Process]:
        """Whoever was told of the profile, in whatever group or session."""
        return [
            one for one in psutil.process_iter(["cmdline"]) if self._profile.name in " ".join(one.info["cmdline"] or ())
        ]

    def _send(self, method: str, **parameters: Any) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser went away"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        self._note(event.get("method"), event.get("params", {}))
        return event

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown" or (
            method == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}
        ):
            self.problems.append(json.dumps(parameters)[:500])
        if method == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning", "assert"}:
            self.problems.append(json.dumps(parameters)[:500])
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        if method == "Fetch.requestPaused":
            self._let_go(parameters["requestId"], parameters["request"]["url"])

    def _let_go(self, request: str, url: str) -> None:
        assert self._answer is not None
        found = self._answer(url)
        if found is None:
            self._send("Fetch.failRequest", requestId=request, errorReason="InternetDisconnected")
            return
        kind, content = found
        headers = [{"name": "Content-Type", "value": kind}, {"name": "Access-Control-Allow-Origin", "value": "*"}]
        body = base64.b64encode(content).decode()
        self._send("Fetch.fulfillRequest", requestId=request, responseCode=200, responseHeaders=headers, body=body)
