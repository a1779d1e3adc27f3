"""Fresh environments, as a user makes them: the two lines of the README, and whatever the package index has today.

Each installs gigabytes and trains, so they belong to `make test-matrix`; `make newest` is the second alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.dev.environments import ROOT, built_wheel, uv_command, without_find_links
from simpletuner_gh200.upstream.tested import choose, constraints

pytestmark = pytest.mark.matrix

Run = Callable[..., subprocess.CompletedProcess[str]]
SHOWN = ("simpletuner", "torch", "torchaudio", "transformers", "diffusers", "numpy")


@pytest.fixture
def fresh(tmp_path) -> Iterator[Run]:
    """Runs a program of a fresh virtual environment that has our wheel, in its folder, with a home of its own."""
    folder = tmp_path / "env"
    uv = uv_command()
    assert uv is not None
    environment = {
        **without_find_links(),
        "PATH": f"{folder / 'bin'}:{Path(uv).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "UV_CACHE_DIR": subprocess.run([uv, "cache", "dir"], capture_output=True, text=True).stdout.strip(),
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    wheel = built_wheel(ROOT, tmp_path / "dist")
    done(run(uv, "venv", "--quiet", "--python", sys.executable, str(folder)))
    done(run(uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), str(wheel)))
    yield run
    shutil.rmtree(folder)  # gigabytes, which pytest would keep


def done(ran: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran


def told(ran: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(ran.stdout.splitlines()[-1])


def installed(fresh: Run) -> dict[str, str]:
    code = "import json, simpletuner_gh200.upstream.tested as v; print(json.dumps(v.installed_distributions()))"
    return told(done(fresh("python", "-c", code)))


@pytest.mark.releases
def test_the_lines_of_the_readme_give_a_simpletuner_that_trains(fresh):
    """In every environment: this interpreter's release, at exactly the versions that CI tests."""
    release = choose(f"3.{sys.version_info.minor}", os.uname().machine).release
    before = installed(fresh)
    planned = told(done(fresh("gh200", "setup", "--cpu", "--dry-run", "--json")))
    assert installed(fresh) == before
    made = told(done(fresh("gh200", "setup", "--cpu", "--json")))
    assert (made["simpletuner"], made["installer"], made["imports"], made["cause"]) == (release, "uv", True, None)
    assert made["changed"] == planned["changed"]
    after = installed(fresh)
    pinned = dict(line.split("==") for line in constraints(release, cpu=True).splitlines())
    common = after.keys() & pinned.keys()
    assert {name: after[name] for name in common} == {name: pinned[name] for name in common}
    assert after["simpletuner-gh200"] == before["simpletuner-gh200"]
    trained = told(done(fresh("gh200", "demo", "--steps", "2", "--json")))
    assert trained["global_step"] == 2
    again = told(done(fresh("gh200", "setup", "--json")))
    assert (again["installer"], again["changed"], again["imports"]) == (None, [], True)


@pytest.mark.only_release("4.")
def test_the_newest_of_everything_trains_or_is_refused_with_the_cause(fresh, capsys):
    """The resolution of the day. Whether it imports is SimpleTuner's; that we say so before anything heavy is ours."""
    done(fresh(uv_command(), "pip", "install", "--quiet", "--compile-bytecode", "--upgrade", "simpletuner[cpu]"))
    here = installed(fresh)
    report = told(fresh("gh200", "doctor", "--skip-allocation", "--json"))
    (finding,) = [check for check in report["checks"] if check["code"] == "GH109"]
    trained = fresh("gh200", "demo", "--steps", "2", "--json")
    with capsys.disabled():
        print(f"\nnewest of everything: {', '.join(f'{name} {here.get(name)}' for name in SHOWN)}")
        print(f"imports: {finding['status']}: {finding['found']}; gh200 demo: exit code {trained.returncode}")
    if finding["status"] == "fail":
        assert finding["found"]
        assert "gh200 setup" in finding["fix"]
        assert trained.returncode == 2
        assert "does not import here" in trained.stderr
        assert "Traceback" not in trained.stderr
    else:
        assert told(done(trained))["global_step"] == 2
