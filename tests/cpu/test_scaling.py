"""Scales: their shapes, values, promises, and the quotient taken with them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.bits import NUMBER_TYPES, NumberType
from sp24cli.errors import BadInputError
from sp24cli.rowblocks import row_slices, tiles
from sp24cli.scaling import (
    ScaleSpec,
    amax,
    expand,
    find_bad,
    join_amax,
    make_scales,
    powers,
    quotient,
    scale_values,
    scales_from_amax,
)
from sp24cli.sparsity import prune_24

NONE, TENSOR, VECTOR = ScaleSpec("none"), ScaleSpec("tensor"), ScaleSpec("vector")
MX = ScaleSpec.parse("mx")
BLOCKS = [(1, 4), (3, 20), (1, 128), (16, 16), (32, 32), (128, 128)]
SPECS = [NONE, TENSOR, VECTOR, *(ScaleSpec("block", b) for b in BLOCKS), MX]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)

TINY = np.finfo(np.float32).tiny
MAX = np.finfo(np.float32).max


def blocks_of(spec: ScaleSpec, rows: int, cols: int) -> dict[tuple[int, ...], tuple[slice, slice]]:
    """Which rows and columns each scale covers, by the definition of the kinds."""
    everything = slice(0, rows), slice(0, cols)
    if spec.kind == "none":
        return {(): everything}
    if spec.kind == "tensor":
        return {(0,): everything}
    if spec.kind == "vector":
        return {(r, 0): (slice(r, r + 1), everything[1]) for r in range(rows)}
    bm, bk = spec.block
    return {
        (i, j): (slice(bm * i, bm * i + bm), slice(bk * j, bk * j + bk))
        for i in range(-(-rows // bm))
        for j in range(-(-cols // bk))
    }


def random_weights(kind: NumberType, rows: int, cols: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((rows, cols)) * 30).astype(kind.dtype)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (NONE, ()),
        (TENSOR, (1,)),
        (VECTOR, (130, 1)),
        (ScaleSpec("block", (128, 128)), (2, 5)),
        (ScaleSpec("block", (1, 516)), (130, 1)),
        (MX, (130, 17)),
    ],
)
def test_shapes(spec: ScaleSpec, shape: tuple[int, ...]) -> None:
    assert spec.shape(130, 516) == shape


def test_parse() -> None:
    assert ScaleSpec.parse("tensor") == TENSOR
    assert ScaleSpec.parse("block", "16x128") == ScaleSpec("block", (16, 128))
    assert ScaleSpec.parse("block", "16X128") == ScaleSpec("block", (16, 128))
    assert ScaleSpec.parse("mx") == ScaleSpec.parse("mx", "1x32") == ScaleSpec("mx", (1, 32))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("row", None, "unknown scale kind 'row'"),
        ("block", None, "'block' needs a block size"),
        ("vector", "1x128", "'vector' takes no block size"),
        ("block", "128", "'128' is not ROWSxCOLUMNS"),
        ("block", "1x2x4", "is not ROWSxCOLUMNS"),
        ("block", "-1x4", "is not ROWSxCOLUMNS"),
        ("block", "²x4", "is not ROWSxCOLUMNS"),
        ("block", "9" * 5000 + "x4", "is not ROWSxCOLUMNS"),
        ("block", f"{2**63}x4", "a side is longer than 9223372036854775807"),
        ("block", f"1x{2**64}", "a side is longer than 9223372036854775807"),
        ("block", "0x4", "both sides must be positive"),
        ("block", "4x0", "both sides must be positive"),
        ("block", "128x130", "columns a multiple of 4"),
        ("mx", "16x32", "16x32: kind 'mx' has 1x32"),
    ],
)
def test_parse_refuses(kind: str, text: str | None, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        ScaleSpec.parse(kind, text)


@every_spec
@pytest.mark.parametrize("kind", NUMBER_TYPES.values(), ids=NUMBER_TYPES)
@pytest.mark.parametrize("shape", [(7, 44), (200, 516)])
def test_amax_is_the_largest_magnitude(
    spec: ScaleSpec, kind: NumberType, shape: tuple[int, int]
) -> None:
    dense = random_weights(kind, *shape)
    found = amax(dense, spec)
    assert found.shape == spec.shape(*shape)
    assert found.dtype == (np.float64 if kind.name == "F64" else np.float32)
    for place, covered in blocks_of(spec, *shape).items():
        assert found[place] == np.abs(dense[covered].astype(np.float64)).max()
    assert amax(prune_24(dense), spec).tolist() == found.tolist()


def test_amax_of_int8_reaches_128() -> None:
    assert amax(np.array([[-128, 5, 127, 0]], np.int8), TENSOR).tolist() == [128]


@every_spec
def test_amax_over_many_tiles_and_of_strided_input(spec: ScaleSpec) -> None:
    # Tiles end at row 32 and column 1 << 14, within blocks of 3 x 20.
    dense = random_weights(NUMBER_TYPES["BF16"], 70, (1 << 14) + 300)
    assert (slice(32, 64), slice(0, 1 << 14)) in tiles(*dense.shape)
    found = amax(dense, spec)
    magnitude = np.abs(dense.astype(np.float32))
    for place, covered in blocks_of(spec, *dense.shape).items():
        assert found[place] == magnitude[covered].max()
    np.testing.assert_array_equal(amax(np.asfortranarray(dense), spec), found)


@every_spec
def test_amax_joins_over_row_blocks(spec: ScaleSpec) -> None:
    dense = random_weights(NUMBER_TYPES["F32"], 300, 64)
    parts = [amax(dense[r], spec) for r in row_slices(300, 2 * spec.row_step)]
    joined = join_amax(parts, spec)
    assert joined.shape == spec.shape(300, 64)
    np.testing.assert_array_equal(joined, amax(dense, spec))


@every_spec
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_amax_of_nothing_is_zero(spec: ScaleSpec, shape: tuple[int, int]) -> None:
    found = amax(np.empty(shape, np.float16), spec)
    assert found.shape == spec.shape(*shape)
    assert not found.any()


@pytest.mark.parametrize("max_finite", [448.0, 57344.0, 127.0])
def test_scale_is_one_float32_division(max_finite: float) -> None:
    largest = np.random.default_rng(0).lognormal(0, 8, (50, 3)).astype(np.float32)
    scale = scales_from_amax(largest, max_finite)
    assert scale.dtype == np.float32
    assert scale.shape == (50, 3)
    assert scale.tolist() == (largest / np.float32(max_finite)).tolist()


@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_scales_are_never_zero_subnormal_or_infinite(source: Any) -> None:
    smallest = 5e-324 if source == np.float64 else 1e-45
    largest = np.array([0, smallest, 1e-40, TINY, TINY * 447, TINY * 448, MAX], source)
    scale = scales_from_amax(largest, 448.0)
    assert scale.tolist() == [1, TINY, TINY, TINY, TINY, TINY, np.float32(MAX) / np.float32(448)]
    assert find_bad(scale) is None


def test_float64_amax_beyond_float32() -> None:
    scale = scales_from_amax(np.array([1e39, 448 * 1e38, 1e300]), 448.0)
    assert scale.tolist() == [np.float32(1e39 / 448), np.float32(1e38), MAX]


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-40, -0.0])
def test_find_bad(bad: float) -> None:
    scale = np.ones((3, 2), np.float32)
    assert find_bad(scale) is None
    scale[2, 1] = bad
    assert find_bad(scale) == (2, 1)
    assert find_bad(np.full(1, bad, np.float32)) == (0,)


@pytest.mark.parametrize(
    "source", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_quotient_is_one_float32_division(source: Any) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 50)).astype(source)
    scale = rng.lognormal(0, 2, (40, 1)).astype(np.float32)
    got = quotient(values, scale)
    assert got.dtype == np.float32
    want = [
        [np.float32(float(v)) / s for v in row]
        for row, s in zip(values.tolist(), scale[:, 0], strict=True)
    ]
    assert got.tolist() == np.array(want, np.float32).tolist()


def test_quotient_of_float64_is_a_float64_division() -> None:
    values = np.array([[1 + 2**-52, 1e300, 1e-320]])
    got = quotient(values, np.array([[3]], np.float32))
    assert got.dtype == np.float64
    assert got.tolist() == [[(1 + 2**-52) / 3, 1e300 / 3, 1e-320 / 3]]


def test_quotient_may_leave_the_range_without_a_warning() -> None:
    tiny = np.array([[TINY]], np.float32)
    assert quotient(np.array([[MAX]], np.float32), tiny).tolist() == [[np.inf]]


@every_spec
@pytest.mark.parametrize("tile", [(slice(0, 70), slice(0, 516)), (slice(6, 20), slice(132, 400))])
def test_expand_gives_every_kept_value_the_scale_of_its_block(
    spec: ScaleSpec, tile: tuple[slice, slice]
) -> None:
    rows, cols = tile
    shape = spec.shape(70, 516)
    scale = None
    want = np.ones((70, 516), np.float32)
    if spec.kind != "none":
        scale = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
        if spec.kind == "mx":
            scale = powers(np.arange(np.prod(shape)) % 200 - 100).reshape(shape)
        for place, covered in blocks_of(spec, 70, 516).items():
            want[covered] = scale[place]
    size = rows.stop - rows.start, (cols.stop - cols.start) // 2
    got = np.broadcast_to(expand(scale, spec, rows, cols), size)
    assert got.dtype == np.float32
    # Both kept values of a group take the scale of the group's first column.
    np.testing.assert_array_equal(got[:, 0::2], want[tile][:, 0::4])
    np.testing.assert_array_equal(got[:, 1::2], want[tile][:, 0::4])


E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def least_power(largest: float, max_finite: float) -> float:
    """The least 2^e, e in -126 to 127, with largest <= max_finite * 2^e, by trying them all."""
    if largest == 0:
        return 1.0
    fits = [
        e for e in range(-126, 128) if Fraction(largest) <= Fraction(max_finite) * Fraction(2) ** e
    ]
    return 2.0 ** (fits[0] if fits else 127)


@pytest.mark.parametrize("max_finite", [448.0, 57344.0, 127.0])
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_mx_scales_are_the_least_powers_that_overflow_nothing(
    max_finite: float, source: Any
) -> None:
    edges = [m * 2.0**e for m in (448.0, 57344.0, 127.0) for e in (-100, -1, 0, 1, 90)]
    edges += [float(np.nextafter(source(e), source(to))) for e in edges for to in (0, np.inf)]
    wide = [1e-45, 1e-40, TINY, 3e38] + ([5e-324, 1e39, 1e300] if source == np.float64 else [])
    spread = np.random.default_rng(0).lognormal(0, 20, 200).astype(source).tolist()
    largest = np.array([0, *edges, *wide, *spread], source)
    scale = make_scales(largest, max_finite, MX)
    assert scale.dtype == E8M0
    assert find_bad(scale) is None
    want = [least_power(float(a), max_finite) for a in largest]
    assert scale_values(scale).tolist() == want
    held = largest < 1e38
    quotients = largest[held].astype(np.float64) / np.array(want)[held]
    assert (quotients <= max_finite).all()


def test_mx_rounds_up_where_the_standard_rounds_down() -> None:
    """OCP MX 1.0, section 6.3: 2^(floor(log2 amax) - 8) for E4M3."""
    largest = np.array([1.0, 1.5, 1.75, np.nextafter(1.75, 2), 1.99, 2.0])
    ours = scale_values(make_scales(largest, 448.0, MX))
    standard = 2.0 ** (np.floor(np.log2(largest)) - 8)
    assert (ours / standard).tolist() == [1, 1, 1, 2, 2, 1]
    assert (largest / ours <= 448).all()
    assert (largest / standard > 448).tolist() == [False, False, False, True, True, False]


def test_what_e8m0_cannot_say_is_no_scale() -> None:
    codes = np.array([[1, 127], [254, 1]], np.uint8).view(E8M0)
    assert find_bad(codes) is None
    for bad in (0, 255):  # 2^-127, which is no normal float32, and NaN
        changed = codes.copy()
        changed.view(np.uint8)[1, 0] = bad
        assert find_bad(changed) == (1, 0)
    every = np.arange(256, dtype=np.uint8).view(E8M0)
    assert scale_values(every)[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(scale_values(every)[255])
    assert powers(np.array([-500, -126, 0, 127, 500])).view(np.uint8).tolist() == [
        1, 1, 127, 254, 254
    ]  # fmt: skip
