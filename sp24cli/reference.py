"""The product of a packed matrix in float64, and how far one summed in float32 may lie from it.

Weight-only products (W8A16) have an 8-bit weight with small blocks and 16-bit activations. There
the operand of the tensor cores is `widened`, which a kernel makes in registers and follows bit by
bit; what it sums is bounded by `f32_bound` as ever, what widening costs by `widening_bound`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from sp24cli import metadata, scaling
from sp24cli.bits import Array, contiguous_bits, widen
from sp24cli.fp8 import round_to
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


def widened(packed: PackedMatrix, dtype: Any) -> Array:
    """The weight [M, K] in ``dtype``, float16 or bfloat16, as 16-bit tensor cores multiply it.

    Two roundings to nearest even: w32 = code * scale in float32 (``mul.rn.f32``, subnormals kept;
    the code widened exactly, by ``cvt.rn.f16x2.e4m3x2`` and ``cvt.f32.f16``), then w32 to
    ``dtype`` (``cvt.rn``). Beyond float16 it goes as ``info.overflow`` says: the magnitude is
    brought to 65504 before the conversion, or becomes infinite in it. Where the scale has no more
    than 24 significant bits less those of a code, as all powers of two, the product is exact and
    this is `PackedMatrix.dequantize`.
    """
    (rows, columns), dtype = packed.shape, np.dtype(dtype)
    values, meta = packed.row_order()
    everywhere = slice(0, rows), slice(0, columns)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        kept = widen(values) * scaling.expand(packed.scale, packed.info.scale, *everywhere)
    bits = contiguous_bits(round_to(kept, dtype, packed.info.overflow))
    dense = np.zeros((rows, columns), bits.dtype)
    dense.reshape(-1)[metadata.kept_places(meta, columns)] = bits
    return dense.view(dtype)


def widened_product(packed: PackedMatrix, activations: Array) -> tuple[Array, Array]:
    """As `product`, with the weight `widened` to the type of the ``activations`` [N, K]."""
    a = widen(widened(packed, activations.dtype)).astype(np.float64)
    b = widen(activations).astype(np.float64).T
    with np.errstate(invalid="ignore", over="ignore"):
        return a @ b, np.abs(a) @ np.abs(b)


def widening_bound(sizes: Array, activations: Array) -> Array:
    """How far `widened_product` may lie from `product`, whose sizes are ``sizes`` [M, N], where
    nothing leaves the range of the type.

    A weight is rounded twice: by a share u of it, the unit roundoff of float32 and then of the
    type of the ``activations`` [N, K], or near zero by half the smallest subnormal of each. So
    the sum of M elements moves by at most ((1 + u32)(1 + u16) - 1) sum |a||b| + h sum |b|, and
    both sums are rounded in float64 (see `f32_bound`).
    """
    info = ml_dtypes.finfo(activations.dtype)
    share = (1 + _U32) * (1 + float(info.eps) / 2) - 1
    half = float(info.smallest_subnormal) / 2 + _TINY
    terms = activations.shape[1]
    gamma = 2 * (terms + _ROUNDINGS) * _U64
    weight = np.abs(widen(activations).astype(np.float64)).sum(axis=1)
    return (share + gamma) * sizes + (1 + gamma) * half * weight


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


def s32_bound(d: Array, sizes: Array, terms: int) -> Array:
    """The same for integers that were summed exactly, converted to float32 and scaled.

    ``d`` is the reference [M, N]: only the roundings of the result remain, and those of the
    reference's own sum. Near the end of float32 anything is allowed, as for `f32_bound`.
    """
    result = _ROUNDINGS + 1
    gamma = result * _U32 / (1 - result * _U32)
    n = terms + _ROUNDINGS
    bound = gamma * np.abs(d) + n * _U64 / (1 - n * _U64) * sizes + result * _TINY
    return np.where(np.abs(d) > _F32_MAX / 2, np.inf, bound)
