"""Numerics without a GPU: decode what the kernels would read, multiply it, compare."""

from __future__ import annotations

import numpy as np

from sp24cli import layout
from sp24cli.bits import Array, widen
from sp24cli.fp8 import convert
from sp24cli.ops.stream import bands, map_bands
from sp24cli.packed import PackedMatrix
from sp24cli.reference import f32_bound, product
from sp24cli.verify.compare import Comparison
from sp24cli.verify.result import NumericsResult

#: Rows of the random activations. Every weight takes part in as many sums.
TOKENS = 32


def verify_matrix(packed: PackedMatrix, seed: int, *, workers: int = 1) -> NumericsResult:
    """Check all of ``packed`` by two products, every element compared.

    The block image is decoded lane by lane as the tensor core reads it, row order is turned
    into the image first. "product" multiplies by random activations of the operand type in
    float32 against float64 on the dequantized weights; "identity" multiplies by the identity,
    which must give every dequantized weight exactly.
    """
    rows, columns = packed.shape
    info = packed.info
    optype = info.optype
    random = np.random.default_rng(seed)
    tokens = random.standard_normal((TOKENS, columns), np.float32)
    activations = convert(tokens, optype)
    b = widen(activations).T
    largest_token = float(np.abs(b).max(initial=0))

    def multiply(start: int, stop: int) -> tuple[int, Array, Array, Array, Array, Array]:
        band = packed.rows(slice(start, stop))
        image = band.to_layout("sm90").blocks
        assert image is not None
        codes, first, second = layout.decode_fragments(image, optype, *band.shape)
        a = _dense(widen(codes), first, second)
        factor = _factor(band)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            if info.scale.kind == "block":
                # A scale that varies along K cannot wait for the end of the sum.
                a *= factor
                d, read_back = a @ b, a
            else:
                d, read_back = (a @ b) * factor, a * factor
            want, sizes = product(band, activations)
            exact = band.dequantize(np.float64).astype(np.float32)
        # Scales and activations are what meets a product after it was rounded.
        magnified = max(float(factor.max(initial=0)), largest_token)
        bound = f32_bound(sizes, columns // 2, magnified)
        return start, d, want, bound, read_back, exact

    by_random, by_identity = Comparison("product"), Comparison("identity")
    ranges = bands(rows, columns, multiple=packed.row_step)
    # In float64, and dense: four times what packing takes.
    done = map_bands(multiply, ranges, columns, workers, share=4)
    for start, d, want, bound, read_back, exact in done:
        by_random.add(d, want, bound, first_row=start)
        by_identity.add(read_back, exact, 0.0, first_row=start)
    return NumericsResult("cpu", (by_random.check(), by_identity.check()))


# Both of these are apart from the code that packs and dequantizes, so that each checks the other.


def _factor(packed: PackedMatrix) -> Array:
    """The float32 scale of every element, broadcasts to [M, K]; a column but for blocks."""
    scale = packed.scale
    if scale is None:
        return np.ones((1, 1), np.float32)
    block = packed.info.scale.block
    if block is None:
        return scale.reshape(-1, 1)
    rows, columns = packed.shape
    by_row = np.repeat(scale, block[0], axis=0)[:rows]
    return np.repeat(by_row, block[1], axis=1)[:, :columns]


def _dense(kept: Array, first: Array, second: Array) -> Array:
    """[M, K] with ``kept`` [M, K/2] at the pairs [M, K/4]."""
    rows, groups = first.shape
    dense = np.zeros((rows, groups, 4), kept.dtype)
    pairs = np.stack([first, second], axis=2).astype(np.intp)
    np.put_along_axis(dense, pairs, kept.reshape(rows, groups, 2), axis=2)
    return dense.reshape(rows, 4 * groups)
