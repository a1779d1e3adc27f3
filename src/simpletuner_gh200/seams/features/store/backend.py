"""``GH200InMemoryBackend``: SimpleTuner's local data backend, reading from a staged dataset where it can.

The class itself is made on first use, since its base is SimpleTuner's. Everything it does not find in memory, and
every write, goes to its base, so that the two can't differ in what they do to the disk.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.held.files import HeldFiles
from simpletuner_gh200.seams.decoding import decode_image, decode_video
from simpletuner_gh200.telemetry.redact import printable

if TYPE_CHECKING:
    Local = Any
else:
    Local = object

logger = logging.getLogger("simpletuner_gh200")

_WRITING = frozenset("wax+")


class StagedFile(io.BytesIO):
    """What ``open_file`` returns for reading: a file in memory that still knows its name."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


class ServedFromMemory(Local):  # type: ignore[misc]
    """The part of the class that is ours; SimpleTuner's ``LocalDataBackend`` comes after it."""

    def __init__(self, accelerator: Any, id: str, dataset: HeldFiles, compress_cache: bool = False) -> None:
        super().__init__(accelerator=accelerator, id=id, compress_cache=compress_cache)
        self.staged = dataset

    def read(self, filepath: Any, as_byteIO: bool = False) -> Any:
        view = self.staged.view(filepath)
        if view is None:
            return super().read(filepath, as_byteIO)
        return io.BytesIO(view) if as_byteIO else bytes(view)

    def exists(self, filepath: Any) -> bool:
        return self.staged.holds(filepath) or bool(super().exists(filepath))

    def open_file(self, filepath: Any, mode: str) -> Any:
        if _WRITING.intersection(mode):
            self.staged.forget(filepath)
            return super().open_file(filepath, mode)
        view = self.staged.view(filepath)
        if view is None:
            return super().open_file(filepath, mode)
        file = StagedFile(bytes(view), os.fspath(filepath))
        return file if "b" in mode else io.TextIOWrapper(file)

    def read_image(self, filepath: Any, delete_problematic_images: bool = False) -> Any:
        """As upstream's: None for what is not there, and what does not decode is deleted or raised."""
        path = os.fspath(filepath).replace("\x00", "")
        decode, upstream = self._decoder(path), partial(super().read_image, path, delete_problematic_images)
        return upstream() if decode is None else self._decoded(path, decode, upstream)

    def torch_load(self, filename: Any) -> Any:
        """As upstream's, which deletes what it can't load: so it is asked about the disk's copy only."""
        return self._decoded(filename, self._unpacked, partial(super().torch_load, filename))

    def _unpacked(self, view: memoryview) -> Any:
        import torch

        stored = io.BytesIO(view)
        if self.compress_cache:
            stored = self._decompress_torch(stored)
        stored.seek(0)
        return torch.load(stored, map_location="cpu")

    def _decoded(self, path: Any, decode: Callable[[memoryview], Any], upstream: Callable[[], Any]) -> Any:
        """A staged copy that does not decode is not believed any more: the file may have been written at the time."""
        view = self.staged.view(path)
        if view is None:
            return upstream()
        try:
            return decode(view)
        except Exception as broken:  # noqa: BLE001 - whatever a decoder says of what is in memory, the disk decides
            logger.warning("gh200: what was staged of %s does not decode; asking the disk: %s", printable(path), broken)
            self.staged.forget(path)
            return upstream()

    def read_image_batch(self, filepaths: Any, delete_problematic_images: bool = False) -> tuple[list[str], list[Any]]:
        if not isinstance(filepaths, list):
            raise ValueError(f"read_image_batch takes a list of paths, not {type(filepaths)}")
        threads = max(1, min(len(os.sched_getaffinity(0)), len(filepaths)))
        with ThreadPoolExecutor(threads, thread_name_prefix="gh200-decode") as pool:
            images = list(pool.map(lambda path: self._image_if_any(path, delete_problematic_images), filepaths))
        read = [(path, image) for path, image in zip(filepaths, images, strict=True) if image is not None]
        return [path for path, _ in read], [image for _, image in read]

    def _image_if_any(self, path: str, delete_problematic_images: bool) -> Any:
        try:
            image = self.read_image(path, delete_problematic_images)
        except Exception as error:  # noqa: BLE001 - as upstream: one that does not decode is left out of the batch
            logger.warning("gh200: left out %s, which does not decode: %s", printable(path), error)
            return None
        if image is None:
            logger.warning("gh200: left out %s, which could not be loaded", printable(path))
        return image

    def write(self, filepath: Any, data: Any) -> None:
        self.staged.forget(filepath)
        super().write(filepath, data)

    def torch_save(self, data: Any, original_location: Any) -> None:
        if isinstance(original_location, (str, os.PathLike)):
            self.staged.forget(original_location)
        super().torch_save(data, original_location)

    def delete(self, filepath: Any) -> None:
        """Not where what was judged is not what would be deleted: the file was changed after it was staged."""
        judged = self.staged.view(filepath)
        self.staged.forget(filepath)
        if judged is not None and not _is_on_disk(filepath, judged):
            logger.warning("gh200: %s is kept: it is not what was staged and judged", printable(filepath))
            return
        super().delete(filepath)

    def _decoder(self, path: str) -> Callable[[memoryview], Any] | None:
        """None for sound, which is decoded by what its name ends in, by programs of their own too: from disk."""
        from simpletuner.helpers.training import audio_file_extensions, video_file_extensions

        ending = os.path.splitext(path)[1].lower().strip(".")
        if "audio" in str(getattr(self, "dataset_type", "")).lower():
            return None
        if ending in video_file_extensions:
            return decode_video
        return None if ending in audio_file_extensions else decode_image


def _is_on_disk(filepath: Any, content: memoryview) -> bool:
    """Is ``content`` what the file holds? Yes where it is gone: then there is nothing to keep."""
    try:
        with open(filepath, "rb") as file:
            return file.read() == content
    except FileNotFoundError:
        return True
    except OSError:
        return False


@lru_cache(maxsize=1)
def backend_class() -> type[Any]:
    """``GH200InMemoryBackend``, made from the installed SimpleTuner's ``LocalDataBackend``."""
    from simpletuner.helpers.data_backend.local import LocalDataBackend

    return type(
        "GH200InMemoryBackend", (ServedFromMemory, LocalDataBackend), {"__doc__": __doc__, "__module__": __name__}
    )


def __getattr__(name: str) -> Any:
    if name == "GH200InMemoryBackend":
        return backend_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
