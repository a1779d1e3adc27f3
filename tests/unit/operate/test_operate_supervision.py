"""Real processes: a launcher, a process in the middle as accelerate or torchrun is, and ranks below it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate import launching, run_lock, supervision
from simpletuner_gh200.operate.ending import Outcome
from simpletuner_gh200.seams import lifeline
from simpletuner_gh200.seams.lifeline import LIFELINE, address
from simpletuner_gh200.seams.rank import run_rank

MIDDLE = """
    import subprocess, sys
    ranks = [subprocess.Popen([sys.executable, {rank!r}, str(number)], start_new_session={apart}) for number in {ranks}]
    for rank in ranks:
        print("the middle speaks", rank.wait(), flush=True)
    sys.exit(any(rank.returncode for rank in ranks))
"""
RANK = """
    import os, signal, sys, time
    from simpletuner_gh200.seams.lifeline import Lifeline
    os.environ["RANK"] = number = sys.argv[1]
    line = Lifeline.from_environment(os.environ)
    line.hold()
    def ready(name, pid=None):
        open({folder!r} + f"/{{name}}.new", "w").write(str(pid or os.getpid()))
        os.rename({folder!r} + f"/{{name}}.new", {folder!r} + f"/{{name}}.pid")
"""
SLEEPS = 'line.tell(phase="caching"); ready(number); time.sleep(60)'


def write_job(folder: Path, body: str, *, ranks: int = 1, apart: bool = True) -> list[str]:
    rank, middle = folder / "rank.py", folder / "middle.py"
    rank.write_text(textwrap.dedent(RANK).format(folder=str(folder)) + textwrap.dedent(body))
    middle.write_text(textwrap.dedent(MIDDLE).format(rank=str(rank), ranks=list(range(ranks)), apart=apart))
    return [sys.executable, str(middle)]


def start(command: list[str], **options) -> subprocess.Popen:
    """``gh200 train``'s part, in a process of its own."""
    code = (
        "import os, sys; from simpletuner_gh200.operate.supervision import watch; "
        "sys.exit(watch(sys.argv[1:], os.environ).signal or 0)"
    )
    return subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True, **options)


def wait_for(condition, patience: float = 20) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pids(folder: Path, *names: str, patience: float = 20) -> list[int]:
    wait_for(lambda: all((folder / f"{name}.pid").exists() for name in names), patience)
    return [int((folder / f"{name}.pid").read_text()) for name in names]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_gone_with(launcher: subprocess.Popen, everybody: list[int]) -> None:
    launcher.kill()
    launcher.wait()
    wait_for(lambda: all(map(gone, everybody)))


def run(folder: Path, body: str, *, ranks: int = 1, **options: bool) -> Outcome:
    """``gh200 train``'s part, in this process."""
    command = tuple(write_job(folder, body, ranks=ranks))
    return launching.run(launching.LaunchCommand(command, {}), **options)


def send_when(folder: Path, *names: str, number: int) -> None:
    """A signal to this process, once these are ready."""
    threading.Thread(target=lambda: (pids(folder, *names), os.kill(os.getpid(), number))).start()


FORKS = """
    if os.fork() == 0:
        ready("fork" + number)
        time.sleep(60)
    ready(number)
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("apart", [True, False], ids=["torchrun", "accelerate"])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, apart):
    launcher = start(write_job(tmp_path, FORKS, ranks=2, apart=apart))
    everybody = [*pids(tmp_path, "0", "1", "fork0", "fork1"), psutil.Process(launcher.pid).children()[0].pid]
    assert_gone_with(launcher, everybody)


def test_a_session_of_its_own_does_not_save_what_a_rank_forked(tmp_path):
    """It is in no group of the rank's, and the kernel ends it with nobody: it has its own ear on the line."""
    launcher = start(write_job(tmp_path, FORKS.replace('ready("fork"', 'os.setsid(); ready("fork"')))
    assert_gone_with(launcher, pids(tmp_path, "0", "fork0"))


def test_a_rank_behind_a_program_of_the_users_ends_too(tmp_path):
    """A wrapper that outlives its parent, as a container's shim does: the rank's own parent lives on."""
    command = write_job(tmp_path, SLEEPS)
    middle = tmp_path / "middle.py"
    wrapped = '["bash", "-c", \'"$@"; sleep 1\', "bash", sys.executable'
    middle.write_text(middle.read_text().replace("[sys.executable", wrapped))
    launcher = start(command)
    assert_gone_with(launcher, pids(tmp_path, "0"))


def test_no_rank_outlives_the_process_in_the_middle(tmp_path):
    launcher = start(write_job(tmp_path, FORKS, ranks=2))
    everybody = pids(tmp_path, "0", "1", "fork0", "fork1")
    psutil.Process(launcher.pid).children()[0].kill()
    launcher.wait(timeout=20)
    assert all(map(gone, everybody)), "the launcher returned before its ranks were gone"


def test_the_kernel_ends_a_rank_whose_main_thread_holds_the_interpreter(tmp_path):
    """A loop in C that never lets another thread run: the thread that watches the line can't."""
    body = "import ctypes; ready(number); ctypes.PyDLL(None).sleep(60)"
    launcher = start(write_job(tmp_path, body))
    assert_gone_with(launcher, pids(tmp_path, "0"))


def test_a_rank_that_finds_its_launcher_gone_does_not_start(monkeypatch):
    """Killed between starting the rank and the rank's first words."""
    monkeypatch.setenv(LIFELINE, "0" * 32)
    said: list[str] = []
    assert run_rank([], said.append) == 1
    assert "`gh200 train`, which started this rank, has ended" in said[0]


SPOKEN_AND_KILLED = """
    import os, signal, socket, subprocess, sys
    from simpletuner_gh200.seams.lifeline import LIFELINE, address
    os.kill(os.getppid(), signal.SIGSTOP)
    where = repr(address(os.environ[LIFELINE]))
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({{where}}); print(flush=True); input()"
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    rank.stdout.readline()
    rank.kill()
    {wait}
    os.kill(os.getppid(), signal.SIGCONT)
"""


@pytest.mark.parametrize("wait", ["rank.wait()", "os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)"])
def test_a_rank_that_is_killed_before_it_is_answered_does_not_end_the_launcher(tmp_path, wait):
    """It has called and is dead when the launcher gets to it; nobody, or not yet, has asked how it ended."""
    middle = tmp_path / "middle.py"
    middle.write_text(textwrap.dedent(SPOKEN_AND_KILLED).format(wait=wait))
    launcher = start([sys.executable, str(middle)], stderr=subprocess.PIPE)
    assert launcher.communicate(timeout=60)[1] == ""
    assert launcher.returncode == 0


def test_another_user_who_has_read_the_name_of_the_line_gets_nothing(tmp_path, monkeypatch):
    """Everybody can: the kernel lists such names. The folder's lock is not handed to him, and he is no rank."""
    monkeypatch.setattr(supervision, "peer_of", lambda _connection: (os.getpid(), os.getuid() + 1))
    folder = os.open(tmp_path, os.O_RDONLY)
    with supervision._Supervisor("0" * 32, (folder,), ()) as supervisor, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address("0" * 32))
        supervisor._welcome()
        assert socket.recv_fds(caller, 16, 4)[:2] == (b"", [])
        assert supervisor._ranks == []
    os.close(folder)


def test_a_summary_counts_for_nobody_who_has_not_spoken():
    """Two ranks have called; while one is still to say its first word, a run that is to stop is not over."""
    with (
        supervision._Supervisor("2" * 32, (), ()) as supervisor,
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
    ):
        for caller in (first, second):
            caller.connect(address("2" * 32))
            supervisor._welcome()
        supervisor._interrupted = signal.SIGTERM
        for number, (caller, rank) in enumerate(zip((first, second), supervisor._ranks, strict=True)):
            assert supervisor._deadline is None
            caller.sendall(b'{"rank": "%d", "summary": {}}\n' % number)
            supervisor._listen_to(rank)
        assert supervisor._deadline is not None, "now both have said their last word"


def test_a_rank_believes_no_launcher_of_another_user(monkeypatch):
    """Who took the name after the launcher was gone."""
    monkeypatch.setattr(lifeline, "peer_of", lambda _connection: (1, os.getuid() + 1))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address("1" * 32))
        listener.listen()
        with pytest.raises(RunFailed, match="another user answers"):
            lifeline.Lifeline.from_environment({LIFELINE: "1" * 32})


def test_an_interrupt_is_quiet_and_leaves_nothing(tmp_path):
    """One rank ends by itself, one never would, nor what it started; the middle, which would print, doesn't get to."""
    body = """
        import subprocess
        line.tell(phase="caching")
        if number == "1":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            helper = subprocess.Popen(["sleep", "60"], start_new_session=True)
            ready("helper", helper.pid)
        ready(number)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            line.tell(summary={"status": "interrupted", "rank": 0})
    """
    command = write_job(tmp_path, body, ranks=2)
    send_when(tmp_path, "0", "1", number=signal.SIGINT)
    output = tmp_path / "output"
    with output.open("w") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "GRACE_SECONDS", 3.0)  # a busy machine needs time for a last word
        before = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            seen = supervision.watch(command, os.environ)
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert seen.signal == signal.SIGINT
    assert seen.phase == "caching"
    assert seen.summaries == [{"status": "interrupted", "rank": 0}]
    assert all(map(gone, pids(tmp_path, "0", "1", "helper")))
    assert output.read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_ignored(tmp_path, number):
    """nohup, and shells that start a job in the background."""
    launcher = start(write_job(tmp_path, SLEEPS), preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    (rank,) = pids(tmp_path, "0")
    launcher.send_signal(number)
    os.kill(rank, signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=0.2)
    assert not gone(rank)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == signal.SIGTERM
    assert gone(rank)


@pytest.mark.parametrize("numbers", [[signal.SIGQUIT], [signal.SIGINT, signal.SIGINT]], ids=["quit", "twice"])
def test_some_signals_end_it_without_patience(tmp_path, numbers):
    body = "signal.signal(signal.SIGINT, lambda *_: ready('told')); ready(number)\nwhile True: time.sleep(0.01)"
    command = write_job(tmp_path, body)

    def send() -> None:
        pids(tmp_path, "0")
        os.kill(os.getpid(), numbers[0])
        for number in numbers[1:]:
            pids(tmp_path, "told")
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "GRACE_SECONDS", 3600.0)
        outcome = supervision.watch(command, os.environ)
    assert outcome.signal == numbers[0]
    assert outcome.hurried, "nobody waits for the disk either"
    assert all(map(gone, pids(tmp_path, "0")))


def test_user_signals_reach_the_ranks_alone(tmp_path):
    """Their default would end accelerate."""
    body = """
        signal.signal(signal.SIGUSR2, lambda *_: (line.tell(summary={"status": "completed"}), os._exit(0)))
        ready(number)
        time.sleep(60)
    """
    send_when(tmp_path, "0", number=signal.SIGUSR2)
    seen = run(tmp_path, body)
    assert (seen.exit_code, seen.signal, seen.summary["status"]) == (0, None, "completed")


CHECKPOINTS = """
    def write(*_):
        time.sleep(0.3)
        line.tell(summary={{"status": "interrupted", "exit_code": 75, "rank": number}})
        os._exit(75)
    signal.signal(signal.SIGTERM, write)
    line.tell(phase="training", checkpoints={ready})
    ready(number)
    time.sleep(60)
"""


@pytest.mark.parametrize(("again", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, None)], ids=["echo", "another"])
def test_a_request_that_comes_twice_at_once_is_one(tmp_path, monkeypatch, again, code):
    """As a job hears it that Slurm preempts: the checkpoint is written all the same. Another signal ends it."""
    monkeypatch.setattr(supervision, "ECHO_SECONDS", 3600.0)
    command = write_job(tmp_path, CHECKPOINTS.format(ready=True).replace("def write(*_):", ECHOED), ranks=1)

    def send() -> None:
        pids(tmp_path, "0")
        os.kill(os.getpid(), signal.SIGTERM)
        pids(tmp_path, "told")
        os.kill(os.getpid(), again)

    threading.Thread(target=send).start()
    seen = supervision.watch(command, os.environ)
    assert seen.signal == signal.SIGTERM
    assert [summary["exit_code"] for summary in seen.summaries] == ([code] if code else [])
    assert all(map(gone, pids(tmp_path, "0")))


ECHOED = """def write(*_):
        ready("told")
        time.sleep(2)"""


@pytest.mark.parametrize(
    ("number", "on_interrupt"), [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, True)]
)
def test_a_signal_waits_for_the_checkpoint_it_asks_for(tmp_path, monkeypatch, number, on_interrupt):
    """Longer than the patience for an end without one."""
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.0)
    send_when(tmp_path, "0", "1", number=number)
    ended = run(tmp_path, CHECKPOINTS.format(ready=True), ranks=2, checkpoint_on_interrupt=on_interrupt)
    assert ended.exit_code == 75
    assert sorted(summary["rank"] for summary in ended.summaries) == ["0", "1"]
    assert all(map(gone, pids(tmp_path, "0", "1")))


def test_a_signal_that_comes_right_behind_a_rank_s_word_heeds_it(tmp_path, monkeypatch):
    """As if both were there at once, and the signal were looked at first."""
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(supervision._Supervisor, "_hear", lambda self, rank: None)
    send_when(tmp_path, "0", number=signal.SIGTERM)
    assert run(tmp_path, CHECKPOINTS.format(ready=True)).exit_code == 75


def test_a_rank_that_has_said_its_last_word_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.1)
    body = CHECKPOINTS.format(ready=True).replace("os._exit(75)", "time.sleep(60)")
    send_when(tmp_path, "0", number=signal.SIGTERM)
    assert run(tmp_path, body).exit_code == 75
    assert all(map(gone, pids(tmp_path, "0")))


def test_a_run_that_has_nothing_to_checkpoint_yet_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.0)
    send_when(tmp_path, "0", number=signal.SIGTERM)
    assert run(tmp_path, CHECKPOINTS.format(ready=False)).exit_code == 143


def test_a_run_needs_no_temporary_folder(tmp_path, monkeypatch):
    """A full one used to turn a completed run into a failed one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    ended = run(tmp_path, 'line.tell(summary={"status": "completed", "long": "x" * 1000000})')
    assert ended.exit_code == 0
    assert len(ended.summaries[0]["long"]) == 1000000


@pytest.mark.parametrize("given", ["", "first"])
def test_a_rank_without_a_number_is_heard(tmp_path, given):
    """RANK may be exported empty, or as anything, where nobody needs it."""
    body = f"""
        os.environ["RANK"] = {given!r}
        again = Lifeline.from_environment(os.environ)
        again.tell(summary={{"status": "completed"}})
    """
    ended = run(tmp_path, body)
    assert [summary["status"] for summary in ended.summaries] == ["completed"]
    assert ended.exit_code == 0


def test_what_a_completed_run_started_for_later_stays(tmp_path):
    """An upload, say."""
    body = """
        if os.fork() == 0:
            os.setsid()
            import subprocess
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            open({!r}, "w").write(str(child.pid))
            os._exit(0)
        os.wait()
        line.tell(summary={{"status": "completed"}})
    """.format(str(tmp_path / "later.pid"))
    assert run(tmp_path, body).exit_code == 0
    (later,) = pids(tmp_path, "later")
    assert not gone(later)
    os.kill(later, signal.SIGKILL)


def test_two_jobs_never_share_an_output_folder(tmp_path):
    output = tmp_path / "output"
    with run_lock.held(output), pytest.raises(UsageError, match="is in use") as refused, run_lock.held(output):
        pass
    assert "output_dir of its own" in str(refused.value)
    with run_lock.held(output) as again:
        assert again is not None
    assert list(output.iterdir()) == [], "off means off: nothing is written there"


def test_the_lock_is_held_until_the_last_rank_is_gone_and_its_holder_named(tmp_path):
    """The launcher is dead; a rank that does not know yet still holds the folder."""
    output, command = tmp_path / "output", write_job(tmp_path, "ready(number); time.sleep(60)")
    rank = tmp_path / "rank.py"
    rank.write_text(rank.read_text().replace("line.hold()", ""))
    code = (
        "import os, sys; from pathlib import Path; from simpletuner_gh200.operate import launching; "
        "launching.run(launching.LaunchCommand(tuple(sys.argv[2:]), {}), Path(sys.argv[1]))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(output), *command])
    (pid,) = pids(tmp_path, "0")
    launcher.kill()
    launcher.wait()
    with pytest.raises(UsageError, match=f"what process {launcher.pid} has started"), run_lock.held(output):
        pass
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(pid))
    with run_lock.held(output) as lock:
        assert lock is not None


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nowhere", "a link to itself"])
def test_what_can_be_no_output_folder_is_refused_with_the_remedy(tmp_path, kind):
    (tmp_path / "a file").touch()
    (tmp_path / "a link to nowhere").symlink_to("nowhere/deeper")
    (tmp_path / "a link to itself").symlink_to("a link to itself")
    folder = tmp_path / kind if kind != "below a file" else tmp_path / "a file" / "output"
    with pytest.raises(UsageError, match="can't be used") as refused, run_lock.held(folder):
        pass
    assert str(folder) in refused.value.message
    assert "another folder" in str(refused.value.remedy)


def test_drafts_of_a_killed_job_are_swept_and_nothing_else(tmp_path):
    folder = tmp_path / "gh200"
    folder.mkdir()
    kept = [folder / "staging-images.json", folder / "staging-notes.tmp", folder / "mine.12.tmp"]
    for path in (*kept, folder / "staging-images.4711.tmp"):
        path.touch()
    with run_lock.held(tmp_path):
        assert sorted(folder.iterdir()) == sorted(kept)
