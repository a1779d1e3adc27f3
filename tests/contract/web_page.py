"""SimpleTuner's server in this process, asked as a browser asks it: pages as text, forms as they are sent."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.form import our_values

HARDWARE = "/web/trainer/tabs/hardware"
PROJECT = {
    "model_family": "sdxl",
    "model_type": "lora",
    "optimizer": "adamw_bf16",
    "pretrained_model_name_or_path": "somebody/something",
    "tracker_project_name": "tiny",
    "max_train_steps": 4,
    "num_train_epochs": 0,
    "gradient_checkpointing": True,
}


class Project:
    """A configuration named ``tiny``, open in the page of ``client``."""

    def __init__(self, client: Any, folder: Path) -> None:
        self.client = client
        self.file = folder / "tiny" / "config.json"
        self.datasets = folder / "tiny" / "multidatabackend.json"

    def opened(self) -> Project:
        self.write()
        return self

    def write(self, **ours: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.datasets.write_text("[]")
        paths = {"output_dir": str(self.file.parent / "out"), "data_backend_config": str(self.datasets)}
        self.file.write_text(json.dumps({**PROJECT, **paths, **ours}))
        answer = self.client.post("/api/configs/tiny/activate")
        assert answer.status_code == 200, answer.text

    def page(self) -> str:
        answer = self.client.get(HARDWARE)
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def form(self, **typed: str) -> dict[str, str]:
        """What the hardware tab sends, with something typed into it."""
        fields = fields_of(self.page())
        assert not set(typed) - set(fields), set(typed) - set(fields)
        return {**fields, **typed}

    def send(self, action: str, form: dict[str, str]) -> Any:
        return self.client.post(f"/api/training/{action}", data={**form, "preserve_defaults": "true"})

    def saved(self) -> dict[str, Any]:
        return dict(json.loads(self.file.read_text()))

    def ours(self) -> dict[str, Any]:
        return our_values(self.saved())


class _Fields(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._select: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name")
        if tag == "select" and name:
            self._select, self.found[name] = name, ""
        elif tag == "option" and self._select and "selected" in given:
            self.found[self._select] = given.get("value") or ""
        elif tag == "input" and name:
            box = given.get("type") == "checkbox"
            self.found[name] = ("true" if "checked" in given else "false") if box else given.get("value") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "select":
            self._select = None


def fields_of(page: str) -> dict[str, str]:
    """Name -> value of what a page would send, boxes as the page's own script spells them."""
    parser = _Fields()
    parser.feed(page)
    return parser.found
