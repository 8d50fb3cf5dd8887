"""Activations quantized for a product, as the GPU does it, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sp24cli import rowblocks
from sp24cli.bits import Array
from sp24cli.fp8 import convert
from sp24cli.optypes import OperandType
from sp24cli.scaling import ScaleSpec, amax, quotient, scales_from_amax
from sp24cli.smoothing import divide

#: Rows converted at a time by one thread.
_ROWS = 64


@dataclass(frozen=True)
class Tokens:
    """Activations as a kernel reads them: ``codes`` [N, K] of type B and, for scaled
    types, ``scale`` float32: [N], one multiplier a row, or with ``scale_k`` [N, ceil(K/scale_k)],
    one a row and so many columns."""

    codes: Array
    scale: Array | None
    scale_k: int = 0

    def first(self, n: int) -> Tokens:
        """The first ``n`` rows."""
        scale = None if self.scale is None else self.scale[:n]
        return Tokens(self.codes[:n], scale, self.scale_k)


def quantize_tokens(
    dense: Array,
    optype: OperandType,
    workers: int,
    scale_k: int = 0,
    smooth: Array | None = None,
) -> Tokens:
    """Activations [N, K] in the operand type, scaled row by row where that type is scaled, or by
    row and ``scale_k`` columns; divided by the factors ``smooth`` [K] of their columns first."""
    n, k = dense.shape
    codes = np.empty((n, k), optype.dtype)
    spec = ScaleSpec("block", (1, scale_k)) if scale_k else ScaleSpec("vector")
    scale = np.empty(spec.shape(n, k), np.float32) if optype.scaled else None

    def fill(part: slice) -> None:
        rows = dense[part]
        if smooth is not None:
            rows = divide(rows, smooth)
        if scale is not None:
            scale[part] = scales_from_amax(amax(rows, spec), optype.max_finite)
            rows = quotient(rows, over_columns(scale[part], k, scale_k))
        codes[part] = convert(rows, optype)

    rowblocks.run(fill, rowblocks.row_slices(n, _ROWS), workers)
    if scale is None:
        return Tokens(codes, None)
    return Tokens(codes, scale if scale_k else scale.ravel(), scale_k)


def over_columns(scale: Array, k: int, scale_k: int) -> Array:
    """Scales of rows and ``scale_k`` columns each (0: all), spread so that they broadcast to K
    columns."""
    return np.repeat(scale, scale_k, axis=1)[:, :k] if scale_k else scale.reshape(-1, 1)
