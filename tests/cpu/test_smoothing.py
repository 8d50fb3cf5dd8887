"""SmoothQuant's factors, and columns multiplied by them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp24cli.bits import NUMBER_TYPES
from sp24cli.errors import BadInputError
from sp24cli.scaling import find_bad
from sp24cli.smoothing import (
    apply,
    check_alpha,
    check_amax,
    check_factors,
    column_amax,
    divide,
    factors,
)
from tests.cpu.modelfile import normal


def test_factors_by_hand() -> None:
    x, w = np.array([16.0, 1, 0, 3, 0]), np.array([0.25, 4, 2, 0, 0])
    assert factors(x, w, 0.5).tolist() == [8, 0.5, 1, 1, 1]
    assert factors(x, w, 1.0).tolist() == [16, 1, 1, 1, 1]
    assert factors(x, w, 0.0).tolist() == [4, 0.25, 1, 1, 1]
    assert factors(x, w, 0.75).tolist() == [np.float32(8 * 2**0.5), np.float32(0.5**0.5), 1, 1, 1]


@settings(deadline=None)
@given(
    st.floats(1e-30, 1e30),
    st.floats(1e-30, 1e30),
    st.floats(0, 1),
)
def test_factors_are_those_of_the_paper_rounded(x: float, w: float, alpha: float) -> None:
    (factor,) = factors(np.array([x]), np.array([w]), alpha)
    assert factor.dtype == np.float32
    want = math.exp(alpha * math.log(x) - (1 - alpha) * math.log(w))
    # Half an ulp, and what float64 loses of logarithms up to 70.
    assert abs(float(factor) - want) <= want * (2.0**-24 + 1e-13) or find_bad(
        np.array([want], np.float32)
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_no_amax_makes_a_factor_that_is_none(alpha: float) -> None:
    ends = np.array([5e-324, 1e-45, 1e-38, 1.0, 3e38, 1e300])
    x, w = (grid.reshape(-1) for grid in np.meshgrid(ends, ends))
    assert find_bad(factors(x, w, alpha)) is None


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(BadInputError, match="of smoothing is not in 0 to 1"):
        check_alpha(alpha)
    with pytest.raises(BadInputError, match="alpha"):
        factors(np.ones(1), np.ones(1), alpha)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_amax_that_cannot_be(value: float) -> None:
    values = np.ones(8, np.float16)
    values[5] = value
    with pytest.raises(BadInputError, match=f"amax of channel 5 is {value}"):
        check_amax(values, 8)
    with pytest.raises(BadInputError, match=r"shape \[8\], not \[9\]"):
        check_amax(values, 9)
    assert check_amax(np.array([0, -0.0, 3], np.float16), 3).tolist() == [0, 0, 3]


@pytest.mark.parametrize("source", NUMBER_TYPES)
def test_columns(source: str) -> None:
    dense = (normal(1, (20, 12)) * 100).astype(NUMBER_TYPES[source].dtype)
    wide = dense.astype(np.float64)
    assert column_amax(dense).tolist() == np.abs(wide).max(axis=0).tolist()
    assert column_amax(dense[:0]).tolist() == [0] * 12
    by = np.linspace(0.3, 3, 12, dtype=np.float32)
    smoothed = apply(dense, by)
    want = wide * by
    if source == "F64":
        assert smoothed.tolist() == want.tolist()
    else:
        # Exact in float64 but for F32, whose 48 bits fit as well.
        assert smoothed.dtype == np.float32
        assert smoothed.tolist() == want.astype(np.float32).tolist()


def test_the_product_stays_what_it_was() -> None:
    x, w = normal(1, (5, 64), "F32", 1.0), normal(2, (7, 64))
    x[:, 9] *= 300
    by = factors(column_amax(x), column_amax(w), 0.5)
    moved = (x / by).astype(np.float64) @ apply(w, by).astype(np.float64).T
    want = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(moved - want).max() <= 4 * 2.0**-24 * (np.abs(x) @ np.abs(w).T).max()
    # Half of the difference between the channels has moved.
    assert np.abs(x / by).max() < 0.2 * np.abs(x).max()


@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
def test_activations_are_divided_once(source: str) -> None:
    dtype = NUMBER_TYPES[source].dtype
    x = (normal(1, (30, 12)) * 100).astype(dtype)
    x[0, 0], x[1, 1] = np.inf, np.nan
    by = np.geomspace(1e-38, 1e38, 12).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        want = x.astype(np.float64) / by.astype(np.float64)
        # float64 has more than twice the bits of float32, so rounding twice is rounding once.
        want = want if source == "F64" else want.astype(np.float32)
    got = divide(x, by)
    assert got.dtype == want.dtype
    near = (np.abs(want) < np.finfo(np.float32).tiny) & (want != 0)
    assert np.array_equal(got[~near], want[~near], equal_nan=True)
    # Twice rounded near zero: half a subnormal more.
    assert np.abs(got[near] - want[near]).max(initial=0) <= 2.0**-149
    assert near.any()


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, np.nan, np.inf, 1e-39])
def test_factors_that_can_be_none(value: float) -> None:
    by = np.ones(9, np.float32)
    check_factors(by)
    by[4] = value
    with pytest.raises(BadInputError, match=r"smooth .* at \[4\] is not positive, normal and fin"):
        check_factors(by)
