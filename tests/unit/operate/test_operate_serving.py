"""``gh200 server``: SimpleTuner's own, asked for us."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from simpletuner_gh200.operate.launching import environment_of_server, serve

PYTHON = Path("/opt/venv/bin/python")


def test_the_extension_is_on_and_accelerate_is_found():
    found = environment_of_server({"PATH": "/usr/bin", "HOME": "/root"}, PYTHON)
    assert found == {"PATH": "/opt/venv/bin:/usr/bin", "HOME": "/root", "SIMPLETUNER_GH200": "1"}
    again = environment_of_server(found, PYTHON)
    assert again == found


def test_the_kill_switch_holds():
    assert environment_of_server({"SIMPLETUNER_GH200": "0"}, PYTHON)["SIMPLETUNER_GH200"] == "0"


def test_everything_is_passed_on(monkeypatch):
    called = []
    monkeypatch.setattr(os, "execve", lambda *given: called.append(given))
    serve(["--port", "8080", "--ssl"])
    ((program, arguments, environment),) = called
    assert program == sys.executable
    assert arguments == [sys.executable, "-m", "simpletuner", "server", "--port", "8080", "--ssl"]
    assert environment["SIMPLETUNER_GH200"] == "1"
