"""A real Chromium, driven over its debugging pipe: open a page, ask it things, take a picture."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One headless browser with one page. ``problems`` collects errors of the console, the page and the network."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="gh200-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
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

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, *, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, *, beyond: bool = True) -> bytes:
        """The whole page, or just what the window shows."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=beyond)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

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
