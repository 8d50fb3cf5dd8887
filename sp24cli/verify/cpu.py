"""Numerics without a GPU: decode what the kernels would read, multiply it, compare."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from sp24cli import layout
from sp24cli.bits import Array, widen
from sp24cli.fp8 import Overflow, convert
from sp24cli.ops.stream import bands, map_bands
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import PackedMatrix
from sp24cli.pruning import permute
from sp24cli.reference import f32_bound, product, s32_bound, widened, widened_product
from sp24cli.verify.compare import Comparison
from sp24cli.verify.pieces import column_pieces
from sp24cli.verify.result import ORIGINAL, NumericsResult
from sp24cli.verify.smoothed import SmoothedTokens

#: Rows of the random activations. Every weight takes part in as many sums.
TOKENS = 32
#: What 8-bit weights with small blocks are widened to.
_WIDENED = ("bf16", "f16")


def verify_matrix(packed: PackedMatrix, seed: int, *, workers: int = 1) -> NumericsResult:
    """Check all of ``packed`` by its products, every element compared.

    The block image is decoded lane by lane as the tensor core reads it, row order is turned
    into the image first. "product" multiplies by random activations of the operand type in
    float32 (integers: exactly, but for block scales) against float64 on the dequantized weights;
    "identity" multiplies by the identity, which must give every dequantized weight exactly. An
    8-bit weight with small blocks is widened to bf16 and f16 as well: "bf16 product" multiplies
    that by activations of the type, "bf16 identity" must give every widened weight exactly.
    To a weight with smoothed columns come activations that were divided by its factors; with their
    scales "original product" compares it with that of the original (see `smoothed`).
    """
    rows, columns = packed.shape
    info = packed.info
    optype = info.optype
    random = np.random.default_rng(seed)
    divided = None
    if packed.smooth is None:
        activations = random_activations(random, TOKENS, columns, optype)
    else:
        divided = SmoothedTokens.random(random, TOKENS, packed.smooth, optype)
        activations = divided.tokens.codes
        if packed.perm is not None:
            activations = permute.apply(activations, packed.perm)
    wide = info.scale.is_small and optype.itemsize == 1
    narrow = {
        n: random_activations(random, TOKENS, columns, OPERAND_TYPES[n])
        for n in (_WIDENED if wide else ())
    }
    # float64 holds what s32 sums; see `tensorcore`.
    exact_sums = optype.name == "s8" and info.scale.block is None
    checks = ["product", "identity"] + [ORIGINAL] * (divided is not None)
    checks += [f"{name} {what}" for name in narrow for what in ("product", "identity")]

    def multiply(start: int, stop: int) -> dict[str, Comparison]:
        done = {name: Comparison(name) for name in checks}
        band = packed.rows(slice(start, stop))
        sums = {name: _Sums() for name in ("", *narrow)}
        factor, magnified = np.ones((1, 1), np.float32), 0.0
        pieces = column_pieces(band)
        for c in pieces:
            part, tokens = band.columns(c), activations[:, c]
            image = part.to_layout("sm90").blocks
            assert image is not None
            codes, first, second = layout.decode_fragments(image, optype, *part.shape)
            a = _dense(widen(codes), first, second, optype.group)
            b = widen(tokens).T
            if exact_sums:
                b = b.astype(np.float64)
            factor = _factor(part)
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                if info.scale.block is not None:
                    # A scale that varies along K cannot wait for the end of the sum.
                    a *= factor
                    d, read_back = a @ b, a
                else:
                    d, read_back = a @ b, a * factor
                sums[""].add(d, *product(part, tokens))
                exact = part.dequantize(np.float64).astype(np.float32)
            # Scales and activations are what meets a product after it was rounded.
            largest = max(float(factor.max(initial=0)), float(np.abs(b).max(initial=0)))
            magnified = max(magnified, largest)
            place = {"first_row": start, "first_column": c.start}
            done["identity"].add(read_back, exact, np.zeros(()), **place)
            for name, x in narrow.items():
                w = _narrowed(a, x.dtype, info.overflow)
                with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                    d = w @ widen(x[:, c]).T
                sums[name].add(d, *widened_product(part, x[:, c]))
                wide = widen(widened(part, x.dtype))
                done[f"{name} identity"].add(w, wide, np.zeros(()), **place)
        if not pieces:
            return done
        d, want, sizes = sums[""].found
        if info.scale.block is None:
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                d = d.astype(np.float32) * factor
        if exact_sums:
            bound = s32_bound(want, sizes, columns // 2)
        else:
            bound = f32_bound(sizes, columns // 2, magnified)
        done["product"].add(d, want, bound, first_row=start)
        if divided is not None:
            original, off = divided.original_product(band, rows)
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                # One more rounding, for which `f32_bound` and `s32_bound` have room.
                d = d * divided.scale
                bound = bound * divided.scale + off + 2.0**-150
            done[ORIGINAL].add(d, original, bound, first_row=start)
        for name in narrow:
            d, want, sizes = sums[name].found
            bound = f32_bound(sizes, columns // 2)
            done[f"{name} product"].add(d, want, bound, first_row=start)
        return done

    comparisons = {name: Comparison(name) for name in checks}
    ranges = bands(rows, columns, multiple=packed.row_step)
    # In float64, and dense: four times what packing takes.
    for done in map_bands(multiply, ranges, columns, workers, share=4):
        for name, comparison in done.items():
            comparisons[name].merge(comparison)
    return NumericsResult("cpu", tuple(c.check() for c in comparisons.values()))


class _Sums:
    """A product, its reference and the sizes of its sums, added up over pieces of K."""

    def __init__(self) -> None:
        self._found: tuple[Array, ...] = ()

    def add(self, *piece: Array) -> None:
        if not self._found:
            self._found = piece
            return
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            for whole, part in zip(self._found, piece, strict=True):
                whole += part

    @property
    def found(self) -> tuple[Array, ...]:
        return self._found


def random_activations(
    random: np.random.Generator, tokens: int, columns: int, optype: OperandType
) -> Array:
    """Activations [tokens, columns] of an operand type: normal values, integers of all sizes."""
    if optype.name == "s8":
        return random.integers(-128, 128, (tokens, columns), np.int8)
    out = np.empty((tokens, columns), optype.dtype)
    for row in out:
        # Of all rows at once the numbers would be the same.
        row[:] = convert(random.standard_normal(columns, np.float32), optype)
    return out


# These are apart from the code that packs and dequantizes, so that each checks the other.


def _factor(packed: PackedMatrix) -> Array:
    """The float32 scale of every element, broadcasts to [M, K]; a column but for blocks."""
    scale = packed.scale
    if scale is None:
        return np.ones((1, 1), np.float32)
    block = packed.info.scale.block
    if block is None:
        return scale.reshape(-1, 1)
    if packed.info.scale.kind == "mx":
        scale = np.ldexp(np.float32(1), scale.view(np.uint8).astype(np.int32) - 127)
    rows, columns = packed.shape
    by_row = np.repeat(scale, min(block[0], rows), axis=0)[:rows]
    return np.repeat(by_row, min(block[1], columns), axis=1)[:, :columns]


def _dense(kept: Array, first: Array, second: Array, group: int) -> Array:
    """[M, K] with ``kept`` [M, K/2] at the pairs [M, K/group]."""
    rows, groups = first.shape
    if group == 2:
        # (0, 1) are the halves of the first of two values, (2, 3) those of the second. Any other
        # pair is undefined, and shows.
        is_high = (first == 2) & (second == 3)
        high = np.where(is_high, 1, np.where((first == 0) & (second == 1), 0, -1))
        dense = np.where(high[..., None] == [0, 1], kept[..., None], kept.dtype.type(0))
        dense[high < 0] = np.nan
        return dense.reshape(rows, 2 * groups)
    dense = np.zeros((rows, groups, 4), kept.dtype)
    pairs = np.stack([first, second], axis=2).astype(np.intp)
    np.put_along_axis(dense, pairs, kept.reshape(rows, groups, 2), axis=2)
    return dense.reshape(rows, 4 * groups)


def _narrowed(products: Array, dtype: np.dtype[Any], overflow: Overflow) -> Array:
    """float32 rounded to a 16-bit ``dtype``, as float32 again."""
    if overflow == "satfinite":
        most = float(ml_dtypes.finfo(dtype).max)
        products = np.clip(products, -most, most)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return products.astype(dtype).astype(np.float32)
