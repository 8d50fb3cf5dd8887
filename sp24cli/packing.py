"""What packing does to the values of a tile: take the kept ones, round them, add up the error.

Plain integer operations on whole arrays bring the kept values together, where an index for every
value and a gather by it take several times as long. All arrays are made once for tiles of one
shape and used again, so that they stay in cache.

Between two NumPy calls a thread needs the interpreter lock, and to wait for it may take longer than
the call. So there are as few calls as possible, each on a whole tile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sp24cli import scaling
from sp24cli.bits import Array, NumberType, magnitude_values, magnitudes, number_type, widen
from sp24cli.fp8 import FP8_NAMES, Overflow, convert, round_fp8, to_f32_odd
from sp24cli.optypes import OperandType
from sp24cli.rowblocks import row_slices
from sp24cli.sparsity import GROUP, PATCH_COLUMNS, PATCH_ROWS, fold_halves, sum_rows

#: Kept values whose errors are squared at a time: in float64 they stay in a core's L2 cache.
_SUM_ELEMENTS = 1 << 16
#: Most values that NumPy takes at a time where it casts or broadcasts: see `short_buffers`.
_BUFFER = 1024
#: Integers of two values, by the bytes of one.
_PAIRS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint16),
    2: np.dtype(np.uint32),
    4: np.dtype(np.uint64),
}


class KeptValues:
    """Takes tiles [R, C] of ``kind`` apart whose groups of ``group`` keep half.

    Of the last tile that had the pattern, valid until the next: ``bits`` [R, C / 2] are those of
    the kept values in row order, every zero +0, ``magnitude`` what `magnitudes` makes of them and
    ``largest`` the greatest; ``nonzero`` bool [R, C] and ``count`` say which and how many values
    of the tile differ from zero.
    """

    def __init__(self, shape: tuple[int, int], kind: NumberType, group: int) -> None:
        rows, cols = shape
        self._kind, self._group = kind, group
        self.nonzero = np.empty(shape, np.bool_)
        self.bits: Array = np.empty((rows, cols // 2), kind.unsigned)
        self.magnitude: Array = np.empty_like(self.bits)
        self.count = self.largest = 0
        # Two values of a group at a time, where an integer holds them.
        self._pair = _PAIRS.get(kind.dtype.itemsize, kind.unsigned)
        self._first = np.empty((rows, cols // group), np.uint8)
        self._change: Array = np.empty((rows, cols // group), kind.unsigned)
        self._both = np.empty((rows, cols // group), self._pair)

    def row_amax(self) -> Array:
        """What `scaling.amax` says of the rows of the tile: [R, 1]."""
        return magnitude_values(self.magnitude.max(axis=1, keepdims=True), self._kind)

    def take(self, tile: Array) -> bool:
        """Read ``tile``, bits [R, C] with any strides; whether it has the pattern.

        Which of a group's zeros count as kept is for `metadata`; here a lone value is the first but
        where it stands in the last place.
        """
        # Two values as one integer need neighbours, and NumPy takes long over unaligned ones.
        if tile.strides[1] != tile.itemsize or not tile.view(self._pair).flags.aligned:
            tile = tile.copy()
        if self._gather(tile):
            return True
        if self._kind.dtype == np.int8:
            return False
        # What looked like values may have been -0.0.
        clean = magnitudes(tile, self._kind) != 0
        return self._gather(np.multiply(tile, clean, dtype=tile.dtype))

    def _gather(self, tile: Array) -> bool:
        """Whether every group has as many kept values other than zero as bits other than zero."""
        np.not_equal(tile, tile.dtype.type(0), out=self.nonzero)
        self.count = int(np.count_nonzero(self.nonzero))
        if self.count > self.bits.size:
            return False
        if self._group == GROUP:
            self._two_of_four(tile)
        else:
            np.bitwise_xor(tile[:, 0::2], tile[:, 1::2], out=self.bits)
        magnitudes(self.bits, self._kind, out=self.magnitude)
        self.largest = int(self.magnitude.max())
        # Of three in a group, and of -0.0, fewer are kept.
        return int(np.count_nonzero(self.magnitude)) == self.count

    def _two_of_four(self, tile: Array) -> None:
        """``bits`` of places a, b, c, d of every group, at most two of which are not zero.

        Where none or both of a and b are taken, they are a ^ c and b ^ d. Where one of them is,
        they are a ^ b and c ^ d, and (a ^ c) ^ (a ^ b) = (b ^ d) ^ (c ^ d) = b ^ c.
        """
        np.bitwise_xor(tile[:, 1::4], tile[:, 2::4], out=self._change)
        taken = self.nonzero.view(np.uint8)
        np.bitwise_xor(taken[:, 0::4], taken[:, 1::4], out=self._first)
        np.multiply(self._change, self._first, out=self._change)
        values, bits, change = tile.view(self._pair), self.bits.view(self._pair), self._change
        lanes = 2 * tile.itemsize // self._pair.itemsize
        if lanes == 1:
            twice = self._pair.type((1 << 8 * tile.itemsize) + 1)
            change = np.multiply(change, twice, out=self._both, dtype=self._pair)
        for i in range(lanes):
            kept = bits[:, i::lanes]
            np.bitwise_xor(values[:, i :: 2 * lanes], values[:, lanes + i :: 2 * lanes], out=kept)
            np.bitwise_xor(kept, change, out=kept)


class Rounder:
    """Rounds the kept values of tiles [R, N] to ``optype``.

    ``values`` (float32) are what the codes stand for, ``source`` what was rounded, both up to the
    sign, which they share, float32 or, from float64, float64. ``clipped`` counts those that round
    past the largest finite value, ``nonzero`` the codes that are not zero. All are of the last tile
    and valid until the next.
    """

    def __init__(
        self, shape: tuple[int, int], kind: NumberType, optype: OperandType, overflow: Overflow
    ) -> None:
        self._kind, self._optype, self._overflow = kind, optype, overflow
        self._fp8 = optype.safetensors in FP8_NAMES
        self.values: Array = np.empty(shape, np.float32)
        self.source: Array = self.values
        self.clipped = self.nonzero = 0
        if self._fp8:
            self._sign = np.empty(shape, np.uint8)
            self._scratch = np.empty(shape, np.uint32)
            self._source = np.empty(shape, np.float64 if kind.name == "F64" else np.float32)

    def round(self, kept: KeptValues, scale: Array | None, out: Array) -> None:
        """The codes of ``kept`` / ``scale`` (float32, broadcasts to [R, N]; None for an unscaled
        type) into ``out``, [R, N] of the type, last axis contiguous."""
        if self._fp8:
            assert scale is not None
            self._round_fp8(kept, scale, out.view(np.uint8))
            return
        self.source = widen(kept.bits.view(self._kind.dtype))
        scaled = self.source if scale is None else scaling.quotient(self.source, scale)
        np.copyto(out, convert(scaled, self._optype, self._overflow))
        self.clipped = _count_clipped(scaled, self._optype)
        self.values = widen(out)
        self.nonzero = int(np.count_nonzero(self.values))

    def _round_fp8(self, kept: KeptValues, scale: Array, codes: Array) -> None:
        kind = self._kind
        self.source = magnitude_values(kept.magnitude, kind, out=self._source)
        if kind.name == "F64":
            np.copyto(self.values, to_f32_odd(scaling.quotient(self._source, scale)))
        else:
            with np.errstate(over="ignore", under="ignore"):
                np.divide(self._source, scale, out=self.values)
        top = kept.bits.dtype.type(8 * kept.bits.itemsize - 8)
        np.right_shift(kept.bits, top, out=self._sign, casting="unsafe")
        name = self._optype.safetensors
        self.clipped, self.nonzero = round_fp8(
            self.values, self._sign, name, self._overflow, codes, self._scratch
        )


class ErrorSums:
    """Energies of error and signal of tiles of kept values [R, N], by patch of the dense matrix."""

    def __init__(self, shape: tuple[int, int]) -> None:
        rows, kept = shape
        self._patches = -(-rows // PATCH_ROWS), -(-2 * kept // PATCH_COLUMNS)
        # What is behind the last column stays zero.
        width = self._patches[1] * PATCH_COLUMNS // 2
        self._by_row = np.zeros((2, self._patches[0], width))
        self._step = PATCH_ROWS * max(1, _SUM_ELEMENTS // (PATCH_ROWS * kept))
        self._wide = np.empty((2, min(rows, self._step), kept))

    def of(self, rounder: Rounder, scale: Array | None, exponent: int) -> Array:
        """The sums of squares of code * scale - source, and of the source, of the tile that
        was rounded with ``scale``: [2, patches of R, of K], in units of 4 to the power
        ``exponent``."""
        rows, kept = rounder.source.shape
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for r in row_slices(rows, self._step):
                wide = self._wide[:, : r.stop - r.start]
                error, signal = wide
                if scale is None:
                    np.copyto(error, rounder.values[r])
                else:
                    of_rows = scale[r] if len(scale) > 1 else scale
                    np.multiply(rounder.values[r], of_rows.astype(np.float64), out=error)
                np.copyto(signal, rounder.source[r])
                error -= signal
                if exponent:
                    np.ldexp(wide, -exponent, out=wide)
                np.square(wide, out=wide)
                patches = slice(r.start // PATCH_ROWS, -(-r.stop // PATCH_ROWS))
                sum_rows(wide, self._by_row[:, patches, :kept])
            return fold_halves(self._by_row.reshape(2, *self._patches, -1))


def _count_clipped(scaled: Array, optype: OperandType) -> int:
    """How many of the quotients round past the largest finite value."""
    # The rounding of the scale takes a quotient a hair past the end, which is no clipping.
    if max(scaled.max(), -scaled.min()) <= optype.max_finite * (1 + 2**-20):
        return 0
    kind = number_type(optype.dtype)
    if kind.nonfinite is None:
        return int(np.count_nonzero(np.abs(np.rint(scaled)) > optype.max_finite))
    unbounded = convert(scaled, optype, "nan").view(kind.unsigned)
    return int(np.count_nonzero(magnitudes(unbounded, kind) >= kind.nonfinite))


@contextmanager
def short_buffers(columns: int) -> Iterator[None]:
    """For ufuncs in it on rows of ``columns`` values: one scale a row is not written out.

    NumPy fills a buffer with whatever it broadcasts along rows, if a row is shorter than that.
    """
    before = np.setbufsize(max(16, min(_BUFFER, columns // 16 * 16)))
    try:
        yield
    finally:
        np.setbufsize(before)


_Tools = tuple[KeptValues, Rounder, ErrorSums]
_MADE = threading.local()


def tools(
    shape: tuple[int, int], kind: NumberType, optype: OperandType, overflow: Overflow
) -> _Tools:
    """For tiles [R, C] = ``shape``. A thread keeps those of the last two shapes, for whole tiles
    and the narrower last one of a row: memory that is handed back after every band of a weight
    would have to be cleared for the next."""
    made: dict[object, tuple[KeptValues, Rounder, ErrorSums]] = _MADE.__dict__.setdefault(
        "tools", {}
    )
    key = shape, kind.name, optype.name, overflow
    if key not in made:
        if len(made) == 2:
            del made[next(iter(made))]
        kept = KeptValues(shape, kind, optype.group)
        shape = kept.bits.shape
        made[key] = kept, Rounder(shape, kind, optype, overflow), ErrorSums(shape)
    return made[key]
