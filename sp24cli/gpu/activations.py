"""What is done to activations before a product: quantizing by row, reordering columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from sp24cli.errors import Sp24Error
from sp24cli.gpu.arguments import pack_struct
from sp24cli.gpu.arrays import DeviceArray, stream_number, vector, view
from sp24cli.gpu.device import Device
from sp24cli.kernels import manifest
from sp24cli.optypes import operand_type

#: The kernels' name of each type that is quantized.
_SOURCES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

#: Rows that a CTA of the gather shares the order of columns among: with more, too few CTAs.
_MOST_ROWS = 8


def quantize_tokens(
    device: Device,
    x: Any,
    *,
    smooth: Any = None,
    type_name: str = "e4m3",
    out: tuple[Any, Any] | None = None,
    stream: int = 0,
) -> tuple[Any, Any]:
    """Activations [N, K] in an operand type, scaled row by row: (codes [N, K], scale f32 [N]).

    ``x`` is a device array of bf16, f16 or f32 by DLPack or the CUDA array interface, K
    contiguous. The results go into `matmul` as ``x`` and ``scale``. A row's scale is its largest
    magnitude over that of the type, 1 for a row of zeros, and its codes are saturated: bit for
    bit what `activations.quantize_tokens` gives, NaN and infinity included.

    ``smooth``, f32 [K] on the device, positive and normal, are the factors of a weight whose
    columns are smoothed, `SparseWeight.smooth`: column k of ``x`` is divided by ``smooth[k]``
    first, in float32, rounded once. None, as of other weights, divides by nothing.

    ``out`` are codes [N, K] of that type, or their bits as unsigned integers, and scale f32 [N] to
    write to, both contiguous. They are returned; without, new `DeviceArray`s are, and memory is
    allocated and later freed, which makes the host wait for the GPU and cannot be captured in a
    CUDA graph.

    ``x`` and ``smooth`` are in the original's order of columns, and so are the codes: those of a
    weight that is permuted as well are put in its order by `matmul`, after they were divided.

    Raises:
        Sp24Error: a shape, type or stride that does not fit, by name.
    """
    stream = stream_number(stream)
    with device.current:
        b = view(x, "x", stream, device.ordinal)
        optype = operand_type(type_name)
        source = _SOURCES.get(b.dtype.name, "")
        loaded = manifest.load()
        kind = "tokens" if smooth is None else "smooth_tokens"
        entry = loaded.conversion(kind, source, optype.name)
        if entry is None:
            raise Sp24Error(f"no kernel quantizes {b.dtype} to {optype.name}")
        if len(b.shape) != 2:
            raise Sp24Error(f"x is {list(b.shape)}, not [N, K]")
        n, k = b.shape
        # The stride of a single row means nothing, and libraries put anything there.
        ldx = b.strides[0] if n > 1 else k
        if (k > 1 and b.strides[1] != 1) or ldx < k:
            raise Sp24Error("x is not contiguous along K, or its rows overlap")
        factors = (
            0 if smooth is None else vector(smooth, "smooth", (k,), stream, device.ordinal).ptr
        )
        if out is None:
            out = DeviceArray(device, (n, k), optype.dtype), DeviceArray(device, (n,), np.float32)
        codes = view(out[0], "codes", stream, device.ordinal, writable=True)
        if codes.dtype not in (optype.dtype, np.dtype(f"u{optype.itemsize}")):
            raise Sp24Error(f"codes are {codes.dtype}, not {optype.dtype}")
        if codes.shape != (n, k) or not codes.is_tight:
            raise Sp24Error(f"codes are {list(codes.shape)}, needed is {[n, k]}, contiguous")
        scale = vector(out[1], "scale", (n,), stream, device.ordinal, writable=True)
        if n:
            aligned = b.ptr % 16 == 0 and ldx * b.dtype.itemsize % 16 == 0 and factors % 16 == 0
            aligned = aligned and codes.ptr % 8 == 0
            args = pack_struct(
                loaded.args[entry.args],
                {
                    "x": b.ptr,
                    "smooth": factors,
                    "codes": codes.ptr,
                    "scale": scale.ptr,
                    "ldx": ldx,
                    "k": k,
                    "vector": int(aligned and k % 8 == 0),
                    "max_finite": int(optype.max_finite),
                },
            )
            device.launch(device.kernel(entry), n, [args], stream)
        return out


def gather_columns(
    device: Device,
    order: int,
    x: int,
    x_pitch: int,
    out: int,
    out_pitch: int,
    shape: tuple[int, int],
    itemsize: int,
    stream: int,
) -> None:
    """Enqueue out[r][j] = x[r][order[j]] for ``shape`` = [N, K] items, K a multiple of 4.

    ``order`` int32 [K], ``x`` and ``out`` are device addresses, pitches are in bytes;
    ``out`` and its pitch, a multiple of 16 that holds a row, are aligned to 16. What a row of
    ``out`` has beyond K becomes zero.
    """
    n, k = shape
    if not (n and out_pitch):
        return
    loaded = manifest.load()
    entry = loaded.conversion("gather", str(8 * itemsize))
    assert entry is not None
    fitting = entry.smem_bytes // (-(-k * itemsize // 16) * 16)
    # Two CTAs an SM, or a row would be better read where it lies by several.
    rows = min(fitting, _MOST_ROWS, n // (2 * device.sm_count))
    column_blocks = 1 if rows else -(-out_pitch // (16 * entry.threads))
    args = pack_struct(
        loaded.args[entry.args],
        {
            "x": x,
            "order": order,
            "out": out,
            "x_pitch": x_pitch,
            "out_pitch": out_pitch,
            "rows": n,
            "k": k,
            "cta_rows": rows,
            "column_blocks": column_blocks,
            "vector": int(x % 16 == 0 and x_pitch % 16 == 0),
        },
    )
    grid = -(-n // max(rows, 1)) * column_blocks
    device.launch(device.kernel(entry), grid, [args], stream)
