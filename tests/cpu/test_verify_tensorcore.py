"""The bounds of the tensor cores' sums, against an emulation of what was measured of them."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.bits import widen
from sp24cli.fp8 import convert
from sp24cli.optypes import operands
from sp24cli.verify.tensorcore import element_bound, frobenius_bound

E4M3 = operands("e4m3")
SUMS = 400


def products(k: int) -> np.ndarray:
    """Kept products of normal values in e4m3, [SUMS, k / 2]."""
    random = np.random.default_rng(k)
    a, b = (
        widen(convert(random.standard_normal((SUMS, k // 2), np.float32), E4M3.a)).astype(
            np.float64
        )
        for _ in range(2)
    )
    return a * b


def summed(p: np.ndarray, promote_k: int) -> np.ndarray:
    """The sums of the rows of ``p``, 16 products a step, every product and the accumulator cut to a
    grid of 2^-13 of the largest exponent, and promoted every ``promote_k`` (0: never)."""
    total, acc = np.zeros(len(p), np.float32), np.zeros(len(p))
    for start in range(0, p.shape[1], 16):
        step = np.concatenate([p[:, start : start + 16], acc[:, None]], axis=1)
        largest = np.abs(step).max(axis=1, keepdims=True)
        grid = np.exp2(np.floor(np.log2(np.where(largest, largest, 1))) - 13)
        acc = (np.trunc(step / grid) * grid).sum(axis=1)
        if promote_k and (start + 16) % (promote_k // 2) == 0:
            total, acc = total + acc.astype(np.float32), np.zeros(len(p))
    return total + acc


@pytest.mark.parametrize("k", [512, 4096, 28672])
@pytest.mark.parametrize("promote_k", [0, 64, 128, 256])
def test_sums_stay_within_their_bounds(k: int, promote_k: int) -> None:
    p = products(k)
    want, norms = p.sum(axis=1), np.sqrt((p * p).sum(axis=1))
    error = np.abs(summed(p, promote_k) - want)
    assert (error <= element_bound(E4M3, k, norms, "f32", want, promote_k)).all()
    relative = np.linalg.norm(error) / np.linalg.norm(want)
    assert relative <= frobenius_bound(E4M3, k, "f32", promote_k)


def test_promotion_is_worth_its_registers() -> None:
    """By emulation 1.0e-4 every 256 of K and 2.5e-3 without, at K = 28672; the bounds follow."""
    p = products(28672)
    want = p.sum(axis=1)
    size = np.linalg.norm(want)
    assert np.linalg.norm(summed(p, 256) - want) / size < 1.5e-4
    assert np.linalg.norm(summed(p, 0) - want) / size > 1e-3
    norms = np.sqrt((p * p).sum(axis=1))
    promoted, fast = (element_bound(E4M3, 28672, norms, "f32", want, p_k) for p_k in (256, 0))
    assert (promoted < fast / 8).all()


def test_a_scale_of_another_piece_exceeds_the_bound() -> None:
    p = products(4096)
    scale = np.repeat(np.random.default_rng(0).uniform(0.5, 2.0, 32), 64)
    right, wrong = p * scale, p * np.roll(scale, 64)
    norms = np.sqrt((right * right).sum(axis=1))
    bound = element_bound(E4M3, 4096, norms, "f32", right.sum(axis=1), 128)
    assert (np.abs(wrong.sum(axis=1) - right.sum(axis=1)) > bound).mean() > 0.5
