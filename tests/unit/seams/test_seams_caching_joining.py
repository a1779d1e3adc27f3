"""Pictures of workers are joined by one thread, to the same bits and with torch's own objections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simpletuner_gh200.seams.features.caching.joining import BatchPicture


def pictures(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.random.default_rng(at).random(shape, np.float32) for at, shape in enumerate(shapes)]


def test_a_batch_is_what_torch_would_join_and_an_ordinary_tensor() -> None:
    arrays = pictures(*[(3, 8, 5)] * 4)
    joined = torch.stack([BatchPicture.of(array).to("cpu", dtype=torch.float32) for array in arrays])
    assert type(joined) is torch.Tensor
    assert torch.equal(joined, torch.stack([torch.from_numpy(array) for array in arrays]))
    assert joined.is_contiguous()


def test_what_is_made_of_a_picture_is_an_ordinary_tensor() -> None:
    picture = BatchPicture.of(pictures((3, 4, 4))[0])
    assert type(picture.to(torch.bfloat16)) is type(picture.unsqueeze(0)) is type(picture + 1) is torch.Tensor


@pytest.mark.parametrize("shapes", [((3, 4, 4), (3, 4, 5)), ()])
def test_what_can_not_be_joined_is_refused_in_torchs_words(shapes) -> None:
    words = []
    for made in (BatchPicture.of, torch.from_numpy):
        with pytest.raises(RuntimeError) as refused:
            torch.stack([made(array) for array in pictures(*shapes)])
        words.append(str(refused.value))
    assert words[0] == words[1]
