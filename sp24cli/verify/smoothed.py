"""Whether a weight with smoothed columns gives the product of the original, as users multiply it.

The activations x [N, K], one in float32 a channel of the original, are divided by the factors s,
quantized by row to codes q with scales t, and multiplied by the weight w' = code * scale, which
stands for w = w' / s. Exactly, sum w x = sum w' y with y = x / s, so the product of w' and q t
is off by sum w' e, e = q t - y:

* y is rounded to float32, and so is its quotient by t: 2^-24 of it, twice, or 2^-150 near zero;
* that is rounded to the operand type: by a share U = u / (1 + u) of it, u the unit roundoff of
  the type, or half of its least step, h. Hence |e| <= (U + 2^-21)|y| + (1 + 2^-20) h t + 2^-149,
  where what is past the end of the type by three roundings of float32 is in the 2^-21;
* e has the sign of x but for a factor that only magnitudes decide, and the signs of x are random
  and independent: P(|sum w' e| > λ sqrt(sum w'^2 e^2)) <= 2 exp(-λ²/2) (Hoeffding).

λ makes the chance that any of the M N elements of a right product fails less than `_FAILURE`. A
wrong factor, or one of another column, changes y by as much as s differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from sp24cli.activations import Tokens, quantize_tokens
from sp24cli.bits import Array
from sp24cli.optypes import OperandType
from sp24cli.packed import PackedMatrix
from sp24cli.verify.pieces import column_pieces

#: Chance that a right product is refused.
_FAILURE = 1e-9

_F32 = np.finfo(np.float32)
_U64 = 2.0**-53


@dataclass(frozen=True)
class SmoothedTokens:
    """Activations [N, K] in the original's order of columns: ``given``, float32, not yet divided,
    and ``tokens``, their quotients by ``factors`` in an operand type."""

    given: Array
    factors: Array
    optype: OperandType
    tokens: Tokens

    @classmethod
    def random(
        cls, random: np.random.Generator, n: int, factors: Array, optype: OperandType
    ) -> SmoothedTokens:
        """Normal values, in each channel as large as its factor: what smoothing makes even."""
        given = np.empty((n, len(factors)), np.float32)
        codes = np.empty(given.shape, optype.dtype)
        scales: list[Array] = []
        for i, row in enumerate(given):
            # Of all rows at once the numbers would be the same.
            wide = random.standard_normal(len(factors)) * factors.astype(np.float64)
            row[:] = np.clip(wide, -_F32.max, _F32.max)
            tokens = quantize_tokens(given[i : i + 1], optype, 1, smooth=factors)
            codes[i] = tokens.codes
            if tokens.scale is not None:
                scales.append(tokens.scale)
        return cls(
            given, factors, optype, Tokens(codes, np.concatenate(scales) if scales else None)
        )

    @property
    def scale(self) -> Array:
        """float32 [N]."""
        assert self.tokens.scale is not None
        return self.tokens.scale

    def original_product(self, packed: PackedMatrix, rows: int) -> tuple[Array, Array]:
        """The product of the original's weight and ``given``, and how far that of the smoothed
        weight and the tokens, summed exactly, may lie from it: float64 [M, N].

        ``packed`` is all or some of the ``rows`` that are judged. Where a weight is not finite
        anything is allowed.
        """
        assert packed.smooth is not None
        tokens, columns = self.given.shape
        walk = math.sqrt(2 * math.log(2 * max(1, rows * tokens) / _FAILURE))
        want, errors = (np.zeros((packed.shape[0], tokens)) for _ in range(2))
        weights, activations = np.zeros(packed.shape[0]), np.zeros(tokens)
        largest = np.zeros((tokens, 1))
        pieces = column_pieces(packed)
        for c in pieces:
            _, y = self._divided(c)
            np.maximum(largest, np.abs(y).max(axis=1, keepdims=True), out=largest)
        for c in pieces:
            places = c if packed.perm is None else packed.perm[c]
            x, y = self._divided(places)
            with np.errstate(invalid="ignore", over="ignore"):
                part = packed.columns(c).dequantize(np.float64)
                squares = np.square(part)
                part /= packed.smooth[places].astype(np.float64)
                want += part @ x.T
                errors += squares @ np.square(self._errors(y, largest)).T
                weights += squares.sum(axis=1)
                activations += np.square(y).sum(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            off = walk * np.sqrt(errors)
            # What the reference rounds, of its weight and in its sum: by |w'||y| for sum |w' y|.
            off += (columns + 4) * _U64 * np.sqrt(np.outer(weights, activations))
        return want, np.where(np.isfinite(want), off, np.inf)

    def _divided(self, places: Array | slice) -> tuple[Array, Array]:
        """Some columns of the activations, and divided by their factors, float64."""
        x = self.given[:, places].astype(np.float64)
        return x, x / self.factors[places].astype(np.float64)

    def _errors(self, y: Array, largest: Array) -> Array:
        """The largest |e| of each element of some columns; ``largest`` [N, 1] are the largest |y|
        of all. See the head of this module."""
        if self.optype.name == "s8":
            share, half = 0.0, 0.5
        else:
            info = ml_dtypes.finfo(self.optype.dtype)
            unit = float(info.eps) / 2
            share, half = unit / (1 + unit), float(info.smallest_subnormal) / 2
        scale = largest / self.optype.max_finite
        scale = np.maximum(scale * (1 + 2.0**-22), float(_F32.tiny))
        errors: Array = (share + 2.0**-21) * np.abs(y) + (1 + 2.0**-20) * half * scale + 2.0**-149
        return errors
