"""How the kept values of a packed weight lie in the range of E4M3."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sp24cli.bits import Array
from sp24cli.packed import PackedMatrix
from sp24cli.scaling import scale_values

#: Exponents of two that E4M3 has: bin i counts magnitudes from 2^(LEAST + i) to twice that.
LEAST, MOST = -9, 8


class Spread:
    """The range of a weight's scales and, if asked for, the histogram of its codes."""

    def __init__(self, *, histogram: bool) -> None:
        self.scale_min: float | None = None
        self.scale_max: float | None = None
        self._wanted = histogram
        self._counts = np.zeros(0, np.int64)

    @property
    def histogram(self) -> tuple[int, ...]:
        return tuple(self._counts.tolist())

    def add(self, band: PackedMatrix) -> None:
        """Take some rows into account."""
        if band.scale is not None and band.scale.size:
            scale = scale_values(band.scale)
            least, most = float(scale.min()), float(scale.max())
            self.scale_min = least if self.scale_min is None else min(self.scale_min, least)
            self.scale_max = most if self.scale_max is None else max(self.scale_max, most)
        if self._wanted:
            counts = code_histogram(band)
            self._counts = self._counts + counts if self._counts.size else counts


def code_histogram(packed: PackedMatrix) -> Array:
    """Counts of the nonzero magnitudes |w| / scale by powers of two, after rounding.

    int64 [18] (see `LEAST`), additive over row blocks; empty for types other than E4M3, whose
    values fill no range.
    """
    if packed.info.type != "e4m3":
        return np.zeros(0, np.int64)
    values, _ = packed.row_order()
    codes = np.bincount(values.view(np.uint8).reshape(-1), minlength=256)
    magnitudes = codes[:128] + codes[128:]
    # Not the last, which is NaN.
    return np.bincount(_BINS, weights=magnitudes[1:127], minlength=MOST - LEAST + 1).astype(
        np.int64
    )


def _bins() -> Array:
    values = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.floor(np.log2(values)).astype(np.intp) - LEAST


_BINS = _bins()
