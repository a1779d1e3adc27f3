"""The Web UI's parts that need no server: edits of pages, background commands, live numbers, forms."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from jinja2 import DictLoader, Environment, TemplateNotFound

from simpletuner_gh200.config.blocks import parts_of
from simpletuner_gh200.config.form import fields_of
from simpletuner_gh200.seams.web_ui import panel as panel_module
from simpletuner_gh200.seams.web_ui.fields import fold_into, split_form
from simpletuner_gh200.seams.web_ui.panel import BackgroundCommand, Panel, live_numbers, opened_configuration, output_of
from simpletuner_gh200.seams.web_ui.templates_of_ours import EDITS, PageLoader, edited
from tests.unit.operate.browser import CHROMIUM, Browser
from tests.unit.telemetry.run_samples import write_ranks

CACHES = "gh200_cache_config_"


def ended(command: BackgroundCommand) -> dict:
    while command.state()["state"] == "running":
        time.sleep(0.02)
    return command.state()


@pytest.fixture
def any_command(monkeypatch):
    """The interpreter in place of gh200: what it is told to do comes as the first argument."""
    monkeypatch.setattr(panel_module, "COMMAND", (sys.executable, "-c"))


class TestBackgroundCommands:
    def test_the_last_line_is_the_document_and_exit_1_is_a_verdict(self, any_command):
        command = BackgroundCommand()
        assert command.state() == {"state": "idle"}
        command.start("import sys; print('on the way'); print('{\"fits\": false}'); sys.exit(1)")
        assert ended(command) == {"state": "done", "document": {"fits": False}}

    def test_what_fails_says_why(self, any_command):
        command = BackgroundCommand()
        command.start("import sys; print('no such machine', file=sys.stderr); sys.exit(2)")
        assert ended(command) == {"state": "failed", "message": "no such machine"}
        refusal = """print('{"ok": false, "reason": "why"}')"""
        command.start(f"import sys; {refusal}; print('tracing failed', file=sys.stderr); sys.exit(1)")
        assert ended(command) == {"state": "failed", "message": "tracing failed"}
        command.start("import sys; sys.exit(3)")
        assert "exit code 3" in ended(command)["message"]

    def test_it_runs_once_at_a_time_and_is_never_waited_for(self, any_command, tmp_path):
        command = BackgroundCommand()
        count = tmp_path / "count"
        code = f"import sys, time, pathlib; pathlib.Path({str(count)!r}).open('a').write('x'); time.sleep(60)"
        command.start(code)
        while not count.exists() or not count.read_text():
            time.sleep(0.02)
        command.start(code)
        assert command.state()["state"] == "running"
        command.stop()
        assert ended(command)["state"] == "failed"
        assert count.read_text() == "x"

    def test_several_pages_may_ask_at_once(self, any_command, tmp_path):
        command = BackgroundCommand()
        go = tmp_path / "go"
        code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nprint('{{}}')"
        with ThreadPoolExecutor(4) as pages:
            started = list(pages.map(lambda _page: command.start(code), range(4)))
            assert started.count(True) == 1
            go.touch()
            heard = list(pages.map(lambda _page: ended(command), range(4)))
        assert heard == [{"state": "done", "document": {}}] * 4

    def test_the_child_is_no_process_of_simpletuner(self, any_command, monkeypatch):
        monkeypatch.setenv("SIMPLETUNER_GH200", "1")
        command = BackgroundCommand()
        command.start("import json, os; print(json.dumps({'asked': os.environ.get('SIMPLETUNER_GH200')}))")
        assert ended(command)["document"] == {"asked": None}


class TestPanel:
    def test_the_panel_shows_the_run_as_the_monitor_does(self, tmp_path):
        assert live_numbers(tmp_path) is None
        write_ranks(tmp_path, 1)
        with (tmp_path / "gh200" / "telemetry.jsonl").open("a") as file:
            file.write('{"kind": "note"}\n{"kind": "st')
        found = live_numbers(tmp_path)
        rows = dict(found["rows"])
        assert found["status"] == "no end recorded: still running, or killed"
        assert (rows["step"], rows["step time"], rows["cache hits"]) == ("5 of 9", "1.0 s", "100 %")
        assert [alert["level"] for alert in found["alerts"]] == ["warn"], "it is silent"

    @pytest.mark.parametrize(
        ("status", "working"), [("running", True), ("Loading models", True), ("Completed", False), ("error", False)]
    )
    def test_whether_a_job_is_at_work_says_whether_the_page_asks_again(self, monkeypatch, tmp_path, status, working):
        told = {"training_status": status, "training_config": {"--output_dir": str(tmp_path)}}
        api = SimpleNamespace(APIState=SimpleNamespace(get_state=told.get))
        monkeypatch.setitem(sys.modules, "simpletuner.simpletuner_sdk.api_state", api)
        assert panel_module.job() == (tmp_path, working)
        told["training_status"] = None
        assert panel_module.job() == (None, False)

    def test_it_knows_the_open_configuration_and_its_output(self, monkeypatch, tmp_path):
        file = tmp_path / "config.json"
        store = SimpleNamespace(get_active_config=lambda: "tiny", _get_config_path=lambda name: file)
        service = SimpleNamespace(get_config_store=lambda: store)
        monkeypatch.setitem(sys.modules, f"{panel_module._SERVICES}.training_service", service)
        assert opened_configuration() is None
        file.write_text('{"output_dir": "out"}')
        assert opened_configuration() == file
        assert output_of(file) == Path("out")
        file.write_text("{oops")
        assert output_of(file) is None

    def test_a_plan_is_shown_under_the_name_it_is_made_of(self, monkeypatch, tmp_path):
        monkeypatch.setattr(panel_module, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
        panel = Panel()
        panel.start_plan(tmp_path / "first.json")
        panel.start_plan(tmp_path / "second.json")
        assert panel.state(None, None, working=False)["plan"]["of"] == "first"
        panel.plan.stop()
        assert ended(panel.plan)["state"] == "failed"

    def test_the_doctors_report_lies_where_nobody_else_writes(self, monkeypatch):
        panel = Panel()
        started = []
        monkeypatch.setattr(panel.doctor, "start", lambda *words: started.append(words))
        panel.start_doctor()
        panel.start_doctor()
        first, second = (Path(words[words.index("--output") + 1]) for words in started)
        assert first == second
        assert first.parent.stat().st_mode & 0o777 == 0o700

    def test_what_cannot_be_read_is_said_and_no_reason_to_fail(self, tmp_path):
        """As of a folder of somebody else's, or one that went away with its file system."""
        (tmp_path / "out").write_text("no folder")
        words = live_numbers(tmp_path / "out")["status"]
        assert words.startswith(str(tmp_path / "out")) and words.endswith("cannot be read: Not a directory")

    def test_a_report_without_a_readable_configuration_says_why(self, monkeypatch, tmp_path):
        monkeypatch.setattr(panel_module, "_same_door", list)
        monkeypatch.setattr(panel_module, "opened_configuration", lambda: tmp_path)
        monkeypatch.setattr(panel_module, "job", lambda: (None, False))
        (report,) = (one.endpoint for one in panel_module.router().routes if one.path.endswith("/report"))
        with pytest.raises(HTTPException) as refused:
            report()
        assert refused.value.status_code == 409
        assert f"{tmp_path} cannot be read: Is a directory" in refused.value.detail

    def test_an_output_folder_may_begin_with_a_dash(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        code = "import pathlib, sys; pathlib.Path(sys.argv[4]).write_text(sys.argv[2])"
        monkeypatch.setattr(panel_module, "COMMAND", (sys.executable, "-c", code))
        assert panel_module.report_page(Path("-out")) == (True, str(tmp_path / "-out"))

    def test_nothing_is_started_by_being_asked(self):
        state = Panel().state(None, None, working=False)
        assert state == {
            "opened": None,
            "doctor": {"state": "idle"},
            "plan": {"state": "idle", "of": None},
            "job": None,
            "working": False,
        }


class TestTemplates:
    WIZARD = "partials/dataset_wizard_modal.html"
    KNOWN = """
      <i :class="{'fa-folder': blueprint.backendType === 'local', 'fa-x': false}"></i>
      <div x-show="selectedBackend === 'local' || selectedBackend === 'aws'"></div>
      <!-- VAE Cache Directory (conditionally disabled) -->
    """

    def environment(self, pages):
        environment = Environment(loader=DictLoader(pages), autoescape=True)
        environment.loader = PageLoader(environment.loader)
        (held,) = parts_of("in_memory")
        environment.globals["gh200_dataset_fields"] = fields_of(held)
        return environment

    def test_a_known_page_gets_our_fields(self):
        environment = self.environment({self.WIZARD: self.KNOWN})
        page = environment.get_template(self.WIZARD).render()
        assert "['local', 'in_memory'].includes(selectedBackend) || selectedBackend === 'aws'" in page
        for key in ("compression", "memory_limit_gb", "num_workers", "verify", "per_node", "wait", "file_extensions"):
            assert f'data-gh200-key="{key}"' in page
        assert "VALUE" not in page, "each field says what it puts in"
        assert environment.loader.changed(environment) == []

    def test_a_page_that_has_changed_is_left_as_it_is_and_named(self):
        other = self.KNOWN.replace("VAE Cache Directory", "Latents")
        environment = self.environment({self.WIZARD: other})
        assert environment.get_template(self.WIZARD).render() == other
        assert environment.loader.changed(environment) == [self.WIZARD]
        assert edited(self.WIZARD, self.KNOWN) is not None

    def test_other_pages_pass_and_ours_are_found(self):
        environment = self.environment({"form_tab.html": "as upstream has it"})
        assert environment.get_template("form_tab.html").render() == "as upstream has it"
        assert {"form_tab.html", "gh200/panel.html", "gh200/dataset_fields.html"} <= set(environment.list_templates())
        with pytest.raises(TemplateNotFound):
            environment.get_template("gh200/nothing.html")
        assert set(EDITS) & {"form_tab.html"} == set()


class TestForms:
    def test_a_checked_box_wins_over_its_stand_in(self):
        form = {CACHES + "persistent_cache": ["false", "true"], "--" + CACHES + "slab": "host", "--seed": "1"}
        typed, rest = split_form(form)
        assert typed == {CACHES + "persistent_cache": "true", CACHES + "slab": "host"}
        assert rest == {"--seed": "1"}

    def test_the_field_counts_and_not_what_the_page_remembers_of_it(self):
        """Of a number field that holds no number the page remembers nothing; it shall be refused, not forgotten."""
        sent = {CACHES + "memory_limit_gb": "not a number", "--" + CACHES + "memory_limit_gb": ""}
        for form in (sent, dict(reversed(sent.items()))):
            assert split_form(form) == ({CACHES + "memory_limit_gb": "not a number"}, {})

    def test_blocks_edited_as_text_stand_for_those_in_the_file(self):
        store = SimpleNamespace(load_config=lambda name: ({"cache_config": {"slab": "auto"}}, None))
        edited = {"cache_config": {"fill": "lazy", "of_tomorrow": 1}}
        sent = {"--gh200_edited_blocks": json.dumps(edited)}
        bundle = SimpleNamespace(
            store=store, active_config="tiny", complete_config=dict(sent), config_dict={}, save_config=dict(sent)
        )
        fold_into(bundle, {CACHES + "memory_limit_gb": "2", CACHES + "slab": "auto"}, sent, replace=False)
        assert bundle.save_config == {"cache_config": {"fill": "lazy", "of_tomorrow": 1, "memory_limit_gb": 2}}
        assert set(bundle.complete_config) == {"--cache_config"}

    def test_nothing_of_the_page_is_left_in_what_is_saved_or_started(self):
        store = SimpleNamespace(load_config=lambda name: ({"cache_config": {"slab": "auto"}}, None))
        sent = {CACHES + "slab": "host", "--cache_config": "[object Object]"}
        bundle = SimpleNamespace(
            store=store, active_config="tiny", complete_config=dict(sent), config_dict={}, save_config={}
        )
        bundle.save_config[CACHES + "slab"] = "host"
        fold_into(bundle, {CACHES + "slab": "host"}, sent, replace=False)
        assert bundle.save_config == {"cache_config": {"slab": "host"}}
        assert bundle.complete_config == {"--cache_config": {"slab": "host"}}


PAGE = """<!DOCTYPE html><html data-theme="dark"><body><script>
    window.state = {doctor: {state: 'idle'}, plan: {state: 'idle', of: null}, job: null, working: false};
    window.asked = [];
    window.fetch = async (address) => {
        window.asked.push(address);
        return new Response(JSON.stringify(window.state), {headers: {'Content-Type': 'application/json'}});
    };
    const wait = window.setTimeout;  // a second of the page takes 20 ms
    window.setTimeout = (what, pause, ...more) => wait(what, (pause || 0) / 50, ...more);
    window.asks = async (seconds) => {
        window.asked = [];
        await new Promise((done) => setTimeout(done, seconds * 1000));
        return window.asked.length;
    };
</script>PANEL</body></html>"""
"""Just enough of a server for the panel to talk to."""


@pytest.fixture(scope="module")
def panel_page(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: scripts/dev/install_test_programs.sh installs Debian's")
    panel = Environment(loader=PageLoader(DictLoader({})), autoescape=True).get_template("gh200/panel.html")
    page = tmp_path_factory.mktemp("panel") / "panel.html"
    page.write_text(PAGE.replace("PANEL", panel.render(gh200_needs={})))
    browser = Browser()
    browser.open(page, width=1000, height=600)
    yield browser
    browser.close()


@pytest.mark.slow
def test_the_panel_asks_while_something_works_and_is_silent_otherwise(panel_page, tmp_path):
    page = panel_page
    write_ranks(tmp_path, 1)
    assert page.problems == [] and page.ask("asks(20)") == 0, "nothing has begun"
    page.ask(f"state.job = {json.dumps(live_numbers(tmp_path))}; state.working = true; undefined")
    page.ask("window.dispatchEvent(new CustomEvent('training-status', {detail: {status: 'starting'}}))")
    assert page.ask("asks(20)") >= 3
    shown = page.ask("document.querySelector('[data-gh200=job]').innerText")
    assert "5 of 9" in shown and "cache hits" in shown and "no step for" in shown
    page.ask("state.working = false; undefined")
    assert page.ask("asks(20)") <= 2, "once as ever, and once more for what is written last"
    assert page.ask("asks(20)") == 0
    page.ask("state.doctor = {state: 'running', seconds: 1}; document.querySelector('[data-gh200-start]').click()")
    assert page.ask("asks(20)") >= 3
    page.ask("state.doctor = {state: 'done', document: {checks: [{status: 'pass'}]}}; undefined")
    page.wait("document.querySelector('[data-gh200-verdict=pass]') !== null")
    assert page.ask("asks(30)") <= 2 and page.ask("asks(20)") == 0
    assert page.problems == []
