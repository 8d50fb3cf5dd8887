"""2:4 sparsity along K: prune by magnitude, check, and name the kept places.

A group is four neighbours along K of which at most two differ from zero. Magnitudes are
compared as values in every type, and -0.0 is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from sp24cli.bits import Array, NumberType, contiguous_bits, magnitudes, number_type, widen
from sp24cli.errors import BadInputError
from sp24cli.rowblocks import pieces, row_slices, run, scratch, tiles

#: Neighbours along K of which two are kept.
GROUP = 4
#: Rows and columns whose squares are added up by themselves: see `sum_patches`.
PATCH_ROWS, PATCH_COLUMNS = 16, 256
#: Columns of one tile where squares are added up: a multiple of `PATCH_COLUMNS` and, for packing,
#: of every operand type's block_k.
TILE_COLUMNS = 1024
#: Squares added up at a time, which mostly stay in a core's cache.
_SUM_ELEMENTS = 1 << 17
#: Powers of two up to which, and down to which, float64 holds sums of squares as they are.
_PLAIN_EXPONENT = 400
#: From so many values on NumPy adds rows without much ado between them.
_LONG_ROW = 32


def check_matrix(dense: Array, group: int = GROUP) -> tuple[int, int, NumberType]:
    """(M, K, type) of a matrix of whole groups; `BadInputError` for any other array."""
    kind = number_type(dense.dtype)
    if dense.ndim != 2:
        raise BadInputError(f"shape {list(dense.shape)} is not a matrix")
    rows, cols = dense.shape
    if cols % group:
        raise BadInputError(f"K = {cols} is not a multiple of {group}")
    return rows, cols, kind


def prune_24(dense: Array, *, out: Array | None = None, workers: int = 1) -> Array:
    """The two largest magnitudes of every group of ``dense`` [M, K], zeros elsewhere.

    Ties keep the lower index; every zero of the result is +0.0. ``out`` (same shape and dtype;
    may be ``dense`` itself, no other overlap) receives and is the result. NaN sorts above
    infinity and is not looked for: see `find_nonfinite`. The bytes do not depend on
    ``workers``. Errors: `BadInputError` unless K is a multiple of 4 and the type supported.
    """
    rows, cols, kind = check_matrix(dense)
    if out is None:
        out = np.empty((rows, cols), dense.dtype)
    elif out.shape != dense.shape or out.dtype != dense.dtype:
        raise BadInputError(
            f"out is {out.dtype.name} {list(out.shape)}, not {dense.dtype.name} {[rows, cols]}"
        )
    source, target = dense, out.view(kind.unsigned)

    def piece(r: slice) -> None:
        part, into = source[r], target[r]
        for tile in tiles(*part.shape):
            bits = contiguous_bits(part[tile])
            magnitude = scratch("magnitude", bits.shape, bits.dtype)
            beats = scratch("beats", (3, bits.size), np.bool_)
            keep = _keep(magnitudes(bits, kind, out=magnitude), beats).reshape(bits.shape)
            np.multiply(bits, keep, out=into[tile])

    run(piece, pieces(rows, cols), workers)
    return out


def _keep(magnitude: Array, beats: Array) -> Array:
    """1 where a value of a group is kept, 0 elsewhere or where it is zero: uint8, flat, in
    ``beats``, bool [3, values]."""
    flat = magnitude.reshape(-1)
    # Byte i of a group's word in beats[d-1]: value i is at least value i + d. Bytes whose
    # partner lies in the next group (or is none) are masked off below.
    for d in (1, 2, 3):
        np.greater_equal(flat[:-d], flat[d:], out=beats[d - 1, :-d])
    near, middle, far = beats.view(np.uint32)
    near &= np.uint32(0x00010101)
    middle &= np.uint32(0x00000101)
    far &= np.uint32(0x00000001)
    # Wins of each value, a byte each: the lower index gets the comparison, the higher one its
    # complement, so near - (near << 8) + 0x01010100 and so on, modulo 2**32.
    near *= np.uint32(0xFFFFFF01)
    middle *= np.uint32(0xFFFF0001)
    far *= np.uint32(0xFF000001)
    near += middle
    near += far
    near += np.uint32(0x03020100)
    # Two or three wins of three are kept: bit 1 of the count.
    near >>= np.uint32(1)
    near &= np.uint32(0x01010101)
    keep = near.view(np.uint8)
    keep &= (flat != 0).view(np.uint8)
    return keep


def find_nonfinite(dense: Array) -> tuple[int, int] | None:
    """(row, column) of the first NaN or infinity of ``dense`` [M, K] in row order, or None."""
    kind = number_type(dense.dtype)
    if kind.nonfinite is None:
        return None
    limit = kind.unsigned.type(kind.nonfinite)
    return _first(dense, 1, lambda bits: magnitudes(bits, kind) >= limit)


def find_violation(dense: Array) -> tuple[int, int] | None:
    """(row, group) of the first group of ``dense`` [M, K] with more than two nonzeros, or None."""
    _, _, kind = check_matrix(dense)
    return _first(dense, GROUP, lambda bits: _counts(magnitudes(bits, kind)) > 2)


def _first(dense: Array, unit: int, test: Callable[[Array], Array]) -> tuple[int, int] | None:
    """The first place in row order where ``test`` of a tile, one answer a ``unit``, holds."""
    found: list[tuple[int, int]] = []
    for r, c in tiles(*dense.shape):
        bad = test(contiguous_bits(dense[r, c]))
        if bad.any():
            i, j = divmod(int(bad.argmax()), bad.shape[1])
            found.append((r.start + i, c.start // unit + j))
        # Tiles of the same rows follow each other: a later one may hold an earlier row.
        if found and c.stop == dense.shape[1]:
            return min(found)
    return None


def _counts(magnitude: Array) -> Array:
    """How many of each group's values differ from zero: uint32 [M, K/4]."""
    words: Array = (magnitude != 0).view(np.uint32)
    # The product's highest byte is the sum of the four bytes, each 0 or 1.
    words *= np.uint32(0x01010101)
    words >>= np.uint32(24)
    return words


def keep_indices(dense: Array) -> tuple[Array, Array]:
    """The canonical pair of kept places of every group of a 2:4 ``dense`` [M, K].

    Returns (first, second), uint8 [M, K/4], first < second. Two nonzeros are kept where they
    stand; a lone one at i gives (i, 3), or (0, 3) when it stands at 3; an empty group (0, 1).
    Taken from the source values: what quantization turns to zero keeps its place. Groups with
    more than two nonzeros give their first two (see `find_violation`).
    """
    rows, cols, kind = check_matrix(dense)
    occupied = np.empty((rows, cols // GROUP), np.uint8)
    for r, c in tiles(rows, cols):
        words = (magnitudes(contiguous_bits(dense[r, c]), kind) != 0).view(np.uint32)
        # Brings bits 0, 8, 16 and 24 together as bits 24 to 27; no partial products meet.
        words *= np.uint32(0x01020408)
        occupied[r, c.start // GROUP : c.stop // GROUP] = words >> np.uint32(24)
    return _FIRST.take(occupied), _SECOND.take(occupied)


def _canonical_pair(occupied: int) -> tuple[int, int]:
    """The pair of a group whose nonzeros are the set bits of ``occupied``."""
    places = [i for i in range(GROUP) if occupied >> i & 1]
    if not places:
        return 0, 1
    if len(places) == 1:
        return (places[0], 3) if places[0] < 3 else (0, 3)
    return places[0], places[1]


_FIRST, _SECOND = np.array([_canonical_pair(i) for i in range(16)], np.uint8).T.copy()


def energy_exponent(values: Array) -> int:
    """Sums of squares of ``values`` are taken in units of 4 to this power, so that they are in
    range: 0 but for float64 whose largest magnitude is very large or very small."""
    if values.dtype != np.float64 or not values.size:
        return 0
    with np.errstate(invalid="ignore"):
        largest = max(float(values.max()), -float(values.min()))
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    return exponent if abs(exponent) > _PLAIN_EXPONENT else 0


def scale_down(values: Array, exponent: int) -> Array:
    """``values`` divided by 2 to the power ``exponent``; as they are for 0."""
    return np.ldexp(values, -exponent) if exponent else values


def common_exponent(sums: Iterable[tuple[float, int]]) -> int:
    """The power of the unit in which ``sums``, each with its own, can be added up."""
    return max((exponent for value, exponent in sums if value), default=0)


def in_unit(value: float, exponent: int, wanted: int) -> float:
    """A sum of squares in units of 4 to the power ``exponent``, in units of that to ``wanted``."""
    return value if exponent == wanted else math.ldexp(value, 2 * (exponent - wanted))


def kept_energy(
    dense: Array, pruned: Array, *, exponent: int = 0, workers: int = 1
) -> tuple[float, float]:
    """Sums of squares (of ``pruned``, of ``dense``) in float64, by `patch_energies`."""
    rows, cols = dense.shape
    parts = pieces(rows, cols, PATCH_ROWS) or [slice(0, 0)]
    found = run(
        lambda r: [patch_energies(m[r], exponent=exponent) for m in (pruned, dense)], parts, workers
    )
    kept, total = (fold(np.concatenate(sums)) for sums in zip(*found, strict=True))
    return kept, total


def patch_energies(values: Array, factors: Array | None = None, *, exponent: int = 0) -> Array:
    """The sums of squares, float64, of every patch of `PATCH_ROWS` x `PATCH_COLUMNS` of ``values``
    [M, K]: [ceil(M / rows), ceil(K / columns)]. With ``factors``, float64 [K], columns are first
    multiplied by these. In units of 4 to the power ``exponent`` (see `energy_exponent`). Infinity
    and NaN are the caller's to explain."""
    rows, cols = values.shape
    patches = -(-rows // PATCH_ROWS), -(-cols // PATCH_COLUMNS)
    by_row = np.zeros((patches[0], patches[1] * PATCH_COLUMNS))
    step = PATCH_ROWS * max(1, _SUM_ELEMENTS // (PATCH_ROWS * max(1, min(cols, TILE_COLUMNS))))
    wide: Array | None = None
    # Of a signalling NaN the cast would warn.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for r in row_slices(rows, step):
            for c in row_slices(cols, TILE_COLUMNS):
                tile = values[r, c]
                squares = scratch("squares", tile.shape, np.float64)
                if values.itemsize < 4:
                    wide = scratch("wide", tile.shape, np.float32)
                # Cast first, then compute: a ufunc that casts as it goes is several times slower.
                np.copyto(squares, widen(tile, out=wide))
                if exponent:
                    np.ldexp(squares, -exponent, out=squares)
                if factors is not None:
                    squares *= factors[c]
                np.square(squares, out=squares)
                sum_rows(squares, by_row[patches_of(r, c)[0], c])
        return fold_halves(by_row.reshape(*patches, PATCH_COLUMNS))


def patches_of(rows: slice, cols: slice) -> tuple[slice, slice]:
    """The patches of a tile whose first row and column begin patches."""
    return (
        slice(rows.start // PATCH_ROWS, -(-rows.stop // PATCH_ROWS)),
        slice(cols.start // PATCH_COLUMNS, -(-cols.stop // PATCH_COLUMNS)),
    )


def sum_rows(values: Array, out: Array) -> None:
    """The sums of every `PATCH_ROWS` rows of ``values`` [..., R, N], one row after the other, into
    ``out`` [..., ceil(R / rows), N]."""
    *lead, rows, cols = values.shape
    whole = rows // PATCH_ROWS
    groups = values[..., : whole * PATCH_ROWS, :].reshape(*lead, whole, PATCH_ROWS, cols)
    rest = values[..., whole * PATCH_ROWS :, :]
    if cols == 1:
        # A lone column would be the last axis, which NumPy adds up in another order.
        out[..., :whole, :] = np.add.accumulate(groups, axis=-2)[..., -1, :]
        if whole < out.shape[-2]:
            out[..., whole, :] = np.add.accumulate(rest, axis=-2)[..., -1, :]
        return
    # NumPy adds along an axis that is not the last one row after the other.
    np.add.reduce(groups, axis=-2, out=out[..., :whole, :])
    if whole < out.shape[-2]:
        np.add.reduce(rest, axis=-2, out=out[..., whole, :])


def fold_halves(values: Array) -> Array:
    """The sums along the last axis, a power of two long: the upper half is added to the lower
    until one is left. Zeros behind, up to a larger power of two, change nothing."""
    while (half := values.shape[-1] // 2) >= _LONG_ROW:
        values = values[..., :half] + values[..., half:]
    # Short rows take NumPy long, so the axis comes first.
    values = np.ascontiguousarray(values.transpose(-1, *range(values.ndim - 1)))
    while (half := len(values) // 2) > 0:
        values = values[:half] + values[half:]
    folded: Array = values[0]
    return folded


def fold(sums: Array) -> float:
    """The sum of all ``sums``, in row order with zeros up to a power of two: half is added to
    half until one is left."""
    padded = np.zeros(1 << max(0, sums.size - 1).bit_length())
    padded[: sums.size] = sums.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(fold_halves(padded))
