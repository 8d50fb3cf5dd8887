"""The product of a packed matrix in float64, and how far one summed in float32 may lie from it."""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array, widen
from sp24cli.packed import PackedMatrix

#: Unit roundoff of float32 and of float64.
_U32 = 2.0**-24
_U64 = 2.0**-53
#: Half the smallest subnormal of float32: what one rounding may cost near zero.
_TINY = 2.0**-150
_F32_MAX = float(np.finfo(np.float32).max)

#: Roundings of a term besides those of the sum: the scale into the operand or into the result,
#: a scale of the activations, and one to spare for the product of the two.
_ROUNDINGS = 3


def product(packed: PackedMatrix, activations: Array) -> tuple[Array, Array]:
    """D = A Bᵀ and the sizes Σ|a||b| of its sums, both float64 [M, N].

    A is the dequantized ``packed`` [M, K], exact in float64 (11 bits of a code times 24 of a
    scale), B is ``activations`` [N, K] of any type.
    """
    a = packed.dequantize(np.float64)
    b = widen(activations).astype(np.float64).T
    with np.errstate(invalid="ignore", over="ignore"):
        return a @ b, np.abs(a) @ np.abs(b)


def f32_bound(sizes: Array, terms: int, magnified: float = 1.0) -> Array:
    """How far each element of D, computed in float32, may lie from `product`.

    ``sizes`` is Σ|a||b| [M, N], ``terms`` the number of products that are not zero by
    construction (K/2), ``magnified`` the largest factor that meets a value after it was rounded
    in the subnormal range.

    A sum of n products, in any order, with fused or separate roundings, deviates by at most
    γ(n) Σ|a||b|, γ(n) = n u / (1 - n u), u = 2^-24 (N. Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002, eq. 3.5 and section 4.2; adding an exact zero rounds nothing).
    Every further rounding of a term or of the result raises n by one: `_ROUNDINGS`. The
    reference deviates likewise with u = 2^-53. A rounding in the subnormal range loses an
    absolute 2^-150 instead: there is one a term or two, magnified, and those of the result.
    Where Σ|a||b| comes near the end of float32 the sum may leave it on the way, and anything
    is allowed.
    """
    n = terms + _ROUNDINGS
    gamma = n * _U32 / (1 - n * _U32) + n * _U64 / (1 - n * _U64)
    floor = (2 * terms * max(magnified, 1.0) + _ROUNDINGS) * _TINY
    return np.where(sizes > _F32_MAX / 2, np.inf, gamma * sizes + floor)
