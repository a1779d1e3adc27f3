"""The built wheel: light, complete, and no danger to an installed torch or SimpleTuner."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.dev.environments import ROOT, built_wheel, run_uv
from simpletuner_gh200.bench.suites.hooks import PTH_LINE
from tests.unit.broken_site import write_site


def uv(*words: str) -> str:
    ran = run_uv(*words)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built_wheel(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def outside(wheel, tmp_path_factory) -> Path:
    """An environment away from the checkout with nothing but the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("outside") / "env"
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    uv("pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), str(wheel))
    return folder


def run(folder: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **variables}
    command = [str(folder / "bin" / words[0]), *words[1:]]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_it_asks_for_neither_torch_nor_simpletuner(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = {
        line.split(";")[0].split("[")[0].strip(" ()<>=!~.,0123456789") for line in metadata.get_all("Requires-Dist")
    }
    assert not wanted & {"torch", "simpletuner", "accelerate", "diffusers", "torchvision", "cuda-toolkit"}
    assert metadata["License-Expression"] == "AGPL-3.0-or-later"


def test_it_would_change_no_package_of_an_environment_with_torch(wheel):
    """Into this very environment, which has SimpleTuner, torch and the rest: only our own package would change."""
    planned = uv("pip", "install", "--dry-run", "--python", sys.executable, str(wheel))
    changes = [line.split()[1] for line in planned.splitlines() if line.strip().startswith(("+", "-", "~"))]
    assert {change.split("==")[0] for change in changes} <= {"simpletuner-gh200"}


def test_it_works_outside_the_checkout(outside, tmp_path):
    assert run(outside, "gh200", "--version", cwd=tmp_path).stdout.startswith("gh200 ")
    helped = run(outside, "gh200", "--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert "train" in helped.stdout


def test_without_simpletuner_it_says_so(outside, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    ended = run(outside, "gh200", "train", "--config", "config.json", cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "SimpleTuner is not installed" in line and "`gh200 setup`" in line


def test_without_accelerate_it_says_so(outside, tmp_path):
    write_site(tmp_path / "site", trainer="import accelerate")
    (tmp_path / "config.json").write_text("{}")
    ended = run(outside, "gh200", "train", "--config", "config.json", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "No module named 'accelerate'" in line and "accelerate missing, tested 1." in line


def test_the_start_up_hook_is_the_line_the_benchmark_measures(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("simpletuner_gh200.pth").decode() == PTH_LINE


def test_it_carries_the_files_of_the_guides(outside, tmp_path):
    assert run(outside, "gh200", "examples", "there", cwd=tmp_path).returncode == 0
    assert (tmp_path / "there" / "scripts" / "feature_matrix" / "main.py").is_file()
    assert (tmp_path / "there" / "accelerate_config_gh200.yaml").is_file()
    sourced = subprocess.run(
        ["bash", "-c", "source there/scripts/setup_gh200_env.sh && echo $SIMPLETUNER_GH200"],
        cwd=tmp_path,
        env={"PATH": f"{outside / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert sourced.stdout.strip() == "1", sourced.stderr


def test_uninstalling_leaves_nothing_behind(wheel, tmp_path):
    folder = tmp_path / "env"
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")

    def files() -> set[Path]:
        return {path for path in folder.rglob("*") if "__pycache__" not in path.parts and path.name != ".lock"}

    before = files()
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, str(wheel))
    assert any(path.suffix == ".pth" and "gh200" in path.name for path in files())
    uv("pip", "uninstall", "--quiet", "--python", python, "simpletuner-gh200")
    assert files() == before
    shutil.rmtree(folder)
