"""The float64 product, and the bound of one that is summed in float32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import PackedMatrix, pack
from sp24cli.reference import f32_bound, product, s32_bound
from sp24cli.scaling import ScaleSpec
from tests.cpu.modelfile import DTYPES, Array, naive_prune, normal

SPECS = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "block": ScaleSpec("block", (4, 8)),
}


def packed_of(kind: str, weight: Array) -> PackedMatrix:
    if kind in SPECS:
        return pack(weight, OPERAND_TYPES["e4m3"], SPECS[kind])[0]
    return pack(weight, OPERAND_TYPES[kind], ScaleSpec("none"))[0]


def exact(packed: PackedMatrix, tokens: Array) -> list[list[Fraction]]:
    dense = packed.dequantize(np.float64)
    return [
        [
            sum(
                (Fraction(float(a)) * Fraction(float(b)) for a, b in zip(r, t, strict=True)),
                start=Fraction(0),
            )
            for t in tokens
        ]
        for r in dense
    ]


@pytest.mark.parametrize("kind", [*SPECS, "f16", "bf16"])
def test_product_is_that_of_fractions(kind: str) -> None:
    packed = packed_of(kind, naive_prune(normal(1, (6, 40))))
    tokens = normal(2, (3, 40), "BF16", 1.0)
    d, sizes = product(packed, tokens)
    want = exact(packed, tokens)
    for row in range(6):
        for column in range(3):
            assert abs(d[row, column] - want[row][column]) <= 40 * 2.0**-53 * sizes[row, column]
    dense = np.abs(packed.dequantize(np.float64))
    assert np.allclose(sizes, dense @ np.abs(tokens.astype(np.float64)).T, rtol=1e-12)


def sequential_f32(a: Array, b: Array) -> Array:
    """The product with one float32 rounding after every operation, terms in order."""
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(np.float32) * b[None, :, k].astype(np.float32)
    return total


@pytest.mark.parametrize("columns", [4, 64, 4096])
@pytest.mark.parametrize("sign", ["mixed", "positive"])
def test_the_worst_order_stays_within_the_bound(columns: int, sign: str) -> None:
    weight = naive_prune(normal(1, (8, columns), "BF16"))
    tokens = normal(2, (5, columns), "BF16", 1.0)
    if sign == "positive":
        weight, tokens = np.abs(weight), np.abs(tokens)
    packed = packed_of("bf16", weight)
    d, sizes = product(packed, tokens)
    # Small terms after large ones: the order that loses most.
    order = np.argsort(-np.abs(packed.dequantize(np.float64)).sum(axis=0))
    got = sequential_f32(packed.dequantize(np.float64)[:, order], tokens[:, order])
    bound = f32_bound(sizes, columns // 2)
    assert (np.abs(got - d) <= bound).all()


def test_the_bound_is_tight_enough_to_miss_nothing_that_matters() -> None:
    """One bf16 ulp in one weight of typical size breaks it."""
    weight = naive_prune(normal(1, (16, 1024), "BF16"))
    tokens = normal(2, (32, 1024), "BF16", 1.0)
    d, sizes = product(packed_of("bf16", weight), tokens)
    bits = weight.view(np.uint16)
    for row in range(16):
        bits[row, int(np.argmax(np.abs(weight[row].astype(np.float32))))] ^= 1
    wrong, _ = product(packed_of("bf16", weight), tokens)
    assert (np.abs(wrong - d) > f32_bound(sizes, 512)).any(axis=1).all()


def test_the_bound_grows_with_the_number_of_terms() -> None:
    sizes = np.array([[1.0]])
    assert f32_bound(sizes, 8)[0, 0] == pytest.approx(11 * 2.0**-24, rel=1e-5)
    assert f32_bound(sizes, 4096)[0, 0] == pytest.approx(4099 * 2.0**-24, rel=1e-3)
    assert f32_bound(np.array([[0.0]]), 8)[0, 0] == 19 * 2.0**-150


def test_subnormal_products_stay_within_the_bound() -> None:
    weight = np.full((4, 64), 2.0**-100, np.float32)
    weight[:, ::2] = 0
    weight = weight.astype(DTYPES["BF16"])
    tokens = (normal(3, (4, 64), "F32", 1.0) * 2.0**-45).astype(DTYPES["BF16"])
    d, sizes = product(packed_of("bf16", weight), tokens)
    got = sequential_f32(weight, tokens)
    error = np.abs(got.astype(np.float64) - d)
    assert error.max() > 0
    assert (error <= f32_bound(sizes, 32)).all()


def test_past_the_end_of_float32_anything_is_allowed() -> None:
    assert f32_bound(np.array([[3e38]]), 2)[0, 0] == np.inf
    assert f32_bound(np.array([[1e38]]), 2)[0, 0] < 1e38
    assert s32_bound(np.array([[-3e38]]), np.array([[3e38]]), 2)[0, 0] == np.inf
    assert s32_bound(np.array([[-1e38]]), np.array([[3e38]]), 2)[0, 0] < 1e38


def test_integers_differ_by_the_roundings_of_the_result_alone() -> None:
    rng = np.random.default_rng(1)
    weight = naive_prune(normal(1, (40, 4096)))
    packed, _ = pack(weight, OPERAND_TYPES["s8"], SPECS["vector"])
    tokens = rng.integers(-128, 128, (20, 4096), np.int8)
    d, sizes = product(packed, tokens)
    sums = packed.codes().astype(np.int64) @ tokens.astype(np.int64).T
    assert np.abs(sums).max() > 2**18
    got = sums.astype(np.float32) * packed.scale
    bound = s32_bound(d, sizes, 2048)
    error = np.abs(got - d)
    assert (error <= bound).all()
    assert (error > 0).any()
    # A sum that is off by one is seen in most elements of this size, and all of half of it.
    off = np.abs((sums + 1).astype(np.float32) * packed.scale - d) > bound
    assert off[np.abs(sums) < 2**21].all()
