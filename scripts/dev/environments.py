#!/usr/bin/env python3
"""Build the development environments: `.venv/` for the best SimpleTuner this machine can run, and one for the other.

    python3 scripts/dev/environments.py check      only .venv-check: package and tools, without SimpleTuner and torch
    python3 scripts/dev/environments.py demo       only .venv
    python3 scripts/dev/environments.py selftest   .venv, and NVIDIA's bindings of CUDA 12 beside its own
    python3 scripts/dev/environments.py test       the same for every pair of interpreter and SimpleTuner that runs here
    python3 scripts/dev/environments.py wheel      no environment: the wheel, into dist/ (or `sdist`)
    python3 scripts/dev/environments.py site       only .venv-site, which builds the documentation site

Prints one line per environment on standard output: `<folder> <simpletuner version>`; the rest goes to standard error.
An environment whose inputs have not changed is left alone, so that a second call takes no time. Needs only the standard
library. Downloads through uv (installed by pip into `.uv/`), and through pip itself where uv finds no index.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
from simpletuner_gh200.upstream.tested import TESTED, Tested  # noqa: E402

PINNED = ROOT / "src" / "simpletuner_gh200" / "upstream" / "constraints"
UV_VERSION = "0.13.7"
EXTRAS = "cuda,codecs"
DEVELOPMENT = ROOT / "constraints" / "development.txt"
SITE = ROOT / "constraints" / "site.txt"
NO_PYTHON = "no CPython 3.11, 3.12 or 3.13 was found; install one and run this again"
CUDA12 = {"4.10.1": "cuda-bindings==12.9.10", "3.1.6": "cuda-bindings==12.8.0"}
"""The environments have bindings of CUDA 13, and the emulated driver is tested with both majors. The older release has
the oldest bindings we support, so that both ends of the range are tested."""


def main(purpose: str) -> int:
    if purpose in {"wheel", "sdist"}:
        return build_distribution(purpose)
    if purpose == "site":
        return build_small_environment("site", ["-r", str(SITE)], SITE)
    if purpose == "check":
        pins = PINNED / f"simpletuner-{TESTED[0].release}.txt"
        project = ROOT / "pyproject.toml"
        wanted = [*development_group(project), "-c", str(DEVELOPMENT), "-c", str(pins), "-e", f"{ROOT}[codecs]"]
        return build_small_environment("check", wanted, DEVELOPMENT, pins, project)
    if purpose not in {"demo", "selftest", "test"}:
        print(__doc__, file=sys.stderr)
        return 2
    here = [each for each in TESTED if platform.machine() in each.machines]
    usable = [(each, python) for each in here if (python := find_python(each.pythons))]
    if not usable:
        say(NO_PYTHON)
        return 1
    missing = [each for each in here if each not in [found for found, _ in usable]]
    for each in missing:
        say(f"SimpleTuner {each.release}: NOT RUN, no CPython {' or '.join(each.pythons)} on this machine")
    if missing and purpose == "test" and os.environ.get("CI"):
        return 1  # developers may test with what they have; CI that tests half of it says nothing
    for number, (tested, python) in enumerate(usable if purpose == "test" else usable[:1]):
        folder = ROOT / (".venv" if number == 0 else f".venv-{tested.release}")
        build(folder, tested, python)
        if purpose != "demo":
            add_cuda12_bindings(folder, CUDA12[tested.release])
        print(f"{folder.name} {tested.release}", flush=True)
    return 0


def build_distribution(kind: str) -> int:
    """With uv alone: neither needs SimpleTuner's gigabytes."""
    try:
        print(built_distribution(ROOT, ROOT / "dist", kind).relative_to(ROOT))
    except RuntimeError as failed:
        say(str(failed))
        return 1
    return 0


def development_group(project: Path) -> list[str]:
    import tomllib

    return list(tomllib.loads(project.read_text(encoding="utf-8"))["dependency-groups"]["dev"])


def build_small_environment(name: str, requirements: list[str], *inputs: Path) -> int:
    """``.venv-<name>``, without SimpleTuner; rebuilt where an input changed."""
    python = find_python(("3.13", "3.12", "3.11"))
    if python is None:
        say(NO_PYTHON)
        return 1
    folder = ROOT / f".venv-{name}"
    stamp, wanted = folder / ".gh200-built-from", fingerprint(python, *inputs)
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", "--without-pip", str(folder)])
        install(folder, requirements)
        stamp.write_text(wanted)
    print(folder.name)
    return 0


def find_python(versions: tuple[str, ...]) -> str | None:
    """The path of an interpreter that really runs; a pyenv shim may exist and yet refuse to."""
    for version in versions:
        # An active virtual environment hides the interpreter it was made from.
        candidates = [shutil.which(f"python{version}"), getattr(sys, "_base_executable", None), shutil.which("python3")]
        pyenv = os.environ.get("PYENV_ROOT") or str(Path.home() / ".pyenv")
        candidates += sorted(map(str, Path(pyenv, "versions").glob(f"{version}.*/bin/python{version}")), reverse=True)
        for candidate in candidates:
            if candidate and answers(candidate, version):
                return candidate
    return None


def answers(python: str, version: str) -> bool:
    """Is this a CPython of that version, outside any virtual environment, with the venv module?"""
    code = (
        "import sys, venv;print('%d.%d' % sys.version_info[:2], sys.implementation.name, sys.prefix == sys.base_prefix)"
    )
    try:
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.stdout.split() == [version, "cpython", "True"]


def build(folder: Path, tested: Tested, python: str) -> None:
    """Anew if interpreter or pinned versions changed, in place if only our own project files did, else not at all."""
    stamp = folder / ".gh200-built-from"
    constraints = PINNED / f"simpletuner-{tested.release}.txt"
    base = fingerprint(python, constraints)
    packaging = sorted((ROOT / "scripts" / "packaging").glob("*.p*"))  # the .pth among them is copied, not linked
    wanted = f"{base}\n{fingerprint(python, DEVELOPMENT, ROOT / 'pyproject.toml', Path(__file__), *packaging)}"
    found = stamp.read_text() if stamp.is_file() else ""
    if found == wanted:
        return
    if not found.startswith(base):
        say(f"building {folder.name}: SimpleTuner {tested.release} on {python} (a minute or two, 8 GB)")
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", "--without-pip", str(folder)])
    requirements = [tested.requirement(cpu=True), "-c", str(constraints), "-r", str(DEVELOPMENT)]
    install(folder, [*requirements, "-e", f"{ROOT}[{EXTRAS}]"])
    stamp.write_text(wanted)


def add_cuda12_bindings(folder: Path, bindings: str) -> None:
    """Beside the environment, in ``.cache/cuda12-python3.x``: what runs with it on PYTHONPATH finds them first."""
    (library,) = (folder / "lib").glob("python3.*")
    site = ROOT / ".cache" / f"cuda12-{library.name}"
    stamp = site / ".gh200-built-from"
    if stamp.is_file() and stamp.read_text() == bindings:
        return
    shutil.rmtree(site, ignore_errors=True)
    install(folder, ["--no-deps", "--target", str(site), bindings])
    stamp.write_text(bindings)


def fingerprint(python: str, *files: Path) -> str:
    digest = hashlib.sha256(python.encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(folder: Path, requirements: list[str]) -> None:
    python = str(folder / "bin" / "python")
    uv = uv_command()
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *requirements]
        if subprocess.run(command, env=without_find_links()).returncode == 0:
            return
        say("uv could not install it; trying pip, which reads your own pip configuration")
    run([python, "-m", "ensurepip", "--upgrade"])
    run([python, "-m", "pip", "install", "--quiet", *requirements])


def without_find_links() -> dict[str, str]:
    """uv reads a pip user's find-links as an index and then believes that nothing else exists."""
    return {key: value for key, value in os.environ.items() if key not in {"PIP_FIND_LINKS", "UV_FIND_LINKS"}}


def uv_command() -> str | None:
    own = ROOT / ".uv"
    if not (own / "bin" / "uv").is_file():
        if subprocess.run([sys.executable, "-m", "venv", str(own)]).returncode:
            say("python3 has no working venv module; on Debian: apt-get install python3-venv")
            return None
        pip = [str(own / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        if subprocess.run([*pip, f"uv=={UV_VERSION}"]).returncode:
            return None
    return str(own / "bin" / "uv")


def run_uv(*words: str | Path) -> subprocess.CompletedProcess[str]:
    own = uv_command()
    if own is None:
        raise RuntimeError("uv could not be installed")
    command = [own, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=without_find_links(), capture_output=True, text=True)


def built_wheel(tree: Path, folder: Path) -> Path:
    return built_distribution(tree, folder, "wheel")


def built_distribution(tree: Path, folder: Path, kind: str) -> Path:
    """The ``wheel`` or ``sdist`` of a tree, into a folder."""
    ran = run_uv("build", f"--{kind}", "--quiet", "--out-dir", folder, tree)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return max(folder.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind]), key=lambda path: path.stat().st_mtime)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def say(text: str) -> None:
    print(f"environments: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
