"""How far a product summed on Hopper's sparse tensor cores may lie from the exact one.

Measured on an H200 by single products beside one large one (the same within a wgmma, in the next
and in the accumulator): a step aligns its products and the accumulator to the largest exponent
among them and cuts each, toward zero, to a grid of 2^-13 of that exponent for 8-bit operands and
of 2^-25 for 16-bit ones, whose result is then cut to float32.

So with g the largest grid of an element's sum, S = sqrt(Σ p²) the norm of its n products p and
steps of `_TERMS` products each:

* |partial sum| <= λ S: the activations' signs are random and independent, so the partial sums are
  a walk of symmetric steps p; Hoeffding and Lévy give P(any exceeds λ S) <= 4 exp(-λ²/2). A product
  alone is at most S. Hence g <= 2^-F max(λ, 1) S.
* each product loses less than g, with the opposite sign of the product, a walk again: at most
  λ g √n in all (Azuma).
* each step cuts the accumulator once more, always toward zero: at most g a step.

λ makes the chance that any of M N elements of a right product fails less than `_FAILURE`. The
bound of an element is wide, as any bound by worst steps is; what it may miss, a single wrong code
or index, the exact product with the identity finds.

tf32 is taken for a 16-bit type here: its products have 22 bits, as f16's, and what an H200 does
with them has yet to be measured. Sums of s8 are exact: of K products half at most are not zero,
none beyond 2^14, so s32 holds them for K < 2^18. Sums in f16 are at worst cut to it at every step,
products and accumulator alike: a grid of 2^-10 of the largest, and of 2^-24 where f16 is subnormal
(this, too, is what must hold, not what was measured).

Over the whole matrix the walks average out: the error's norm is that of the cuts of the
accumulator, at most a grid of it a step, and of √(n/3) independent uniform losses.

Promoted sums are P sums of short pieces, m products and t steps each, with norms S_i, ΣS_i² = S²,
added in float32. All partial sums of all pieces are within λ S_i when λ counts P sums an element,
so the grid of a piece is at most g_i = 2^-F λ S_i, and:

* the products' losses are one walk over all of them: λ √(m Σg_i²) = 2^-F λ² √m S;
* the cuts of a piece's accumulator, at most t g_i, change sign with it, and the pieces' signs are
  independent: a walk, λ t √(Σg_i²) = 2^-F λ² t S, and never more than their sum, 2^-F λ √P t S;
* an addition rounds by 2^-24 of a sum that is at most λ S, P times in all; a scale of A, one of B
  and the fused addition's product by as much of a piece, together 3 Σ λ S_i <= 3 λ √P S.

Over the whole matrix the pieces' errors are independent, so their norms add as the pieces' do.
"""

from __future__ import annotations

import math

from sp24cli.bits import Array
from sp24cli.optypes import Operands

#: Chance that a right product is refused.
_FAILURE = 1e-9

#: Bits of the grid below the largest exponent, by operand bytes. The 16-bit sum is cut again, to
#: float32's 23, which is the larger of its two losses.
_GRID_BITS = {1: 13, 2: 23, 4: 23}

#: The same for sums in f16, and the least grid that they have, a step.
_F16_GRID_BITS = 10
_F16_LEAST = 2.0**-24

#: Kept products summed in one step, by operand bytes: half a wgmma. Fewer steps would only narrow
#: the bound.
_TERMS = {1: 16, 2: 8, 4: 4}

#: Unit roundoff and half the smallest subnormal of each output type.
OUT_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24, "s32": 0.0}
OUT_TINY = {"bf16": 2.0**-134, "f16": 2.0**-25, "f32": 2.0**-150, "s32": 0.0}

#: Roundings of float32 between the sum and the output: that of an s32 sum, two scales and the bias.
_EPILOGUE = 4 * 2.0**-24


def _steps(operands: Operands, k: int) -> int:
    return -(-k // (2 * _TERMS[operands.multiplied.itemsize]))


def _pieces(k: int, promote_k: int) -> tuple[int, int]:
    """How many pieces a sum has, and the K of one; 0 for ``promote_k`` keeps it whole."""
    return (max(1, -(-k // promote_k)), min(k, promote_k)) if promote_k else (1, k)


def _grid(operands: Operands) -> float:
    """The grid of a step in terms of the largest that it sums; 0 where sums are exact."""
    if operands.accumulate == "s32":
        return 0.0
    bits = (
        _F16_GRID_BITS if operands.accumulate == "f16" else _GRID_BITS[operands.multiplied.itemsize]
    )
    return float(2.0**-bits)


def _rounding(out: str) -> float:
    return 0.0 if out == "s32" else OUT_UNIT[out] + _EPILOGUE


def element_bound(
    operands: Operands, k: int, norms: Array, out: str, d: Array, promote_k: int = 0
) -> Array:
    """The largest error of each element: ``norms`` is S, ``d`` the exact result, both [M, N].

    Scales and bias included: ``norms`` is taken of the scaled products. (Those of f16 sums, which
    alone have a least grid, are not scaled by more than the activations' scale, at most 2 in
    verification.) ``promote_k`` is the K of a piece where sums are promoted, 0 where they are not.
    """
    pieces, piece_k = _pieces(k, promote_k)
    count = max(1, d.size) * pieces
    walk = math.sqrt(2 * math.log(8 * count / _FAILURE))
    grid = _grid(operands) * walk * norms
    cuts = min(walk, math.sqrt(pieces)) * _steps(operands, piece_k)
    losses = walk * math.sqrt(piece_k / 2) + cuts
    error = grid * losses
    if promote_k:
        error = error + 2.0**-24 * walk * (pieces + 3 * math.sqrt(pieces)) * norms
    if operands.accumulate == "f16":
        error = error + 2 * _F16_LEAST * losses
    if operands.accumulate == "s32" and out != "s32":
        # What rounds before the bias, which may cancel most of it: the sum, and that times a scale.
        error = 2 * 2.0**-24 * walk * norms
    return error + _rounding(out) * (abs(d) + error) + OUT_TINY[out]


def frobenius_bound(operands: Operands, k: int, out: str, promote_k: int = 0) -> float:
    """The largest norm of the error over that of a product with random activations."""
    pieces, piece_k = _pieces(k, promote_k)
    additions = 2.0**-24 * (pieces + 3) if promote_k else 0.0
    sums = _grid(operands) * (_steps(operands, piece_k) + math.sqrt(piece_k / 6)) + additions
    return sums + _rounding(out)
