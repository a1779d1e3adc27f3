from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.dev.page_libraries import fetched
from tests.unit.operate.browser import CHROMIUM, Browser
from tests.web_ui.server import Server, open_page, write_page_project


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SimpleTuner's real server with the extension on, over a project that trains in seconds."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: scripts/dev/install_test_programs.sh installs Debian's")
    if not fetched():
        pytest.skip("the page's libraries are not here: scripts/dev/install_test_programs.sh fetches them")
    folder = tmp_path_factory.mktemp("page")
    write_page_project(folder)
    running = Server(folder)
    try:
        running.wait()
        running.welcome()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Browser]:
    browser = open_page(server)
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def what_the_server_says(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shown beside a test that fails: the server's own words are the only ones that say why a page got no answer."""
    log: Path | None = request.getfixturevalue("server").log if "server" in request.fixturenames else None
    before = log.stat().st_size if log else 0
    yield
    if log:
        print(log.read_bytes()[before:].decode(errors="replace")[-6000:])
