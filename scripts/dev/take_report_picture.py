"""Photograph the report of a run in Chromium.

python -m scripts.dev.take_report_picture RUN docs/pictures/report.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from simpletuner_gh200.operate.report.page import build
from tests.unit.operate.browser import Browser


def main() -> None:
    run, picture = map(Path, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        page.write_text(build(run), encoding="utf-8")
        browser = Browser()
        browser.open(page, width=1000, height=1240)
        browser.ask("document.documentElement.style.overflow = 'hidden'")
        picture.write_bytes(browser.picture(beyond=False))
        browser.close()


if __name__ == "__main__":
    main()
