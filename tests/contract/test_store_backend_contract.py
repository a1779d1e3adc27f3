"""One suite for SimpleTuner's local backend and for ours, so that the two can't drift.

Every test runs against both. Ours is staged from the same folder first, so its answers come from memory.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
imageio = pytest.importorskip("imageio")
local = pytest.importorskip("simpletuner.helpers.data_backend.local", reason="needs SimpleTuner")

from PIL import Image  # noqa: E402

from simpletuner_gh200.config.blocks import InMemorySettings  # noqa: E402
from simpletuner_gh200.held.files import HeldFiles  # noqa: E402
from simpletuner_gh200.held.staging import stage  # noqa: E402
from simpletuner_gh200.seams.features.store.backend import backend_class  # noqa: E402

pytestmark = pytest.mark.real


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    picture = Image.frombytes("RGB", (40, 30), bytes(range(256)) * 14 + bytes(16))
    for name in ("a.png", "sub/b.jpg", "c.webp", "d.bmp"):
        picture.save(root / name)
    picture.convert("RGBA").save(root / "alpha.png")
    picture.convert("L").save(root / "grey.png")
    picture.convert("P").save(root / "palette.png", transparency=3)
    Image.frombytes("I;16", (40, 15), bytes(range(240)) * 5).save(root / "deep.png")
    picture.convert("CMYK").save(root / "cmyk.jpg")
    (root / "a.txt").write_text("a caption, größer", encoding="utf-8")
    (root / "broken.png").write_bytes(b"not an image")
    (root / "aspect_ratio_bucket_indices_x.json").write_text('{"old": 1}')
    torch.save({"x": torch.arange(6)}, root / "t.pt")
    (root / "z.pt").write_bytes(gzip.compress(_saved(torch.arange(4))))
    return root


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def make(kind: str, folder: Path, **settings: Any) -> Any:
    if kind == "upstream":
        return local.LocalDataBackend(accelerator=None, id="data", **settings)
    segment, _report = stage(folder, InMemorySettings(compression="auto", max_corruption_rate=1.0))
    return backend_class()(None, "data", HeldFiles.alone(segment), **settings)


@pytest.fixture(params=["upstream", "ours"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def backend(kind: str, folder: Path) -> Any:
    return make(kind, folder)


def test_ours_is_a_local_backend(folder: Path) -> None:
    ours = make("ours", folder)
    assert isinstance(ours, local.LocalDataBackend)
    assert ours.type == "local"
    assert type(ours).__name__ == "GH200InMemoryBackend"


def test_ours_reads_without_the_disk(folder: Path) -> None:
    ours = make("ours", folder)
    expected = {name: (folder / name).read_bytes() for name in ("a.txt", "t.pt")}
    os.rename(folder, folder.with_name("moved"))
    assert {name: ours.read(str(folder / name)) for name in expected} == expected
    assert ours.exists(str(folder / "a.txt"))
    assert ours.read_image(str(folder / "a.png")).size == (40, 30)
    assert torch.equal(ours.torch_load(str(folder / "t.pt"))["x"], torch.arange(6))


def test_a_video_is_decoded_without_the_disk(folder: Path) -> None:
    frames = np.random.default_rng(3).integers(0, 255, (5, 64, 64, 3), np.uint8)
    imageio.mimwrite(folder / "moving.mp4", list(frames), fps=25)
    decoded = make("upstream", folder).read_image(str(folder / "moving.mp4"))
    assert decoded.shape == frames.shape
    ours = make("ours", folder)
    open_files = len(os.listdir("/proc/self/fd"))
    os.rename(folder, folder.with_name("moved"))
    assert np.array_equal(ours.read_image(str(folder / "moving.mp4")), decoded)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_read_as_a_file(backend: Any, folder: Path) -> None:
    file = backend.read(str(folder / "a.txt"), as_byteIO=True)
    assert isinstance(file, io.BytesIO)
    assert file.tell() == 0
    assert file.read() == (folder / "a.txt").read_bytes()
    file.write(b"callers may write into it")
    assert backend.read(str(folder / "a.txt")) == (folder / "a.txt").read_bytes()


def test_what_is_not_there(backend: Any, folder: Path) -> None:
    missing = str(folder / "nothing.png")
    assert backend.exists(missing) is False
    with pytest.raises(FileNotFoundError):
        backend.read(missing)
    with pytest.raises(FileNotFoundError):
        backend.torch_load(missing)
    with pytest.raises(FileNotFoundError):
        backend.delete(missing)
    with pytest.raises(FileNotFoundError):
        backend.open_file(missing, "rb")
    assert backend.read_image(missing) is None


@pytest.mark.parametrize(
    "data", ["text, größer", b"bytes", {"x": torch.ones(2)}, torch.ones(3)], ids=["str", "bytes", "dict", "tensor"]
)
def test_a_write_is_on_disk_and_read_back(backend: Any, folder: Path, data: Any) -> None:
    for name in ("a.txt", "new/deep/file.bin"):
        path = str(folder / name)
        backend.write(path, data)
        on_disk = Path(path).read_bytes()
        assert backend.read(path) == on_disk
        if isinstance(data, (str, bytes)):
            assert on_disk == (data.encode() if isinstance(data, str) else data)
        else:
            loaded = backend.torch_load(path)
            assert torch.equal(
                loaded["x"] if isinstance(data, dict) else loaded, data["x"] if isinstance(data, dict) else data
            )
    leftovers = [name for name in os.listdir(folder) if "tmp" in name]
    assert leftovers == []


def test_torch_save_over_a_staged_file(backend: Any, folder: Path) -> None:
    path = str(folder / "t.pt")
    backend.torch_save(torch.full((2,), 7.0), path)
    assert torch.equal(backend.torch_load(path), torch.full((2,), 7.0))


def test_torch_files_may_be_gzipped(kind: str, folder: Path) -> None:
    backend = make(kind, folder, compress_cache=True)
    assert torch.equal(backend.torch_load(str(folder / "z.pt")), torch.arange(4))
    backend.torch_save(torch.arange(9), str(folder / "z.pt"))
    assert (folder / "z.pt").read_bytes()[:2] == b"\x1f\x8b"
    assert torch.equal(backend.torch_load(str(folder / "z.pt")), torch.arange(9))


def test_a_delete_is_final(backend: Any, folder: Path) -> None:
    backend.delete(str(folder / "a.txt"))
    assert not (folder / "a.txt").exists()
    assert backend.exists(str(folder / "a.txt")) is False
    with pytest.raises(FileNotFoundError):
        backend.read(str(folder / "a.txt"))


def test_deleting_a_link_leaves_what_it_leads_to(kind: str, folder: Path) -> None:
    target = folder.parent / "outside.txt"
    target.write_text("kept")
    (folder / "link.txt").symlink_to(target)
    backend = make(kind, folder)
    assert backend.read(str(folder / "link.txt")) == b"kept"
    backend.delete(str(folder / "link.txt"))
    assert target.read_text() == "kept"
    assert not os.path.lexists(folder / "link.txt")


@pytest.mark.parametrize("mode", ["rb", "r"])
def test_open_for_reading(backend: Any, folder: Path, mode: str) -> None:
    with backend.open_file(str(folder / "a.txt"), mode) as file, open(folder / "a.txt", mode) as plain:
        assert file.name == plain.name
        assert file.readable()
        assert file.read() == plain.read()
        file.seek(0)
        assert file.readlines() == list(open(folder / "a.txt", mode))  # noqa: SIM115


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b"])
def test_open_for_writing(backend: Any, folder: Path, mode: str) -> None:
    with backend.open_file(str(folder / "a.txt"), mode) as file:
        file.write(b"NEW")
    assert b"NEW" in (folder / "a.txt").read_bytes()
    assert backend.read(str(folder / "a.txt")) == (folder / "a.txt").read_bytes()


def test_lists_are_the_same(folder: Path) -> None:
    upstream, ours = make("upstream", folder), make("ours", folder)
    for extensions in (["png", "jpg"], ["txt"], []):
        expected = upstream.list_files(extensions, str(folder))
        assert ours.list_files(extensions, str(folder)) == expected
        for entry in expected:
            assert len(entry) == 3
    ours.write(str(folder / "fresh.txt"), "x")
    assert any(str(folder / "fresh.txt") in files for _root, _dirs, files in ours.list_files(["txt"], str(folder)))


IMAGES = ["a.png", "sub/b.jpg", "c.webp", "d.bmp", "alpha.png", "grey.png", "palette.png", "deep.png", "cmyk.jpg"]


@pytest.mark.parametrize("name", IMAGES)
def test_pixels_are_upstreams(folder: Path, name: str) -> None:
    path = str(folder / name)
    expected, found = make("upstream", folder).read_image(path), make("ours", folder).read_image(path)
    assert found.mode == expected.mode
    assert found.size == expected.size
    assert found.tobytes() == expected.tobytes()


def test_a_broken_image_is_raised_or_deleted(backend: Any, folder: Path) -> None:
    path = str(folder / "broken.png")
    with pytest.raises(Exception, match="cannot identify"):
        backend.read_image(path)
    assert os.path.exists(path)
    assert backend.read_image(path, delete_problematic_images=True) is None
    assert not os.path.exists(path)
    assert backend.exists(path) is False


@pytest.mark.parametrize("delete", [False, True])
def test_the_disk_decides_about_a_file_that_was_still_being_copied(folder: Path, delete: bool) -> None:
    """Half of it was staged. Upstream deletes what does not decode, and must not be told so of a good file."""
    whole, tensor = (folder / "a.png").read_bytes(), (folder / "t.pt").read_bytes()
    (folder / "a.png").write_bytes(whole[: len(whole) // 2])
    (folder / "t.pt").write_bytes(b"no load key" + tensor[: len(tensor) // 2])
    backend = make("ours", folder)
    (folder / "a.png").write_bytes(whole)
    (folder / "t.pt").write_bytes(tensor)
    image, loaded = str(folder / "a.png"), str(folder / "t.pt")
    assert backend.read_image(image, delete_problematic_images=delete).size == (40, 30)
    assert torch.equal(backend.torch_load(loaded)["x"], torch.arange(6))
    assert (Path(image).read_bytes(), Path(loaded).read_bytes()) == (whole, tensor)
    assert backend.read(image) == whole, "the staged half is not served any more"


def test_a_torch_file_that_is_broken_on_disk_too_ends_as_upstream_has_it(folder: Path) -> None:
    ends = []
    for kind in ("upstream", "ours"):
        path = folder / "broken.pt"
        path.write_bytes(b"\x0bcertainly no pickle")
        with pytest.raises(Exception) as raised:
            make(kind, folder).torch_load(str(path))
        ends.append((type(raised.value), str(raised.value), path.exists()))
    assert ends[0] == ends[1]


def test_what_was_judged_by_its_staged_copy_is_not_deleted_where_the_disk_has_another(folder: Path) -> None:
    """Upstream's scan of a dataset reads the bytes, decodes them itself, and deletes through the backend."""
    (folder / "a.png").write_bytes(b"half of an image")
    backend = make("ours", folder)
    (folder / "a.png").write_bytes((folder / "d.bmp").read_bytes())
    backend.delete(str(folder / "a.png"))
    assert (folder / "a.png").exists()
    backend.delete(str(folder / "a.png"))
    assert not (folder / "a.png").exists(), "judged by what is there, it goes"


@pytest.mark.parametrize("delete", [False, True])
def test_a_batch_gives_keys_and_images_in_order(backend: Any, folder: Path, delete: bool) -> None:
    paths = [str(folder / name) for name in ("c.webp", "broken.png", "a.png", "nothing.png", "sub/b.jpg")]
    keys, images = backend.read_image_batch(paths, delete_problematic_images=delete)
    assert keys == [paths[0], paths[2], paths[4]]
    assert [image.size for image in images] == [(40, 30)] * 3
    assert os.path.exists(paths[1]) is not delete
    assert backend.read_image_batch([]) == ([], [])
    with pytest.raises(ValueError):
        backend.read_image_batch("not a list")


def test_bookkeeping_is_always_read_from_disk(backend: Any, folder: Path) -> None:
    path = folder / "aspect_ratio_bucket_indices_x.json"
    assert backend.read(str(path)) == b'{"old": 1}'
    path.write_text('{"new": 2}')  # as another rank's process would
    assert backend.read(str(path)) == b'{"new": 2}'


def test_the_representation_for_child_processes(backend: Any, folder: Path) -> None:
    representation = pickle.loads(pickle.dumps(backend.get_instance_representation()))
    assert representation["backend_type"] == "local"
    child = type(backend).from_instance_representation(representation)
    assert child.read(str(folder / "a.txt")) == (folder / "a.txt").read_bytes()


def test_no_method_of_upstream_was_forgotten() -> None:
    """A method that upstream adds and that touches files must be looked at before it is inherited blindly."""
    known = {
        "create_directory", "delete", "exists", "from_instance_representation", "get_abs_path", "torch_save",
        "get_instance_representation", "list_files", "open_file", "read", "read_image", "read_image_batch",
        "torch_load", "write", "write_batch", "iter_cache_groups",
    }  # fmt: skip
    public = {name for name in dir(local.LocalDataBackend) if not name.startswith("_")}
    assert public - known == set()
