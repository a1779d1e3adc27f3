"""The real torchrun in the middle: it hosts the store of its ranks, and a scheduler signals it as well."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import threading

import psutil
import pytest

from simpletuner_gh200.operate import launching
from tests.unit.operate.test_operate_supervision import gone, pids

pytestmark = pytest.mark.releases  # torchrun is each environment's own

RANK = """
    import datetime, os, signal, sys, time
    import torch.distributed as dist
    from simpletuner_gh200.seams.lifeline import Lifeline

    signal.alarm(120)  # nothing here may wait for ever: a rank that hangs dies without a word
    number = os.environ["RANK"]
    line = Lifeline.from_environment(os.environ)
    line.hold()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    asked = []
    for request in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(request, lambda *_: asked.append(True))
    line.tell(phase="training", checkpoints=True)
    open({folder!r} + f"/{{number}}.new", "w").write(str(os.getpid()))
    os.rename({folder!r} + f"/{{number}}.new", {folder!r} + f"/{{number}}.pid")
    while not asked:
        time.sleep(0.01)
    time.sleep(0.5)  # as long as the launcher may take to do something to the middle
    together = dist.new_group()  # a checkpoint may need one: FSDP's and torch's own do
    dist.barrier(group=together)
    store = dist.distributed_c10d._get_default_store()
    store.set("written by " + number, "yes")
    store.wait(["written by 0", "written by 1"])
    if number == "0":
        time.sleep(1)  # the other has said its last word by now
        store.set("one more", "yes")
        dist.new_group([0])
    line.part({{"status": "interrupted", "exit_code": 75, "rank": number}})
    time.sleep(0.5 * int(number))  # one ends before the other, which is not to be disturbed
    open({folder!r} + f"/{{number}}.closed", "w").write("closed")
    sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_reach_their_store_while_they_save_and_torchrun_leaves_them_alone(tmp_path, capfd, number):
    """The signal reaches every process, as Slurm sends it; torchrun would end its ranks, or itself and them with it."""
    rank = tmp_path / "rank.py"
    rank.write_text(textwrap.dedent(RANK).format(folder=str(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}")
    command = (sys.executable, *torchrun, str(rank))

    def send() -> None:
        ranks = pids(tmp_path, "0", "1", patience=120)
        for process in (psutil.Process(ranks[0]).ppid(), *ranks, os.getpid()):
            os.kill(process, number)

    threading.Thread(target=send).start()
    ended = launching.run(launching.LaunchCommand(command, {}))
    said = capfd.readouterr()
    assert sorted(summary["rank"] for summary in ended.summaries) == ["0", "1"], said.err
    assert ended.exit_code == 75
    assert all((tmp_path / f"{rank}.closed").exists() for rank in "01"), "one was ended by the end of the other"
    assert "closing signal" not in said.err and "Traceback" not in said.err, said.err
    assert all(map(gone, pids(tmp_path, "0", "1")))
