"""Staging: everything in, nothing half in, every kind of trouble with a defined outcome."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import os
import signal
import threading
import time
from functools import cache
from pathlib import Path

import pytest

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.errors import DatasetCorrupt, DatasetTooLarge, FeatureUnavailable, StoreError
from simpletuner_gh200.held import bulk, image_check, stager, staging
from simpletuner_gh200.held.codecs import CHUNK_BYTES
from simpletuner_gh200.held.listing import BATCH_BYTES
from simpletuner_gh200.held.staging import look_over, stage
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.memory.mapping import CONTENT_SEALS
from simpletuner_gh200.memory.numa import Node
from simpletuner_gh200.units import GIB, MIB
from tests.unit.held.held_samples import fill, image, open_memfds, roomy, staged, staged_alone
from tests.unit.nobody import as_nobody

pytestmark = pytest.mark.usefixtures("file_calls")

CODECS = [None, "lz4", "zlib", "snappy", "zstd", "auto"]


@pytest.mark.parametrize("compression", CODECS)
def test_every_file_comes_back_as_it_is_on_disk(tmp_path: Path, compression: str | None) -> None:
    files = {
        "a.png": image(),
        "a.txt": b"a red circle " * 40,
        "empty.txt": b"",
        "noise.pt": os.urandom(300_000),
        "deep/er/long.safetensors": (b"weights" * 1000 + os.urandom(500)) * 400,
        "large_noise.bin": os.urandom(CHUNK_BYTES * 2 + 17),
        "exact.bin": bytes(CHUNK_BYTES * 2),
    }
    fill(tmp_path, files)
    dataset, report = staged(tmp_path, compression=compression)
    for name, content in files.items():
        view = dataset.view(tmp_path / name)
        assert view == content, name
        assert view.readonly
    assert (report.files, report.staged) == (7, 7)
    assert report.size == sum(map(len, files.values()))
    assert report.held <= report.size + 64 * 8
    if compression in ("lz4", "zstd"):
        assert report.held < report.size * 0.6


def test_auto_compresses_what_gains_and_says_why(tmp_path: Path) -> None:
    fill(tmp_path, {"a.jpg": image("JPEG", 64) + os.urandom(50_000), "a.txt": b"caption " * 100})
    _dataset, report = staged(tmp_path, compression="auto")
    assert report.forms == {"raw": 1, "lz4": 1}
    assert report.choices["jpg"].startswith("raw: lz4 gives 1.0")
    assert report.choices["txt"].startswith("lz4: ")


def test_the_memory_is_sealed_and_goes_with_the_dataset(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"abc"})
    before = open_memfds()
    segment, _report = stage(tmp_path, host=roomy)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & CONTENT_SEALS == CONTENT_SEALS
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", 0)
    del segment
    assert open_memfds() == before


def test_a_missing_folder_is_an_error_that_quotes_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        staged(tmp_path / "nowhere")


def test_more_than_the_limit_is_refused_before_anything_is_allocated(tmp_path: Path, monkeypatch) -> None:
    fill(tmp_path, {f"{number}.txt": b"very compressible " * 5000 for number in range(20)})
    monkeypatch.setattr(stager.BatchStager, "stage", lambda *_: pytest.fail("it must not start"))
    before = open_memfds()
    with pytest.raises(DatasetTooLarge) as refused:
        staged(tmp_path, memory_limit_gb=MIB / GIB)
    assert refused.value.allowed == MIB
    assert refused.value.needed == 20 * 90_000
    assert "lz4 (about" in str(refused.value)
    assert "memory_limit_gb" in str(refused.value)
    assert open_memfds() == before


def test_the_limit_is_on_what_is_really_held(tmp_path: Path) -> None:
    fill(tmp_path, {f"{number}.txt": b"very compressible " * 5000 for number in range(20)})
    _dataset, report = staged(tmp_path, memory_limit_gb=MIB / GIB, compression="lz4")
    assert report.held < MIB < report.size


def test_going_over_while_compressing_stops_and_frees(tmp_path: Path) -> None:
    fill(tmp_path, {f"{number}.bin": os.urandom(100_000) for number in range(14)})
    before = open_memfds()
    with pytest.raises(DatasetTooLarge, match="at least"):
        staged(tmp_path, memory_limit_gb=MIB / GIB, compression="lz4")
    assert open_memfds() == before


def test_what_the_machine_can_give_is_a_limit_too(tmp_path: Path) -> None:
    fill(tmp_path, {"a.bin": bytes(MIB)})
    poor = HostMemory(total=GIB, free=0, available=256 * MIB, limit="cgroup job")
    with pytest.raises(DatasetTooLarge, match="cgroup job"):
        stage(tmp_path, InMemorySettings(memory_limit_gb=100), host=lambda: poor)


def test_broken_images_are_listed_and_beyond_the_rate_stop_the_run(tmp_path: Path) -> None:
    good = {f"{number}.png": image() for number in range(8)}
    fill(tmp_path, {**good, "bad.png": b"not an image", "void.jpg": b"", "void.txt": b""})
    dataset, report = staged(tmp_path, max_corruption_rate=0.5)
    found = {Path(problem.as_json()["path"]).name: problem.reason for problem in report.problems}
    assert found == {"bad.png": "image does not open", "void.jpg": "empty image"}
    assert report.corruption_rate == pytest.approx(0.2)
    assert dataset.view(tmp_path / "bad.png") == b"not an image", "served as it is, as from disk"
    before = open_memfds()
    with pytest.raises(
        DatasetCorrupt, match=r"2 of 10 files are broken \(20.0%, at most 1.0% allowed; counted: images"
    ):
        staged(tmp_path, max_corruption_rate=0.01)
    assert open_memfds() == before


def test_decode_finds_what_a_header_hides(tmp_path: Path) -> None:
    whole = image("PNG", 200)
    fill(tmp_path, {"cut.png": whole[: len(whole) // 2], "whole.png": whole})
    assert not list(staged(tmp_path, verify="header")[1].problems)
    (problem,) = staged(tmp_path, verify="decode")[1].problems
    assert problem.reason == "image does not decode"
    assert problem.path.endswith(b"cut.png")


def test_verify_none_looks_at_no_image(tmp_path: Path) -> None:
    fill(tmp_path, {"bad.png": b"not an image"})
    _dataset, report = staged(tmp_path, verify="none", max_corruption_rate=0.0)
    assert report.images_checked == 0


def test_large_images_are_checked_with_all_of_their_bytes(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.frombytes("RGB", (700, 700), os.urandom(700 * 700 * 3))
    picture.save(tmp_path / "large.tiff")
    assert (tmp_path / "large.tiff").stat().st_size > CHUNK_BYTES
    _dataset, report = staged(tmp_path, verify="decode")
    assert (report.images_checked, len(report.problems)) == (1, 0)


def test_an_unreadable_file_is_reported_and_left_to_the_disk(tmp_path: Path) -> None:
    fill(tmp_path, {"open.txt": b"1", "closed.txt": b"2"})
    (tmp_path / "closed.txt").chmod(0)

    def work() -> None:
        dataset, report = staged(tmp_path)
        (problem,) = report.problems
        assert problem.reason == "unreadable"
        assert report.corruption_rate == 0.5, "of all files"
        assert dataset.view(tmp_path / "closed.txt") is None
        assert dataset.view(tmp_path / "open.txt") == b"1"

    assert as_nobody(work, tmp_path) == 0


def test_one_unreadable_file_of_a_thousand_is_one_in_a_thousand(tmp_path: Path) -> None:
    """Whatever is verified: nobody looked at the others, but they were read."""
    fill(tmp_path, {f"{number}.{kind}": b"" for number in range(200) for kind in ("png", "txt")})
    for name in ("0.png", "0.txt"):
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("/proc/self/mem")  # a regular file, whose first byte is an I/O error
    _dataset, report = staged(tmp_path, verify="none", max_corruption_rate=0.005)
    assert report.problems.counts == {"unreadable": 2}
    assert report.corruption_rate == pytest.approx(1 / 200), "of the images; of all files it is 1 in 400"
    with pytest.raises(DatasetCorrupt, match=r"1 of 200 files are broken \(0.5%"):
        staged(tmp_path, verify="none", max_corruption_rate=0.004)


def once_listed(monkeypatch, change) -> None:
    """Run ``change`` once, after the folder is listed and before a file is read."""
    original = stager.BatchStager.stage
    done = threading.Event()

    def stage_after(self, batch):
        if not done.is_set():
            done.set()
            change()
        original(self, batch)

    monkeypatch.setattr(stager.BatchStager, "stage", stage_after)


def test_a_file_that_vanishes_is_reported_not_counted_as_damage(tmp_path: Path, monkeypatch) -> None:
    fill(tmp_path, {"a.txt": b"1", "b.txt": b"2"})
    once_listed(monkeypatch, (tmp_path / "a.txt").unlink)
    dataset, report = staged(tmp_path, max_corruption_rate=0.0)
    assert [problem.reason for problem in report.problems] == ["vanished"]
    assert dataset.view(tmp_path / "a.txt") is None
    assert dataset.view(tmp_path / "b.txt") == b"2"


@pytest.mark.parametrize("now", [b"", b"short", b"longer than it was", b"large" * CHUNK_BYTES], ids=len)
def test_a_small_file_that_changed_since_it_was_listed_is_staged_as_it_is_now(tmp_path: Path, monkeypatch, now) -> None:
    others = {f"{number}.bin": os.urandom(20_000) for number in range(12)}
    fill(tmp_path, {**others, "a.txt": b"first content"})
    once_listed(monkeypatch, lambda: (tmp_path / "a.txt").write_bytes(now))
    dataset, _report = staged(tmp_path)
    for name, content in {**others, "a.txt": now}.items():
        assert dataset.view(tmp_path / name) == content


def test_a_large_file_that_never_holds_still_is_left_to_the_disk(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(CHUNK_BYTES * 2))
    original = stager.BatchStager._chunk

    def growing(self, fd, done, size):
        with path.open("ab") as file:
            file.write(b"more")
        return original(self, fd, done, size)

    monkeypatch.setattr(stager.BatchStager, "_chunk", growing)
    dataset, report = staged(tmp_path)
    assert [problem.reason for problem in report.problems] == ["unstable"]
    assert dataset.view(path) is None


def test_a_large_file_that_is_cut_while_it_is_read_is_staged_as_it_is_now(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(CHUNK_BYTES * 3))
    once_listed(monkeypatch, lambda: os.truncate(path, CHUNK_BYTES * 2))
    dataset, _report = staged(tmp_path, compression="lz4")
    assert dataset.view(path) == path.read_bytes()


def test_a_file_that_is_half_written_is_read_when_it_was_left_alone(
    tmp_path: Path, monkeypatch, file_calls: str
) -> None:
    """Nothing tells but the bytes: it has the size, the time and the inode that it had."""
    fill(tmp_path, {"a.txt": b"new old!", "b.txt": b"new new!", "c.txt": b"still"})
    before = os.stat(tmp_path / "a.txt")

    def written_to_its_end(seconds: float) -> None:
        (tmp_path / "a.txt").write_bytes(b"new new!")
        os.utime(tmp_path / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
        sleep(seconds)
        (tmp_path / "c.txt").write_bytes(b"going on")

    sleep = time.sleep
    monkeypatch.setattr("simpletuner_gh200.held.staging.time.sleep", written_to_its_end)
    dataset, report = staged(tmp_path, max_corruption_rate=0.0)
    assert dataset.view(tmp_path / "a.txt") == dataset.view(tmp_path / "b.txt") == b"new new!"
    assert dataset.view(tmp_path / "c.txt") is None, "somebody is still at it"
    assert [problem.reason for problem in report.problems] == ["unstable"]


@pytest.mark.parametrize("dated", [None, 4 * 10**18, -(10**18)], ids=["as written", "to come", "before 1970"])
def test_nobody_waits_for_files_that_nobody_touched_lately(tmp_path: Path, monkeypatch, dated: int | None) -> None:
    """Whatever date an archive has given them."""
    fill(tmp_path, {"a.txt": b"old"})
    if dated is not None:
        os.utime(tmp_path / "a.txt", ns=(dated, dated))
    later = time.time_ns() + 2 * stager.RECENT_NS
    monkeypatch.setattr("simpletuner_gh200.held.stager.time.time_ns", lambda: later)
    monkeypatch.setattr("simpletuner_gh200.held.staging.time.sleep", lambda _seconds: pytest.fail("waited"))
    dataset, _report = staged(tmp_path)
    assert dataset.view(tmp_path / "a.txt") == b"old"


def test_a_file_with_a_date_before_1970_that_is_written_now_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    fill(tmp_path, {"a.txt": b"new old!"})
    os.utime(tmp_path / "a.txt", ns=(-(10**18), -(10**18)))
    sleep = time.sleep

    def written_to_its_end(seconds: float) -> None:
        (tmp_path / "a.txt").write_bytes(b"new new!")
        sleep(seconds)

    monkeypatch.setattr("simpletuner_gh200.held.staging.time.sleep", written_to_its_end)
    dataset, _report = staged(tmp_path)
    assert dataset.view(tmp_path / "a.txt") == b"new new!"


@pytest.mark.parametrize("in_place", [True, False], ids=["rewritten", "replaced"])
@pytest.mark.parametrize("size", [8, BATCH_BYTES + 1], ids=["small", "large"])
def test_another_content_of_the_same_size_is_seen_while_reading_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch, size: int, in_place: bool
) -> None:
    """A file server whose clock is behind: nothing looks recent, so nothing is looked at again later."""
    monkeypatch.setattr(stager, "library_if_any", lambda: None)
    monkeypatch.setattr(stager, "RECENT_NS", -(10**18))
    path = tmp_path / "a.bin"
    path.write_bytes(b"a" * size)
    original = stager.BatchStager._copy

    def replaced(self, *arguments):
        row = original(self, *arguments)
        fresh = path if in_place else tmp_path / "fresh"
        fresh.write_bytes(b"b" * size)
        os.utime(fresh, (1, 1))
        fresh.replace(path)
        return row

    monkeypatch.setattr(stager.BatchStager, "_copy", replaced)
    dataset, _report = staged(tmp_path)
    assert dataset.view(path) in (None, b"b" * size), "never what is no longer there"


@contextlib.contextmanager
def rewritten_all_the_time(paths: list[Path], size: int):
    """The first bytes of each, by a process that never rests."""
    writer = os.fork()
    if writer == 0:
        # A writer that is put to sleep in the middle of a write can't be told from one that is done.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        files = [os.open(path, os.O_WRONLY) for path in paths]
        for letter in itertools.cycle(b"bcdefgh"):
            for fd in files:
                os.pwrite(fd, bytes([letter]) * size, 0)
    try:
        yield
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def test_files_rewritten_in_place_all_the_time_never_come_out_torn(tmp_path: Path) -> None:
    """Whole 4 KiB pages of one letter, the same size all the time, by a process that never rests."""
    size, names = 192 << 10, [f"{number:02}.bin" for number in range(24)]
    fill(tmp_path, dict.fromkeys(names, b"a" * size))
    with rewritten_all_the_time([tmp_path / name for name in names], size):
        for _ in range(6):
            dataset, _report = staged(tmp_path)
            views = [view for name in names if (view := dataset.view(tmp_path / name)) is not None]
            assert [len(set(bytes(view))) for view in views] == [1] * len(views)


def test_the_native_reader_hands_out_nothing_that_changed_while_it_read(tmp_path: Path) -> None:
    """Whatever the clocks say: what it does not vouch for is looked at again, one by one.

    The window is as long as one file takes to be read, and file times move in ticks; so it is tried until it was hit.
    """
    size, names = 384 << 10, [f"{number}.bin".encode() for number in range(4)]
    fill(tmp_path, dict.fromkeys(map(os.fsdecode, names), b"a" * size))
    library = bulk.library_if_any()
    assert library is not None
    reader = bulk.FileReader(library, memoryview(bytearray(5 * size)), len(names))
    with rewritten_all_the_time([tmp_path / os.fsdecode(name) for name in names], 1):
        deadline = time.monotonic() + 120
        while (reader.read(os.fsencode(tmp_path), names, give_back=False)["status"] == bulk.TAKEN).all():
            assert time.monotonic() < deadline, "it vouched for all it read while files were being written"


def test_staging_gives_signs_of_life_while_its_threads_work(tmp_path: Path, monkeypatch) -> None:
    """Other ranks wait for it, and take one that says nothing for hung."""
    fill(tmp_path, {"a.txt": b"1"})
    ticked, original = threading.Event(), stager.BatchStager.stage

    def slow(self, batch):
        assert ticked.wait(60)
        original(self, batch)

    monkeypatch.setattr(stager.BatchStager, "stage", slow)
    _segment, report = stage(tmp_path, tick=ticked.set, listing=look_over(tmp_path))
    assert report.staged == 1


def test_a_missing_library_is_an_error_with_the_hint(tmp_path: Path, monkeypatch) -> None:
    def missing(name: str):
        raise ImportError(name)

    monkeypatch.setattr("simpletuner_gh200.held.codecs.import_module", missing)
    fill(tmp_path, {"a.txt": b"1"})
    with pytest.raises(FeatureUnavailable, match="pip install zstandard"):
        staged(tmp_path, compression="zstd")


def large_webp(size: int) -> bytes:
    """Opens, after all of it was read: a picture, and a chunk that nobody knows."""
    content = image("WEBP")
    padding = b"JUNK" + (size).to_bytes(4, "little") + bytes(size)
    return content[:4] + (len(content) - 8 + len(padding)).to_bytes(4, "little") + content[8:] + padding


@cache
def large_jpeg() -> bytes:
    """Progressive, so that its decoder keeps every coefficient."""
    from PIL import Image

    out = io.BytesIO()
    Image.effect_noise((3900, 3900), 90).convert("RGB").save(out, "JPEG", progressive=True, subsampling=0, quality=60)
    return out.getvalue()


@pytest.mark.one_release("4.")
@pytest.mark.parametrize(("verify", "make"), [("header", lambda: large_webp(20 * MIB)), ("decode", large_jpeg)])
def test_checking_large_images_needs_little_memory_besides(tmp_path: Path, verify: str, make, file_calls: str) -> None:
    content = make()
    fill(tmp_path, {f"{number}.{'webp' if verify == 'header' else 'jpg'}": content for number in range(8)})
    found = staged_alone(tmp_path, native=file_calls == "native", num_workers=72, verify=verify)
    assert (found["broken"], found["checked"]) == (0, 8)
    assert found["grown"] < 256 * MIB


def test_many_workers_and_large_files_need_little_memory_besides(tmp_path: Path) -> None:
    for number in range(4):
        with (tmp_path / f"{number}.bin").open("wb") as file:
            for _ in range(40):
                file.write(os.urandom(1 << 16) * 16)
    assert staged_alone(tmp_path, num_workers=1000, compression="zstd", verify="none")["grown"] < 256 * MIB


def is_cold(fd: int) -> bool:
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    return False


def cold_file(path: Path, size: int) -> int:
    """A descriptor of a file that is on the disk and not in the page cache."""
    path.write_bytes(os.urandom(size))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    for _attempt in range(50):  # a page that another core is just at stays
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cold(fd):
            return fd
        time.sleep(0.02)
    return pytest.skip("this file system does not tell what is in the page cache")


@pytest.mark.parametrize("size", [70_000, MIB])
def test_the_page_cache_is_given_back(tmp_path: Path, size: int) -> None:
    fd = cold_file(tmp_path / "a.bin", size)
    cold = False
    for _attempt in range(20):
        os.pread(fd, size, 0)
        assert not is_cold(fd)
        staged(tmp_path)
        cold = is_cold(fd)
        if cold:
            break
        time.sleep(0.02)  # the kernel keeps a page that another core is just at; never that of every attempt
    assert cold
    os.close(fd)


def test_cold_files_are_fetched_ahead(tmp_path: Path) -> None:
    """There is room for the first only: that the others are in the page cache afterwards can be nobody else's doing."""
    size = 70_000
    descriptors = [cold_file(tmp_path / f"{number}.bin", size) for number in range(16)]
    reader = bulk.FileReader(bulk.library(), memoryview(bytearray(size + 1)), 16)
    read = reader.read(os.fsencode(tmp_path), [b"%d.bin" % number for number in range(16)], give_back=False)
    assert read["status"].tolist() == [bulk.TAKEN, *[bulk.NO_ROOM] * 15]
    deadline = time.monotonic() + 20
    while any(map(is_cold, descriptors)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_cold, descriptors))
    for fd in descriptors:
        os.close(fd)


def test_memory_that_is_refused_is_the_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    fill(tmp_path, {"a.txt": b"1"})
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(DatasetTooLarge):
        staged(tmp_path)


def test_beside_a_node_without_cpus_the_memory_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(staging, "read_nodes", lambda: (Node(0, True, 1 << 40), Node(1, False, 1 << 40)))

    def bind(address: int, size: int) -> str:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text(), "the kernel is asked about memory that is mapped"
        bound.append(size)
        return "bound"

    monkeypatch.setattr(staging, "bind", bind)
    fill(tmp_path, {"a.txt": b"1"})
    dataset, report = staged(tmp_path)
    assert dataset.view(tmp_path / "a.txt") == b"1"
    assert bound and bound[0] > report.held


def test_videos_and_huge_pictures_are_not_called_broken(tmp_path: Path, monkeypatch) -> None:
    from PIL import Image

    fill(tmp_path, {"clip.mpg": b"\x00\x00\x01\xba rest of a programme stream", "big.png": image("PNG", 100)})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    _dataset, report = staged(tmp_path, verify="decode")
    assert list(report.problems) == []
    assert report.images_checked == 1


def test_without_a_compiler_staging_goes_on_and_says_so(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bulk, "library", bulk.library.__wrapped__)
    with caplog.at_level("INFO"):
        assert bulk.library_if_any.__wrapped__() is None
    assert "more slowly: cache_config needs a C compiler" in caplog.text


def test_a_user_without_a_home_can_stage(monkeypatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(bulk, "library", bulk.library.__wrapped__)
    assert bulk.library_if_any.__wrapped__() is None


def test_what_is_needed_is_never_more_than_the_files_are(tmp_path: Path) -> None:
    """A codec that gains nothing: the ceiling shows in the middle of the first file."""
    fill(tmp_path, {"a.bin": os.urandom(3 * MIB)})
    with pytest.raises(DatasetTooLarge) as large:
        staged(tmp_path, compression="zlib", memory_limit_gb=2.5 / 1024)
    assert 2.5 * MIB < large.value.needed <= 3 * MIB + 4096
    assert large.value.allowed == int(2.5 * MIB)
    assert "no compression makes it fit" in str(large.value)


def test_memory_that_runs_out_on_the_way_is_named_as_it_is_now(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("simpletuner_gh200.held.staging.CHECK_HOST_EVERY", MIB)
    fill(tmp_path, {f"{number}.bin": os.urandom(MIB) for number in range(8)})
    asked = []

    def shrinking() -> HostMemory:
        asked.append(1)
        return roomy() if len(asked) == 1 else HostMemory(64 * GIB, 0, 10 * MIB, "MemAvailable")

    with pytest.raises(DatasetTooLarge) as large:
        stage(tmp_path, InMemorySettings(verify="none"), host=shrinking)
    assert large.value.needed <= 8 * MIB + 4096
    assert large.value.allowed < 8 * MIB


def test_auto_refuses_before_it_begins_where_what_stays_raw_is_too_much(tmp_path: Path) -> None:
    fill(tmp_path, {"a.bin": os.urandom(3 * MIB), "a.txt": b"caption " * 100})
    before = open_memfds()
    with pytest.raises(DatasetTooLarge, match="at least 3 MiB"):
        staged(tmp_path, compression="auto", memory_limit_gb=2 / 1024)
    assert open_memfds() == before


@pytest.mark.parametrize(("most", "broken"), [(16 * 16, 1), (16 * 16 - 1, 0)])
def test_images_beyond_what_may_be_decoded_are_opened_only(tmp_path: Path, monkeypatch, most: int, broken: int) -> None:
    monkeypatch.setattr(image_check, "DECODE_PIXELS", most)
    fill(tmp_path, {"cut.png": image("PNG", 16)[:60]})
    _dataset, report = staged(tmp_path, verify="decode", max_corruption_rate=1.0)
    assert report.problems.broken == broken
