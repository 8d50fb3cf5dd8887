"""The block image of E4M3 weights that kernels widen to 16 bits before they multiply them.

It is made when a weight is uploaded, never stored. A block is 64 rows by 64 logical columns, two
wgmma steps of 32: codes in the order in which threads load them, the metadata words of a 16-bit
operand with the same mask, and the scales that the weight meets in registers. The kernels' side is
``cuda/include/sp24/widen.cuh``, which draws a block; the GPU makes it, and numpy to check that.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from sp24cli.bits import Array
from sp24cli.errors import Sp24Error
from sp24cli.layout import meta_words
from sp24cli.optypes import BLOCK_ROWS, OPERAND_TYPES
from sp24cli.scaling import ScaleSpec

#: What weights are widened to: the activations' type.
WIDENED = ("bf16", "f16")

#: Which scales a weight meets before it is multiplied: "none" leaves those of a tensor or a row to
#: the epilogue; "block" are float32, a block covering whole groups of `GROUP` rows and columns.
WeightScales = Literal["none", "block", "mx"]
GROUP = 16

#: Logical columns of a block, and its bytes by the scales in it.
BLOCK_K = 64
BLOCK_BYTES: dict[WeightScales, int] = {"none": 2560, "block": 2624, "mx": 2688}

_CODE_BYTES = BLOCK_ROWS * BLOCK_K // 2
_SCALES_AT = BLOCK_BYTES["none"]
#: Metadata is that of any 16-bit type.
_SIXTEEN_BIT = OPERAND_TYPES["f16"]
#: E8M0 of 1: what rows and columns have that only pad.
_ONE = 127


def weight_scales(spec: ScaleSpec) -> WeightScales:
    """How a weight so scaled is widened; `Sp24Error` for blocks that no kernel knows."""
    if spec.kind == "mx":
        return "mx"
    if spec.block is None:
        return "none"
    if spec.block[0] % GROUP or spec.block[1] % GROUP:
        rows, columns = spec.block
        raise Sp24Error(
            f"scales of {rows}x{columns} need a kernel that is not in this version: weights are "
            f"widened with blocks of multiples of {GROUP}x{GROUP}, or with mx"
        )
    return "block"


#: Exponents of the largest scales, by the type that weights are widened to, under which no code but
#: NaN leaves it: 448 times 2^7 is 57344 in f16, and times 2^118 less than 2^127 in bf16.
_MOST = {"bf16": 118, "f16": 7}
#: The least power of two that is a value of f16. Of bf16 all of E8M0 are, but for code 0, 2^-127,
#: which the kernels do not make.
_LEAST_F16 = -24


def plain(scale: Array | None, kind: WeightScales, name: str) -> bool:
    """Whether a weight with such scales is widened to ``name`` without a limit: every product of a
    finite code and a scale rounds to a finite value, and powers of two (mx) are values of the type.
    Then a kernel may multiply by these in the type: the product in float32 is exact, 4 bits of a
    code from 2^-9 on by at least 2^-126, so both ways round once."""
    if kind == "none" or scale is None or not scale.size:
        return True
    if kind == "block":
        return bool((np.abs(scale) <= 2.0 ** _MOST[name]).all())
    exponent = scale.view(np.uint8).astype(np.int32) - _ONE
    least = _LEAST_F16 if name == "f16" else 1 - _ONE
    return bool(least <= exponent.min() and exponent.max() <= _MOST[name])


def blocks(m: int, k: int) -> tuple[int, int]:
    """Blocks along M and along K of a weight [m, k]; without columns one, of empty groups."""
    return -(-m // BLOCK_ROWS), max(1, -(-k // BLOCK_K))


def to_fragments(values: Array, meta: Array, k: int, scale: Array | None, spec: ScaleSpec) -> Array:
    """The image, uint8 [Mb, Kb, block bytes], of row-order ``values`` [M, K/2] of one byte,
    ``meta`` uint8 [M, ceil(K/8)] and the ``scale`` of ``spec``."""
    m = values.shape[0]
    mb, kb = blocks(m, k)
    kind = weight_scales(spec)
    image = np.empty((mb, kb, BLOCK_BYTES[kind]), np.uint8)

    codes = np.zeros((mb * BLOCK_ROWS, kb * BLOCK_K // 2), np.uint8)
    codes[:m, : k // 2] = values.view(np.uint8)
    # (block row, warp, +8, row of the quad, K block, step, +4 groups, group of the quad, pair)
    split = codes.reshape(mb, 4, 2, 8, kb, 2, 2, 4, 2)
    by_thread = split.transpose(0, 4, 1, 3, 7, 5, 6, 2, 8)
    image[:, :, :_CODE_BYTES] = by_thread.reshape(mb, kb, _CODE_BYTES)
    image[:, :, _CODE_BYTES:_SCALES_AT] = meta_words(meta, k, (mb, kb), _SIXTEEN_BIT)

    if kind == "none":
        return image
    assert scale is not None and spec.block is not None
    rows, columns = (1, 32) if kind == "mx" else (GROUP, GROUP)
    row, column = np.arange(0, mb * BLOCK_ROWS, rows), np.arange(0, kb * BLOCK_K, columns)
    if kind == "mx":
        spread = np.full((row.size, column.size), _ONE, np.uint8)
        stored = scale.view(np.uint8)
    else:
        spread, stored = np.ones((row.size, column.size), np.float32), scale
    row, column = row[row < m] // spec.block[0], column[column < k] // spec.block[1]
    spread[: row.size, : column.size] = stored[row[:, None], column]
    by_block = spread.reshape(mb, BLOCK_ROWS // rows, kb, BLOCK_K // columns).swapaxes(1, 2)
    image[:, :, _SCALES_AT:] = np.ascontiguousarray(by_block).view(np.uint8).reshape(mb, kb, -1)
    return image
