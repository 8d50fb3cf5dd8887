"""Packing tile by tile against packing value by value: the same codes, places, sums, to the bit."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.bits import NUMBER_TYPES, NumberType, number_type, widen
from sp24cli.fp8 import Overflow
from sp24cli.metadata import encode, kept_places
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import PackedMatrix, PackInfo, QuantStats, pack, pack_rows
from sp24cli.packing import KeptValues
from sp24cli.scaling import ScaleSpec, amax, make_scales
from sp24cli.sparsity import PATCH_COLUMNS, PATCH_ROWS, fold, keep_indices
from tests.cpu.patchsums import sum_patches

VECTOR = ScaleSpec("vector")
both_fp8 = pytest.mark.parametrize("type_name", ["e4m3", "e5m2"])
both_modes = pytest.mark.parametrize("overflow", ["satfinite", "nan"])


def every_finite_value(dtype: Any, columns: int = 512, seed: int = 3) -> np.ndarray:
    """All finite patterns of a 16-bit type, two a group, in a shuffled order and any of its places.

    What is left of a group is +0 or -0.
    """
    rng = np.random.default_rng(seed)
    kind = number_type(np.dtype(dtype))
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns[patterns & kind.magnitude_mask >= kind.nonfinite] = 0
    pairs = rng.permutation(patterns).reshape(-1, 2)
    return in_any_places(pairs.view(dtype), rng).reshape(-1, columns)


def in_any_places(pairs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Groups [n, 4] that hold ``pairs`` [n, 2] in some order of places, and +0 or -0 elsewhere."""
    groups = np.where(rng.random((len(pairs), 4)) < 0.1, -0.0, 0).astype(pairs.dtype)
    places = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    np.put_along_axis(groups, places[rng.integers(0, 6, len(pairs))], pairs, axis=1)
    return groups


def plain(
    dense: np.ndarray, scale: np.ndarray, optype: OperandType, overflow: Overflow
) -> tuple[np.ndarray, np.ndarray, QuantStats]:
    """Codes, metadata and stats with a scale a row: an index for every value, ml_dtypes' rounding
    (right for float32), and the sums of values in row order."""
    meta = encode(*keep_indices(dense))
    values = dense.reshape(-1).take(kept_places(meta, dense.shape[1]))
    values[values == 0] = 0
    wide = widen(values)
    with np.errstate(over="ignore", under="ignore"):
        quotient = wide / scale
    bits = np.uint8
    with np.errstate(over="ignore", invalid="ignore"):
        free = quotient.astype(optype.dtype)
    past = ~np.isfinite(free.astype(np.float32))
    codes = free.view(bits)
    if overflow == "satfinite":
        limit = np.array(optype.max_finite, optype.dtype).view(bits)
        codes = np.where(past, limit | np.signbit(quotient) << 7, codes).astype(bits)
    elif optype.name == "e4m3":
        codes = np.where(past, 0x7F, codes).astype(bits)
    exact = wide.astype(np.float64)
    error = codes.view(optype.dtype).astype(np.float64) * scale.astype(np.float64) - exact
    stats = QuantStats(
        kept=int(np.count_nonzero(exact)),
        clipped=int(past.sum()),
        underflowed=int(np.count_nonzero((codes & 0x7F == 0) & (exact != 0))),
        amax=float(np.abs(exact).max(initial=0)),
        signal_energy=fold(sum_patches(exact, PATCH_COLUMNS // 2)),
        error_energy=math.inf
        if past.any() and overflow == "nan"
        else fold(sum_patches(error, PATCH_COLUMNS // 2)),
    )
    return codes, meta, stats


def check(dense: np.ndarray, scale: np.ndarray, optype: OperandType, overflow: Overflow) -> None:
    source = number_type(dense.dtype).name
    info = PackInfo(dense.shape, source, optype.name, VECTOR, "given", "row", overflow)
    into = PackedMatrix.empty(info, scale)
    stats = pack_rows(dense, into)
    codes, meta, want = plain(dense, scale, optype, overflow)
    assert into.values is not None
    assert into.meta is not None
    assert np.flatnonzero(into.values.view(np.uint8) != codes).size == 0
    if dense.shape[1] % 8:
        meta[:, -1] &= 0x0F
    assert (into.meta == meta).all()
    assert stats == want


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
@both_fp8
@both_modes
@pytest.mark.parametrize("scale", ["amax", 1.0, 2.0**-9, 0.001, 448.0, 3e4, 2.0**-126])
def test_every_16_bit_value(
    source: Any, type_name: str, overflow: Overflow, scale: float | str
) -> None:
    optype = OPERAND_TYPES[type_name]
    dense = every_finite_value(source)
    if scale == "amax":
        scales = make_scales(amax(dense, VECTOR), optype.max_finite, VECTOR)
    else:
        # A little other in every row, so that quotients are not those of another scale.
        scales = np.float32(scale) * np.linspace(1, 1.9, len(dense), dtype=np.float32)[:, None]
    check(dense, scales, optype, overflow)


@pytest.mark.parametrize("source", [k.name for k in NUMBER_TYPES.values()])
@pytest.mark.parametrize("shape", [(1, 4), (16, 4), (39, 4), (39, 12), (130, 1028), (530, 2088)])
@both_fp8
def test_shapes(source: str, shape: tuple[int, int], type_name: str) -> None:
    # A lone group a row, rows and columns that fill no patch, several tiles.
    kind = NUMBER_TYPES[source]
    rng = np.random.default_rng(7)
    pairs = np.clip(rng.standard_normal((shape[0] * shape[1] // 4, 2)) * 30, -120, 120)
    pairs[rng.random(pairs.shape) < 0.2] = 0
    dense = in_any_places(pairs.astype(kind.dtype), rng).reshape(shape)
    optype = OPERAND_TYPES[type_name]
    scales = make_scales(amax(dense, VECTOR), optype.max_finite, VECTOR)
    if source != "F64":
        check(dense, scales, optype, "satfinite")
        check(dense, scales / np.float32(3), optype, "nan")
        check(np.asfortranarray(dense), scales, optype, "satfinite")
        return
    # ml_dtypes rounds float64 twice: here only that codes and sums are those of the values.
    narrow = np.float32(scales)
    exact = dense.astype(np.float32).astype(np.float64)
    info = PackInfo(shape, source, type_name, VECTOR, "given", "row", "satfinite")
    into = PackedMatrix.empty(info, narrow)
    stats = pack_rows(exact, into)
    values = exact.reshape(-1).take(kept_places(encode(*keep_indices(exact)), shape[1])) + 0.0
    assert into.values is not None
    error = into.values.astype(np.float64) * narrow.astype(np.float64) - values
    assert stats.error_energy == fold(sum_patches(error, PATCH_COLUMNS // 2))
    assert stats.signal_energy == fold(sum_patches(values.copy(), PATCH_COLUMNS // 2))


def groups_of(occupancies: list[int], kind: NumberType, zero: float) -> np.ndarray:
    """A row of groups with nonzeros at the set bits of ``occupancies`` and ``zero`` elsewhere."""
    groups = np.array([[(1.5 + i if w >> i & 1 else 0) for i in range(4)] for w in occupancies])
    return np.where(groups == 0, zero, -groups).astype(kind.dtype).reshape(1, -1)


@pytest.mark.parametrize("source", [k.name for k in NUMBER_TYPES.values()])
def test_kept_values_of_every_occupancy(source: str) -> None:
    # Each of the eleven ways to hold at most two nonzeros, with zeros of either sign between.
    kind = NUMBER_TYPES[source]
    ways = [w for w in range(16) if w.bit_count() <= 2]
    for zero in (0.0, -0.0):
        dense = groups_of(ways, kind, zero)
        values = KeptValues(dense.shape, kind, 4)
        assert values.take(dense.view(kind.unsigned))
        kept = values.bits.view(kind.dtype).reshape(-1).astype(np.float64)
        want = dense.reshape(-1).take(kept_places(encode(*keep_indices(dense)), dense.shape[1]))
        assert (kept == want.astype(np.float64)).all()
        assert not np.signbit(kept[kept == 0]).any()
        assert values.count == sum(w.bit_count() for w in ways)


@pytest.mark.parametrize("source", [k.name for k in NUMBER_TYPES.values()])
@pytest.mark.parametrize("crowded", [w for w in range(16) if w.bit_count() > 2])
def test_a_crowded_group_does_not_fit(source: str, crowded: int) -> None:
    # Beside as many empty groups as hide it from who counts over the tile.
    kind = NUMBER_TYPES[source]
    for zero in (0.0, -0.0):
        dense = groups_of([0, crowded, 0, 0], kind, zero)
        values = KeptValues(dense.shape, kind, 4)
        assert not values.take(dense.view(kind.unsigned))


def test_scales_of_rows_wider_than_a_tile() -> None:
    rng = np.random.default_rng(6)
    dense = in_any_places(rng.standard_normal((65 * 5000, 2)).astype(np.float16), rng)
    dense = dense.reshape(65, 20000)
    scales = make_scales(amax(dense, VECTOR), 448.0, VECTOR)
    packed, _ = pack(dense, OPERAND_TYPES["e4m3"], VECTOR)
    assert packed.scale is not None
    assert (packed.scale == scales).all()
    check(dense, scales, OPERAND_TYPES["e4m3"], "satfinite")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_rows_that_start_off_a_pair(dtype: Any) -> None:
    # As in a file whose tensors before have an odd number of values.
    rng = np.random.default_rng(5)
    pairs = rng.standard_normal((16 * 64, 2)).astype(dtype)
    dense = in_any_places(pairs, rng).reshape(64, 64)
    size = dense.nbytes
    room = np.empty(size + 16, np.uint8)
    start = -room.ctypes.data % 16 + dense.itemsize
    shifted = room[start : start + size].view(dtype).reshape(dense.shape)
    shifted[:] = dense
    check(shifted, np.full((64, 1), 0.01, np.float32), OPERAND_TYPES["e4m3"], "satfinite")


def test_patches_are_sixteen_rows() -> None:
    assert (PATCH_ROWS, PATCH_COLUMNS) == (16, 256)
