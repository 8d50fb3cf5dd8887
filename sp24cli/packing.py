"""What packing does to the values of a tile: take the kept ones, round them, add up the error.

The kept values lie in planes: the first of all groups in one array, the second in another. Plain
integer operations on whole arrays bring them there, where an index for every value and a gather by
it take several times as long. All arrays are made once for tiles of one shape and used again, so
that they stay in cache.
"""

from __future__ import annotations

import threading

import numpy as np

from sp24cli import scaling
from sp24cli.bits import Array, NumberType, magnitude_values, magnitudes, number_type, widen
from sp24cli.fp8 import FP8_NAMES, Overflow, convert, round_fp8, to_f32_odd
from sp24cli.optypes import OperandType
from sp24cli.sparsity import PATCH_COLUMNS, PATCH_ROWS, fold_halves, sum_rows


class KeptPlanes:
    """Takes tiles [R, C] of ``kind`` apart whose groups of ``group`` keep half.

    ``nonzero`` bool [R, C] and ``count`` say which and how many values of the last tile differ
    from zero; ``largest`` is its greatest magnitude as `magnitudes` has it.
    """

    def __init__(self, shape: tuple[int, int], kind: NumberType, group: int) -> None:
        rows, cols = shape
        self._kind, self._group = kind, group
        self._magnitude = np.empty(shape, kind.unsigned)
        self.nonzero = np.empty(shape, np.bool_)
        self._places = np.empty((group, rows, cols // group), kind.unsigned)
        #: Of what `take` gives.
        self.kept_shape = group // 2, rows, cols // group
        self._kept = np.empty(self.kept_shape, kind.unsigned)
        self._masks = np.empty((2, rows, cols // group), kind.unsigned)

    def look(self, tile: Array) -> None:
        """Read ``tile``, bits [R, C] with any strides."""
        magnitudes(tile, self._kind, out=self._magnitude)
        np.not_equal(self._magnitude, self._kind.unsigned.type(0), out=self.nonzero)
        self.count = int(np.count_nonzero(self.nonzero))
        self.largest = int(self._magnitude.max())

    def take(self, tile: Array) -> Array:
        """The bits of the kept values of the ``tile`` that was looked at, which must have the
        pattern: [group / 2, R, C / group], the lower place first; every zero is +0.

        Valid until the next tile. Which of a group's zeros count as kept is for `metadata`; here
        a lone value is the first but where it stands in the last place.
        """
        places, kept, masks = self._places, self._kept, self._masks
        np.copyto(places, tile.reshape(len(tile), -1, self._group).transpose(2, 0, 1))
        if self._kind.dtype != np.int8 and np.count_nonzero(places) != self.count:
            places[places == self._kind.sign] = 0
        if self._group == 2:
            np.bitwise_or(places[0], places[1], out=kept[0])
            return kept
        # All ones where place 0, and where places 0 and 1 hold zero, else nothing.
        magnitudes(places[:2], self._kind, out=masks)
        np.subtract(masks, self._kind.unsigned.type(1), out=masks)
        signed = masks.view(f"i{masks.itemsize}")
        np.right_shift(signed, signed.dtype.type(8 * masks.itemsize - 1), out=signed)
        np.bitwise_and(masks[0], masks[1], out=masks[1])
        # What of places 1 and 2 comes first, then what of them comes second.
        np.bitwise_and(places[1:3], masks, out=masks)
        np.bitwise_or(places[0], masks[0], out=kept[0])
        np.bitwise_or(kept[0], masks[1], out=kept[0])
        np.bitwise_xor(places[1:3], masks, out=masks)
        np.bitwise_or(places[3], masks[0], out=kept[1])
        np.bitwise_or(kept[1], masks[1], out=kept[1])
        return kept


class Rounder:
    """Rounds the kept values [P, R, G] of tiles, as `KeptPlanes` gives them, to ``optype``.

    ``values`` (float32) are what the codes stand for, ``source`` what was rounded, both up to the
    sign, which they share, float32 or, from float64, float64. ``clipped`` counts those that round
    past the largest finite value, ``nonzero`` the codes that are not zero, ``scale`` is that of
    every group, float64 [R, G], None for an unscaled type. All are of the last tile and valid until
    the next. ``wide``, float64 [R, G] each, are for what follows.
    """

    def __init__(
        self, shape: tuple[int, ...], kind: NumberType, optype: OperandType, overflow: Overflow
    ) -> None:
        self._kind, self._optype, self._overflow = kind, optype, overflow
        self._fp8 = optype.safetensors in FP8_NAMES
        self.values: Array = np.empty(shape, np.float32)
        self.source: Array = self.values
        self.clipped = self.nonzero = 0
        self.wide = np.empty(shape[1:]), np.empty(shape[1:])
        self.scale: Array | None = None
        if optype.scaled:
            self.scale = np.empty(shape[1:])
            self._narrow_scale = np.empty(shape[1:], np.float32)
        if self._fp8:
            self._magnitude = np.empty(shape, kind.unsigned)
            self._sign = np.empty(shape, np.uint8)
            self._codes = np.empty(shape, np.uint8)
            self._scratch = np.empty(shape, np.uint32)
            self._source = np.empty(shape, np.float64 if kind.name == "F64" else np.float32)

    def round(self, kept: Array, given: Array | None) -> Array:
        """The codes of ``kept`` / ``given`` (float32, broadcasts to [R, G]; None for an unscaled
        type)."""
        scale = None
        if self.scale is not None:
            assert given is not None
            # Spread out first: a ufunc that broadcasts a column as it goes takes longer.
            scale = self._narrow_scale
            np.copyto(scale, given)
            np.copyto(self.scale, scale)
            if self._fp8:
                return self._round_fp8(kept, scale)
        self.source = widen(kept.view(self._kind.dtype))
        scaled = self.source if scale is None else scaling.quotient(self.source, scale)
        codes = convert(scaled, self._optype, self._overflow)
        self.clipped = _count_clipped(scaled, self._optype)
        self.values = widen(codes)
        self.nonzero = int(np.count_nonzero(self.values))
        return codes

    def _round_fp8(self, kept: Array, scale: Array) -> Array:
        kind = self._kind
        magnitudes(kept, kind, out=self._magnitude)
        self.source = magnitude_values(self._magnitude, kind, out=self._source)
        if kind.name == "F64":
            np.copyto(self.values, to_f32_odd(scaling.quotient(self._source, scale)))
        else:
            with np.errstate(over="ignore", under="ignore"):
                for source, values in zip(self._source, self.values, strict=True):
                    np.divide(source, scale, out=values)
        np.right_shift(kept, kept.dtype.type(8 * kept.itemsize - 8), out=self._magnitude)
        np.copyto(self._sign, self._magnitude, casting="unsafe")
        name = self._optype.safetensors
        self.clipped, self.nonzero = round_fp8(
            self.values, self._sign, name, self._overflow, self._codes, self._scratch
        )
        return self._codes.view(self._optype.dtype)


class ErrorSums:
    """Energies of error and signal of rows [R, ``cols``], by patch of the dense matrix: what
    `sum_patches` gives of the kept values, and of their difference to code * scale, in row order.
    """

    def __init__(self, rows: int, cols: int, group: int) -> None:
        self._width = PATCH_COLUMNS // group
        patches = -(-rows // PATCH_ROWS), -(-cols // PATCH_COLUMNS)
        self._group = group
        self._by_row = np.zeros((2, group // 2, patches[0], patches[1] * self._width))

    def add(self, rounder: Rounder, first: int) -> None:
        """Take a tile of all rows into account, from column ``first`` (a patch's first) on."""
        planes, rows, groups = rounder.source.shape
        error, signal = rounder.wide
        begin = first // self._group
        place = slice(0, -(-rows // PATCH_ROWS)), slice(begin, begin + groups)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for plane in range(planes):
                # Cast first, then compute: a ufunc that casts as it goes is several times slower.
                np.copyto(signal, rounder.source[plane])
                np.copyto(error, rounder.values[plane])
                if rounder.scale is not None:
                    error *= rounder.scale
                error -= signal
                for wide, sums in zip((error, signal), self._by_row, strict=True):
                    np.square(wide, out=wide)
                    sum_rows(wide, sums[plane][place])

    def fold(self, rows: int) -> Array:
        """The sums of the tiles' first ``rows`` rows: [error and signal, patches of rows, of K]."""
        by_row = self._by_row[:, :, : -(-rows // PATCH_ROWS)]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            # One after the other, for less memory.
            sums = np.stack([fold_halves(s.reshape(*s.shape[:2], -1, self._width)) for s in by_row])
            # The last step of folding kept values by halves adds the even and the odd ones up.
            total: Array = sums[:, 0] if len(sums[0]) == 1 else sums[:, 0] + sums[:, 1]
        return total


def in_row_order(planes: Array, out: Array | None = None) -> Array:
    """Planes [P, R, G] of codes as kept values [R, P * G], in ``out`` when given (last axis
    contiguous, pairs aligned to their size)."""
    rows = planes.shape[1]
    if out is None:
        out = np.empty((rows, len(planes) * planes.shape[2]), planes.dtype)
    if len(planes) == 1:
        np.copyto(out, planes[0])
        return out
    # As integers of two codes: to write every second one by itself takes several times as long.
    bits = planes.view(f"u{planes.itemsize}")
    pairs = out.view(f"<u{2 * planes.itemsize}")
    np.copyto(pairs, bits[1])
    np.left_shift(pairs, pairs.dtype.type(8 * bits.itemsize), out=pairs)
    np.bitwise_or(pairs, bits[0].astype(pairs.dtype), out=pairs)
    return out


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


_MADE = threading.local()


def tools(
    shape: tuple[int, int], kind: NumberType, optype: OperandType, overflow: Overflow
) -> tuple[KeptPlanes, Rounder]:
    """For tiles [R, C] = ``shape``. A thread keeps those of the last two shapes, for whole tiles
    and the narrower last one of a row: memory that is handed back after every band of a weight
    would have to be cleared for the next."""
    made: dict[object, tuple[KeptPlanes, Rounder]] = _MADE.__dict__.setdefault("tools", {})
    key = shape, kind.name, optype.name, overflow
    if key not in made:
        if len(made) == 2:
            del made[next(iter(made))]
        planes = KeptPlanes(shape, kind, optype.group)
        made[key] = planes, Rounder(planes.kept_shape, kind, optype, overflow)
    return made[key]
