"""Pruning by magnitude and the naming of kept places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.bits import NUMBER_TYPES, NumberType
from sp24cli.errors import BadInputError
from sp24cli.rowblocks import tiles
from sp24cli.sparsity import (
    PATCH_COLUMNS,
    PATCH_ROWS,
    find_nonfinite,
    find_violation,
    fold,
    keep_indices,
    kept_energy,
    patch_energies,
    prune_24,
)
from tests.cpu.patchsums import sum_patches

KINDS = list(NUMBER_TYPES.values())
FLOATS = [k for k in KINDS if k.nonfinite is not None]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
every_float = pytest.mark.parametrize("kind", FLOATS, ids=lambda k: k.name)

#: Wider than one tile, so that two column tiles cover the same rows.
WIDE = (1 << 14) + 8


def finite_values(kind: NumberType, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Random finite bit patterns: all exponents, subnormals, both zeros."""
    rng = np.random.default_rng(seed)
    size = kind.dtype.itemsize
    bits = np.frombuffer(rng.bytes(size * math.prod(shape)), kind.unsigned).reshape(shape)
    if kind.nonfinite is not None:
        bits = np.where((bits & kind.magnitude_mask) >= kind.nonfinite, 0, bits)
    return bits.astype(kind.unsigned).view(kind.dtype)


def normal_values(kind: NumberType, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 20).astype(kind.dtype)


def pruned_by_sorting(dense: np.ndarray) -> np.ndarray:
    """What `prune_24` must give, a group at a time, by comparing values."""
    result = np.zeros(dense.shape, dense.dtype)
    for row, values in enumerate(dense.astype(np.float64).tolist()):
        for start in range(0, len(values), 4):
            group = range(start, start + 4)
            for i in sorted(group, key=lambda i: (-abs(values[i]), i))[:2]:
                if values[i] != 0:
                    result[row, i] = dense[row, i]
    return result


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@every_kind
def test_prune_of_every_ordering_tie_and_sign(kind: NumberType) -> None:
    magnitudes = np.array(list(itertools.product([0.0, 0.5, 3.0, 4.0], repeat=4)))
    if kind.name == "I8":
        magnitudes *= 2
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=4)))
    dense = (magnitudes[:, None, :] * signs).reshape(256, 64).astype(kind.dtype)
    assert_same_bits(prune_24(dense), pruned_by_sorting(dense))


@every_kind
def test_prune_of_random_bit_patterns(kind: NumberType) -> None:
    dense = finite_values(kind, (64, 256))
    assert_same_bits(prune_24(dense), pruned_by_sorting(dense))


@every_kind
def test_ties_keep_the_lower_index(kind: NumberType) -> None:
    dense = np.array([[2, -2, 2, -2, 1, 2, -2, 2]]).astype(kind.dtype)
    assert prune_24(dense).astype(float).tolist() == [[2, -2, 0, 0, 0, 2, -2, 0]]


def test_fp8_is_compared_by_value_not_by_byte() -> None:
    # As bytes the negative codes are the largest.
    dense = np.array([[-0.5, 8, -1, 4]]).astype(ml_dtypes.float8_e4m3fn)
    assert prune_24(dense).astype(float).tolist() == [[0, 8, 0, 4]]


def test_int8_minus_128_is_larger_than_127() -> None:
    dense = np.array([[127, 127, -128, 127]], np.int8)
    assert prune_24(dense).tolist() == [[127, 0, -128, 0]]


def test_float64_magnitudes_are_compared_in_full() -> None:
    dense = np.array([[1.0, 1 + 2**-52, 1.0, -(1 + 2**-51)]])
    assert prune_24(dense).tolist() == [[0, 1 + 2**-52, 0, -(1 + 2**-51)]]


@every_float
def test_every_zero_of_the_result_is_positive(kind: NumberType) -> None:
    dense = np.array([[-0.0] * 4, [-0.0, 1, -0.0, 0.0], [-1, -2, -3, -4]]).astype(kind.dtype)
    result = prune_24(dense)
    assert result.astype(float).tolist() == [[0] * 4, [0, 1, 0, 0], [0, 0, -3, -4]]
    assert not np.signbit(result[result == 0].astype(float)).any()


@every_float
def test_infinity_and_nan_sort_above_everything(kind: NumberType) -> None:
    nan = kind.unsigned.type(kind.magnitude_mask)
    bits = np.array([[1, 2, nan, 3, 1, 2, 3, nan | kind.sign]], kind.unsigned)
    result = prune_24(bits.view(kind.dtype)).view(kind.unsigned)
    assert result.tolist() == [[0, 0, nan, 3, 0, 0, 3, nan | kind.sign]]


@every_kind
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_prune_is_the_same_for_any_number_of_workers(kind: NumberType, workers: int) -> None:
    dense = finite_values(kind, (301, 8192))
    assert_same_bits(prune_24(dense, workers=workers), prune_24(dense))


def test_prune_over_several_column_tiles() -> None:
    dense = finite_values(NUMBER_TYPES["BF16"], (9, WIDE))
    assert_same_bits(prune_24(dense), pruned_by_sorting(dense))


def test_many_tiles_give_what_single_rows_give() -> None:
    dense = finite_values(NUMBER_TYPES["BF16"], (100, WIDE))
    assert len(list(tiles(100, WIDE))) > 4
    pruned = prune_24(dense)
    pairs = keep_indices(pruned)
    for row in range(100):
        alone = prune_24(dense[row : row + 1])
        assert_same_bits(pruned[row : row + 1], alone)
        for got, want in zip(pairs, keep_indices(alone), strict=True):
            assert_same_bits(got[row : row + 1], want)
    pruned[99, :3] = 1
    assert find_violation(pruned) == (99, 0)
    pruned[98, WIDE - 1] = np.inf
    assert find_nonfinite(pruned) == (98, WIDE - 1)


def misaligned(dense: np.ndarray) -> np.ndarray:
    raw = np.frombuffer(b"\0" + dense.tobytes(), np.uint8)[1:]
    return raw.view(dense.dtype).reshape(dense.shape)


STRANGE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fortran": np.asfortranarray,
    "rows apart": lambda d: np.repeat(d, 2, axis=0)[::2],
    "columns apart": lambda d: np.repeat(d, 3, axis=1)[:, ::3],
    "backwards": lambda d: np.ascontiguousarray(d[::-1, ::-1])[::-1, ::-1],
    "one row repeated": lambda d: np.broadcast_to(d[:1], d.shape),
    "misaligned and read-only": misaligned,
}


@every_kind
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_strides_and_alignment_do_not_matter(
    kind: NumberType, strange: Callable[[np.ndarray], np.ndarray]
) -> None:
    dense = strange(finite_values(kind, (13, 44)))
    before = dense.tobytes()
    plain = np.array(dense, order="C")
    pruned = prune_24(dense)
    assert_same_bits(pruned, prune_24(plain))
    assert dense.tobytes() == before
    assert find_violation(dense) == find_violation(plain)
    for got, want in zip(keep_indices(dense), keep_indices(plain), strict=True):
        assert_same_bits(got, want)


def test_prune_in_place_and_into_another_array() -> None:
    dense = normal_values(NUMBER_TYPES["F32"], (40, 64))
    want = prune_24(dense)
    apart = np.full((40, 128), 7, np.float32)
    into = apart[:, ::2]
    assert prune_24(dense, out=into) is into
    assert_same_bits(np.ascontiguousarray(into), want)
    assert (apart[:, 1::2] == 7).all()
    assert prune_24(dense, out=dense) is dense
    assert_same_bits(dense, want)


@pytest.mark.parametrize("out", [np.empty((4, 4), np.float32), np.empty((4, 8), np.float16)])
def test_prune_refuses_an_unfit_out(out: np.ndarray) -> None:
    with pytest.raises(BadInputError, match="out is float"):
        prune_24(np.ones((4, 8), np.float32), out=out)


@every_kind
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_zero_size(kind: NumberType, shape: tuple[int, int]) -> None:
    dense = np.empty(shape, kind.dtype)
    assert prune_24(dense, workers=2).shape == shape
    assert find_violation(dense) is None
    assert find_nonfinite(dense) is None
    assert keep_indices(dense)[0].shape == (shape[0], shape[1] // 4)
    assert kept_energy(dense, dense) == (0, 0)


@pytest.mark.parametrize("check", [prune_24, find_violation, keep_indices])
@pytest.mark.parametrize(
    ("dense", "words"),
    [
        (np.ones((2, 6), np.float32), "K = 6 is not a multiple of 4"),
        (np.ones(8, np.float32), r"shape \[8\] is not a matrix"),
        (np.ones((2, 2, 4), np.float32), r"shape \[2, 2, 4\] is not a matrix"),
        (np.ones((2, 4), np.int32), "unsupported weight type int32"),
        (np.ones((2, 4), ml_dtypes.float8_e4m3fnuz), "unsupported weight type float8_e4m3fnuz"),
        (np.ones((2, 4), ">f4"), "unsupported weight type"),
    ],
)
def test_what_cannot_be_sparse_is_refused(check: Any, dense: np.ndarray, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        check(dense)


@every_float
@pytest.mark.parametrize("negative", [False, True])
def test_find_nonfinite_sees_every_place_and_pattern(kind: NumberType, negative: bool) -> None:
    dense = finite_values(kind, (6, 20))
    assert find_nonfinite(dense) is None
    sign = kind.sign if negative else 0
    for place in itertools.product(range(6), range(20)):
        for magnitude in (kind.nonfinite, kind.magnitude_mask):
            bad = dense.copy()
            bad.view(kind.unsigned)[place] = magnitude | sign
            assert find_nonfinite(bad) == place
    largest = np.full((1, 4), kind.nonfinite - 1, kind.unsigned).view(kind.dtype)
    assert find_nonfinite(largest) is None


def test_int8_is_always_finite() -> None:
    assert find_nonfinite(np.arange(-128, 128, dtype=np.int8).reshape(2, 128)) is None


def test_the_first_place_is_the_first_in_row_order() -> None:
    # A tile of several rows comes before the next columns of its first row.
    dense = np.zeros((3, WIDE), np.float32)
    dense[1, 0] = np.nan
    dense[0, WIDE - 5] = np.inf
    assert find_nonfinite(dense) == (0, WIDE - 5)
    dense = np.zeros((3, WIDE), np.float32)
    dense[1, :3] = 1
    dense[0, WIDE - 3 :] = 1
    assert find_violation(dense) == (0, WIDE // 4 - 1)


@every_kind
def test_find_violation_by_every_pattern_and_place(kind: NumberType) -> None:
    one = 1 if kind.name == "I8" else np.array(1, kind.unsigned).view(kind.dtype)
    for pattern in itertools.product([0, 1], repeat=4):
        for group in range(5):
            dense = np.zeros((3, 20), kind.dtype)
            dense[:, 0:2] = one
            dense[2, 4 * group : 4 * group + 4] = np.array(pattern) * one
            if kind.nonfinite is not None:
                dense[dense == 0] = -0.0
            assert find_violation(dense) == ((2, group) if sum(pattern) > 2 else None)


@every_kind
def test_keep_indices_of_every_pattern(kind: NumberType) -> None:
    want = {
        (0, 0, 0, 0): (0, 1),
        (1, 0, 0, 0): (0, 3),
        (0, 1, 0, 0): (1, 3),
        (0, 0, 1, 0): (2, 3),
        (0, 0, 0, 1): (0, 3),
        (1, 1, 0, 0): (0, 1),
        (1, 0, 1, 0): (0, 2),
        (1, 0, 0, 1): (0, 3),
        (0, 1, 1, 0): (1, 2),
        (0, 1, 0, 1): (1, 3),
        (0, 0, 1, 1): (2, 3),
    }
    dense = np.array(list(want)).reshape(1, -1).astype(kind.dtype)
    if kind.nonfinite is not None:
        dense[dense == 0] = -0.0
    first, second = keep_indices(dense)
    assert first.dtype == second.dtype == np.uint8
    assert list(zip(first[0].tolist(), second[0].tolist(), strict=True)) == list(want.values())


def test_keep_indices_of_a_pruned_matrix_find_every_nonzero() -> None:
    pruned = prune_24(finite_values(NUMBER_TYPES["F16"], (5, WIDE)))
    first, second = keep_indices(pruned)
    groups = pruned.reshape(5, -1, 4).copy()
    for places in (first, second):
        np.put_along_axis(groups, places[..., None].astype(int), 0, axis=2)
    assert not groups.any()


@every_kind
def test_kept_energy_is_the_sum_of_squares(kind: NumberType) -> None:
    dense = normal_values(kind, (67, 132))
    pruned = prune_24(dense)
    got = kept_energy(dense, pruned)
    for value, matrix in zip(got, (pruned, dense), strict=True):
        exact = sum(Fraction(v) ** 2 for v in matrix.astype(float).ravel().tolist())
        assert value == pytest.approx(float(exact), rel=1e-14)
    assert 0 < got[0] < got[1]


def test_kept_energy_is_the_same_for_any_number_of_workers() -> None:
    dense = normal_values(NUMBER_TYPES["BF16"], (400, 8192))
    pruned = prune_24(dense)
    assert kept_energy(dense, pruned, workers=3) == kept_energy(dense, pruned)


def folded(values: list[float]) -> float:
    """A list of a power of two added up half onto half, in Python's own float64."""
    while len(values) > 1:
        half = len(values) // 2
        values = [low + high for low, high in zip(values[:half], values[half:], strict=True)]
    return values[0]


def patch_sum(squares: list[list[float]], width: int) -> float:
    """The documented order: row after row, then `folded`."""
    columns = [0.0] * width
    for row in squares:
        for i, square in enumerate(row):
            columns[i] += square
    return folded(columns)


@pytest.mark.parametrize(
    "shape", [(1, 2), (16, 2), (17, 4), (33, 300), (48, 256), (250, 6), (5, 1030)]
)
@pytest.mark.parametrize("width", [PATCH_COLUMNS, PATCH_COLUMNS // 2])
def test_squares_are_added_up_in_the_order_that_the_gpu_follows(
    shape: tuple[int, int], width: int
) -> None:
    values = np.random.default_rng(3).standard_normal(shape) * 1e3
    want = [
        [
            patch_sum(np.square(values[r : r + PATCH_ROWS, c : c + width]).tolist(), width)
            for c in range(0, shape[1], width)
        ]
        for r in range(0, shape[0], PATCH_ROWS)
    ]
    assert sum_patches(values.copy(), width).tolist() == want
    if width == PATCH_COLUMNS:
        assert patch_energies(values).tolist() == want
        factors = np.random.default_rng(4).random(shape[1])
        products = values * factors
        assert patch_energies(values, factors).tolist() == patch_energies(products).tolist() != want
    flat = [x for row in want for x in row]
    padded = flat + [0.0] * ((1 << (len(flat) - 1).bit_length()) - len(flat))
    assert fold(np.array(want)) == folded(padded)


def test_the_sum_of_nothing_is_zero() -> None:
    assert fold(patch_energies(np.zeros((0, 8)))) == 0
    assert fold(patch_energies(np.zeros((8, 0)))) == 0


def test_a_signalling_nan_is_for_the_caller_to_explain() -> None:
    """Its cast would warn, and a warning is not the one line of an error."""
    bits = np.zeros((4, 8), np.uint32)
    bits[1, 2] = 0x7F800001
    assert np.isnan(patch_energies(bits.view(np.float32))).all()
