"""Packing: what is kept, the codes, both layouts, what the file says, and the way back."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.bits import NUMBER_TYPES
from sp24cli.errors import BadInputError
from sp24cli.layout import decode_fragments
from sp24cli.metadata import decode
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import (
    PackedMatrix,
    PackInfo,
    QuantStats,
    check_structure,
    pack,
    pack_rows,
)
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from sp24cli.rowblocks import row_slices
from sp24cli.scaling import ScaleSpec, amax, make_scales
from sp24cli.sparsity import keep_indices, prune_24

E4M3 = OPERAND_TYPES["e4m3"]
NONE, TENSOR, VECTOR = ScaleSpec("none"), ScaleSpec("tensor"), ScaleSpec("vector")
BLOCK = ScaleSpec("block", (48, 20))
MX = ScaleSpec("mx", (1, 32))
CASES: list[tuple[OperandType, ScaleSpec]] = [
    (t, s)
    for t in OPERAND_TYPES.values()
    for s in ([TENSOR, VECTOR, BLOCK, MX] if t.scaled else [NONE])
]
every_case = pytest.mark.parametrize(
    ("optype", "spec"), CASES, ids=[f"{t.name}-{s.kind}" for t, s in CASES]
)
SOURCES = [k.dtype for k in NUMBER_TYPES.values()]


def weights(
    rows: int,
    cols: int,
    dtype: Any = ml_dtypes.bfloat16,
    *,
    seed: int = 0,
    optype: OperandType = E4M3,
) -> np.ndarray:
    """A matrix pruned for ``optype``, whose groups hold up to what is kept, over a wide range."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((rows, cols)) * rng.lognormal(0, 1, (rows, 1)) * 8
    dense[rng.random((rows, cols)) < 0.3] = 0
    dense[:, : cols // 2] *= 0.25
    if np.dtype(dtype) == np.float16:
        dense = np.clip(dense, -6e4, 6e4)
    if np.dtype(dtype).itemsize == 1:
        dense = np.clip(dense, -120, 120)
    return prune_magnitude(dense.astype(dtype), pattern_of(optype))


def keep_of(dense: np.ndarray, optype: OperandType) -> tuple[np.ndarray, np.ndarray]:
    """The pairs that the metadata must name; of tf32 in halves."""
    if optype.group == 4:
        return keep_indices(dense)
    second = dense.reshape(len(dense), -1, 2)[..., 1] != 0
    return np.where(second, 2, 0), np.where(second, 3, 1)


def parts_of(packed: PackedMatrix) -> dict[str, tuple[Any, ...]]:
    return {
        name: (part.dtype, part.shape, part.tobytes())
        for name in ("values", "meta", "blocks", "scale")
        if (part := getattr(packed, name)) is not None
    }


@every_case
@pytest.mark.parametrize("source", SOURCES, ids=NUMBER_TYPES)
@pytest.mark.parametrize("shape", [(70, 132), (5, 1100), (64, 4)])
def test_pack_by_definition(
    optype: OperandType, spec: ScaleSpec, source: np.dtype, shape: tuple[int, int]
) -> None:
    dense = weights(*shape, source, optype=optype)
    packed, stats = pack(dense, optype, spec)
    rows, cols = shape

    first, second = keep_of(dense, optype)
    got_first, got_second = decode(packed.meta, optype.meta_k(cols))
    np.testing.assert_array_equal(got_first, first)
    np.testing.assert_array_equal(got_second, second)

    wide = dense.astype(np.float64 if source == np.float64 else np.float32)
    scale = np.ones((rows, cols), wide.dtype)
    if spec.kind != "none":
        largest = {"e4m3": 448.0, "e5m2": 57344.0, "s8": 127.0}[optype.name]
        want_scale = make_scales(amax(dense, spec), largest, spec)
        assert packed.scale.dtype == want_scale.dtype == spec.dtype
        assert packed.scale.tolist() == want_scale.tolist()
        height, width = spec.block or {"tensor": (rows, cols), "vector": (1, cols)}[spec.kind]
        of_blocks = packed.scale.astype(np.float32).reshape(-(-rows // height), -(-cols // width))
        scale = np.repeat(np.repeat(of_blocks, height, 0)[:rows], width, 1)[:, :cols]
    quotient = np.clip(wide / scale.astype(wide.dtype), -optype.max_finite, optype.max_finite)
    if source == np.float64:
        # No value here lies within a double rounding of a midpoint: checked by test_fp8.
        quotient = quotient.astype(np.float32)
    if optype.name == "s8":
        quotient = np.rint(quotient)
    elif optype.name == "tf32":
        # Eleven significant bits, the low ones of the range apart: test_fp8 has those.
        fraction, exponent = np.frexp(quotient)
        quotient = np.ldexp(np.rint(np.ldexp(fraction, 11)), exponent - 11)
    codes = quotient.astype(optype.dtype)
    if optype.group == 2:
        codes = codes.reshape(rows, -1, 2)
        want = np.take_along_axis(codes, (first // 2)[..., None].astype(int), 2)[..., 0]
    else:
        codes = codes.reshape(rows, -1, 4)
        kept = [np.take_along_axis(codes, i[..., None].astype(int), 2) for i in (first, second)]
        want = np.concatenate(kept, 2).reshape(rows, cols // 2)
    assert packed.values.dtype == optype.dtype
    np.testing.assert_array_equal(packed.values.view(np.uint8), want.view(np.uint8))

    assert packed.info == PackInfo(
        shape, packed.info.source_dtype, optype.name, spec, "given", "row", "satfinite"
    )
    assert NUMBER_TYPES[packed.info.source_dtype].dtype == source
    assert check_structure(packed) is None
    assert stats.kept == np.count_nonzero(dense.astype(float))
    assert stats.underflowed == stats.kept - np.count_nonzero(want.astype(float))


@every_case
@pytest.mark.parametrize("shape", [(70, 132), (64, 4092), (129, 2052), (1, 4), (200, 128)])
def test_both_layouts_hold_the_same(
    optype: OperandType, spec: ScaleSpec, shape: tuple[int, int]
) -> None:
    dense = weights(*shape, optype=optype)
    row, row_stats = pack(dense, optype, spec)
    image, image_stats = pack(dense, optype, spec, layout="sm90")
    assert image_stats == row_stats
    assert image.values is None and image.meta is None
    assert check_structure(image) is None
    assert parts_of(row.to_layout("sm90")) == parts_of(image)
    assert parts_of(image.to_layout("row")) == parts_of(row)
    assert row.to_layout("row") is row
    assert image.to_layout("row").info == row.info
    codes, first, second = decode_fragments(image.blocks, optype, *shape)
    assert codes.tobytes() == row.values.tobytes()
    for got, want in zip((first, second), decode(row.meta, optype.meta_k(shape[1])), strict=True):
        np.testing.assert_array_equal(got, want)
    assert image.codes().tobytes() == row.codes().tobytes()
    assert image.dequantize().tobytes() == row.dequantize().tobytes()


@every_case
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_any_number_of_workers_gives_the_same(
    optype: OperandType, spec: ScaleSpec, layout: Any
) -> None:
    dense = weights(1000, 2500 * 2, optype=optype)
    one, one_stats = pack(dense, optype, spec, layout=layout)
    many, many_stats = pack(dense, optype, spec, layout=layout, workers=5)
    assert parts_of(one) == parts_of(many)
    assert one_stats == many_stats
    assert many.dequantize(workers=3).tobytes() == one.dequantize().tobytes()


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("shape", [(70, 132), (3, 20), (65, 2052)])
def test_unpack_gives_back_every_bit(name: str, layout: Any, shape: tuple[int, int]) -> None:
    optype = OPERAND_TYPES[name]
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(np.uint16)
    limit = NUMBER_TYPES[optype.safetensors].nonfinite
    bits[bits & 0x7FFF >= limit] = 1
    dense = prune_24(bits.view(optype.dtype))
    packed, stats = pack(dense, optype, NONE, layout=layout)
    assert packed.dequantize(optype.dtype).tobytes() == dense.tobytes()
    assert packed.codes().tobytes() == dense.tobytes()
    assert (stats.error_energy, stats.snr_db) == (0, math.inf)
    assert packed.scale is None


@pytest.mark.parametrize("spec", [TENSOR, VECTOR, BLOCK], ids=lambda s: s.kind)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_dequantize_is_the_exact_product_rounded_once(spec: ScaleSpec, dtype: Any) -> None:
    dense = weights(70, 132)
    packed, _ = pack(dense, E4M3, spec)
    got = packed.dequantize(dtype)
    assert got.dtype == dtype
    codes = packed.codes().astype(np.float64)
    bm, bk = {"tensor": (70, 132), "vector": (1, 132), "block": (48, 20)}[spec.kind]
    scale = packed.scale.reshape(-(-70 // bm), -(-132 // bk)).astype(np.float64)
    product = codes * np.repeat(np.repeat(scale, bm, 0)[:70], bk, 1)[:, :132]
    if dtype == ml_dtypes.bfloat16:
        # Nearest by exact distance, among the neighbours.
        near = product.astype(np.float32).view(np.uint32) >> 16
        sides = [(near + d).astype(np.uint16).view(dtype).astype(np.float64) for d in (0, 1)]
        below, above = (np.abs(side - product) for side in sides)
        odd = near & 1
        want = np.where((above < below) | ((above == below) & (odd == 1)), sides[1], sides[0])
        assert np.array_equal(got.astype(np.float64), want)
    else:
        assert got.tolist() == product.astype(dtype).tolist()


def test_quantization_error_is_half_a_step() -> None:
    dense = weights(70, 132)
    packed, _ = pack(dense, E4M3, VECTOR)
    source = dense.astype(np.float64)
    error = np.abs(packed.dequantize(np.float64) - source)
    # Half of 2**-3 relative, of 2**-9 below the normal codes; the quotient's own rounding
    # adds at most 2**-24 of the value.
    scale = packed.scale.astype(np.float64)
    assert (error <= np.abs(source) * (2**-4 + 2**-24) + scale * 2**-10).all()
    assert (error.max(axis=1) > np.abs(source).max(axis=1) * 2**-7).all()


def test_underflow_keeps_the_place() -> None:
    # What rounds to zero is still what is kept: (1,2), not the pair of an empty group.
    dense = np.array([[448, 0, 0, 0, 0, -(2**-12), 2**-12, 0]], np.float32)
    packed, stats = pack(dense, E4M3, TENSOR)
    first, second = decode(packed.meta, 8)
    assert (first.tolist(), second.tolist()) == ([[0, 1]], [[3, 2]])
    assert packed.values.view(np.uint8).tolist() == [[0x7E, 0, 0x80, 0]]
    assert (stats.kept, stats.underflowed, stats.clipped) == (3, 2, 0)


@pytest.mark.parametrize("name", list(OPERAND_TYPES))
def test_negative_zero_is_zero(name: str) -> None:
    optype = OPERAND_TYPES[name]
    dense = np.array([[-0.0, -0.0, 3, -0.0], [-0.0] * 4], np.float32)
    packed, stats = pack(dense, optype, VECTOR if optype.scaled else NONE)
    first, second = decode(packed.meta, optype.meta_k(4))
    if optype.group == 4:
        assert (first.tolist(), second.tolist()) == ([[2], [0]], [[3], [1]])
    else:
        assert (first.tolist(), second.tolist()) == ([[0, 0], [0, 0]], [[1, 1], [1, 1]])
    # The other kept place: behind the 3, or that of the empty pair before it.
    assert not packed.values.view(f"u{optype.itemsize}")[:, 1 if optype.group == 4 else 0].any()
    assert not packed.values.view(f"u{optype.itemsize}")[1].any()
    assert stats.kept == 1
    assert packed.dequantize().tobytes() == np.array([[0, 0, 3, 0], [0] * 4], np.float32).tobytes()


@pytest.mark.parametrize("spec", [TENSOR, VECTOR, BLOCK], ids=lambda s: s.kind)
def test_zeros_get_scale_one(spec: ScaleSpec) -> None:
    packed, stats = pack(np.zeros((50, 40), np.float16), E4M3, spec)
    assert (packed.scale == 1).all()
    assert not packed.values.view(np.uint8).any()
    assert (packed.meta == 0x44).all()
    assert stats == QuantStats(0, 0, 0, 0.0, 0.0, 0.0)
    assert stats.snr_db == math.inf


@pytest.mark.parametrize("spec", [TENSOR, VECTOR, BLOCK], ids=lambda s: s.kind)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_scales_keep_their_promises_at_the_ends_of_the_range(spec: ScaleSpec, source: Any) -> None:
    dense = np.zeros((100, 40), source)
    dense[0, 0] = np.finfo(source).smallest_subnormal
    dense[60, 0] = np.finfo(source).max
    dense[99, 39] = -np.finfo(np.float32).tiny
    packed, stats = pack(dense, E4M3, spec)
    assert check_structure(packed) is None
    top = {np.float32: np.finfo(np.float32).max, np.float64: 448 * float(np.finfo(np.float32).max)}
    assert packed.dequantize(np.float64)[60, 0] == pytest.approx(float(top[source]), rel=2**-23)
    assert stats.amax == np.finfo(source).max


@pytest.mark.parametrize("overflow", ["satfinite", "nan"])
def test_clipping_of_an_unscaled_type(overflow: Any) -> None:
    f16 = OPERAND_TYPES["f16"]
    dense = np.array([[65519, 0, 0, 65520, -1e9, 0, 0, 1]], np.float32)
    packed, stats = pack(dense, f16, NONE, overflow=overflow)
    top = 65504.0 if overflow == "satfinite" else np.inf
    assert packed.values.astype(float).tolist() == [[65504, top, -top, 1]]
    assert (stats.clipped, stats.kept) == (2, 4)
    assert check_structure(packed) is None
    if overflow == "nan":
        assert (stats.error_energy, stats.snr_db) == (math.inf, -math.inf)
        assert packed.dequantize().tolist() == [[65504, 0, 0, np.inf, -np.inf, 0, 0, 1]]
    else:
        assert stats.error_energy == 15.0**2 + 16.0**2 + (1e9 - 65504) ** 2


def test_values_past_a_given_scale_saturate_or_are_nan() -> None:
    dense = np.array([[464, 0, 0, -465]], np.float32)
    for overflow, codes, clipped in (("satfinite", [0x7E, 0xFE], 1), ("nan", [0x7E, 0x7F], 1)):
        info = PackInfo((1, 4), "F32", "e4m3", TENSOR, "given", "row", overflow)
        into = PackedMatrix.empty(info, np.ones(1, np.float32))
        stats = pack_rows(dense, into)
        assert into.values.view(np.uint8).tolist() == [codes]
        assert stats.clipped == clipped


def test_stats_are_those_of_exact_arithmetic() -> None:
    dense = weights(67, 132)
    packed, stats = pack(dense, E4M3, VECTOR)
    source = [Fraction(v) for v in dense.astype(float).ravel().tolist()]
    scale = np.repeat(packed.scale, 132, 1).astype(float).ravel().tolist()
    code = packed.codes().astype(float).ravel().tolist()
    signal = sum(v * v for v in source)
    error = sum(
        (v - Fraction(c) * Fraction(s)) ** 2 for v, c, s in zip(source, code, scale, strict=True)
    )
    assert stats.signal_energy == pytest.approx(float(signal), rel=1e-13)
    assert stats.error_energy == pytest.approx(float(error), rel=1e-13)
    assert stats.snr_db == pytest.approx(10 * math.log10(signal / error), rel=1e-13)
    assert stats.amax == np.abs(dense.astype(float)).max()
    assert stats.clipped == 0
    assert 25 < stats.snr_db < 40


@every_case
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_row_blocks_can_be_packed_one_by_one(
    optype: OperandType, spec: ScaleSpec, layout: Any
) -> None:
    dense = weights(500, 300, optype=optype)
    whole, whole_stats = pack(dense, optype, spec, layout=layout)
    step = whole.row_step
    assert step == (192 if spec is BLOCK else 64)
    tensor_scale = make_scales(amax(dense, TENSOR), optype.max_finite, TENSOR)
    written: dict[str, list[bytes]] = {}
    stats = []
    for r in row_slices(500, step):
        rows = dense[r]
        info = dataclasses.replace(whole.info, shape=rows.shape)
        scale = None
        if spec.kind == "tensor":
            scale = tensor_scale
        elif optype.scaled:
            scale = make_scales(amax(rows, spec), optype.max_finite, spec)
        into = PackedMatrix.empty(info, scale)
        stats.append(pack_rows(rows, into, first_row=r.start))
        of_whole = whole.rows(r)
        assert of_whole.info == into.info
        assert parts_of(of_whole) == parts_of(into)
        assert of_whole.dequantize().tobytes() == whole.dequantize()[r].tobytes()
        for name, (_, _, data) in parts_of(into).items():
            written.setdefault(name, []).append(data)
    for name, (_, _, data) in parts_of(whole).items():
        got = written[name]
        assert b"".join(got[:1] if (name, spec.kind) == ("scale", "tensor") else got) == data
    merged = QuantStats.merge(stats)
    assert QuantStats.merge(reversed(stats)) == merged
    for field in dataclasses.fields(QuantStats):
        want = pytest.approx(getattr(whole_stats, field.name), rel=1e-14)
        assert getattr(merged, field.name) == want


@every_case
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_many_tiles_in_one_go(optype: OperandType, spec: ScaleSpec, layout: Any) -> None:
    # Several tiles of rows and of columns in one call, against single rows of blocks.
    dense = weights(1300, 2092, optype=optype)
    want, _ = pack(dense, optype, spec, layout=layout)
    got = PackedMatrix.empty(want.info, want.scale)
    pack_rows(dense, got)
    assert parts_of(got) == parts_of(want)
    again = PackedMatrix.empty(want.info, want.scale)
    for r in row_slices(1300, want.row_step):
        pack_rows(dense[r], again.rows(r))
    assert parts_of(again) == parts_of(want)


def test_rows_must_start_at_a_step() -> None:
    packed, _ = pack(weights(200, 40), E4M3, BLOCK)
    for rows in (slice(64, 200), slice(0, 64)):
        with pytest.raises(ValueError, match="row 64 is not a multiple of 192"):
            packed.rows(rows)
    assert packed.rows(slice(192, None)).shape == (8, 40)


def test_a_scaled_type_starts_with_its_scale() -> None:
    info = PackInfo((4, 8), "F32", "e4m3", VECTOR, "given", "row", "satfinite")
    for scale in (None, np.ones(1, np.float32), np.ones((4, 1))):
        with pytest.raises(ValueError, match="scale does not fit"):
            PackedMatrix.empty(info, scale)
    with pytest.raises(ValueError, match="scale does not fit"):
        PackedMatrix.empty(
            dataclasses.replace(info, type="f16", scale=NONE), np.ones(1, np.float32)
        )


def test_rows_must_fit() -> None:
    info = PackInfo((4, 8), "F32", "f16", NONE, "given", "row", "satfinite")
    with pytest.raises(ValueError, match="do not fit"):
        pack_rows(np.zeros((8, 8), np.float32), PackedMatrix.empty(info))


@every_case
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("shape", [(0, 128), (64, 0), (0, 0)])
def test_zero_size(
    optype: OperandType, spec: ScaleSpec, layout: Any, shape: tuple[int, int]
) -> None:
    packed, stats = pack(np.empty(shape, np.float32), optype, spec, layout=layout, workers=2)
    assert check_structure(packed) is None
    assert packed.dequantize().shape == shape
    assert stats == QuantStats(0, 0, 0, 0.0, 0.0, 0.0)
    assert packed.to_layout("sm90").to_layout("row").shape == shape


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 3, 299])
@pytest.mark.parametrize("workers", [1, 4])
def test_nan_and_infinity_are_refused_with_their_place(
    value: float, row: int, workers: int
) -> None:
    dense = weights(300, 5000, np.float32)
    dense[row, 1030] = value
    dense[299, 4999] = np.nan
    for spec in (TENSOR, VECTOR):
        with pytest.raises(BadInputError, match=rf"^{value} at row {row}, column 1030$"):
            pack(dense, E4M3, spec, workers=workers)


@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "F64"])
def test_a_signalling_nan_is_refused_like_any(name: str) -> None:
    kind = NUMBER_TYPES[name]
    dense = weights(8, 16, kind.dtype)
    dense.view(kind.unsigned)[5, 6] = kind.nonfinite + 1
    for spec in (TENSOR, VECTOR):
        with pytest.raises(BadInputError, match=r"^nan at row 5, column 6$"):
            pack(dense, E4M3, spec)


@pytest.mark.parametrize("row", [0, 299])
def test_a_violation_is_refused_with_its_place(row: int) -> None:
    dense = weights(300, 5000, np.float32)
    dense[row, 4200:4204] = [1, 2, 0, 3]
    words = rf"nonzeros at row {row}, group 1050 \(columns 4200 to 4203\): not 2:4"
    with pytest.raises(BadInputError, match=words):
        pack(dense, E4M3, VECTOR, workers=2)


def test_a_violation_in_the_odd_last_group_is_seen() -> None:
    dense = np.zeros((2, 12), np.float16)
    dense[1, 9:] = 1
    with pytest.raises(BadInputError, match="row 1, group 2 "):
        pack(dense, E4M3, TENSOR)


@pytest.mark.parametrize(
    ("dense", "words"),
    [
        (np.zeros((2, 6), np.float32), "K = 6"),
        (np.zeros(8, np.float32), "not a matrix"),
        (np.zeros((2, 8), np.int64), "unsupported weight type int64"),
    ],
)
def test_what_cannot_be_packed(dense: np.ndarray, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        pack(dense, E4M3, TENSOR)


def test_scaled_types_need_a_scale_and_others_take_none() -> None:
    with pytest.raises(BadInputError, match="'e4m3' needs a scale"):
        pack(np.zeros((4, 8), np.float32), E4M3, NONE)
    with pytest.raises(BadInputError, match="'bf16' takes no scale"):
        pack(np.zeros((4, 8), np.float32), OPERAND_TYPES["bf16"], TENSOR)


def test_strided_input_packs_as_its_copy() -> None:
    dense = weights(130, 260)
    want, _ = pack(dense, E4M3, VECTOR, layout="sm90")
    for strange in (np.asfortranarray(dense), np.repeat(dense, 2, axis=1)[:, ::2]):
        assert parts_of(pack(strange, E4M3, VECTOR, layout="sm90")[0]) == parts_of(want)


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("shape", [(4096, 4096), (64, 1 << 18)])
def test_temporaries_stay_small(layout: Any, shape: tuple[int, int]) -> None:
    dense = np.zeros(shape, ml_dtypes.bfloat16)
    dense[:, ::4] = 1.5
    tracemalloc.start()
    try:
        packed, _ = pack(dense, E4M3, ScaleSpec("block", (128, 128)), layout=layout)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    owned = sum(len(data) for _, _, data in parts_of(packed).values())
    assert peak - owned < 24 << 20


# What the file says.


def some_info(**changes: Any) -> PackInfo:
    info = PackInfo((70, 132), "BF16", "e4m3", BLOCK, "magnitude", "sm90", "nan")
    return dataclasses.replace(info, **changes)


def test_info_as_json() -> None:
    assert some_info().to_json() == {
        "shape": [70, 132],
        "source_dtype": "BF16",
        "type": "e4m3",
        "scale": "block",
        "block": [48, 20],
        "pruned": "magnitude",
        "layout": "sm90",
        "overflow": "nan",
    }
    for info in (some_info(), some_info(scale=TENSOR), some_info(type="f16", scale=NONE)):
        assert PackInfo.from_json(info.to_json()) == info


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layout", "sm100", "unknown layout 'sm100'"),
        ("type", "e2m1", "unknown operand type 'e2m1'"),
        ("scale", "mxfp4", "unknown scale kind 'mxfp4'"),
        ("scale", "mx", "48x20: kind 'mx' has 1x32"),
        ("scale", "none", "'none' takes no block size"),
        ("pruned", "lottery", "unknown pruning 'lottery'"),
        ("overflow", "wrap", "unknown overflow mode 'wrap'"),
        ("type", "s8", "s8 has neither NaN nor infinity"),
        ("type", "tf32", "operand type 'tf32' takes no scale"),
        ("source_dtype", "F4", "unknown source dtype 'F4'"),
        ("shape", [70], r"field 'shape' is \[70\]"),
        ("shape", "70x132", "field 'shape' is '70x132'"),
        ("shape", [True, 132], r"field 'shape' is \[True, 132\]"),
        ("shape", [70, 130], r"shape \[70, 130\] is not"),
        ("shape", [-1, 132], r"shape \[-1, 132\] is not"),
        ("block", [48], r"field 'block' is \[48\]"),
        ("block", [48, 22], "scale block 48x22"),
        ("block", None, "'block' needs a block size"),
        ("layout", 3, "field 'layout' is 3, not a string"),
        ("type", ["e4m3"], "field 'type' is"),
    ],
)
def test_info_refuses_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        PackInfo.from_json({**some_info().to_json(), field: value})


def test_info_refuses_unknown_and_missing_fields() -> None:
    with pytest.raises(BadInputError, match="unknown field 'rotated'"):
        PackInfo.from_json({**some_info().to_json(), "rotated": True})
    for field in some_info().to_json():
        rest = {k: v for k, v in some_info().to_json().items() if k != field}
        with pytest.raises(BadInputError, match=f"lacks '{field}'"):
            PackInfo.from_json(rest)
    with pytest.raises(BadInputError, match="not an object"):
        PackInfo.from_json(["e4m3"])


# Structure.


@pytest.mark.parametrize(("layout", "names"), [("row", ["values", "meta"]), ("sm90", ["blocks"])])
def test_structure_of_parts(layout: Any, names: list[str]) -> None:
    packed, _ = pack(weights(70, 132), E4M3, VECTOR, layout=layout)
    assert check_structure(packed) is None
    for name in [*names, "scale"]:
        part = getattr(packed, name)
        fault = check_structure(dataclasses.replace(packed, **{name: None}))
        assert fault == f"{name} missing"
        fault = check_structure(dataclasses.replace(packed, **{name: part[:-1]}))
        assert fault is not None and fault.startswith(f"{name} is {part.dtype.name} [")
        fault = check_structure(dataclasses.replace(packed, **{name: part.view("i1")}))
        assert fault is not None and fault.startswith(f"{name} is int8 [")
    other = "meta" if layout == "sm90" else "blocks"
    fault = check_structure(dataclasses.replace(packed, **{other: np.zeros((1, 1), np.uint8)}))
    assert fault == f"{other} does not belong to it"


@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_structure_of_contents(layout: Any) -> None:
    clean, _ = pack(weights(70, 132), E4M3, VECTOR)

    def fault(**changes: np.ndarray) -> str | None:
        return check_structure(dataclasses.replace(clean, **changes).to_layout(layout))

    assert fault() is None
    meta = clean.meta.copy()
    meta[69, 3] = 0x45
    assert fault(meta=meta) == "metadata at row 69, group 6 is no ascending pair"
    values = clean.values.copy()
    values.view(np.uint8)[5, 7] = 0xFF
    assert fault(values=values) == "value at row 5, kept column 7 is not finite"
    scale = clean.scale.copy()
    for bad in (0.0, np.nan, np.inf, -1.0, 1e-40):
        scale[8] = bad
        found = fault(scale=scale)
        assert found is not None
        assert found.endswith("at [8, 0] is not positive, normal and finite")


@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_structure_names_rows_far_down(layout: Any) -> None:
    clean, _ = pack(weights(1001, 2000), E4M3, VECTOR)
    meta, values = clean.meta.copy(), clean.values.copy()
    meta[999, 3] = 0x45
    values.view(np.uint8)[998, 7] = 0x7F

    def fault(**changes: np.ndarray) -> str | None:
        return check_structure(dataclasses.replace(clean, **changes).to_layout(layout))

    assert fault(meta=meta) == "metadata at row 999, group 6 is no ascending pair"
    assert fault(values=values) == "value at row 998, kept column 7 is not finite"
    image = clean.to_layout("sm90")
    blocks = image.blocks.copy()
    blocks[15, 0, 63 * 64] = 1
    bad = check_structure(dataclasses.replace(image, blocks=blocks))
    assert bad is not None
    assert bad.startswith("padding at row 1023, group ")


def test_structure_allows_nan_where_the_mode_makes_it() -> None:
    dense = np.array([[1e9, 0, 0, 1]], np.float32)
    packed, _ = pack(dense, OPERAND_TYPES["f16"], NONE, overflow="nan")
    assert np.isinf(packed.values[0, 0])
    assert check_structure(packed) is None


def test_structure_of_padding() -> None:
    packed, _ = pack(weights(70, 132), E4M3, VECTOR, layout="sm90")
    places = set()
    for block, row in itertools.product(((1, 0), (1, 1)), (6, 63)):
        blocks = packed.blocks.copy()
        blocks[block][row * 64] ^= 0x80
        fault = check_structure(dataclasses.replace(packed, blocks=blocks))
        assert fault is not None
        assert fault.startswith(f"padding at row {64 + row}, group ")
        places.add(fault)
    assert len(places) == 4
