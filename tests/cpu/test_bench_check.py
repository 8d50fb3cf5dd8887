"""The checks before any timing: that they pass what is right and see one wrong element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sp24cli.bench.check import (
    Reference,
    check_exact,
    compare,
    dense_codes,
    exact_problem,
    reference_on_cpu,
    row_norms,
    tolerance,
)
from sp24cli.bench.problem import random_tokens, random_weight
from sp24cli.optypes import OPERANDS, operand_type, operands
from sp24cli.packed import check_structure
from sp24cli.scaling import ScaleSpec

M, N, K = 200, 48, 1024
OUT = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


@pytest.fixture(
    params=[("e4m3", "vector", "bf16"), ("e4m3", "tensor", "f32"), ("f16", "none", "f16")]
)
def case(request):
    name, kind, out = request.param
    optype = operand_type(name)
    packed = random_weight(M, K, optype, ScaleSpec(kind), seed=1, workers=2)
    tokens = random_tokens(N, K, optype, seed=1, workers=2)
    return packed, tokens, out


def expected(packed, tokens):
    a = packed.dequantize(np.float64)
    b = tokens.codes.astype(np.float64)
    return a @ b.T * (1.0 if tokens.scale is None else tokens.scale)


def check(packed, tokens, out, got, *, normal=True):
    dense = dense_codes(packed, workers=2)
    reference = Reference(
        reference_on_cpu(dense, tokens.codes), row_norms(dense, 1), row_norms(tokens.codes, 2)
    )
    limits = tolerance(operands(packed.info.type), out, K, normal=normal)
    row = 1.0 if packed.scale is None else packed.scale
    column = 1.0 if tokens.scale is None else tokens.scale
    return compare("D", got, reference, row, column, limits, workers=2)


def test_the_dense_codes_are_those_of_the_packed_matrix(case):
    packed, _, _ = case
    assert np.array_equal(dense_codes(packed, 2), packed.codes())


def test_a_rounded_product_passes(case):
    packed, tokens, out = case
    found = check(packed, tokens, out, expected(packed, tokens).astype(OUT[out]))
    assert found.passed
    assert found.first_bad is None
    assert 0 < found.max_error <= found.bound
    assert found.rel_frobenius < 0.004


def test_an_nm_output_is_compared_as_a_view(case):
    packed, tokens, out = case
    stored = np.ascontiguousarray(expected(packed, tokens).T.astype(OUT[out]))
    assert check(packed, tokens, out, stored.T).passed


@pytest.mark.parametrize("place", [(0, 0), (131, 7), (M - 1, N - 1)])
def test_one_wrong_element_is_found(case, place):
    packed, tokens, out = case
    want = expected(packed, tokens)
    got = want.astype(OUT[out])
    got[place] += OUT[out](0.25 * want.std())
    found = check(packed, tokens, out, got)
    assert not found.passed
    assert found.first_bad == place
    assert found.max_error > found.bound


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_never_passes(case, value):
    packed, tokens, out = case
    got = expected(packed, tokens).astype(OUT[out])
    got[5, 3] = value
    assert check(packed, tokens, out, got).first_bad == (5, 3)


def test_one_metadata_pair_wrong_is_found(case):
    """A kept value multiplied with its neighbour's token: the smallest fault a kernel can make."""
    packed, tokens, out = case
    a = packed.dequantize(np.float64)
    row, group = 17, 40
    first, second = np.flatnonzero(a[row, 4 * group : 4 * group + 4])[:2]
    moved = next(i for i in range(4) if i not in (first, second))
    a[row, 4 * group + moved], a[row, 4 * group + first] = a[row, 4 * group + first], 0.0
    wrong = a @ tokens.codes.astype(np.float64).T
    wrong = wrong * (1.0 if tokens.scale is None else tokens.scale)
    found = check(packed, tokens, out, wrong.astype(OUT[out]))
    assert not found.passed
    assert found.first_bad[0] == row


def test_a_lost_scale_is_found(case):
    packed, tokens, out = case
    got = (1.01 * expected(packed, tokens)).astype(OUT[out])
    assert not check(packed, tokens, out, got).passed


def test_measured_fp8_errors_lie_within_the_bounds():
    """Relative errors of FP8 sums as an H200 gave them at these K pass; five times as much would
    not."""
    for k, measured in ((4096, 7.24e-4), (8192, 1.165e-3), (28672, 2.652e-3)):
        limits = tolerance(operands("e4m3"), "f32", k, normal=True)
        assert measured < limits.frobenius < 5 * measured
        # ‖a‖‖b‖ is √K deviations of D; the largest of 10^8 errors lies 6 deviations out.
        assert 6 * measured < limits.sums * np.sqrt(k) < 40 * measured


def test_given_data_may_have_a_product_that_outweighs_all():
    """FP8 sums cut a large accumulator at every step; a right kernel on outliers must pass."""
    types, k = operands("e4m3"), 8192
    rng = np.random.default_rng(1)
    a, b = np.sign(rng.standard_normal((2, 1, k))) * 2.0**-4
    a[0, 0] = b[0, 0] = 448.0
    total = 0.0
    for step in range(0, k, 64):
        total += float(a[0, step : step + 64] @ b[0, step : step + 64])
        grid = 2.0 ** (np.floor(np.log2(abs(total))) - 13)
        total = np.trunc(total / grid) * grid
    exact = a @ b.T
    assert total != exact.item()
    reference = Reference(exact, np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    got = np.array([[total]], np.float32)
    for normal in (False, True):
        limits = tolerance(types, "f32", k, normal=normal)
        assert compare("D", got, reference, 1.0, 1.0, limits, 1).passed != normal
    # and what is far off still does not
    limits = tolerance(types, "f32", k, normal=False)
    assert not compare("D", 0.8 * got, reference, 1.0, 1.0, limits, 1).passed


def test_a_stand_in_reference_widens_the_bound():
    product = np.full((2, 2), 100.0)
    got = product * (1 + 1.5 * 2.0**-8)
    limits = tolerance(operands("f16"), "bf16", 64, normal=True)
    norms = np.full(2, 1e-9)
    strict = compare("D", got, Reference(product, norms, norms), 1.0, 1.0, limits, 1)
    wide = compare("D", got, Reference(product, norms, norms, 2.0**-8), 1.0, 1.0, limits, 1)
    assert not strict.passed
    assert wide.passed


class TestExact:
    @pytest.fixture(params=list(OPERANDS))
    def problem(self, request):
        optype = OPERANDS[request.param].a
        spec = ScaleSpec("vector" if optype.scaled else "none")
        packed = random_weight(M, K, optype, spec, seed=2, workers=2)
        return packed, exact_problem(packed, N, OPERANDS[request.param].b, seed=3)

    def product(self, exact):
        return reference_on_cpu(exact.packed.codes(), exact.tokens)

    def test_the_mask_is_the_weights_own(self, problem):
        packed, exact = problem
        assert check_structure(exact.packed) is None
        assert np.array_equal(exact.packed.meta, packed.to_layout("row").meta)
        assert exact.packed.info.scale.kind in ("tensor", "none")

    @pytest.mark.parametrize("spec", [ScaleSpec("block", (32, 32)), ScaleSpec.parse("mx")])
    def test_kernels_that_widen_with_scales_get_some_of_1(self, spec):
        e4m3 = operand_type("e4m3")
        packed = random_weight(M, K, e4m3, spec, seed=2, workers=2)
        exact = exact_problem(packed, N, operand_type("bf16"), seed=3)
        assert exact.packed.info.scale == spec
        assert check_structure(exact.packed) is None
        assert np.array_equal(exact.packed.dequantize(), exact.packed.codes().astype(np.float32))
        # Kernels of 8 bits know one scale, or block scales and then none.
        assert exact_problem(packed, N, e4m3, seed=3).packed.info.scale.kind == "tensor"

    def test_every_output_type_holds_the_product(self, problem):
        product = self.product(problem[1])
        assert product.std() > 7  # and it is not degenerate
        assert np.abs(product).max() <= 256
        # Whatever was summed before, sums in f16 were exact: the terms are 1 or -1.
        dense, tokens = problem[1].packed.codes(), problem[1].tokens
        largest = np.abs(dense.astype(np.float64)) @ np.abs(tokens.astype(np.float64)).T
        assert largest.max() <= 2048
        for dtype in OUT.values():
            assert np.array_equal(product.astype(dtype).astype(np.float64), product)

    def test_the_right_product_passes(self, problem):
        got = self.product(problem[1]).astype(ml_dtypes.bfloat16)
        assert check_exact("D", got, problem[1], 4, 2).passed

    @pytest.mark.parametrize("place", [(0, 0), (123, 45), (M - 1, N - 1)])
    def test_one_element_off_by_one_is_found(self, problem, place):
        got = self.product(problem[1]).astype(np.float32)
        got[place] += 1
        found = check_exact("D", got, problem[1], 4, 2)
        assert not found.passed
        assert found.first_bad == place

    def test_errors_that_cancel_in_plain_sums_are_found(self, problem):
        got = self.product(problem[1]).astype(np.float32)
        got[3, 3] += 1
        got[3, 4] -= 1
        got[9, 3] -= 1
        got[9, 4] += 1
        assert check_exact("D", got, problem[1], 4, 2).first_bad == (3, 3)

    def test_nan_is_found(self, problem):
        got = self.product(problem[1]).astype(np.float16)
        got[7, 5] = np.nan
        assert not check_exact("D", got, problem[1], 4, 2).passed
