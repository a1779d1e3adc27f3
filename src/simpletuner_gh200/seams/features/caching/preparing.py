"""In a worker: a picture from its file to what the VAE is given, by SimpleTuner's own functions.

What SimpleTuner keeps in its process, arguments, data sets, metadata, comes with each job; nothing is written. Two
things can't be decided here, and are left to the rank: a crop drawn from Python's random numbers, which come in the
order of the files, and a change of the table of resolutions, which later pictures depend on. Pictures are handed from
function to function as arrays: a Pillow image is made of one only where somebody wants to have it as such.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from simpletuner_gh200.seams.decoding import decode_video

Pixels = np.ndarray[Any, Any]

Companion = Literal["none", "to be resized", "fits"]
"""What SimpleTuner processes a picture together with: older releases measure and resize only several at once."""


COMPANION = "gh200-companion"
COMPANION_GOALS: dict[Companion, list[int]] = {"to be resized": [1, 1], "fits": [2, 2]}
"""What its two by two pixels are to become."""


@dataclass(frozen=True)
class PassContext:
    """What is the same for all pictures of a pass."""

    id: str
    configs: dict[str, Any]
    """Of this data set, and of the one that it belongs to."""
    arguments: dict[str, Any]
    canvas: Any
    """The model's largest size."""
    transform: Any
    """None where the rank has to do it."""
    float_type: str
    video_extensions: frozenset[str]


@dataclass
class PictureJob:
    """One job."""

    path: str
    metadata: Any
    """As the metadata backend has it."""
    prepared_by: Any
    """As it is looked up for the preparation: mostly the same object."""
    partner: tuple[str, str, Any] | None
    """Data set, path and metadata of the picture whose geometry this one follows."""
    resolutions: dict[Any, Any]
    companion: Companion = "none"


@dataclass
class Preparation:
    """What became of it. ``kind``: unread - the rank reads it itself, and does what SimpleTuner does with such a file;
    skipped - SimpleTuner leaves it out; failed - it raises ``words``; rank - the rank prepares it itself; lost - the
    process that was at it is gone, twice."""

    kind: Literal["done", "unread", "skipped", "failed", "rank", "lost"]
    words: str = ""
    """Of one that is done: why it could not be transformed."""
    size: tuple[int, int] = (0, 0)
    """As decoded, width first."""
    companion: Companion = "none"
    crop_coordinates: Any = None
    aspect_ratio: Any = None
    is_image: bool = True
    """Whether it is a Pillow image that the array stands for."""
    crop: tuple[int, int, int, int] | None = None
    """Width and height before a random crop that is still to be drawn, and after."""
    metadata: Any = None
    """Where it was changed."""
    updates: list[tuple[str, str, Any]] = field(default_factory=list)
    """Calls of the metadata backend's ``update_metadata_attribute``."""


class _Noted:
    """What SimpleTuner's functions did while one picture was prepared."""

    def __init__(self) -> None:
        self.for_the_rank = False
        self.size = (0, 0)
        self.crop: tuple[int, int, int, int] | None = None
        self.updates: list[tuple[str, str, Any]] = []


_noted = _Noted()


def serve(job: tuple[bytes, PictureJob], content: bytes | None) -> tuple[Preparation, Pixels | None]:
    """``job``: a pickled ``PassContext``, and a picture of it."""
    global _noted
    _noted = _Noted()
    pickled, picture = job
    _set_scene(pickled)
    before = copy.deepcopy(picture.metadata)
    try:
        verdict, array = _prepared(_scene.dataset, picture, content)
    except (MemoryError, OSError):
        return Preparation("rank"), None  # perhaps of this process alone, or of this moment: the rank tries for itself
    except Exception as failure:  # noqa: BLE001 - the rank says it where SimpleTuner would
        verdict, array = Preparation("failed", words=str(failure)), None
    verdict.size = _noted.size
    if _noted.for_the_rank:
        return Preparation("rank"), None
    verdict.companion, verdict.crop, verdict.updates = picture.companion, _noted.crop, _noted.updates
    if picture.metadata != before:
        verdict.metadata = picture.metadata
    return verdict, array


def _prepared(
    dataset: PassContext, picture: PictureJob, content: bytes | None
) -> tuple[Preparation, np.ndarray[Any, Any] | None]:
    from simpletuner.helpers.training.state_tracker import StateTracker

    StateTracker.aspect_resolution_map = picture.resolutions
    try:
        image = _read(dataset, picture.path, content)
    except Exception:  # noqa: BLE001 - whatever a decoder says: the rank asks it again, and heeds the answer
        return Preparation("unread"), None
    is_image = not isinstance(image, np.ndarray)
    _noted.size = image.size if is_image else (image.shape[2], image.shape[1])
    array = _processed(picture, image)
    if array is None:
        return Preparation("skipped"), None
    del image
    sample = _sample(dataset.id, array, picture.path, picture.prepared_by)
    del array
    prepared = sample.prepare() if picture.partner is None else sample.prepare_like(_sample_of_partner(picture.partner))
    del sample
    verdict = Preparation("done", crop_coordinates=prepared.crop_coordinates, aspect_ratio=prepared.aspect_ratio)
    result = prepared.image
    if dataset.transform is not None:
        try:
            return verdict, dataset.transform(result).numpy()
        except Exception as failure:  # noqa: BLE001 - raised again where SimpleTuner transforms it
            verdict.words = str(failure) or repr(failure)
            return verdict, None
    verdict.is_image = not isinstance(result, np.ndarray)
    return verdict, np.asarray(result)


def _read(dataset: PassContext, path: str, content: bytes | None) -> Any:
    from simpletuner.helpers.image_manipulation.load import load_image, load_video

    ending = os.path.splitext(path)[1].lower().strip(".")
    if ending in dataset.video_extensions:
        return load_video(path) if content is None else decode_video(content)
    return load_image(path if content is None else content)


def _processed(picture: PictureJob, image: Any) -> Any:
    """What SimpleTuner's batch processor makes of it, as the input of its preparation."""
    from PIL import Image
    from simpletuner.helpers.image_manipulation.batched_training_samples import BatchedTrainingSamples

    metadata = {picture.path: picture.metadata}
    group = [(picture.path, image, "")]
    if picture.companion != "none":
        metadata[COMPANION] = {"target_size": COMPANION_GOALS[picture.companion]}
        group.append((COMPANION, np.zeros((2, 2, 3), np.uint8), ""))
    results = BatchedTrainingSamples().process_aspect_grouped_images({"": group}, metadata_backend=_Metadata(metadata))
    for path, array, _metadata in results:
        if path == picture.path:
            return Image.fromarray(array) if isinstance(array, np.ndarray) and array.ndim == 3 else array
    return None


class _Metadata:
    """As much of a metadata backend as the batch processor asks for."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def get_metadata_by_filepath(self, path: str) -> Any:
        return self._entries[path]

    def update_metadata_attribute(self, path: str, attribute: str, value: Any) -> bool:
        if path != COMPANION:
            _noted.updates.append((path, attribute, value))
        return True


def _sample(dataset: str, image: Any, path: str, metadata: Any) -> Any:
    from simpletuner.helpers.image_manipulation.training_sample import TrainingSample

    return TrainingSample(
        image=image, data_backend_id=dataset, image_metadata=metadata, image_path=path, model=_scene.model
    )


def _sample_of_partner(partner: tuple[str, str, Any]) -> Any:
    dataset, path, metadata = partner
    return _sample(dataset, None, path, metadata)


# -- SimpleTuner's surroundings ----------------------------------------------------------------------------------


class _Scene:
    """The data set that was last worked on."""

    pickled = b""
    dataset: PassContext
    model: Any = None


_scene = _Scene()


def _set_scene(pickled: bytes) -> None:
    import torch
    from simpletuner.helpers.training.state_tracker import StateTracker

    if _scene.pickled == pickled:
        return
    _scene.pickled, _scene.dataset = pickled, pickle.loads(pickled)
    dataset = _scene.dataset
    _scene.model = SimpleNamespace(get_transforms=lambda *_a, **_k: None, MAXIMUM_CANVAS_SIZE=dataset.canvas)
    StateTracker.args = SimpleNamespace(**dataset.arguments)
    StateTracker.data_backends = {name: {"config": config} for name, config in dataset.configs.items()}
    torch.set_default_dtype(getattr(torch, dataset.float_type))


def _learn_resolution(dataloader_resolution: Any, aspect: Any, resolution: Any) -> None:
    from simpletuner.helpers.training.state_tracker import StateTracker

    _noted.for_the_rank = True
    StateTracker.aspect_resolution_map.setdefault(dataloader_resolution, {})[str(aspect)] = resolution


class _NoRandomNumbers:
    """In place of ``random`` where SimpleTuner chooses: these numbers are the rank's to draw."""

    def __getattr__(self, name: str) -> Any:
        _noted.for_the_rank = True
        return getattr(random, name)


def _crop_later(self: Any, target_width: int, target_height: int) -> tuple[Any, tuple[int, int]]:
    """``RandomCropping.crop``: nothing is done with a picture after it but what is done to each pixel by itself."""
    _noted.crop = (self.intermediary_width, self.intermediary_height, target_width, target_height)
    return self.image, (0, 0)


def workshop() -> Any:
    """The target of the workers. Called once, in their server, whose SimpleTuner is made a worker's."""
    import torch
    from PIL import Image, ImageFile
    from simpletuner.helpers.image_manipulation import cropping, load, training_sample  # noqa: F401
    from simpletuner.helpers.training.state_tracker import StateTracker

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.disable(logging.CRITICAL)  # what is to be said is said by the rank
    warnings.filterwarnings("ignore")
    StateTracker.webhook_handler = None
    StateTracker.set_resolution_by_aspect = _learn_resolution
    training_sample.random = _NoRandomNumbers()
    cropping.RandomCropping.crop = _crop_later
    whole, transposed = Image.fromarray, training_sample.exif_transpose

    def pixels_of(image: Any) -> Pixels | None:
        found: Pixels | None = vars(image).get("_pixels")
        return found

    def im(image: Any) -> Any:
        if image._im is None and pixels_of(image) is not None:
            image._im = whole(image._pixels)._im
        return theirs.im.fget(image)

    def array_interface(image: Any) -> Any:
        if pixels_of(image) is not None:
            raise AttributeError("__array__ has it without a copy")
        image.load()
        block = ImageFile.MAXBLOCK
        ImageFile.MAXBLOCK = max(block, 4 * image.width * image.height)  # in one piece, where Pillow would join many
        try:
            return theirs.array_interface.fget(image)
        finally:
            ImageFile.MAXBLOCK = block

    def array(image: Any, dtype: Any = None, copy: bool | None = None) -> Pixels:
        found: Pixels = image._pixels
        return found if dtype is None or dtype == found.dtype else found.astype(dtype)

    def convert(image: Any, mode: str | None = None, *rest: Any, **options: Any) -> Any:
        """What is RGB already is not copied: nobody changes the one and wants the other."""
        if not image.mode == mode == "RGB" or rest or options:
            return theirs.convert(image, mode, *rest, **options)
        if pixels_of(image) is not None:
            return image
        image.load()
        return image._new(image.im)

    def fromarray(found: Any, mode: Any = None) -> Any:
        """An image that is still the array it came from; Pillow's own pixels are made when somebody asks."""
        rgb = isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
        if mode is not None or not rgb:
            return whole(found) if mode is None else whole(found, mode)
        found.flags.writeable = False
        image = Image.Image()
        image._mode, image._size, image._pixels = "RGB", (found.shape[1], found.shape[0]), found
        return image

    def upright(image: Any, **options: Any) -> Any:
        # An array has no EXIF.
        return image if pixels_of(image) is not None else transposed(image, **options)

    kept = Image.Image
    theirs = SimpleNamespace(im=kept.im, array_interface=kept.__array_interface__, convert=kept.convert)
    kept.im = property(im, theirs.im.fset)
    kept.__array_interface__ = property(array_interface)
    kept.__array__ = array
    kept.convert = convert
    Image.fromarray = fromarray
    training_sample.exif_transpose = upright
    return serve
