"""A server that imports SimpleTuner once and forks a child per job.

Importing SimpleTuner costs half a minute of CPU; a forked child starts training at once. The server reads one JSON
job per line on standard input and answers with one JSON line. Nothing of the extension is active in the server
itself, so a job can be stock SimpleTuner (with the same ``pin_memory`` stand-in and the same queue between the threads
that look at new samples, and nothing else) or ours.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import queue
import runpy
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

ASKED_FOR_LATER = ("torch._inductor.cudagraph_trees", "torchsde", "datasets")
"""By SimpleTuner, when training starts, but then always, as far as they exist: half of a short job's time."""


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SimpleTuner prints while importing must not mix with the answers
    for name in ASKED_FOR_LATER:
        with suppress(ImportError):
            importlib.import_module(name)
    for name in ("simpletuner.helpers.training.trainer", "simpletuner.helpers.data_backend.factory"):
        importlib.import_module(name)
    # SimpleTuner collects garbage by itself, many times a run; a child need not go through all that was imported, which
    # would also copy the pages that it shares with this process.
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), file=answers, flush=True)


def run_job(job: dict) -> dict:
    world = job["world"]
    port = free_port()
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            become(job, rank, port)
        children.append(child)
    codes = wait_for(children, job["timeout"])
    return {"exit_codes": codes}


def become(job: dict, rank: int, port: int) -> None:
    """In the child: set the scene, train, and leave without the parent's clean-up."""
    code = 1
    try:
        set_scene(job, rank, port)
        record: dict = {"losses": []}
        record_losses(record)
        if job.get("probe"):
            load_probe(job["probe"])(record)
        try:
            code = train(job)
        finally:
            atexit._run_exitfuncs()
            Path(job["results"], f"record-{rank}.json").write_text(json.dumps(record, default=str))
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 1
    except BaseException:  # noqa: BLE001 - a forked child must never return into the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def set_scene(job: dict, rank: int, port: int) -> None:
    log = os.open(Path(job["results"], f"log-{rank}.txt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job["folder"])
    os.environ.update(job["env"])
    os.environ["SIMPLETUNER_GH200_SUMMARY_DIR"] = job["results"]
    if job["world"] > 1:
        local = job["world"] // job["nodes"]
        places = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": job["world"], "LOCAL_WORLD_SIZE": local}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
        os.environ["TORCHELASTIC_RUN_ID"] = f"forge-{port}"
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)


def record_losses(record: dict) -> None:
    """Every micro-batch's loss, to the bit, before accelerate scales it."""
    from accelerate import Accelerator

    original = Accelerator.backward

    def backward(self, loss, **kwargs):
        record["losses"].append(float(loss.detach()).hex())
        return original(self, loss, **kwargs)

    Accelerator.backward = backward


def load_probe(named: str):
    """``file:function``: a probe is whatever a test names, and runs in this child alone."""
    path, _, function = named.rpartition(":")
    spec = importlib.util.spec_from_file_location("probe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def train(job: dict) -> int:
    if job.get("code"):
        exec(job["code"], {})
        return 0
    if not job["stock"]:
        from simpletuner_gh200.seams.rank import run_rank

        return run_rank(job["argv"], lambda words: print(words, file=sys.stderr, flush=True))
    import torch
    from simpletuner.helpers.metadata.backends import base

    torch.Tensor.pin_memory = lambda self, device=None: self
    base.Queue = queue.SimpleQueue  # its own forgets samples on a busy machine: seams/points/data_backends.py
    os.environ["CONFIG_BACKEND"] = "json"
    os.environ["CONFIG_PATH"] = job["config"]
    import simpletuner

    script = Path(next(iter(simpletuner.__path__)), "train.py")
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def wait_for(children: list[int], timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    for child in children:  # what a rank left behind must not outlive the job
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [codes[child] for child in children]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    serve()
