"""Discovery finds every regular file once, whatever the folder looks like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simpletuner_gh200.held.listing import BATCH_BYTES, BATCH_FILES, Listing, is_caption, list_files
from simpletuner_gh200.held.staging import look_over
from simpletuner_gh200.held.staging_report import extension_of
from tests.unit.held.held_samples import fill
from tests.unit.nobody import as_nobody

pytestmark = pytest.mark.usefixtures("file_calls")


def names(listing: Listing) -> set[str]:
    prefix = listing.root + b"/"
    return {os.fsdecode(path.removeprefix(prefix)) for batch in listing.batches for path in batch.paths()}


def reasons(listing: Listing) -> list[str]:
    return sorted(problem.reason for problem in listing.problems)


def test_an_empty_folder_is_an_empty_listing(tmp_path: Path) -> None:
    listing = list_files(tmp_path)
    assert (listing.files, listing.size, listing.batches, len(listing.problems)) == (0, 0, [], 0)


def test_everything_but_bookkeeping_is_found(tmp_path: Path) -> None:
    fill(tmp_path, dict.fromkeys(("a.png", "a.txt", "deep/er/b.pt", ".hidden/c.wav", "no_extension"), b"x"))
    fill(tmp_path, {"aspect_ratio_bucket_indices_x.json": b"", "meta.json": b"", ".zfs/d.png": b"x"})
    listing = list_files(tmp_path)
    assert names(listing) == {"a.png", "a.txt", "deep/er/b.pt", ".hidden/c.wav", "no_extension"}
    assert listing.size == 5


def test_extensions_choose_without_regard_to_case_or_dots(tmp_path: Path) -> None:
    fill(tmp_path, {"a.PNG": b"", "b.txt": b"", "c.webp": b""})
    assert names(list_files(tmp_path, ("png", ".WebP"))) == {"a.PNG", "c.webp"}


def test_links_are_followed_even_out_of_the_folder_and_each_real_folder_once(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", {"x.png": b"1"})
    root = fill(tmp_path / "root", {"a.png": b"22"})
    (root / "link").symlink_to(outside)
    (root / "again").symlink_to(outside)
    (root / "one.png").symlink_to(outside / "x.png")
    listing = list_files(root)
    assert listing.files == 3, "a.png, one.png, and x.png through one of the two links"
    staged = {name.split("/")[0] for name in names(listing) if name.endswith("x.png")}
    assert len(staged) == 1
    others = {other for other, _staged in listing.aliases}
    assert os.fsencode(outside) + b"/" in others, "the real path is known as another name"


def test_loops_and_broken_links_end_and_are_reported(tmp_path: Path) -> None:
    fill(tmp_path, {"sub/a.png": b"1"})
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "gone.png").symlink_to("nowhere")
    listing = list_files(tmp_path)
    assert names(listing) == {"sub/a.png"}
    assert reasons(listing) == ["broken link", "broken link"]


def test_devices_and_pipes_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert list_files(tmp_path).files == 0


def test_names_need_not_be_text(tmp_path: Path) -> None:
    strange = [b"\xff\xfe.png", b"new\nline.png", b"[bold]markup.png", b"\x1b[31mred.png", b"n" * 251 + b".png"]
    for name in strange:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"1")
    listing = list_files(tmp_path)
    assert {name for batch in listing.batches for name in batch.names} == set(strange)


def test_an_unreadable_folder_is_reported_not_fatal(tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": b"1", "closed/b.png": b"1"})
    (tmp_path / "closed").chmod(0)

    def work() -> None:
        listing = list_files(tmp_path)
        assert (names(listing), reasons(listing)) == ({"a.png"}, ["unreadable"])

    assert as_nobody(work, tmp_path) == 0
    (tmp_path / "closed").chmod(0o700)


def test_batches_stay_small(tmp_path: Path) -> None:
    fill(tmp_path, {f"{number:04d}.txt": b"x" for number in range(BATCH_FILES + 50)})
    fill(tmp_path / "large", {f"{number}.bin": bytes(BATCH_BYTES * 2 // 3) for number in range(3)})
    listing = list_files(tmp_path)
    assert sum(len(batch.names) for batch in listing.batches) == listing.files == BATCH_FILES + 53
    for batch in listing.batches:
        assert len(batch.names) <= BATCH_FILES
        assert sum(batch.sizes) <= BATCH_BYTES or len(batch.names) == 1


def test_extension_of() -> None:
    assert [extension_of(name) for name in (b"a.JPG", b"a", b"x.tar.gz", b"d.d/plain.txt")] == ["jpg", "", "gz", "txt"]


def test_a_long_listing_ticks(tmp_path):
    """Other ranks wait for it."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "image.png").touch()
    ticks: list[int] = []
    assert list_files(tmp_path, tick=lambda: ticks.append(1)).files == 3
    assert len(ticks) >= 3
    ticks.clear()
    assert look_over(tmp_path, tick=lambda: ticks.append(1)).files == 3
    assert len(ticks) >= 3, "also before a dataset is staged"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.png", "b.png", "c.d.png"], {"png": 3}),
        (["a.png", "b.txt"], {"png": 1, "txt": 1}),
        (["a.png", "b.png.txt"], {"png": 1, "txt": 1}),
        (["a", "b"], {"": 2}),
        ([".png", "png"], {"png": 1, "": 1}),
    ],
)
def test_files_are_counted_by_extension(tmp_path: Path, names: list[str], expected: dict[str, int]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"123")
    totals = list_files(tmp_path).extensions
    assert {ending: (found.files, found.size) for ending, found in totals.items()} == {
        ending: (count, 3 * count) for ending, count in expected.items()
    }


def test_a_part_of_a_listing(tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": b"12345", "a.txt": b"1", "sub/b.txt": b"22", "sub/b.png": b"1"})
    part = list_files(tmp_path).part(is_caption)
    assert (part.files, part.size, names(part)) == (2, 3, {"a.txt", "sub/b.txt"})
