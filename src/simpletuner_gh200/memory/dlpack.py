"""A tensor on an address, on the CPU or on CUDA, through DLPack: zero-copy, and the memory lives as long as it does.

``__cuda_array_interface__`` refuses memory that CUDA didn't allocate, and torch refuses DLPack's host and managed
device types; bytes labelled as plain CPU or CUDA memory it takes, whatever they are. So they are always handed over as
uint8, and viewed as their dtype afterwards, which also covers the dtypes DLPack has no name for.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# No lock: single dict operations are atomic, and the deleter may run while this very thread would hold one.
_alive: dict[int, tuple[Any, ...]] = {}
_tokens = itertools.count(1)


def _delete(managed: Any) -> None:
    """Called by torch, on whatever thread drops the tensor's last storage, perhaps in the middle of a collection."""
    _alive.pop(managed.contents.context, None)


_deleter = _Deleter(_delete)


def bytes_tensor(
    owner: object, address: int, size: int, device: Literal["cpu", "cuda"], ordinal: int = 0
) -> torch.Tensor:
    """``size`` bytes at ``address`` as a uint8 tensor; ``owner`` is kept until the tensor's storage is gone."""
    import torch

    if device == "cuda":
        torch.cuda.init()
    token = next(_tokens)
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(_DEVICE_TYPES[device], ordinal)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _DataType(_UNSIGNED, 8, 1)
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.context = token
    managed.deleter = _deleter
    _alive[token] = (owner, managed, shape)
    try:
        return torch.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
    except BaseException:
        _alive.pop(token, None)
        raise


def tensor_at(
    owner: object,
    address: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: Literal["cpu", "cuda"],
    ordinal: int = 0,
) -> torch.Tensor:
    """As ``bytes_tensor``, of any shape and dtype."""
    import torch

    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return bytes_tensor(owner, address, size, device, ordinal).view(dtype).view(tuple(shape))
