"""Off means off: what SimpleTuner's server answers where we are installed is what it answers where we are not.

Three servers; in `make test` stands for it, within one process, tests/contract/test_web_ui_fields.py.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from simpletuner_gh200.demo.project import dataset_list
from tests.web_ui.server import NAME, Server, free_port, write_page_project

pytestmark = [pytest.mark.real, pytest.mark.matrix, pytest.mark.one_release("4.")]

OURS = {
    "cache_config": {"vae_cache_type": "unified_memory", "of_tomorrow": 1},
    "gh200_optimizations": {"enable_batch_size_rampup": True, "initial_effective_batch_size": 2},
}
HELD = {"type": "in_memory", "in_memory": {"compression": "lz4"}}

FURTHER = ("/openapi.json", f"/api/configs/{NAME}", "/web/trainer/search?q=memory", "/api/fields/search?q=batch")
"""Answers that the list of routes does not name by themselves."""
ENDLESS = ("/api/events", "/broadcast", "/api/workers/stream")
RANDOM = ("/api/configs/project-name", "/api/events/recent")
"""Names and ids that upstream draws anew each time."""
ELSEWHERE = ("/api/cloud/", "/api/publishing/", "/api/metrics/replicate", "/api/auth/external/")
"""These ask other machines; a test does not."""

Answers = dict[str, tuple[int, str, bytes]]
"""Address -> status, content type, body."""


def test_a_server_with_us_installed_but_off_answers_as_one_without_us(tmp_path: Path) -> None:
    port = free_port()
    stock, again, off = (answers_of(kind, tmp_path / "project", port) for kind in ("stock", "stock", "off"))
    assert len(stock) > 60 and any("/tabs/hardware" in path for path in stock)
    assert stock.keys() == again.keys() == off.keys()
    vary = {path for path in stock if stock[path] != again[path]}
    assert {path for path in stock.keys() - vary if off[path] != stock[path]} == set(), "not a byte differs"
    # Times, memory and process numbers differ between any two servers: there, all but the numbers is compared.
    assert {path for path in vary if without_numbers(again[path]) != without_numbers(stock[path])} == set()
    assert {path for path in vary if without_numbers(off[path]) != without_numbers(stock[path])} == set()
    assert not {"/web/trainer/tabs/hardware", "/api/datasets/blueprints", "saved"} & vary


def answers_of(kind: Literal["off", "stock"], folder: Path, port: int) -> Answers:
    """All that one server says about a project that uses us; the same place and port for each, for they are shown."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_page_project(folder)
    server = Server(folder, kind=kind, port=port)
    server.config.write_text(json.dumps({**server.saved(), **OURS}))
    server.datasets.write_text(json.dumps(dataset_list(server.project, HELD)))
    try:
        server.wait()
        server.welcome()
        found = {path: answer(server, path) for path in addresses(server)}
        typed = urllib.parse.urlencode({"--learning_rate": "0.002", "gh200_cache_config_slab": "{oops"}).encode()
        for path in ("/api/training/validate", "/api/training/config"):
            found[f"typed into {path}"] = answer(server, path, typed)
        return {**found, "saved": (0, "", server.config.read_bytes())}
    finally:
        server.close()


def addresses(server: Server) -> Iterator[str]:
    """Every page and every answer that is asked for without more than its address."""
    routes = json.loads(server.get("/openapi.json"))["paths"]
    fixed = [path for path, methods in routes.items() if "get" in methods and "{" not in path]
    page = server.get("/web/trainer")
    tabs = sorted(set(re.findall(r'data-tab="([a-z_-]+)"', page)))
    files = sorted(set(re.findall(r'(?:src|href)="(/static/[^"?]+\.(?:js|css))', page)))
    for path in dict.fromkeys((*fixed, *(f"/web/trainer/tabs/{tab}" for tab in tabs), *files, *FURTHER)):
        if path not in (*ENDLESS, *RANDOM) and not path.startswith(ELSEWHERE):
            yield path


def answer(server: Server, path: str, typed: bytes | None = None) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(server.address + path, typed, timeout=60) as found:
            return found.status, found.headers["Content-Type"] or "", found.read()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers["Content-Type"] or "", refused.read()


def without_numbers(found: tuple[int, str, bytes]) -> tuple[int, str, bytes]:
    status, kind, body = found
    return status, kind, re.sub(rb"\d+", b"0", body)
