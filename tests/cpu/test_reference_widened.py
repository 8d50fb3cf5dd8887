"""Weights widened to 16 bits with their scale, bit by bit, and what that costs."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp24cli import fragments
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import PackedMatrix, PackInfo, pack
from sp24cli.reference import f32_bound, product, widened, widened_product, widening_bound
from sp24cli.scaling import ScaleSpec
from tests.cpu.modelfile import DTYPES, Array, naive_prune, normal

E4M3 = OPERAND_TYPES["e4m3"]
SMALL = [ScaleSpec("block", b) for b in [(16, 16), (32, 32), (1, 32), (8, 12)]]
SPECS = [*SMALL, ScaleSpec.parse("mx"), ScaleSpec("block", (128, 128)), ScaleSpec("vector")]
BF16, F16 = DTYPES["BF16"], DTYPES["F16"]
every_type = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
#: Significant bits, least exponent of a normal, largest value.
FORMATS = {
    np.dtype(np.float32): (24, -126, Fraction(float(np.finfo(np.float32).max))),
    BF16: (8, -126, Fraction(float(ml_dtypes.finfo(BF16).max))),
    F16: (11, -14, Fraction(65504)),
}


def rounded(value: Fraction, dtype: Any) -> Fraction:
    """``value`` to nearest even in ``dtype``, saturating."""
    bits, least, most = FORMATS[np.dtype(dtype)]
    if value == 0:
        return value
    exponent = least
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    step = Fraction(2) ** (exponent - bits + 1)
    # Python rounds halves to even.
    return max(-most, min(most, round(value / step) * step))


def one_value(code: int, scale: float) -> PackedMatrix:
    info = PackInfo((1, 4), "F32", "e4m3", SMALL[2], "given", "row", "satfinite")
    values = np.array([[code, 0]], np.uint8).view(E4M3.dtype)
    meta = np.array([[0b0100]], np.uint8)
    return PackedMatrix(info, values, meta, None, np.array([[scale]], np.float32))


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F),
    st.floats(float(np.finfo(np.float32).tiny), 2.0**100, width=32),
    st.sampled_from([BF16, F16]),
)
def test_a_product_is_rounded_to_f32_and_then_to_the_type(
    code: int, scale: float, dtype: Any
) -> None:
    value = Fraction(float(np.uint8(code).view(E4M3.dtype)))
    want = rounded(rounded(value * Fraction(scale), np.float32), dtype)
    got = widened(one_value(code, scale), dtype)
    assert got.dtype == dtype
    assert Fraction(float(got[0, 0])) == want
    assert got[0, 1:].tolist() == [0, 0, 0]


def test_the_first_rounding_is_there_and_shows() -> None:
    """13/8 times this scale lies a hair above the middle of two bf16, and in float32 on it."""
    found = []
    for scale in (np.float32(1) + np.arange(1, 1 << 23, 2, dtype=np.float32) * 2.0**-23).tolist():
        exact = Fraction(13, 8) * Fraction(scale)
        once = np.float64(exact.numerator / exact.denominator)
        if float(np.float32(once)) * 2**8 % 1 == 0 and once * 2**8 % 1 != 0:
            found.append(scale)
            break
    (scale,) = found
    code = int(np.float32(1.625).astype(E4M3.dtype).view(np.uint8))
    packed = one_value(code, scale)
    exact = Fraction(13, 8) * Fraction(scale)
    twice = rounded(rounded(exact, np.float32), BF16)
    assert Fraction(float(widened(packed, BF16)[0, 0])) == twice
    assert Fraction(float(packed.dequantize(BF16)[0, 0])) == rounded(exact, BF16)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("layout", ["row", "sm90"])
@every_type
def test_with_few_bits_in_the_scale_it_is_what_unpack_gives(
    spec: ScaleSpec, layout: Any, dtype: Any
) -> None:
    packed, _ = pack(naive_prune(normal(1, (70, 132))), E4M3, spec, layout=layout)
    if spec.kind != "mx":
        # 20 significant bits, times the 4 of a code, are exact in float32.
        packed.scale.view(np.uint32)[...] &= np.uint32(0xFFFFFFF0)
    got, want = widened(packed, dtype), packed.dequantize(dtype)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(("overflow", "most"), [("satfinite", 65504.0), ("nan", np.inf)])
def test_beyond_f16(overflow: Any, most: float) -> None:
    dense = np.array([[1e6, 0, 0, -3.0]], np.float32)
    packed, _ = pack(dense, E4M3, SMALL[2], overflow=overflow)
    assert widened(packed, F16).astype(float)[0, 0] == most
    assert widened(packed, BF16).astype(float)[0, 0] == float(np.float32(1e6).astype(BF16))


def naive_product(packed: PackedMatrix, x: Array) -> tuple[Array, Array]:
    w, b = widened(packed, x.dtype).astype(np.float64), x.astype(np.float64)
    return w @ b.T, np.abs(w) @ np.abs(b).T


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("tiny", [False, True])
@every_type
def test_what_widening_costs(spec: ScaleSpec, tiny: bool, dtype: Any) -> None:
    weight = naive_prune(normal(1, (40, 132)))
    if tiny:
        # Where the type has subnormals only, or nothing.
        weight *= np.float32(2.0**-20 if dtype == F16 else 2.0**-121)
    packed, _ = pack(weight, E4M3, spec)
    x = normal(2, (6, 132), "F32", 1.0).astype(dtype)
    exact, sizes = product(packed, x)
    got, got_sizes = widened_product(packed, x)
    want, want_sizes = naive_product(packed, x)
    assert np.allclose(got, want, rtol=1e-12, atol=0)
    assert np.allclose(got_sizes, want_sizes, rtol=1e-12, atol=0)
    off = np.abs(got - exact)
    bound = widening_bound(sizes, x)
    assert (off <= bound).all()
    if spec.kind == "mx" and not tiny:
        assert not off.any()
    else:
        # Of the size of what happens: 66 roundings that go either way.
        assert off.max() > bound.max() / 200


@every_type
def test_the_bound_is_that_of_one_rounding_a_weight(dtype: Any) -> None:
    """The worst: every weight moves by half an ulp of the type, in one direction."""
    u = 2.0 ** -FORMATS[dtype][0]
    x = np.ones((1, 8), np.float32).astype(dtype)
    bound = widening_bound(np.array([[4.0]]), x)
    assert bound[0, 0] == pytest.approx(4 * u, rel=2e-2)
    assert bound[0, 0] > 4 * u
    nothing = widening_bound(np.array([[0.0]]), x)[0, 0]
    assert nothing == pytest.approx(
        8 * float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2, rel=1e-4
    )


@every_type
def test_a_sum_in_float32_stays_within_the_bound(dtype: Any) -> None:
    packed, _ = pack(naive_prune(normal(1, (24, 128))), E4M3, SMALL[1])
    x = normal(2, (5, 128), "F32", 1.0).astype(dtype)
    want, sizes = widened_product(packed, x)
    w = widened(packed, dtype).astype(np.float32)
    total = np.zeros((24, 5), np.float32)
    for k in np.argsort(-np.abs(w).sum(axis=0)):
        total += w[:, k, None] * x[None, :, k].astype(np.float32)
    off = np.abs(total - want)
    assert off.max() > 0
    assert (off <= f32_bound(sizes, 64)).all()
    # One ulp of one weight is seen.
    wrong = w.copy()
    wrong[3, int(np.abs(w[3]).argmax())] *= np.float32(1 + 2.0 ** (1 - FORMATS[dtype][0]))
    moved = wrong.astype(np.float64) @ x.astype(np.float64).T
    assert (np.abs(moved - want) > f32_bound(sizes, 64))[3].any()


@every_type
def test_powers_of_two_of_a_plain_weight_multiply_in_the_type(dtype: Any) -> None:
    """What a kernel makes of mx there, every code under every scale: the code as it is in the type
    times the scale as it is in the type, rounded once, is the definition's operand bit for bit."""
    name = "bf16" if dtype == BF16 else "f16"
    exponents = np.arange(-126, 127)
    stored = (exponents + 127).astype(np.uint8)
    plain = np.array([fragments.plain(s[None], "mx", name) for s in stored])
    first, last = exponents[plain][[0, -1]]
    assert (first, last) == ((-126, 118) if name == "bf16" else (-24, 7))
    assert plain.sum() == last - first + 1
    code = np.arange(256, dtype=np.uint8).view(E4M3.dtype).astype(np.float64)[:, None]
    scale = np.exp2(exponents[plain].astype(np.float64))
    for exact in (code, scale):
        assert np.array_equal(exact.astype(dtype).astype(np.float64), exact, equal_nan=True)
    product = code * scale
    assert np.array_equal(product.astype(np.float32).astype(np.float64), product, equal_nan=True)
    m, k = scale.size, 512
    info = PackInfo((m, k), "F32", "e4m3", ScaleSpec.parse("mx"), "given", "row", "satfinite")
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (m, 256)).copy().view(E4M3.dtype)
    meta = np.full((m, k // 8), 0x44, np.uint8)
    of_row = np.repeat(stored[plain][:, None], k // 32, axis=1)
    packed = PackedMatrix(info, values, meta, None, of_row.view(ml_dtypes.float8_e8m0fnu))
    got = widened(packed, dtype).reshape(m, -1, 4)[:, :, :2].reshape(m, 256).T
    # Of 62,000 products some thousands differ.
    distinct, of = np.unique(np.nan_to_num(product), return_inverse=True)
    want = np.array([rounded(Fraction(v), dtype) for v in distinct])[of].reshape(product.shape)
    number = ~np.isnan(code[:, 0])
    assert np.array_equal(got[number].astype(np.float64), want[number].astype(np.float64))
    assert np.isnan(got[~number].astype(np.float64)).all() and np.isfinite(want.astype(float)).all()


@every_type
def test_no_scale_of_a_plain_weight_takes_a_code_beyond_the_type(dtype: Any) -> None:
    name = "bf16" if dtype == BF16 else "f16"
    most = np.float32(2.0 ** (118 if name == "bf16" else 7))
    for scale, plain in ((most, True), (-most, True), (np.nextafter(most, np.inf), False)):
        assert fragments.plain(np.array([[1, scale]], np.float32), "block", name) == plain
    assert not fragments.plain(np.array([1, np.nan], np.float32), "block", name)
    assert not fragments.plain(np.array([np.inf], np.float32), "block", name)
    largest = np.float32(448) * most
    assert np.isfinite(largest.astype(dtype).astype(np.float32))
    assert fragments.plain(None, "none", name)
