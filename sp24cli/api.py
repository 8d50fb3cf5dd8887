"""What `import sp24cli` offers: packed weights on the host, and their product on the GPU."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint.packedfile import PackedFile
from sp24cli.errors import BadInputError
from sp24cli.packed import PackedMatrix

if TYPE_CHECKING:
    from sp24cli.gpu.matmul import SparseWeight

_DTYPES: dict[str, npt.DTypeLike] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


@overload
def load(path: str | PathLike[str], name: str) -> PackedMatrix: ...
@overload
def load(path: str | PathLike[str], name: None = None) -> dict[str, PackedMatrix]: ...
def load(
    path: str | PathLike[str], name: str | None = None
) -> PackedMatrix | dict[str, PackedMatrix]:
    """The packed weight ``name`` of a file, or all of them by name.

    Their arrays are read-only views of the mapped file, so nothing is read before it is used.

    Raises:
        BadInputError: no packed file, or no such weight in it.
    """
    with PackedFile(path) as file:
        if name is None:
            return {each: file.load(each) for each in file.packed}
        if name not in file.packed:
            raise BadInputError(f"{path}: no packed tensor {name!r}")
        return file.load(name)


def unpack(packed: PackedMatrix, dtype: str = "f32") -> npt.NDArray[Any]:
    """The dense [M, K] of codes times scales, zeros where nothing was kept; bf16, f16, f32, f64.

    In the original's order of columns, without the factors of smoothing (`PackedMatrix.restore`);
    where there are none of these, the exact product is rounded once.
    """
    if dtype not in _DTYPES:
        raise BadInputError(f"unknown dtype {dtype!r} (known: {', '.join(_DTYPES)})")
    return packed.restore(_DTYPES[dtype])


def upload(
    packed: PackedMatrix, device: int = 0, *, activations: str | None = None
) -> SparseWeight:
    """``packed`` on GPU number ``device``, ready for `matmul`.

    ``activations`` "bf16" or "f16" widens an e4m3 weight to that type in the kernel; mx and small
    blocks need it. Of a weight whose columns are smoothed, ``smooth`` of the result are the factors
    that the activations must be divided by: `quantize_tokens` takes them.

    Raises:
        NoGpuError: no usable Hopper GPU.
        Sp24Error: scales that no kernel applies so.
    """
    from sp24cli.gpu.device import Device
    from sp24cli.gpu.matmul import SparseWeight

    return SparseWeight.upload(Device.open(device), packed, activations=activations)


def matmul(weight: SparseWeight, x: Any, **options: Any) -> Any:
    """D = A Bᵀ for device arrays by DLPack or the CUDA array interface: see `gpu.matmul.matmul`."""
    from sp24cli.gpu.matmul import matmul as product

    return product(weight, x, **options)


def quantize_tokens(x: Any, *, device: int = 0, **options: Any) -> tuple[Any, Any]:
    """Activations in FP8 or s8 with a scale a row, for `matmul`, divided by the weight's factors
    before where it has such (``smooth=weight.smooth``), into arrays of the caller's where they are
    given (``out=(codes, scale)``): see `gpu.activations.quantize_tokens`.

    Raises:
        NoGpuError: no usable Hopper GPU.
    """
    from sp24cli.gpu.activations import quantize_tokens as quantize
    from sp24cli.gpu.device import Device

    return quantize(Device.open(device), x, **options)
