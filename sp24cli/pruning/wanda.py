"""Wanda: a weight counts as much as its magnitude times the norm of what it multiplies.

Source: Sun, Liu, Bair, Kolter, "A Simple and Effective Pruning Approach for Large Language
Models" (2023), section 3, with the groups of N:M in place of whole rows.
"""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array, widen
from sp24cli.errors import BadInputError
from sp24cli.pruning.pattern import NEVER_ACTIVE, TWO_OF_FOUR, Pattern, prune_by
from sp24cli.sparsity import fold, patch_energies


def check_norms(norms: Array, k: int) -> Array:
    """``norms`` [K] as float64, with a largest of about 1 (only their ratios count).

    Errors: `BadInputError` naming the channel of a value that no norm can have, and for norms
    that are all zero, which rank nothing.
    """
    if norms.shape != (k,):
        raise BadInputError(f"norms have shape {list(norms.shape)}, not {[k]}")
    values = widen(norms).astype(np.float64)
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        channel = int(bad.argmax())
        raise BadInputError(f"norm of channel {channel} is {values[channel]}")
    if k and not values.any():
        raise BadInputError(NEVER_ACTIVE)
    # By a power of two, which is exact: products then stay in range.
    return np.ldexp(values, -int(np.frexp(values.max(initial=0.0))[1]))


def prune_wanda(dense: Array, norms: Array, pattern: Pattern = TWO_OF_FOUR) -> Array:
    """The values of ``dense`` [M, K] with the highest |w| * norm of every group, +0.0 elsewhere.

    ``norms`` [K] are the L2 norms of the input channels, as `check_norms` gives them. The
    product is taken in float64; ties keep the lower index, and any nonzero comes before a
    zero, so a matrix that has the pattern stays as it is. Errors: `BadInputError` as
    `pattern.prune_pattern`.
    """

    def score(tile: Array, c: slice) -> Array:
        magnitude = np.abs(widen(tile).astype(np.float64))
        product = magnitude * norms[c]
        product[magnitude == 0] = -1
        return product

    return prune_by(dense, pattern, score)


def weighted_energy(dense: Array, norms: Array) -> float:
    """Sum of (w * norm) squared over ``dense`` [R, K], in float64: product and square are rounded
    by themselves, then added up in the order of `sparsity.patch_energies` and `fold`."""
    return fold(patch_energies(dense, norms))
