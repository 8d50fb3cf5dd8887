"""The bounds of verification hold for sums that are cut as they say, and see what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.bits import widen
from sp24cli.optypes import OPERANDS
from sp24cli.packed import pack
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from sp24cli.scaling import ScaleSpec
from sp24cli.verify.cpu import random_activations
from sp24cli.verify.tensorcore import element_bound, frobenius_bound
from tests.cpu.modelfile import Array

#: Bits of the grid that a step cuts to, and products a step.
CUTS = {"f32": {1: (13, 16), 2: (23, 8), 4: (23, 4)}, "f16": {2: (10, 8)}}


def cut_sums(a: Array, b: Array, name: str) -> Array:
    """D [M, N], every product and the accumulator cut toward zero to the grid of each step."""
    types = OPERANDS[name]
    if types.accumulate == "s32":
        return a @ b.T
    bits, terms = CUTS[types.accumulate][types.multiplied.itemsize]
    total = np.zeros((len(a), len(b)))
    for k in range(0, a.shape[1], 2 * terms):
        products = a[:, None, k : k + 2 * terms] * b[None, :, k : k + 2 * terms]
        largest = np.maximum(np.abs(products).max(axis=2), np.abs(total))
        grid = np.ldexp(1.0, np.frexp(largest)[1] - 1 - bits)
        if types.accumulate == "f16":
            grid = np.maximum(grid, 2.0**-24)
        total = np.trunc(products / grid[..., None]).sum(axis=2) + np.trunc(total / grid)
        total *= grid
    return total


@pytest.mark.parametrize("name", list(OPERANDS))
@pytest.mark.parametrize("k", [256, 2048])
def test_sums_that_are_cut_at_every_step_are_within_the_bounds(name: str, k: int) -> None:
    types = OPERANDS[name]
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((40, k), np.float32) * 0.05
    spec = ScaleSpec("vector" if types.a.scaled else "none")
    packed, _ = pack(prune_magnitude(dense, pattern_of(types.a)), types.a, spec)
    x = widen(random_activations(rng, 30, k, types.b)).astype(np.float64)
    scale = np.ones((40, 1)) if packed.scale is None else packed.scale.astype(np.float64)
    codes = widen(packed.codes()).astype(np.float64)
    scale_b = rng.uniform(0.5, 2, 30)
    got = cut_sums(codes, x, name) * scale * scale_b
    a, b = codes * scale, x * scale_b[:, None]
    want, norms = a @ b.T, np.sqrt((a * a) @ (b * b).T)
    out = "f16" if types.accumulate == "f16" else "f32"
    error = np.abs(got - want)
    bound = element_bound(types, k, norms, out, want)
    assert (error <= bound).all()
    relative = np.linalg.norm(error) / np.linalg.norm(want)
    assert relative <= frobenius_bound(types, k, out)
    if types.accumulate != "s32":
        # A code has four bits: its products with 16 bits fit most grids, and lose nothing there.
        wide = 300 if types.widened else 100
        assert relative > frobenius_bound(types, k, out) / wide, "no bound that all pass"
    # A scale that was rounded to bfloat16 is seen, but where sums have few bits themselves: there
    # exact integers and the identity decide.
    seen = np.abs(got * (1 + 2.0**-8) - want) > bound
    assert seen.any() == (name in ("f16", "bf16", "tf32", "s8", "e4m3_bf16", "e4m3_f16"))


def test_sums_of_integers_are_to_be_exact() -> None:
    types = OPERANDS["s8"]
    d = np.array([[2.0**30, -1.0]])
    assert not element_bound(types, 28672, np.full((1, 2), 1e6), "s32", d).any()
    assert frobenius_bound(types, 28672, "s32") == 0
