"""What `import sp24cli` offers: packed weights on the host, on the GPU, and activations for them.

The product itself is `gpu.matmul.matmul`, which `import sp24cli` offers as it is.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint.packedfile import PackedFile
from sp24cli.errors import BadInputError
from sp24cli.packed import PackedMatrix, check_structure

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

    Their arrays are read-only views of the mapped file, so nothing is read before it is used, and
    nothing is checked but what the headers say: `unpack` and `upload` check the rest.

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

    Raises:
        BadInputError: no such dtype, or parts that cannot be right (`packed.check_structure`), by
            file, tensor and place.
    """
    if dtype not in _DTYPES:
        raise BadInputError(f"unknown dtype {dtype!r} (known: {', '.join(_DTYPES)})")
    _check_structure(packed)
    return packed.restore(_DTYPES[dtype])


def upload(
    packed: PackedMatrix, device: int = 0, *, activations: str | None = None
) -> SparseWeight:
    """``packed`` on GPU number ``device``, ready for `matmul`.

    ``activations`` "bf16" or "f16" widens an e4m3 weight to that type in the kernel; mx and small
    blocks need it. Of a weight whose columns are smoothed, ``smooth`` of the result are the factors
    that the activations must be divided by: `quantize_tokens` takes them.

    Raises:
        BadInputError: parts that cannot be right, as of `unpack`; types that do not go together.
        NoGpuError: no usable Hopper GPU.
        Sp24Error: scales that no kernel applies so.
    """
    from sp24cli.gpu.device import Device
    from sp24cli.gpu.matmul import SparseWeight

    _check_structure(packed)
    gpu = Device.open(device, current=False)
    return SparseWeight.upload(gpu, packed, activations=activations)


def quantize_tokens(
    x: Any,
    *,
    device: int = 0,
    smooth: Any = None,
    type_name: str = "e4m3",
    out: tuple[Any, Any] | None = None,
    stream: int = 0,
) -> tuple[Any, Any]:
    """Activations in FP8 or s8 with a scale a row, for `matmul`, on GPU number ``device``: see
    `gpu.activations.quantize_tokens`.

    Raises:
        NoGpuError: no usable Hopper GPU.
        Sp24Error: as there.
    """
    from sp24cli.gpu.activations import quantize_tokens as quantize
    from sp24cli.gpu.device import Device

    gpu = Device.open(device, current=False)
    return quantize(gpu, x, smooth=smooth, type_name=type_name, out=out, stream=stream)


def _check_structure(packed: PackedMatrix) -> None:
    """`BadInputError` for what would give wrong values, or send a kernel astray, unsaid."""
    # Late: all of `ops` comes with it, which `load` needs none of.
    from sp24cli.ops.stream import default_workers

    fault = check_structure(packed, workers=default_workers())
    if fault is not None:
        raise BadInputError(f"{packed.where}: {fault}" if packed.where else fault)
