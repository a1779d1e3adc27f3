"""The documentation site as `make site` builds it: strict, every link followed, nothing fetched from elsewhere."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.dev import build_site
from tests.unit.operate.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://example.org/someone/simpletuner-gh200"


def copied(tree: Path, repository: str = "") -> Path:
    """The parts of a checkout that the site is made of, with another address in the one setting."""
    for name in ("docs", "scripts/site"):
        shutil.copytree(ROOT / name, tree / name)
    for path in ROOT.iterdir():
        if path.suffix == ".md" or path.name == "pyproject.toml":
            shutil.copy(path, tree)
    for name in ("src", "tests", ".github"):
        (tree / name).symlink_to(ROOT / name)
    project = tree / "pyproject.toml"
    project.write_text(project.read_text().replace('\nrepository = ""\n', f'\nrepository = "{repository}"\n'))
    return tree


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    ran = build_site.run_mkdocs(ROOT, target)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return target


def test_the_site_builds_and_every_link_leads_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 25
    assert list(build_site.problems(site)) == []


def test_without_an_address_no_link_leaves_for_the_repository(site: Path) -> None:
    """No address is known: where the source is meant, its name stands there as text."""
    page = (site / "architecture.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "<code>upstream/contract</code>" in page
    assert "/blob/" not in page


def test_faults_of_a_page_stop_the_build_and_are_named(tmp_path: Path) -> None:
    tree = copied(tmp_path, ADDRESS)
    (tree / "docs" / "forgotten.md").write_text("# Nobody lists me\n")
    with (tree / "docs" / "plan.md").open("a") as page:
        page.write("\n[no anchor](quick-start.md#nowhere) [no page](gone.md) [no source](../src/gone.py)\n")
        page.write("[a file](../src/simpletuner_gh200/units.py) [a page](../CONTRIBUTING.md#tests)\n")
        page.write("Packs are in <output_dir>/gh200.\n")
        page.write('\n<img src="pictures/gone.png"> <img src="https://example.org/far.png">\n')
    target = tmp_path / "site"
    ran = build_site.run_mkdocs(tree, target)
    assert ran.returncode != 0
    told = ran.stdout + ran.stderr
    for fault in ("forgotten.md", "#nowhere", "gone.md", "../src/gone.py"):
        assert fault in told, told
    found = "\n".join(build_site.problems(target))
    assert "plan.html: pictures/gone.png: no such file" in found
    assert "plan.html: <output_dir> is lost as a tag: write it as code" in found
    assert "plan.html: fetches https://example.org/far.png from elsewhere" in found
    built = (target / "plan.html").read_text(encoding="utf-8")
    assert f'href="{ADDRESS}/blob/main/src/simpletuner_gh200/units.py"' in built
    assert 'href="contributing.html#tests"' in built


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_fit_a_telephone_and_fetch_nothing_from_elsewhere(site: Path) -> None:
    browser = Browser()
    try:
        for name in ("index.html", "concepts/how-it-works.html", "reference/configuration.html"):
            browser.open(site / name, width=375, height=800)
            assert browser.ask("document.documentElement.scrollWidth") == 375, name
            assert browser.ask("[...document.images].every(image => image.naturalWidth > 0)"), name
        away = [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))]
        assert (away, browser.problems) == ([], [])
    finally:
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_words: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("words", ["rampup", "batch_rampup_steps", "cache_config.fill"])
def test_a_key_is_found_whole_and_by_a_word_in_it(served: str, words: str) -> None:
    browser = Browser()
    try:
        browser.open(f"{served}/index.html", width=1400, height=900)
        browser.wait("document.querySelector('.md-search__input').offsetWidth > 0")
        browser.ask("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text=words)
        # The page looks at the field when a key is let go, and once when its index has come: either may be first.
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="Shift")
        found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.pathname)"
        assert browser.wait(f"{found}.includes('/reference/configuration.html')")
    finally:
        browser.close()
