"""Whether a product is right, before anyone asks how fast it was.

Every element of D is compared with float64. The bound of an element has two parts:

* rounding of the output, ``u·|d|`` with u half an ulp of the output type (and a few float32
  roundings for the scales);
* the tensor core's sums. Each step cuts its products and the accumulator to a grid g of 2^-13 of
  the largest of them for FP8 (2^-22 covers 16-bit types, 2^-20 tf32), and by Cauchy-Schwarz no
  partial sum exceeds ‖a‖·‖b‖.

For normal data the partial sums are a walk that stays far below that, and the bound is calibrated,
not derived: ``2^-13·‖a‖·‖b‖·(8·√(64/K) + √(K/8192))``, narrow enough to see one wrong index. On
an H200 the largest error of a product was 32 to 53 % of its bound for e4m3 into bf16, 88 % for f16.
(What must hold of any right kernel is derived in ``verify/tensorcore.py``, and wider.) An element
that ends far out had a large accumulator on the way, and is allowed half a grid of itself a step
more.

Data that someone gives may have one product that outweighs all others, and then every step cuts a
large accumulator toward zero: a grid a step and 9 √(K/2) for the products, which is as wide as such
bounds are. So for given data small integers on the weight's own mask decide as well: their product
is exact in every sum, and Freivalds' test judges all of its elements at once. It also stands in
where no float64 product is at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli import rowblocks
from sp24cli.bits import widen
from sp24cli.optypes import Operands, OperandType, operand_type
from sp24cli.packed import PackedMatrix
from sp24cli.reference import widened
from sp24cli.scaling import ScaleSpec
from sp24cli.verify.result import Check

Array = npt.NDArray[Any]

#: Half an ulp, relative, of each output type, and three roundings of float32 before it.
OUT_ROUNDING = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 4 * 2.0**-24, "s32": 0.0}
#: Half of the smallest subnormal: what rounding may cost near zero.
OUT_FLOOR = {"bf16": 0.0, "f16": 2.0**-25, "f32": 0.0, "s32": 0.0}

#: By bytes of an item. That of tf32 is calibrated: an H200 showed, at 1000x77x4092, 2.4 times the
#: error that the grid of 16-bit types allows.
_SUM_ROUNDING = {1: 2.0**-13, 2: 2.0**-22, 4: 2.0**-20}


def _sum_rounding(operands: Operands) -> float:
    """The grid of a step; sums of integers are exact, those in f16 cut to its eleven bits."""
    if operands.accumulate == "s32":
        return 0.0
    return 2.0**-10 if operands.accumulate == "f16" else _SUM_ROUNDING[operands.multiplied.itemsize]


#: Rows compared at a time by one thread.
_ROWS = 128

#: Half the range of the integers in Freivalds' vectors: a wrong row passes once in 2^21.
_FREIVALDS = 1 << 20
#: Standard deviation of the exact product; bf16 holds integers to 256, nine deviations.
_EXACT_DEVIATION = 28.0


@dataclass(frozen=True)
class Tolerance:
    """The bound of each element, ``rounding·|d| + floor + sums·‖a‖·‖b‖``, and of the whole."""

    rounding: float
    floor: float
    sums: float
    frobenius: float


def tolerance(operands: Operands, out: str, k: int, *, normal: bool) -> Tolerance:
    """What a right kernel may deviate over a sum of ``k``; see the head of this module.

    ``normal``: weight and activations are normal values. Peers are held to the same bounds.
    """
    unit = _sum_rounding(operands)
    length = max(k, 1)
    rounding = OUT_ROUNDING[out]
    # The dense peers take the shortest steps, of 32 bytes along K.
    steps = -(-length * operands.multiplied.itemsize // 32)
    if normal:
        # An accumulator that ends at d was d/2 on average; each step cuts at most a grid of it.
        rounding += unit * steps / 2
        sums = 8 * math.sqrt(64 / length) + math.sqrt(length / 8192)
        # A random sum is ‖a‖‖b‖/√K large, so its relative error is flat for short K, then grows.
        relative = 8 * max(1.0, length / 4096)
    else:
        sums = steps + 9 * math.sqrt(length / 2)
        relative = 2.0 * steps
    return Tolerance(rounding, OUT_FLOOR[out], unit * sums, OUT_ROUNDING[out] / 2 + unit * relative)


@dataclass(frozen=True)
class Reference:
    """The product of the codes, P [M, N] float64, and the norms of the rows of A and B; of the
    values, where scales change along K.

    ``rounding`` is P's own relative error: 0, or that of a verified output that stands in for P.
    """

    product: Array
    a_norms: Array
    b_norms: Array
    rounding: float = 0.0


def dense_codes(packed: PackedMatrix, workers: int) -> Array:
    """The dense matrix of codes [M, K], zeros where nothing was kept."""
    out = np.empty(packed.shape, operand_type(packed.info.type).dtype)
    step = -(-_ROWS // packed.row_step) * packed.row_step

    def fill(part: slice) -> None:
        out[part] = packed.rows(part).codes()

    rowblocks.run(fill, rowblocks.row_slices(packed.shape[0], step), workers)
    return out


def dense_widened(packed: PackedMatrix, optype: OperandType, workers: int) -> Array:
    """The dense matrix [M, K] of a 16-bit type that kernels multiply, of a weight that they widen
    to it: with its scales, but for those of a tensor or of rows, which come after the sum."""
    out = np.empty(packed.shape, optype.dtype)
    step = -(-_ROWS // packed.row_step) * packed.row_step

    def fill(part: slice) -> None:
        rows = packed.rows(part)
        in_operand = packed.info.scale.block is not None
        out[part] = (
            widened(rows, optype.dtype) if in_operand else widen(rows.codes()).astype(optype.dtype)
        )

    rowblocks.run(fill, rowblocks.row_slices(packed.shape[0], step), workers)
    return out


def dense_values(packed: PackedMatrix, workers: int) -> Array:
    """The dense matrix [M, K] that ``packed`` stands for, scales applied, float64."""
    out = np.empty(packed.shape)
    step = -(-_ROWS // packed.row_step) * packed.row_step

    def fill(part: slice) -> None:
        out[part] = packed.rows(part).dequantize(np.float64)

    rowblocks.run(fill, rowblocks.row_slices(packed.shape[0], step), workers)
    return out


def result_values(output: Array) -> Array:
    """What a kernel wrote, or operands, in a float type that holds it exactly."""
    return output.astype(np.float64) if output.dtype == np.int32 else widen(output)


def row_norms(codes: Array, workers: int) -> Array:
    """‖row‖ of a matrix of codes or values, float64."""
    norms = np.empty(codes.shape[0])

    def fill(part: slice) -> None:
        wide = widen(codes[part])
        norms[part] = np.sqrt(np.einsum("ij,ij->i", wide, wide, dtype=np.float64))

    rowblocks.run(fill, rowblocks.row_slices(codes.shape[0], _ROWS), workers)
    return norms


def compare(
    name: str,
    got: Array,
    reference: Reference,
    row_scale: Array | float,
    column_scale: Array | float,
    limits: Tolerance,
    workers: int,
) -> Check:
    """Compare every element of ``got`` [M, N] with ``row_scale·P·column_scale``.

    Scales are one number or one a row (column). NaN never passes.
    """
    m, n = reference.product.shape
    rows = np.broadcast_to(np.asarray(row_scale, np.float64).ravel(), (m,))
    columns = np.broadcast_to(np.asarray(column_scale, np.float64).ravel(), (n,))
    column_norms = reference.b_norms * columns

    def piece(part: slice) -> tuple[float, float, float, float, float, int]:
        scale = rows[part, None]
        expected = reference.product[part] * scale * columns
        with np.errstate(invalid="ignore"):
            error = np.abs(result_values(got[part]) - expected)
        size = np.abs(expected)
        bound = (limits.rounding + reference.rounding) * size + limits.floor
        bound += limits.sums * (reference.a_norms[part, None] * scale) * column_norms
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error == 0, 0.0, error / bound)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        worst = int(ratio.argmax())
        bad = ratio.ravel() > 1
        first = int(bad.argmax()) if bad.any() else -1
        return (
            float(ratio.flat[worst]),
            float(error.flat[worst]),
            float(bound.flat[worst]),
            float(np.square(error).sum()),
            float(np.square(expected).sum()),
            part.start * n + first if first >= 0 else -1,
        )

    found = rowblocks.run(piece, rowblocks.row_slices(m, _ROWS), workers)
    worst = max(found, key=lambda item: item[0])
    total = math.fsum(item[4] for item in found)
    wrong = math.sqrt(sum(item[3] for item in found))
    relative = wrong / math.sqrt(total) if total else (math.inf if wrong else 0.0)
    firsts = [item[5] for item in found if item[5] >= 0]
    first_bad = (firsts[0] // n, firsts[0] % n) if firsts else None
    allowed = limits.frobenius + reference.rounding
    if first_bad is None and not relative <= allowed:
        return Check(f"{name}, as a whole", False, relative, allowed, relative)
    return Check(name, first_bad is None, worst[1], worst[2], relative, first_bad)


def reference_on_cpu(a: Array, b: Array) -> Array:
    """A·Bᵀ of codes [M, K] and [N, K] in float64, [M, N], block by block."""
    wide = widen(b).astype(np.float64).T
    out = np.empty((a.shape[0], b.shape[0]))
    for part in rowblocks.row_slices(a.shape[0], 1024):
        np.matmul(widen(a[part]).astype(np.float64), wide, out=out[part])
    return out


@dataclass(frozen=True)
class ExactProblem:
    """Operands whose product is exact: the weight's own mask with values -1, 0, 1, no scales."""

    packed: PackedMatrix
    tokens: Array


def exact_problem(packed: PackedMatrix, n: int, b_type: OperandType, seed: int) -> ExactProblem:
    """Integers on the mask of ``packed``, as sparse as keeps |D| under 256 (nine deviations).

    Scales that are applied to a weight that is widened are all 1, for the kernels that apply them;
    any other weight is left without."""
    rng = np.random.default_rng([seed, n])
    row = packed.to_layout("row")
    assert row.values is not None
    k = packed.shape[1]
    optype = operand_type(packed.info.type)
    density = min(2 / 3, _EXACT_DEVIATION / math.sqrt(max(1, k // 2)))
    spec = ScaleSpec("tensor" if optype.scaled else "none")
    if optype.itemsize < b_type.itemsize and row.info.scale.block is not None:
        spec = row.info.scale
    values = _signs(rng, row.values.shape, density).astype(optype.dtype)
    tokens = _signs(rng, (n, k), density).astype(b_type.dtype)
    info = replace(row.info, scale=spec)
    ones = np.ones(spec.shape(*packed.shape)).astype(spec.dtype) if optype.scaled else None
    return ExactProblem(replace(row, info=info, values=values, scale=ones), tokens)


def _signs(rng: np.random.Generator, shape: tuple[int, ...], density: float) -> Array:
    """-1 or 1 with probability ``density`` together, else 0; int8."""
    drawn = rng.random(shape, dtype=np.float32)
    signs = np.where(drawn < density / 2, np.int8(-1), np.int8(1))
    return np.where(drawn < density, signs, np.int8(0))


def check_exact(name: str, got: Array, problem: ExactProblem, seed: int, workers: int) -> Check:
    """Freivalds' test of ``got`` [M, N] = A·Bᵀ: D·r against A·(Bᵀ·r) for random integers r.

    All in integers that float64 holds, so a right product gives equality and a wrong row passes
    with probability 2^-21. The same from the left finds the column.
    """
    rng = np.random.default_rng([seed, 1])
    m, n = got.shape
    a = dense_codes(problem.packed, workers)
    right = rng.integers(-_FREIVALDS, _FREIVALDS + 1, (n,)).astype(np.float64)
    left = rng.integers(-_FREIVALDS, _FREIVALDS + 1, (m,)).astype(np.float64)
    through_b = _blocks_dot(problem.tokens.T, right)
    off_row = _blocks_dot(got, right) - _blocks_dot(a, through_b)
    off_column = _blocks_dot(got.T, left) - _blocks_dot(problem.tokens, _blocks_dot(a.T, left))
    bad_rows, bad_columns = (np.flatnonzero(~(off == 0)) for off in (off_row, off_column))
    if not bad_rows.size and not bad_columns.size:
        return Check(name, True, 0.0, 0.0, 0.0)
    row, column = (int(bad[0]) if bad.size else 0 for bad in (bad_rows, bad_columns))
    return Check(name, False, math.inf, 0.0, math.inf, (row, column))


def _blocks_dot(matrix: Array, vector: Array) -> Array:
    """matrix @ vector in float64 without a float64 copy of the whole matrix."""
    out = np.empty(matrix.shape[0])
    for part in rowblocks.row_slices(matrix.shape[0], 2048):
        out[part] = result_values(matrix[part]).astype(np.float64) @ vector
    return out
