"""Photograph our parts of SimpleTuner's Web UI, in its real server, for docs/web-ui.md.

python -m scripts.dev.take_web_ui_pictures docs/pictures
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

from simpletuner_gh200.demo.project import dataset_list, write_tiny_sdxl
from tests.unit.operate.browser import Browser
from tests.web_ui.server import Server, click, open_dataset, open_page, open_tab, write_page_project

BLOCKS = {
    "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
    "gh200_optimizations": {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4},
}
HELD = {"type": "in_memory", "in_memory": {"compression": "lz4", "memory_limit_gb": 200}}


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_page_project(folder)
        server = Server(folder)
        write_tiny_sdxl(server.project.model)
        server.config.write_text(json.dumps({**server.saved(), **BLOCKS}))
        server.datasets.write_text(json.dumps(dataset_list(server.project, HELD)))
        server.wait()
        server.welcome()
        try:
            photograph(server, target)
        finally:
            server.close()


def photograph(server: Server, target: Path) -> None:
    browser = open_page(server, height=1300)
    open_tab(browser, "hardware")
    for command in ("doctor", "plan"):
        click(browser, f"[data-gh200-start={command}]")
    browser.wait("document.querySelector('[data-gh200-running]')")
    browser.wait("document.querySelector('[data-gh200-verdict]') && document.querySelector('[data-gh200-fits]')", 600)
    take(browser, "document.querySelector('#section-gh200_panel')", target / "web-ui-panel.png")
    take(browser, "document.querySelector('#section-gh200_batch_ramp')", target / "web-ui-fields.png")
    browser.close()
    browser = open_page(server, height=1300)
    open_dataset(browser)
    take(browser, f"{FIELDS_OF_DATASET}?.closest('.dataset-modal')", target / "web-ui-dataset.png")
    browser.close()


FIELDS_OF_DATASET = (
    "[...document.querySelectorAll('[data-gh200-dataset=editingDataset]')].find(it => it.offsetParent !== null)"
)
STILL = (
    "document.getAnimations().every(it => it.playState !== 'running'"
    " || it.effect.getComputedTiming().endTime === Infinity)"
)
"""Nothing moves, but for what does so for ever."""
OVER_THE_PAGE = ".event-dock, #toast-container"


def take(browser: Browser, element: str, file: Path) -> None:
    """One element of the page, cut out of what the window shows: a larger picture would make the page fade in again."""
    browser.wait(f"Boolean({element})")
    browser.ask(f"document.querySelectorAll({json.dumps(OVER_THE_PAGE)}).forEach(it => it.style.display = 'none')")
    browser.ask(f"{element}.scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
    browser.wait(STILL)
    box = browser.ask(f"(it => [it.left, it.top, it.right, it.bottom])({element}.getBoundingClientRect())")
    with Image.open(io.BytesIO(browser.picture(beyond=False))) as window:
        window.crop(tuple(map(round, box))).save(file, optimize=True)
    print(file)


if __name__ == "__main__":
    main()
