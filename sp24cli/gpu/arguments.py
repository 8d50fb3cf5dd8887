"""A kernel's parameters as bytes, laid out as its manifest says."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.errors import Sp24Error
from sp24cli.gpu.driver import api
from sp24cli.kernels.manifest import ArgumentLayout

_SWIZZLE = {0: "NONE", 64: "64B", 128: "128B"}
_TYPES = {"uint64_t": "<u8", "int64_t": "<i8", "int32_t": "<i4", "uint32_t": "<u4"}


@cache
def struct_dtype(layout: ArgumentLayout) -> np.dtype[Any]:
    """A struct of the kernels as numpy knows it."""
    return np.dtype(
        {
            "names": [name for name, _, _ in layout.fields],
            "formats": [_TYPES[kind] for _, kind, _ in layout.fields],
            "offsets": [offset for _, _, offset in layout.fields],
            "itemsize": layout.bytes,
        }
    )


def pack_struct(layout: ArgumentLayout, values: dict[str, int]) -> npt.NDArray[Any]:
    """The parameter struct with every field given, once each."""
    dtype = struct_dtype(layout)
    if dtype.names is None or set(values) != set(dtype.names):
        raise Sp24Error(f"kernel arguments {sorted(values)} are not those of the manifest")
    struct = np.zeros((), dtype)
    for name, value in values.items():
        try:
            struct[name] = value
        except OverflowError:
            raise Sp24Error(f"{name} is {value}, more than a kernel takes") from None
    return struct


def tensor_map(
    ptr: int, row_bytes: int, rows: int, pitch: int, box: tuple[int, int], swizzle: int = 128
) -> npt.NDArray[Any]:
    """The 128 bytes of a ``CUtensorMap`` over ``rows`` rows of bytes.

    ``box`` is (bytes, rows), ``swizzle`` 128 or 64 bytes, or 0 for none. What lies outside the
    matrix is read as zero. ``ptr`` and ``pitch`` are multiples of 16. Source: CUDA driver API,
    ``cuTensorMapEncodeTiled``.
    """
    cu = api()
    status, made = cu.cuTensorMapEncodeTiled(
        cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        ptr,
        [cu.cuuint64_t(row_bytes), cu.cuuint64_t(rows)],
        [cu.cuuint64_t(pitch)],
        [cu.cuuint32_t(box[0]), cu.cuuint32_t(box[1])],
        [cu.cuuint32_t(1), cu.cuuint32_t(1)],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLE[swizzle]}"),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status.value:
        raise Sp24Error(
            f"no tensor map for {rows} rows of {row_bytes} bytes, pitch {pitch}: {status.name}"
        )
    words = np.array([int(word) for word in made.opaque], np.uint64)
    # A kernel parameter of this type is 64-byte aligned on the device; the host copy need not be.
    return words
