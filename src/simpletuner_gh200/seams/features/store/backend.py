"""``GH200InMemoryBackend``: SimpleTuner's local data backend, reading from a staged dataset where it can.

The class itself is made on first use, since its base is SimpleTuner's. Everything it does not find in memory, and
every write, goes to its base, so that the two can't differ in what they do to the disk.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.telemetry.printable import printable

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

    def __init__(self, accelerator: Any, id: str, dataset: StagedDataset, compress_cache: bool = False) -> None:
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
        if not self._is_still_image(path):
            return super().read_image(path, delete_problematic_images)
        view = self.staged.view(path)
        if view is None:
            return super().read_image(path, delete_problematic_images)
        try:
            return decode_image(bytes(view))
        except Exception as broken:
            logger.error("gh200: %s does not decode: %s", printable(path), broken)
            if not delete_problematic_images:
                raise
            self._delete_problematic(path)
            return None

    def read_image_batch(self, filepaths: Any, delete_problematic_images: bool = False) -> tuple[list[str], list[Any]]:
        if not isinstance(filepaths, list):
            raise ValueError(f"read_image_batch takes a list of paths, not {type(filepaths)}")
        keys: list[str] = []
        images: list[Any] = []
        for path, image, error in read_in_parallel(self.read_image, filepaths, delete_problematic_images):
            if error is not None:
                logger.warning("gh200: left out %s, which does not decode: %s", printable(path), error)
            elif image is None:
                logger.warning("gh200: left out %s, which could not be loaded", printable(path))
            else:
                keys.append(path)
                images.append(image)
        return keys, images

    def write(self, filepath: Any, data: Any) -> None:
        self.staged.forget(filepath)
        super().write(filepath, data)

    def torch_save(self, data: Any, original_location: Any) -> None:
        if isinstance(original_location, (str, os.PathLike)):
            self.staged.forget(original_location)
        super().torch_save(data, original_location)

    def delete(self, filepath: Any) -> None:
        self.staged.forget(filepath)
        super().delete(filepath)

    def _is_still_image(self, path: str) -> bool:
        """Video and sound are decoded by libraries that want a file; they keep upstream's way, from disk."""
        from simpletuner.helpers.training import audio_file_extensions, video_file_extensions

        ending = os.path.splitext(path)[1].lower().strip(".")
        if ending in video_file_extensions or ending in audio_file_extensions:
            return False
        return "audio" not in str(getattr(self, "dataset_type", "")).lower()

    def _delete_problematic(self, path: str) -> None:
        try:
            self.delete(path)
        except OSError as refused:
            logger.error("gh200: could not delete %s: %s", printable(path), refused)


def decode_image(content: bytes) -> Any:
    """Bytes to pixels, exactly as SimpleTuner's own loader gives them."""
    from simpletuner.helpers.image_manipulation.load import load_image

    return load_image(content)


ReadImage = tuple[str, Any, Exception | None]


def read_in_parallel(read: Callable[[str, bool], Any], paths: list[str], delete: bool) -> Iterator[ReadImage]:
    """(path, image or None, error or None) for each path, in the order given."""

    def one(path: str) -> ReadImage:
        try:
            return path, read(path, delete), None
        except Exception as error:  # noqa: BLE001 - handed to the caller, who decides as upstream does
            return path, None, error

    threads = min(len(os.sched_getaffinity(0)), len(paths))
    if threads <= 1:
        yield from map(one, paths)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="gh200-decode") as pool:
        yield from pool.map(one, paths)


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
