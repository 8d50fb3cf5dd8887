"""The order in which squares are summed, written plainly, for tests of what sums them faster."""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array
from sp24cli.sparsity import PATCH_ROWS, fold_halves, sum_rows


def sum_patches(values: Array, width: int) -> Array:
    """The sums of the squares of every `PATCH_ROWS` rows and ``width`` columns (a power of two) of
    float64 ``values``, which it overwrites.

    First the rows of a patch, one after the other; then what that gives, as `fold` does. An order
    of its own, so that a GPU can add in the same and get the same bits.
    """
    rows, cols = values.shape
    by_row = np.zeros((-(-rows // PATCH_ROWS), -(-cols // width) * width))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.square(values, out=values)
        sum_rows(values, by_row[:, :cols])
        return fold_halves(by_row.reshape(len(by_row), -1, width))
