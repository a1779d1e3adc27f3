"""The container files, as far as that can be told without a builder: there is none here, and neither was ever built."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.dev.environments import ROOT, built_wheel

FOLDER = ROOT / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
DEFINITION = (FOLDER / "gh200.def").read_text(encoding="utf-8")
KNOWN = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}


def docker_lines() -> list[tuple[str, str]]:
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def sections() -> dict[str, list[str]]:
    parts = re.split(r"^%(\w+)\n", DEFINITION, flags=re.M)
    return {
        name: [line.strip() for line in text.split("\n") if line.strip()]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def copied() -> tuple[list[str], list[str]]:
    docker = [name for word, rest in docker_lines() if word == "COPY" for name in rest.split()[:-1]]
    return docker, [line.split()[0] for line in sections()["files"]]


def test_the_dockerfile_is_well_formed() -> None:
    lines = docker_lines()
    assert {word for word, _ in lines} <= KNOWN
    assert [word for word, _ in lines].index("FROM") == 0
    assert all(rest.startswith("[") for word, rest in lines if word in {"ENTRYPOINT", "CMD"}), "no shell in between"


def test_the_definition_is_well_formed() -> None:
    header = dict(re.findall(r"^(\w+): (\S+)$", DEFINITION, re.M))
    assert header == {"Bootstrap": "docker", "From": "ubuntu:24.04"}
    assert set(sections()) == {"files", "post", "environment", "runscript", "test"}
    assert all(line.split()[1] == f"/src/{line.split()[0]}" for line in sections()["files"])


def test_both_start_from_the_same_pinned_system_and_install_the_same() -> None:
    assert f"FROM {re.search(r'^From: (.+)$', DEFINITION, re.M)[1]}\n" in DOCKERFILE
    for text in (DOCKERFILE, DEFINITION):
        assert text.count("./containers/install.sh") == 1
        assert ":latest" not in text


def test_what_both_copy_is_enough_for_our_package(tmp_path: Path) -> None:
    """The very files, in a folder of their own, give a wheel with everything that the project says it carries."""
    docker, definition = copied()
    assert sorted(docker) == sorted(definition)
    for source in docker:
        place = ROOT / source
        copy = shutil.copytree if place.is_dir() else shutil.copy
        copy(place, tmp_path / source)
    built_wheel(tmp_path, tmp_path / "dist")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {Path(source).parts[0] for source in wheel["force-include"]} <= set(docker)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_the_script_is_sound() -> None:
    ran = subprocess.run(["shellcheck", str(FOLDER / "install.sh")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
