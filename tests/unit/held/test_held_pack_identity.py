"""Packs serve what their sources hold: told apart by more than size and time, and by what made them."""

from __future__ import annotations

import gzip
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from simpletuner_gh200.held import source
from simpletuner_gh200.held.cache import MISSING
from simpletuner_gh200.held.packs import PackFolder
from simpletuner_gh200.held.source import identify, identities, recognise
from simpletuner_gh200.seams.features.caches.found import made_by
from tests.unit.held.conftest import filled, packed_at

LONG_AGO = (0, 0)
COUNT = 3


def source_of(path):
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


def content(number, form="zip"):
    """A cache file as SimpleTuner writes it: the same size whatever the number, if not compressed."""
    buffer = io.BytesIO()
    torch.save(torch.full((500,), float(number)), buffer, _use_new_zipfile_serialization=form != "legacy")
    # The older form has the tensor's address in it, in as many digits as that takes; what follows is not read.
    whole = buffer.getvalue().ljust(4096, b"\0") if form == "legacy" else buffer.getvalue()
    return gzip.compress(whole, 0, mtime=0) if form == "gzip" else whole


def write(path, number, form="zip", *, in_place=False):
    """With the time that reproducible archives give to everything."""
    Path(path).parent.mkdir(exist_ok=True)
    if not in_place:
        Path(path).unlink(missing_ok=True)
    with open(path, "r+b" if in_place else "wb") as file:
        file.write(content(number, form))
    os.utime(path, ns=LONG_AGO)


@pytest.fixture(params=["zip", "gzip", "legacy"])
def packed(request, tmp_path):
    """(folder of packs, paths, form); every file has the same size and the same time."""
    paths = [str(tmp_path / "src" / f"{number}.pt") for number in range(COUNT)]
    for number, path in enumerate(paths):
        write(path, number, request.param)
    return packed_at(tmp_path / "packs", *paths).folder, paths, request.param


def load(folder, made_by=""):
    packs = PackFolder(folder, made_by)
    cache = filled(packs=packs.open_all())
    packs.recognise()
    return cache, packs.report()


def test_a_cache_made_again_with_the_same_sizes_and_times_is_not_served_from_old_packs(packed):
    folder, paths, form = packed
    sizes = [os.stat(path).st_size for path in paths]
    write(paths[0], 9, form)
    write(paths[1], 8, form, in_place=True)  # the same inode too
    write(paths[2], 7, form)
    assert [os.stat(path).st_size for path in paths] == sizes
    cache, loaded = load(folder)
    assert (loaded["entries"], loaded["changed"]) == (0, COUNT)
    assert all(cache.get(path) is MISSING for path in paths)


def test_a_cache_that_was_copied_or_restored_keeps_its_packs(packed, tmp_path):
    folder, paths, _form = packed
    before = [os.stat(path).st_ino for path in paths]
    shutil.copytree(tmp_path / "src", tmp_path / "copy")  # copy2: times are kept, inodes and change times are not
    shutil.rmtree(tmp_path / "src")
    os.rename(tmp_path / "copy", tmp_path / "src")
    assert [os.stat(path).st_ino for path in paths] != before
    cache, loaded = load(folder)
    assert (loaded["entries"], loaded["changed"]) == (COUNT, 0)
    assert [cache.get(path)[0].item() for path in paths] == [0.0, 1.0, 2.0]


def test_a_file_that_is_untouched_is_not_opened(packed, monkeypatch):
    folder, _paths, _form = packed
    monkeypatch.setattr(source, "fingerprint", lambda *_: pytest.fail("inode and change time are enough here"))
    assert load(folder)[1]["entries"] == COUNT


def test_change_times_of_whole_seconds_are_not_believed(packed, monkeypatch):
    """An image made to come out alike: size, times and inode are the very same, the content is another VAE's."""
    folder, paths, form = packed
    found = {path: os.stat(path) for path in paths}
    second = source.SECOND_NS
    (pack,) = PackFolder(folder).open_all()
    rows = range(COUNT)
    known = [
        (pack.path(row), identity._replace(ctime_ns=1_700_000_000 * second))
        for row, identity in zip(rows, identities(pack, rows), strict=True)
    ]
    for number, path in enumerate(paths):
        write(path, number + 5, form, in_place=True)
    look = source.look_at

    def as_in_the_image(asked):
        looks = look(asked)
        looks["ctime_ns"] = 1_700_000_000 * second
        looks["inode"] = [found[path].st_ino for path in asked]
        return looks

    monkeypatch.setattr(source, "look_at", as_in_the_image)
    assert recognise(known) == [False] * COUNT


def test_entries_of_another_configuration_are_left_alone_and_not_served(packed):
    folder, paths, form = packed
    cache, loaded = load(folder, "another VAE")
    assert (loaded["entries"], loaded["of_others"]) == (0, COUNT)
    assert cache.get(paths[0]) is MISSING
    assert PackFolder(folder, "another VAE").save(filled(*paths)) > 0
    assert load(folder, "another VAE")[1]["entries"] == load(folder)[1]["entries"] == COUNT, "each has its own"
    for path in paths:
        write(path, 5, form)
        os.utime(path, ns=(1, 1))
    assert PackFolder(folder, "another VAE").save(filled(*paths)) > 0
    assert len(list(folder.glob("*.pack"))) == 1, "what nobody can want any more is removed, whoever made it"


ARGUMENTS = {
    "model_family": "flux",
    "pretrained_model_name_or_path": "org/model",
    "pretrained_vae_model_name_or_path": None,
    "pretrained_t5_model_name_or_path": None,
    "text_encoder_1_precision": "no_change",
    "vae_dtype": "bf16",
    "mixed_precision": "bf16",
    "learning_rate": 1e-4,
    "max_train_steps": 10,
}


@pytest.mark.parametrize(
    ("kind", "change", "dataset", "matters"),
    [
        ("vae", {"pretrained_vae_model_name_or_path": "org/vae"}, {}, True),
        ("vae", {"vae_dtype": "fp32"}, {}, True),
        ("vae", {"pretrained_model_name_or_path": "org/other"}, {}, True),
        ("vae", {}, {"resolution": 512}, True),
        ("vae", {}, {"crop_style": "center"}, True),
        ("vae", {"learning_rate": 1e-5, "max_train_steps": 20}, {"repeats": 3}, False),
        ("vae", {"text_encoder_1_precision": "int8"}, {}, False),
        ("text", {"text_encoder_1_precision": "int8"}, {}, True),
        ("text", {"pretrained_t5_model_name_or_path": "org/t5"}, {}, True),
        ("text", {"vae_dtype": "fp32"}, {"resolution": 512}, False),
        ("distillation", {"vae_dtype": "fp32"}, {}, True),
    ],
)
def test_what_made_an_entry_is_what_decides_its_values(kind, change, dataset, matters):
    before = made_by(kind, SimpleNamespace(**ARGUMENTS), {"resolution": 1024, "repeats": 0})
    after = made_by(kind, SimpleNamespace(**(ARGUMENTS | change)), {"resolution": 1024, "repeats": 0} | dataset)
    assert (before != after) is matters
    assert before == made_by(kind, SimpleNamespace(**dict(reversed(ARGUMENTS.items()))), {"resolution": 1024})


def test_files_are_recognised_as_what_they_were(tmp_path):
    names = ("plain", "changed", "gone", "linked", "two names", "rewritten", "ümlaut")
    paths = [str(tmp_path / f"{name}.pt") for name in names]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"content of " + os.fsencode(path))
    known = [identify(path) for path in paths]
    with open(paths[1], "ab") as file:
        file.write(b"more")
    os.unlink(paths[2])
    os.rename(paths[3], tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", paths[3])
    os.link(paths[4], tmp_path / "another")
    times = os.stat(paths[5])
    with open(paths[5], "r+b") as file:
        file.write(b"CONTENT")
    os.utime(paths[5], ns=(times.st_atime_ns, times.st_mtime_ns))
    entries = list(zip(paths, known, strict=True))
    assert recognise(entries) == [True, False, False, True, True, False, True]


def test_any_number_that_a_file_system_gives_is_compared(tmp_path, saved):
    """Hashes of 64 bits for inodes, and times before 1970."""
    path = saved(torch.zeros(3), "old.pt")
    os.utime(path, ns=(-5, -5))
    identity = identify(path)
    assert identity is not None and identity.mtime_ns < 0
    copied = identity._replace(inode=(1 << 64) - 3)
    assert recognise([(path, identity), (path, copied)]) == [True, True]
    assert filled(path).find(path) is not None
