"""Photograph our parts of SimpleTuner's Web UI, in its real server, for docs/web-ui.md.

python -m scripts.dev.take_web_ui_pictures docs/pictures
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from simpletuner_gh200.demo.project import dataset_list
from simpletuner_gh200.demo.tiny_model import write_tiny_sdxl
from tests.unit.operate.browser import Browser
from tests.web_ui.server import Server, click, open_page, open_tab, write_page_project

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
    browser = open_page(server)
    open_tab(browser, "hardware")
    for command in ("doctor", "plan"):
        click(browser, f"[data-gh200-start={command}]")
    browser.wait("document.querySelector('[data-gh200-verdict]') && document.querySelector('[data-gh200-fits]')", 600)
    take(browser, "#section-gh200_panel", target / "web-ui-panel.png")
    take(browser, "#section-gh200_batch_ramp", target / "web-ui-fields.png")
    browser.close()


def take(browser: Browser, selector: str, file: Path) -> None:
    """One element of the page, as large as it is."""
    browser.ask(f"document.querySelector({selector!r}).scrollIntoView()")
    box = browser.ask(
        f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
        " return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}; })()"
    )
    file.write_bytes(browser.picture(clip=box))
    print(file)


if __name__ == "__main__":
    main()
