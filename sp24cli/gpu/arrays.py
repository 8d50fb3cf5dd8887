"""Device arrays of other libraries, by DLPack or ``__cuda_array_interface__``, and our own.

Source: DLPack 1.1 (``dlpack.h``), whose type codes include the FP8 formats that numpy's type
strings, and so the CUDA array interface, cannot name; the CUDA Array Interface, version 3.
"""

from __future__ import annotations

import ctypes
import math
import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli.errors import Sp24Error
from sp24cli.gpu.device import Buffer, Device

_CUDA = 2  # kDLCUDA

#: (type code, bits) of DLPack.
_DLPACK_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (0, 8): np.dtype(np.int8),
    (0, 32): np.dtype(np.int32),
    (1, 8): np.dtype(np.uint8),
    (2, 16): np.dtype(np.float16),
    (2, 32): np.dtype(np.float32),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (12, 8): np.dtype(ml_dtypes.float8_e5m2),
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True)
class View:
    """A device array of two or one dimensions: address, shape, strides in elements, dtype.

    ``owner`` keeps the memory alive.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: object

    @property
    def is_tight(self) -> bool:
        """Whether it is C-contiguous; strides along axes of one element mean nothing."""
        want = _tight(self.shape)
        return all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, want, strict=True))


def stream_number(stream: Any) -> int:
    """The stream, which is an integer; `Sp24Error` for None and for objects of other libraries."""
    try:
        return operator.index(stream)
    except TypeError:
        raise Sp24Error(f"stream is {stream!r}, needed is its address as an integer") from None


def view(
    array: Any, what: str, stream: int, ordinal: int | None = None, *, writable: bool = False
) -> View:
    """A device array by DLPack or the CUDA array interface; ``what`` names it in errors.

    DLPack producers order their work before ``stream``; with the array interface that is the
    caller's part, as everywhere. ``ordinal`` is the number of the GPU that it must be on, as far as
    it tells (the array interface does not). ``writable``: it is to be written to.

    Raises:
        Sp24Error: it is neither, is not on that GPU, has a type that sp24 does not multiply or
            strides of parts of items, or is read-only and to be written to.
    """
    if isinstance(array, DeviceArray):
        _check_device(what, array.device.ordinal, ordinal)
        return array.view()
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        device_type, number = array.__dlpack_device__()
        if int(device_type) != _CUDA:
            raise Sp24Error(f"{what} is not on a CUDA device")
        _check_device(what, int(number), ordinal)
        # 1 names the legacy default stream in DLPack.
        capsule = array.__dlpack__(stream=stream or 1)
        tensor = ctypes.cast(
            _capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)
        ).contents
        dtype = _DLPACK_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        if dtype is None:
            raise Sp24Error(
                f"{what} has the DLPack type (code {tensor.code}, {tensor.bits} bits), which sp24 "
                "does not take"
            )
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = (
            tuple(tensor.strides[i] for i in range(tensor.ndim))
            if tensor.strides
            else _tight(shape)
        )
        ptr = (tensor.data or 0) + tensor.byte_offset
        return View(ptr, shape, strides, dtype, (capsule, array))
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise Sp24Error(f"{what} has neither __dlpack__ nor __cuda_array_interface__")
    dtype = np.dtype(interface["typestr"])
    shape = tuple(int(n) for n in interface["shape"])
    raw = interface.get("strides")
    if raw is not None and any(s % dtype.itemsize for s in raw):
        raise Sp24Error(
            f"{what} has strides {list(raw)}, no multiples of its {dtype.itemsize} bytes"
        )
    strides = _tight(shape) if raw is None else tuple(s // dtype.itemsize for s in raw)
    address, is_read_only = interface["data"]
    if writable and is_read_only:
        raise Sp24Error(f"{what} is read-only")
    return View(int(address), shape, strides, dtype, array)


def _check_device(what: str, number: int, ordinal: int | None) -> None:
    if ordinal is not None and number != ordinal:
        raise Sp24Error(f"{what} is on CUDA device {number}, the product on {ordinal}")


def vector(
    array: Any,
    what: str,
    lengths: tuple[int, ...],
    stream: int,
    ordinal: int | None = None,
    *,
    writable: bool = False,
) -> View:
    """As `view`, of float32 in a row, as many as one of ``lengths`` says; `Sp24Error` otherwise."""
    found = view(array, what, stream, ordinal, writable=writable)
    count = math.prod(found.shape)
    if found.dtype != np.float32 or count not in lengths:
        raise Sp24Error(
            f"{what} is {found.dtype} {list(found.shape)}, needed is f32 of "
            f"{' or '.join(map(str, lengths))}"
        )
    if not found.is_tight:
        raise Sp24Error(f"{what} is not contiguous")
    return View(found.ptr, (count,), (1,), found.dtype, found.owner)


def _tight(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class DeviceArray:
    """A tight array on the GPU, readable by DLPack (any type) and the CUDA array interface.

    In ``buffer``, which it then owns, or in memory of its own.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        buffer: Buffer | None = None,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * self.dtype.itemsize
        self.buffer: Buffer = device.alloc(nbytes) if buffer is None else buffer

    def view(self) -> View:
        return View(self.buffer.ptr, self.shape, _tight(self.shape), self.dtype, self)

    def numpy(self) -> npt.NDArray[Any]:
        """A copy on the host, once the work enqueued so far is done."""
        return self.device.download(self.buffer, self.dtype, self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind not in "fiu":
            raise AttributeError(f"the CUDA array interface has no {self.dtype}: use DLPack")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.buffer.ptr, False),
            "strides": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, self.device.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("only this memory is lent out, where it is; numpy() makes a copy")
        # The consumer may use any stream: what was enqueued here must be over.
        self.device.synchronize()
        code, bits = next(key for key, dtype in _DLPACK_TYPES.items() if dtype == self.dtype)
        managed = _DLManagedTensor()
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed.tensor = _DLTensor(
            self.buffer.ptr, _CUDA, self.device.ordinal, len(self.shape), code, bits, 1, shape
        )
        managed.deleter = _release
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, self)
        return _capsule_new(address, b"dltensor", ctypes.cast(_drop_capsule, ctypes.c_void_p))


#: What is lent out, until the consumer calls the deleter.
_exported: dict[int, tuple[object, ...]] = {}


def _forget(address: int) -> None:
    _exported.pop(address, None)


_release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


def _destroy(capsule: int) -> None:
    """The capsule's destructor: one that nobody consumed still owns its tensor."""
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    if is_valid(capsule, b"dltensor"):
        get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        _exported.pop(get(capsule, b"dltensor"), None)


_drop_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)
