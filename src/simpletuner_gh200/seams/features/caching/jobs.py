"""What a worker is told of a picture, in the rank: looked up in SimpleTuner's state, which workers do not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simpletuner_gh200.seams.features.caching.preparing import (
    COMPANION,
    COMPANION_GOALS,
    Companion,
    PassContext,
    PictureJob,
)
from simpletuner_gh200.units import MIB

WORKING_BYTES = 10
"""For each pixel of a picture that a worker is at: as decoded, as Pillow holds it, and what a decoder keeps besides."""

RESULT_BYTES = 12
"""For each pixel of what is made of it: three numbers of four bytes."""

UNKNOWN = 64 * MIB
"""Where the metadata says nothing of a picture's size."""


def context_of(cache: Any) -> PassContext:
    import torch
    from simpletuner.helpers.training import video_file_extensions
    from simpletuner.helpers.training.state_tracker import StateTracker
    from torchvision import transforms

    arguments = vars(StateTracker.get_args())
    transform = cache.transform_sample
    by_pixel = type(transform) is transforms.Compose and all(
        type(step) in (transforms.ToTensor, transforms.Normalize) for step in transform.transforms
    )
    mappings = StateTracker.get_conditioning_mappings()
    names = [cache.id, *(train for train, conditioning in mappings if conditioning == cache.id)]
    return PassContext(
        id=cache.id,
        configs={name: StateTracker.get_data_backend_config(name) for name in names},
        arguments={key: value for key, value in arguments.items() if isinstance(value, str | int | float | None)},
        canvas=getattr(cache.model, "MAXIMUM_CANVAS_SIZE", None),
        transform=transform if by_pixel and not _takes_first_frame(cache) else None,
        float_type=str(torch.get_default_dtype()).removeprefix("torch."),
        video_extensions=frozenset(video_file_extensions),
    )


def _takes_first_frame(cache: Any) -> bool:
    """SimpleTuner looks into what was prepared, before it is transformed."""
    i2v = getattr(cache.model, "_is_i2v_like_flavour", None)
    return cache.dataset_type == "conditioning" and callable(i2v) and bool(i2v())


def _partner(dataset: str, path: str, metadata: Any) -> tuple[str, str, Any] | None:
    """The picture whose geometry a conditioning picture without metadata of its own follows."""
    from simpletuner.helpers.image_manipulation.training_sample import TrainingSample
    from simpletuner.helpers.training.state_tracker import StateTracker

    trained = {conditioning: train for train, conditioning in StateTracker.get_conditioning_mappings()}.get(dataset)
    if trained is None or StateTracker.get_metadata_by_filepath(path, data_backend_id=dataset):
        return None
    sample = TrainingSample.__new__(TrainingSample)
    sample.image_metadata, sample.data_backend_id, sample._image_path = metadata, dataset, path
    found = str(sample.training_sample_path(training_dataset_id=trained))
    backend = StateTracker.get_data_backend(trained)["metadata_backend"]
    return trained, found, backend.get_metadata_by_filepath(found)


def job_of(cache: Any, path: str, companion: Companion) -> PictureJob:
    from simpletuner.helpers.training.state_tracker import StateTracker

    types = getattr(cache, "_metadata_search_types", None)
    searched = {} if types is None else {"search_dataset_types": types}
    metadata = cache.metadata_backend.get_metadata_by_filepath(path)
    prepared_by = StateTracker.get_metadata_by_filepath(path, data_backend_id=cache.id, **searched)
    return PictureJob(
        path=path,
        metadata=metadata,
        prepared_by=prepared_by,
        partner=_partner(cache.id, path, prepared_by),
        resolutions=StateTracker.aspect_resolution_map,
        companion=companion,
    )


def weight_of(cache: Any, path: str) -> int:
    """Bytes that a worker needs for it at most."""
    metadata = cache.metadata_backend.get_metadata_by_filepath(path) or {}
    size, goal = metadata.get("original_size"), metadata.get("intermediary_size") or metadata.get("target_size")
    if not size or not goal:
        return UNKNOWN
    frames = int(metadata.get("num_frames") or 1)
    return frames * int(size[0] * size[1] * WORKING_BYTES + goal[0] * goal[1] * RESULT_BYTES)


class WithCompanion:
    """SimpleTuner's metadata backend, with an entry for the picture that stands for the others of a group."""

    def __init__(self, backend: Any, companion: Companion) -> None:
        self._backend = backend
        self._goal = COMPANION_GOALS[companion]

    def get_metadata_by_filepath(self, path: str) -> Any:
        return {"target_size": self._goal} if path == COMPANION else self._backend.get_metadata_by_filepath(path)

    def update_metadata_attribute(self, path: str, attribute: str, value: Any) -> Any:
        return path == COMPANION or self._backend.update_metadata_attribute(path, attribute, value)


def companions_of(pictures: Sequence[tuple[Any, Any]]) -> list[Companion]:
    """Sizes of a group's pictures, as decoded and as they are to be: what each was to be processed together with."""
    if len(pictures) < 2 or not all(goal for _size, goal in pictures):
        return ["none"] * len(pictures)
    resized = [tuple(size or ()) != tuple(map(int, goal)) for size, goal in pictures]
    alone = sum(resized) == 1
    return ["fits" if alone and needed else "to be resized" for needed in resized]


def draw_crop(crop: tuple[int, int, int, int]) -> tuple[tuple[int, int], tuple[slice, slice]]:
    """(top, left), and rows and columns, drawn as SimpleTuner draws them: from this process's random numbers."""
    from simpletuner.helpers.image_manipulation.cropping import RandomCropping

    width, height, target_width, target_height = crop
    cropper = RandomCropping(image_metadata={"original_size": (width, height)}).set_intermediary_size(width, height)
    _nothing, (top, left) = cropper.crop(target_width, target_height)
    rows, columns = slice(top, min(top + target_height, height)), slice(left, min(left + target_width, width))
    return (top, left), (rows, columns)


def as_image(array: Any) -> Any:
    from PIL import Image

    return Image.fromarray(array) if isinstance(array, np.ndarray) and array.ndim == 3 else array
