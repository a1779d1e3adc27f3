"""A small upstream with two releases, a fork of the first, and a small package to vendor."""

from __future__ import annotations

from pathlib import Path

from tests.unit.upstream.upstream_samples import run_git

TRAINER = """
class Trainer:
    def train(self):
        with self.accelerator.accumulate():
            self.step()

    def step(self):
        pass

    def register_manual_validation_trigger(self, consumer):
        self.consumer = consumer
"""
RELEASE_1 = {
    "simpletuner/__init__.py": "__version__ = '1.0'\n",
    "simpletuner/helpers/training/trainer.py": TRAINER,
    "simpletuner/helpers/plain.py": "def plain():\n    return 1\n",
    "simpletuner/gone.py": "def gone(): ...\n",
}
RELEASE_2 = {**RELEASE_1, "simpletuner/__init__.py": "__version__ = '2.0'\n", "simpletuner/new.py": "x = 1\n"}
FORK = {
    # The ramp in a function that a seam wraps, someone's own counter in the same function, and a deletion.
    "simpletuner/helpers/training/trainer.py": TRAINER.replace(
        "        with self.acc", "        batch_rampup = self.gh200_rampup()\n        with self.acc"
    )
    .replace("self.step()", "self.my_own_counter += 1")
    .split("    def register")[0],
    "simpletuner/helpers/plain.py": "def plain():\n    return 2\n",
    "simpletuner/gh200/uvm.py": "hint = None\n",
    "tools/mine.sh": "echo mine\n",
}
PACKAGE = (
    "errors.py",
    "__init__.py",
    "data.json",
    *(f"{room}/__init__.py" for room in ("config", "memory", "store", "cache")),
)
MORE = tuple(f"{room}/__init__.py" for room in ("ramp", "seams", "cli", "telemetry", "upstream", "brand_new_room"))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def commit(root: Path, message: str) -> None:
    run_git(root, "add", "--all")
    run_git(root, "commit", "--quiet", "--message", message)


def make_repository(root: Path) -> Path:
    """On branch ``fork``; tags v1 and v2."""
    root.mkdir()
    run_git(root, "init", "--quiet")
    run_git(root, "config", "user.name", "tester")
    run_git(root, "config", "user.email", "tester@example.org")
    write(root, {**RELEASE_1, ".gitignore": "vendor/\n*.json\n"})
    commit(root, "one")
    run_git(root, "tag", "v1")
    run_git(root, "branch", "fork")
    write(root, RELEASE_2)
    commit(root, "two")
    run_git(root, "tag", "v2")
    run_git(root, "switch", "--quiet", "fork")
    write(root, FORK)
    (root / "simpletuner/gone.py").unlink()
    commit(root, "ours")
    return root


def make_package(root: Path) -> Path:
    write(root, {name: f'"""The purpose of {Path(name).parent}."""\n' for name in (*PACKAGE, *MORE)})
    write(root, {"cache/__pycache__/x.pyc": "bytecode"})
    return root
