"""Scales: multipliers, value = code * scale, one a tensor, a row or a block.

A scale is amax / max_finite in float32, floored at the smallest normal float32; a zero
tensor, row or block gets 1. No scale is ever zero, subnormal, NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast, get_args

import numpy as np

from sp24cli.bits import (
    Array,
    contiguous_bits,
    magnitude_values,
    magnitudes,
    number_type,
    widen,
)
from sp24cli.errors import BadInputError
from sp24cli.rowblocks import tiles
from sp24cli.sparsity import GROUP

ScaleKind = Literal["none", "tensor", "vector", "block"]

_F32 = np.finfo(np.float32)


@dataclass(frozen=True)
class ScaleSpec:
    """What one scale covers: nothing (``none``), the tensor, a row, or ``block`` = (bm, bk).

    ``block`` is rows by logical columns, the columns a multiple of 4; None for other kinds.
    """

    kind: ScaleKind
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScaleKind):
            raise BadInputError(
                f"unknown scale kind {self.kind!r} (known: {', '.join(get_args(ScaleKind))})"
            )
        if (self.kind == "block") != (self.block is not None):
            needs = "needs a" if self.kind == "block" else "takes no"
            raise BadInputError(f"scale kind {self.kind!r} {needs} block size")
        if self.block is not None and (min(self.block) < 1 or self.block[1] % GROUP):
            bm, bk = self.block
            raise BadInputError(
                f"scale block {bm}x{bk}: both sides must be positive, columns a multiple of {GROUP}"
            )

    @classmethod
    def parse(cls, kind: str, block_text: str | None = None) -> ScaleSpec:
        """The spec of ``kind`` with a block written ``ROWSxCOLUMNS``, as in ``128x128``."""
        block = None
        if block_text is not None:
            sides = block_text.lower().split("x")
            if len(sides) != 2 or not all(s.isascii() and s.isdigit() for s in sides):
                raise BadInputError(f"scale block {block_text!r} is not ROWSxCOLUMNS")
            block = (int(sides[0]), int(sides[1]))
        return cls(cast(ScaleKind, kind), block)

    def shape(self, rows: int, k: int) -> tuple[int, ...]:
        """Shape of the scale of a tensor [rows, k]."""
        if self.kind == "none":
            return ()
        if self.kind == "tensor":
            return (1,)
        if self.kind == "vector":
            return (rows, 1)
        bm, bk = cast(tuple[int, int], self.block)
        return (-(-rows // bm), -(-k // bk))

    @property
    def row_step(self) -> int:
        """Rows that share scales: row blocks must start at multiples of it."""
        return self.block[0] if self.block else 1


def amax(dense: Array, spec: ScaleSpec) -> Array:
    """The largest magnitude under each scale of ``dense`` [M, K], shape ``spec.shape(M, K)``.

    float32, exact (float64 for float64 sources); 0 where there is nothing. Pruning keeps the
    largest magnitude of every group, so the amax of a matrix and of its 2:4 pruning agree.
    Row blocks that start at multiples of ``spec.row_step`` may be taken one by one: `join_amax`.
    """
    kind = number_type(dense.dtype)
    rows, cols = dense.shape
    bm, bk = spec.block or (1, max(1, cols))
    top = np.zeros((-(-rows // bm), -(-cols // bk) if spec.block else 1), kind.unsigned)
    for r, c in tiles(rows, cols):
        part = magnitudes(contiguous_bits(dense[r, c]), kind)
        if bm > 1:
            edges = [*_edges(r, bm), r.stop]
            spans = [part[a - r.start : b - r.start] for a, b in pairwise(edges)]
            part = np.stack([span.max(axis=0) for span in spans])
        if spec.block:
            part = np.maximum.reduceat(part, _edges(c, bk) - c.start, axis=1)
        else:
            part = part.max(axis=1, keepdims=True)
        place = (
            slice(r.start // bm, r.start // bm + part.shape[0]),
            slice(c.start // bk, c.start // bk + part.shape[1]),
        )
        np.maximum(top[place], part, out=top[place])
    found = magnitude_values(top, kind)
    if spec.kind in ("none", "tensor"):
        found = np.max(found, initial=0, keepdims=True)
    return found.reshape(spec.shape(rows, cols))


def join_amax(parts: Sequence[Array], spec: ScaleSpec) -> Array:
    """The `amax` of a tensor from those of all its row blocks, in order."""
    if spec.kind in ("none", "tensor"):
        joined: Array = np.max(np.stack(parts), axis=0)
        return joined
    return np.concatenate(parts)


def _edges(s: slice, step: int) -> Array:
    """Where the blocks of ``step`` begin within ``s``, its own start included."""
    inner = np.arange((s.start // step + 1) * step, s.stop, step)
    return np.concatenate([[s.start], inner]).astype(np.intp)


def scales_from_amax(largest: Array, max_finite: float) -> Array:
    """The float32 scales that take ``largest`` (finite, >= 0) to ``max_finite``."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = largest.astype(np.float32)
        scale = narrow / np.float32(max_finite)
        # A float64 amax beyond float32 may still have a scale within it.
        scale = np.where(np.isinf(narrow), largest / max_finite, scale)
    scale = np.where(largest == 0, 1, np.clip(scale, _F32.tiny, _F32.max))
    return scale.astype(np.float32)


def quotient(values: Array, scale: Array) -> Array:
    """``values / scale``, broadcast: one IEEE division in float32 (float64 for float64)."""
    wide = widen(values)
    with np.errstate(over="ignore", under="ignore"):
        divided: Array = wide / scale.astype(wide.dtype, copy=False)
    return divided


def expand(scale: Array | None, spec: ScaleSpec, rows: slice, cols: slice) -> Array:
    """The scale of every kept value of a tile: float32, broadcasts to [rows, columns/2].

    ``rows`` and ``cols`` (logical, multiples of 4) place the tile in the tensor that ``scale``
    belongs to. Kept values 2g and 2g+1 of a row belong to group g, columns 4g to 4g+3, which
    lie in one block. ``none`` gives 1.
    """
    if scale is None:
        return np.ones((1, 1), np.float32)
    if spec.block is None:
        return scale.reshape(-1, 1) if spec.kind == "tensor" else scale[rows]
    bm, bk = spec.block
    across = scale.take(np.arange(cols.start, cols.stop, 2) // bk, axis=1)
    return across.take(np.arange(rows.start, rows.stop) // bm, axis=0)


def find_bad(scale: Array) -> tuple[int, ...] | None:
    """Index of the first scale that is not a positive, normal, finite float32, or None."""
    bad = ~((scale >= _F32.tiny) & (scale <= _F32.max))
    if not bad.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(bad.argmax()), scale.shape))
