"""A picture on its way to the VAE, which is joined with others of its batch by this thread alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class BatchPicture(torch.Tensor):  # type: ignore[misc]
    """Whatever is done with it gives ordinary tensors, as always.

    torch joins them with a thread for each core. While workers have the cores, those threads wait for one another, and
    use up more time in waiting than all the copying takes.
    """

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(array).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.stack and len(args) == 1 and not kwargs and _are_alike(args[0]):
                return torch.from_numpy(np.stack([picture.numpy() for picture in args[0]]))
            return function(*args, **kwargs or {})


def _are_alike(pictures: Any) -> bool:
    """Else torch is to say what is wrong with them."""
    kinds = {(type(picture), picture.device.type, picture.dtype, picture.shape) for picture in pictures}
    return len(kinds) == 1
