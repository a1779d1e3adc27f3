"""Projects and jobs for integration tests: prepare once, snapshot, restore before each run, train, look."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.demo.project import DemoProject, dataset_list, training_config, write_project

FORGE = Path(__file__).with_name("forge.py")


def probe(name: str) -> str:
    """For ``train``: a function of probes.py, or all of a ``probe_NAME.py`` beside it, which has an ``install``."""
    own = FORGE.with_name(f"probe_{name}.py")
    return f"{own}:install" if own.is_file() else f"{FORGE.with_name('probes.py')}:{name}"


RANKS = [pytest.param(1, marks=pytest.mark.one_release("3.")), pytest.param(2, marks=pytest.mark.one_release("4."))]
"""Of a test that asks one rank what it asks two: the other two combinations belong to `make test-matrix`."""

UNIFIED = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}
"""For ``cache_config``: every cache that the tiny project has is ours."""


def ramp(initial: int, target: int, steps: int, **keys: Any) -> dict[str, Any]:
    """A block of ``gh200_optimizations`` with a batch ramp."""
    sizes = {"initial_effective_batch_size": initial, "target_effective_batch_size": target}
    return {"enable_batch_size_rampup": True, **sizes, "batch_rampup_steps": steps, **keys}


def _alone(release: str) -> pytest.MarkDecorator:
    """One rank on this release; every other combination belongs to `make test-matrix`."""
    one = pytest.param(1, marks=pytest.mark.one_release(release))
    return pytest.mark.parametrize("world", [one, pytest.param(2, marks=pytest.mark.matrix)])


NEWEST_ALONE, OLDEST_ALONE = _alone("4."), _alone("3.")
"""Where two ranks are a combination of what other tests ask of each part."""


@dataclass
class JobResult:
    """What one job left behind. ``records`` and ``summaries`` are by rank."""

    exit_codes: list[int]
    results: Path
    folder: Path
    output: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(code == 0 for code in self.exit_codes)

    @property
    def losses(self) -> list[list[str]]:
        """Per rank, the loss of every micro-batch as an exact hexadecimal float."""
        return [record["losses"] for record in self.records]

    def log(self, rank: int = 0) -> str:
        return (self.results / f"log-{rank}.txt").read_text(errors="replace")

    def lora(self) -> dict[str, Any]:
        """The final LoRA tensors."""
        from safetensors.torch import load_file

        return load_file(str(self.output / "pytorch_lora_weights.safetensors"))

    def same_lora(self, other: JobResult) -> bool:
        """Are the final tensors the same to the bit?"""
        import torch

        mine, theirs = self.lora(), other.lora()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def weights(self) -> dict[str, bytes]:
        """Every file of weights that the run left, those of checkpoints and of EMA among them."""
        found = {str(path.relative_to(self.output)): path.read_bytes() for path in self.output.rglob("*.safetensors")}
        assert found
        return found

    def explain(self) -> str:
        """For assertion messages: exit codes and the end of each rank's log."""
        tails = [f"--- rank {rank}\n{self.log(rank)[-4000:]}" for rank in range(len(self.exit_codes))]
        return f"exit codes {self.exit_codes}\n" + "\n".join(tails)


def clean_environment() -> dict[str, str]:
    """What pytest itself was started with: importing SimpleTuner, as some tests do, changes the environment (its log
    level among others).
    One thread, so that sums are repeatable; bytecode on, or every import compiles SimpleTuner anew.
    """
    words = Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**environment, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}


class Forge:
    """The running server (see forge.py)."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(FORGE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._server.stdout is not None
        assert json.loads(self._server.stdout.readline()) == {"ready": True}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)


class Workbench:
    """One tiny project at a fixed path, with filled caches that can be put back as they were."""

    def __init__(self, forge: Forge, folder: Path, *, steps: int = 8) -> None:
        self.forge = forge
        self.project = DemoProject(folder / "project", steps=steps)
        self._snapshot = folder / "snapshot"
        self._runs = folder / "runs"
        self._known: dict[tuple[object, ...], JobResult] = {}
        self._runs.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Fill caches and bucket index with one stock run, then remember the state of everything."""
        write_project(self.project, blocks={}, dataset={})
        self.configure(max_train_steps=1)
        first = self.train(stock=True)
        assert first.ok, first.explain()
        shutil.rmtree(self.project.output, ignore_errors=True)
        shutil.copytree(self.project.folder, self._snapshot, symlinks=True)

    def restore(self) -> None:
        """Back to the snapshot: same paths, same caches, same index, no output."""
        shutil.rmtree(self.project.folder, ignore_errors=True)
        shutil.copytree(self._snapshot, self.project.folder, symlinks=True)

    def kept(self, path: Path) -> Path:
        """Where the snapshot has a file or folder of the project."""
        return self._snapshot / path.relative_to(self.project.folder)

    def known(
        self,
        *,
        stock: bool = False,
        world: int = 1,
        probe: str | None = None,
        env: dict[str, str] | None = None,
    ) -> JobResult:
        """What a run of the restored project gives with what ``configure`` wrote: trained once, then remembered.

        Runs from the same state are the same to the bit, so every test that compares with one may look at the same.
        The project is restored and configured as before when this returns; the result's ``folder`` is kept.
        """
        written = {path: path.read_text() for path in (self.project.config, self.project.datasets)}
        asked = (stock, world, probe, str(env), *written.values())
        self.restore()
        self._write(written)
        if asked not in self._known:
            run = self.train(stock=stock, world=world, probe=probe, env=env)
            self.set_aside(run)
            self._write(written)
            self._known[asked] = run
        return self._known[asked]

    @staticmethod
    def _write(written: dict[Path, str]) -> None:
        for path, text in written.items():
            path.write_text(text)

    def go_on_from(self, run: JobResult) -> None:
        """Make the project what ``run`` left, but for the configuration, which stays."""
        written = {path: path.read_text() for path in (self.project.config, self.project.datasets)}
        shutil.rmtree(self.project.folder)
        shutil.copytree(run.folder, self.project.folder, symlinks=True)
        self._write(written)

    def set_aside(self, run: JobResult) -> None:
        """Keep what ``run`` left, so that it can be looked at after the next one, which starts from the snapshot."""
        run.folder = self.project.folder.rename(run.results / "project")
        run.output = run.folder / self.project.output.relative_to(self.project.folder)
        self.restore()

    def configure(
        self,
        *,
        blocks: dict[str, Any] | None = None,
        dataset: dict[str, Any] | None = None,
        datasets: list[dict[str, Any]] | None = None,
        **overrides: Any,
    ) -> None:
        """Write config.json and datasets.json: our blocks, changes to the image entry, other training keys."""
        config = {**training_config(self.project), **(blocks or {}), **overrides}
        self.project.config.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        self.project.datasets.write_text(json.dumps(datasets or dataset_list(self.project, dataset or {})))

    def execute(self, code: str, *, world: int = 1) -> JobResult:
        """Run ``code`` in a process that has imported SimpleTuner, nothing of ours; ``log()`` has what it printed."""
        return self.train(code=code, world=world)

    def train(
        self,
        *,
        code: str | None = None,
        stock: bool = False,
        argv: list[str] | None = None,
        env: dict[str, str] | None = None,
        world: int = 1,
        nodes: int = 1,
        probe: str | None = None,
        timeout: float = 300,
    ) -> JobResult:
        """Train with what ``configure`` wrote. ``probe`` names a function that runs in each rank (see ``probe``).

        ``nodes``: over how many the ranks believe themselves to be.
        """
        results = Path(tempfile.mkdtemp(dir=self._runs))
        job = {
            "code": code,
            "stock": stock,
            "argv": argv if argv is not None else ["--config", str(self.project.config)],
            "config": str(self.project.config),
            "env": env or {},
            "world": world,
            "nodes": nodes,
            "folder": str(self.project.folder),
            "results": str(results),
            "probe": probe,
            "timeout": timeout,
        }
        answer = self.forge.run(job)
        return JobResult(
            exit_codes=answer["exit_codes"],
            results=results,
            folder=self.project.folder,
            output=self.project.output,
            records=[_read(results / f"record-{rank}.json") for rank in range(world)],
            summaries=[_read(results / f"rank-{rank}.json") for rank in range(world)],
        )


def _read(path: Path) -> dict[str, Any]:
    """A rank that was killed leaves no record; an empty one stands for it."""
    return json.loads(path.read_text()) if path.is_file() else {"losses": []}
