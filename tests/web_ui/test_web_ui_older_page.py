"""The server of SimpleTuner 3.1, started as a person does; its page in a browser is that of 4.x but for its age."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner_gh200.config.form import form_fields
from simpletuner_gh200.demo.project import dataset_list
from tests.web_ui.server import Server, write_page_project

pytestmark = [pytest.mark.real, pytest.mark.one_release("3.")]


def test_the_older_server_has_the_fields_the_card_and_the_panel(tmp_path: Path) -> None:
    write_page_project(tmp_path)
    server = Server(tmp_path)
    server.datasets.write_text(json.dumps(dataset_list(server.project, {"type": "in_memory"})))
    try:
        server.wait()
        server.welcome()
        page = server.get("/web/trainer/tabs/hardware")
        assert [field.name for field in form_fields() if f'id="{field.name}"' not in page] == []
        assert 'id="gh200-panel"' in page and "Memory: model state" in page
        assert json.loads(server.get("/api/gh200/panel"))["opened"] == str(server.config)
        cards = json.loads(server.get("/api/datasets/blueprints"))["blueprints"]
        assert "in_memory" in [card["backendType"] for card in cards]
        assert "data-gh200-dataset=" in server.get("/web/trainer/tabs/datasets")
        log = server.log.read_text(errors="replace")
        assert "is on in this server" in log
        assert "is not the page we know" not in log
    finally:
        server.close()
