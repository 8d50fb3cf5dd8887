"""Rounding, once, from every source type: against an exact search of the table of all codes."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.errors import BadInputError
from sp24cli.fp8 import (
    Overflow,
    convert,
    find_unrounded,
    round_to,
    to_e4m3,
    to_e5m2,
    to_s8,
    to_tf32,
)
from sp24cli.optypes import OPERAND_TYPES

MODES: list[Overflow] = ["satfinite", "nan"]
both_modes = pytest.mark.parametrize("overflow", MODES)


class Format:
    """A float format by definition: every nonnegative code's exact value, in order."""

    def __init__(self, exponent_bits: int, mantissa_bits: int, codes: int, dtype: Any) -> None:
        bias = 2 ** (exponent_bits - 1) - 1
        self.dtype = np.dtype(dtype)
        self.bits = np.dtype(f"u{self.dtype.itemsize}")
        self.sign = 1 << (exponent_bits + mantissa_bits)
        self.codes = codes
        # One more than there are: where rounding past the end would land.
        self.values: list[Fraction] = []
        for code in range(codes + 1):
            exponent, mantissa = divmod(code, 2**mantissa_bits)
            normal = Fraction(2**mantissa_bits if exponent else 0)
            power = max(exponent, 1) - bias - mantissa_bits
            self.values.append((normal + mantissa) * Fraction(2) ** power)

    @cached_property
    def middles(self) -> list[Fraction]:
        return [(a + b) / 2 for a, b in zip(self.values, self.values[1:], strict=False)]

    def code(self, x: float, overflow: Overflow, past_end: int) -> int:
        """The code of a number: nearest, ties to even; ``past_end`` is that of overflow."""
        sign = self.sign if math.copysign(1, x) < 0 else 0
        last = self.codes - 1
        if math.isinf(x):
            code = self.codes
        else:
            magnitude = abs(Fraction(x))
            upper = bisect.bisect_left(self.values, magnitude)
            if upper > self.codes:
                code = self.codes
            elif self.values[upper] == magnitude:
                code = upper
            else:
                below, above = magnitude - self.values[upper - 1], self.values[upper] - magnitude
                code = upper if (above, upper % 2) < (below, (upper - 1) % 2) else upper - 1
        if code > last:
            code = last if overflow == "satfinite" else past_end
        return code | sign


E4M3 = Format(4, 3, 0x7F, ml_dtypes.float8_e4m3fn)
E5M2 = Format(5, 2, 0x7C, ml_dtypes.float8_e5m2)
F16 = Format(5, 10, 0x7C00, np.float16)
BF16 = Format(8, 7, 0x7F80, ml_dtypes.bfloat16)
#: By its 19 bits, without those that float32 has below.
TF32 = Format(8, 10, 0x3FC00, np.float32)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "f16": F16, "bf16": BF16}
FP8 = {"e4m3": (to_e4m3, E4M3, 0x7F), "e5m2": (to_e5m2, E5M2, 0x7C)}
each_fp8 = pytest.mark.parametrize(("into", "form", "past_end"), FP8.values(), ids=FP8)


def want_codes(
    form: Format, numbers: np.ndarray, overflow: Overflow, past_end: int, nan: int
) -> list[int]:
    """The codes of ``numbers``; NaN in place of a number has one code, without a sign."""
    codes = [
        nan if math.isnan(x) else form.code(x, overflow, past_end)
        for x in numbers.astype(np.float64).ravel().tolist()
    ]
    # E4M3 has no infinity: past the end lies the one NaN.
    return [nan if c & ~form.sign == nan else c for c in codes]


def check(form: Format, got: np.ndarray, want: list[int], numbers: np.ndarray) -> None:
    assert got.dtype == form.dtype
    assert got.shape == numbers.shape
    codes = got.view(form.bits).ravel()
    wrong = np.flatnonzero(codes != np.array(want, form.bits))
    assert wrong.size == 0, [
        (float(numbers.ravel()[i]), hex(codes[i]), hex(want[i])) for i in wrong[:5]
    ]


def near(points: list[Fraction], dtype: Any) -> np.ndarray:
    """``points`` (all exact in ``dtype``) and their two neighbours, of both signs."""
    exact = np.array([float(p) for p in points]).astype(dtype)
    assert [Fraction(float(p)) for p in exact] == points
    infinity = np.array(np.inf, dtype)
    around = np.concatenate([exact, np.nextafter(exact, infinity), np.nextafter(exact, -infinity)])
    return np.concatenate([around, -around])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the oracle's own casts
@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
@each_fp8
@both_modes
def test_every_16_bit_value(
    into: Any, form: Format, past_end: int, overflow: Overflow, source: Any
) -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(source)
    check(
        form, into(numbers, overflow=overflow), want_codes(form, numbers, overflow, past_end, 0x7F),
        numbers,
    )  # fmt: skip


@pytest.mark.parametrize("source", [np.float32, np.float64])
@each_fp8
@both_modes
def test_midpoints_and_codes_and_their_neighbours(
    into: Any, form: Format, past_end: int, overflow: Overflow, source: Any
) -> None:
    numbers = near(form.middles + form.values, source)
    check(
        form, into(numbers, overflow=overflow), want_codes(form, numbers, overflow, past_end, 0x7F),
        numbers,
    )  # fmt: skip


@each_fp8
@both_modes
def test_float64_far_from_float32(
    into: Any, form: Format, past_end: int, overflow: Overflow
) -> None:
    # What is lost on the way to float32 alone decides: 2**-30 and 2**-52 of a midpoint.
    numbers = np.concatenate(
        [np.array([float(m) for m in form.middles]) * (1 + s * 2.0**-p)
         for p in (24, 25, 30, 51) for s in (-1, 1)]
        + [np.array([1e-300, 5e-324, 1e-46, 1e39, 1e300, np.inf])]
    )  # fmt: skip
    numbers = np.concatenate([numbers, -numbers])
    check(
        form, into(numbers, overflow=overflow), want_codes(form, numbers, overflow, past_end, 0x7F),
        numbers,
    )  # fmt: skip


def test_e4m3_by_hand() -> None:
    numbers = [464, 464.01, 1e9, math.inf, -math.inf, math.nan, 2**-10, -(2**-10), -0.0, 448, 2**-9]
    for dtype in (np.float32, np.float64):
        x = np.array(numbers).astype(dtype)
        satfinite = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x80, 0x7E, 0x01]
        nan = [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x00, 0x80, 0x80, 0x7E, 0x01]
        assert to_e4m3(x).view(np.uint8).tolist() == satfinite
        assert to_e4m3(x, overflow="nan").view(np.uint8).tolist() == nan


def test_e5m2_by_hand() -> None:
    x = np.array([61439, 61440, -61440, math.inf, math.nan, 57344, 2**-17, -(2**-16)], np.float32)
    assert to_e5m2(x).view(np.uint8).tolist() == [
        0x7B, 0x7B, 0xFB, 0x7B, 0x7F, 0x7B, 0x00, 0x81,
    ]  # fmt: skip
    assert to_e5m2(x, overflow="nan").view(np.uint8).tolist() == [
        0x7B, 0x7C, 0xFC, 0x7C, 0x7F, 0x7B, 0x00, 0x81,
    ]  # fmt: skip


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["f16", "bf16"])
@both_modes
def test_16_bit_targets_round_once(name: str, overflow: Overflow, source: Any) -> None:
    form = FORMATS[name]
    rng = np.random.default_rng(0)
    # Ends of the range, the step to normal numbers, and codes at random.
    codes = {0, 1, 2, form.codes - 2, form.codes - 1}
    codes |= set(range((form.values.index(Fraction(1))) - 3, form.values.index(Fraction(1)) + 3))
    codes |= set(rng.integers(0, form.codes, 2000).tolist())
    points = [p for c in sorted(codes) for p in (form.values[c], form.middles[c])]
    limit = Fraction(float(np.finfo(source).max))
    numbers = near([p for p in points if p <= limit], source)
    want = want_codes(form, numbers, overflow, form.codes, -1)
    check(form, convert(numbers, OPERAND_TYPES[name], overflow), want, numbers)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_float64_to_16_bits_is_not_rounded_by_way_of_float32(name: str) -> None:
    form = FORMATS[name]
    one = form.values.index(Fraction(1))
    for code in range(one, one + 16):
        for sign in (-1, 1):
            x = np.array([float(form.middles[code] * (1 + sign * Fraction(2) ** -50))])
            want = [form.code(float(x[0]), "satfinite", 0)]
            check(form, convert(x, OPERAND_TYPES[name]), want, x)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_16_bit_targets_past_the_end(name: str) -> None:
    form, optype = FORMATS[name], OPERAND_TYPES[name]
    x = np.array([np.inf, -np.inf, 1e300, -1e300])
    top, infinity = form.codes - 1, form.codes
    clamped = convert(x, optype, "satfinite").view(np.uint16).tolist()
    assert clamped == [top, top | 0x8000, top, top | 0x8000]
    unbounded = convert(x, optype, "nan").view(np.uint16).tolist()
    assert unbounded == [infinity, infinity | 0x8000, infinity, infinity | 0x8000]
    for mode in MODES:
        for source in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
            nan = convert(np.array([np.nan, -np.nan], source), optype, mode)
            assert np.isnan(nan.astype(np.float32)).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # np.isnan's own cast
@pytest.mark.parametrize("name", list(FORMATS))
@both_modes
def test_every_kind_of_nan_stays_one(name: str, overflow: Overflow) -> None:
    # A mantissa of ones carries when rounded, a signalling NaN has few bits to lose.
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001], np.uint32)
    wide = np.array([0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FF0000000000001], np.uint64)
    for x in (bits.view(np.float32), wide.view(np.float64)):
        got = round_to(x, FORMATS[name].dtype, overflow)
        assert np.isnan(got.astype(np.float32)).all()


@pytest.mark.parametrize("name", list(FORMATS))
@both_modes
def test_a_value_of_the_type_itself_stays(name: str, overflow: Overflow) -> None:
    form = FORMATS[name]
    codes = np.arange(form.codes, dtype=form.bits)
    codes = np.concatenate([codes, codes | form.sign])
    got = convert(codes.view(form.dtype), OPERAND_TYPES[name], overflow)
    assert got.view(form.bits).tolist() == codes.tolist()


def tf32_codes(x: np.ndarray, overflow: Overflow = "satfinite") -> np.ndarray:
    """The upper 19 bits of ``x`` rounded to tf32; the others must be zero."""
    bits = to_tf32(x, overflow=overflow).view(np.uint32)
    assert not (bits & 0x1FFF).any()
    return bits >> 13


@pytest.mark.parametrize("source", [np.float32, np.float64])
@both_modes
def test_tf32_rounds_once_to_nearest_even(overflow: Overflow, source: Any) -> None:
    rng = np.random.default_rng(0)
    one = TF32.values.index(Fraction(1))
    # Subnormals, the step to normal numbers, around 1, the end of the range, and at random.
    codes = {0, 1, 2, 1023, 1024, 1025, *range(one - 3, one + 3), TF32.codes - 2, TF32.codes - 1}
    codes |= set(rng.integers(0, TF32.codes, 2000).tolist())
    points = [p for c in sorted(codes) for p in (TF32.values[c], TF32.middles[c])]
    numbers = near([p for p in points if p <= Fraction(float(np.finfo(source).max))], source)
    want = want_codes(TF32, numbers, overflow, TF32.codes, -1)
    assert tf32_codes(numbers, overflow).tolist() == want


def test_tf32_by_hand() -> None:
    x = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11 + 2.0**-23), 2.0**-137, -0.0])
    assert to_tf32(x).tolist() == [1, 1 + 2.0**-9, -(1 + 2.0**-10), 0, 0]
    assert np.signbit(to_tf32(x)).tolist() == [False, False, True, False, True]
    largest = OPERAND_TYPES["tf32"].max_finite
    ends = np.array([np.finfo(np.float32).max, -1e300, np.inf, largest])
    assert to_tf32(ends).tolist() == [largest, -largest, largest, largest]
    assert to_tf32(ends, overflow="nan").tolist() == [np.inf, -np.inf, np.inf, largest]
    # One step of its last bit below the tie past the end.
    assert to_tf32(np.array([largest + 2.0**116 * 0.999]), overflow="nan").tolist() == [largest]
    assert np.isnan(to_tf32(np.array([np.nan, -np.nan], np.float32))).all()


def test_every_float32_exponent_and_cut_of_tf32() -> None:
    # All patterns of the 13 bits that go, below an even, an odd and a full mantissa.
    low = np.arange(1 << 13, dtype=np.uint32)
    for high in (0x3F800000, 0x3F802000, 0x3FFFE000, 0x00000000, 0x80002000, 0x7F7FE000):
        got = to_tf32((high | low).view(np.float32), overflow="nan").view(np.uint32)
        up = (low > 0x1000) | ((low == 0x1000) & bool(high & 0x2000))
        assert got.tolist() == (high + np.where(up, 0x2000, 0)).tolist()


@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_s8_rounds_once_to_nearest_even_and_is_symmetric(source: Any) -> None:
    halves = np.arange(-260, 261).astype(source) / 2
    numbers = np.concatenate([halves, np.nextafter(halves, source(9e9)), np.nextafter(halves, 0)])
    want = [max(-127, min(127, round(Fraction(float(x))))) for x in numbers]
    assert to_s8(numbers).tolist() == want
    ends = np.array([np.inf, -np.inf, 1e30, np.nan, -0.0], source)
    assert to_s8(ends).tolist() == [127, -127, 127, 0, 0]


def test_s8_from_16_bit_types_is_that_of_float32() -> None:
    for source in (np.float16, ml_dtypes.bfloat16):
        bits = np.arange(1 << 16, dtype=np.uint16)
        numbers = bits.view(source)
        numbers = numbers[np.isfinite(numbers.astype(np.float32))]
        want = np.clip(np.rint(numbers.astype(np.float64)), -127, 127).astype(int)
        assert to_s8(numbers).tolist() == want.tolist()


def test_s8_has_no_nan_to_overflow_to() -> None:
    with pytest.raises(BadInputError, match="s8 has neither NaN nor infinity"):
        convert(np.ones(3, np.float32), OPERAND_TYPES["s8"], "nan")


def test_what_tf32_does_not_hold_is_found() -> None:
    values = to_tf32(np.random.default_rng(0).standard_normal((4, 6), np.float32))
    assert find_unrounded(values) is None
    values.view(np.uint32)[2, 5] |= 1
    assert find_unrounded(values) == (2, 5)


def test_float64_to_float32_saturates_or_not() -> None:
    x = np.array([1e39, -np.inf, 1.5])
    largest = float(np.finfo(np.float32).max)
    float32 = np.dtype(np.float32)
    assert round_to(x, float32).tolist() == [largest, -largest, 1.5]
    assert round_to(x, float32, "nan").tolist() == [np.inf, -np.inf, 1.5]
    narrow = np.array([np.inf, 2.5], np.float32)
    assert round_to(narrow, float32).tolist() == [largest, 2.5]
    for numbers in (x, narrow):
        assert round_to(numbers, np.dtype(np.float64), "nan").tolist() == numbers.tolist()
        clamped = np.clip(numbers.astype(np.float64), -np.finfo(float).max, np.finfo(float).max)
        assert round_to(numbers, np.dtype(np.float64)).tolist() == clamped.tolist()


@pytest.mark.parametrize("name", list(OPERAND_TYPES))
def test_shapes_and_strides(name: str) -> None:
    optype = OPERAND_TYPES[name]
    x = np.random.default_rng(0).standard_normal((6, 10, 4)).astype(np.float32)
    flat = convert(x.reshape(-1).copy(), optype)
    for strange in (x, np.asfortranarray(x), x[::-1, :, ::2], x[:0], x[0, 0, 0]):
        got = convert(np.asarray(strange), optype)
        assert got.shape == strange.shape
        assert got.astype(float).tolist() == convert(strange.copy(), optype).astype(float).tolist()
    assert convert(x, optype).tobytes() == flat.tobytes()


def test_the_source_is_left_alone() -> None:
    for source in (np.float32, np.float64):
        x = np.array([1e9, 3.3, np.nan, -5e-5], source)
        before = x.tobytes()
        for optype in OPERAND_TYPES.values():
            convert(x, optype)
        assert x.tobytes() == before


def test_types_that_are_not_converted() -> None:
    with pytest.raises(BadInputError, match="unsupported weight type complex64"):
        to_e4m3(np.ones(3, np.complex64))
    with pytest.raises(BadInputError, match="not rounded to I8"):
        round_to(np.ones(3, np.float32), np.dtype(np.int8))


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [(to_e4m3, ml_dtypes.float8_e4m3fn), (to_e5m2, ml_dtypes.float8_e5m2)],
)
def test_packed_pairs_and_quads_are_the_codes_in_order(convert: Any, dtype: Any) -> None:
    """PTX's x2 and x4: element i in bits 8i to 8i + 7 of a word, as bytes lie in memory."""
    codes = convert(np.array([1.0, -2.0, 0.5, 448.0, -0.0, 3.0, 1e9, -1e9], np.float32))
    assert codes.dtype == dtype
    flat = codes.view(np.uint8).tolist()
    for count, word in ((2, "<u2"), (4, "<u4")):
        packed = codes.view(word).tolist()
        want = [
            sum(code << 8 * i for i, code in enumerate(flat[start : start + count]))
            for start in range(0, 8, count)
        ]
        assert packed == want


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_both_modes_at_the_end_of_e4m3(source: Any) -> None:
    """464, half way to what would be next, is the last that rounds down."""
    values = np.array([448, 464, -464, 480, -480, 6e4, np.inf, -np.inf, np.nan], source)
    finite = to_e4m3(values, overflow="satfinite").view(np.uint8).tolist()
    assert finite == [0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x7F]
    whole = to_e4m3(values, overflow="nan").view(np.uint8).tolist()
    assert whole == [0x7E, 0x7E, 0xFE] + [0x7F] * 6  # NaN has no sign, as in PTX
    if source != ml_dtypes.bfloat16:
        beyond = np.nextafter(source(464), source(np.inf))
        assert to_e4m3(np.array([beyond]), overflow="nan").view(np.uint8).tolist() == [0x7F]
        assert to_e4m3(np.array([beyond])).view(np.uint8).tolist() == [0x7E]
