"""Small hand-made SimpleTuners."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path


def write_wheel(folder: Path, version: str, files: dict[str, str], *, requires_python: str = ">=3.8") -> Path:
    """A wheel that pip accepts, with these files in it."""
    path = folder / f"simpletuner-{version}-py3-none-any.whl"
    info = f"simpletuner-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: simpletuner\nVersion: {version}\nRequires-Python: {requires_python}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
