"""SmoothQuant: what is hard to quantize in the activations is moved into the weights.

Column j of the weight is multiplied, and channel j of the activations divided, by
s_j = max|x_j|^alpha / max|w_j|^(1 - alpha). The product stays what it was. Source: Xiao, Lin,
Seznec, Wu, Demouth, Han, "SmoothQuant: Accurate and Efficient Post-Training Quantization for
Large Language Models", arXiv 2211.10438, equation 4.
"""

from __future__ import annotations

from decimal import Context, Decimal

import numpy as np

from sp24cli.bits import Array, contiguous_bits, magnitude_values, magnitudes, number_type, widen
from sp24cli.errors import BadInputError
from sp24cli.scaling import find_bad, quotient

#: As the paper has it for most models.
ALPHA = 0.5

_F32 = np.finfo(np.float32)
#: Powers in decimal, which are rounded rightly on every machine; those of a C library are not.
_DECIMAL = Context(prec=20)


def check_alpha(alpha: float) -> None:
    """`BadInputError` unless ``alpha`` is a share."""
    if not 0 <= alpha <= 1:
        raise BadInputError(f"alpha {alpha} of smoothing is not in 0 to 1")


def check_amax(values: Array, k: int) -> Array:
    """The largest magnitudes ``values`` [K] of the input channels as float64.

    Errors: `BadInputError` naming the channel of a value that none can have.
    """
    if values.shape != (k,):
        raise BadInputError(f"amax of the channels has shape {list(values.shape)}, not {[k]}")
    wide = widen(values).astype(np.float64)
    bad = ~(np.isfinite(wide) & (wide >= 0))
    if bad.any():
        channel = int(bad.argmax())
        raise BadInputError(f"amax of channel {channel} is {wide[channel]}")
    return wide


def column_amax(dense: Array) -> Array:
    """The largest magnitude of every column of ``dense`` [R, K]: float32 (float64 for float64)."""
    kind = number_type(dense.dtype)
    return magnitude_values(magnitudes(contiguous_bits(dense), kind).max(axis=0, initial=0), kind)


def factors(activations: Array, weights: Array, alpha: float) -> Array:
    """s_j of the channels, float32 [K], each positive and normal.

    ``activations`` and ``weights`` [K] are largest magnitudes, finite and not negative. A channel
    that is zero in either gets 1. The power is taken to 20 digits and then rounded.
    """
    check_alpha(alpha)
    share = Decimal(repr(float(alpha)))
    rest = 1 - share

    def power(x: float, w: float) -> float:
        if not (x and w):
            return 1.0
        up, down = (_DECIMAL.ln(Decimal(value)) for value in (x, w))
        exponent = _DECIMAL.subtract(_DECIMAL.multiply(share, up), _DECIMAL.multiply(rest, down))
        return float(_DECIMAL.exp(exponent))

    exact = [power(x, w) for x, w in zip(activations.tolist(), weights.tolist(), strict=True)]
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(np.array(exact), _F32.tiny, _F32.max).astype(np.float32)


def check_factors(factors: Array) -> None:
    """`BadInputError` naming the first of ``factors`` [K] that can be none."""
    if (bad := find_bad(factors)) is not None:
        factor = float(factors[bad])
        raise BadInputError(f"smooth {factor} at {list(bad)} is not positive, normal and finite")


def apply(dense: Array, factors: Array) -> Array:
    """``dense`` [R, K] with column j times ``factors[j]``: float32, each product rounded once
    (float64 for float64)."""
    wide = widen(dense)
    with np.errstate(over="ignore", under="ignore"):
        smoothed: Array = wide * factors.astype(wide.dtype)
    return smoothed


def divide(activations: Array, factors: Array) -> Array:
    """``activations`` [N, K] with column j divided by ``factors[j]``: float32, by one IEEE
    division each (float64 for float64). What `apply` does to the weight, undone in the product."""
    return quotient(activations, factors)
