"""Scales: multipliers, value = code * scale, one a tensor, a row or a block.

A scale is amax / max_finite in float32, floored at the smallest normal float32; a zero
tensor, row or block gets 1. No scale is ever zero, subnormal, NaN or infinite.

Kind ``mx`` has the blocks and the scales (E8M0, powers of two) of the OCP Microscaling Formats
specification 1.0, but rounds up: the least power of two with amax / scale <= max_finite. The
specification's own 2^(floor(log2 amax) - emax) is half of that where amax is more than
max_finite / 2^emax (1.75 for E4M3) times a power of two, and lets such values saturate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import frexp
from typing import Any, Literal, cast, get_args

import ml_dtypes
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

ScaleKind = Literal["none", "tensor", "vector", "block", "mx"]

#: The logical K of one sparse 8-bit wgmma.
WGMMA_K = 64
#: Rows x columns under one scale of kind ``mx``.
MX_BLOCK = (1, 32)
#: The longest side of a block: what numpy still divides by.
_MOST_SIDE = 2**63 - 1

_F32 = np.finfo(np.float32)
_F32_TYPE = np.dtype(np.float32)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
#: Code e of E8M0 is 2^(e - 127). 2^-127 is no normal float32, and 0xFF is NaN.
_E8M0_BIAS = 127
_LEAST_POWER, _MOST_POWER = -126, 127


@dataclass(frozen=True)
class ScaleSpec:
    """What one scale covers: nothing (``none``), the tensor, a row, or ``block`` = (bm, bk).

    ``block`` is rows by logical columns, the columns a multiple of 4; `MX_BLOCK` for ``mx``,
    None for other kinds.
    """

    kind: ScaleKind
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScaleKind):
            raise BadInputError(
                f"unknown scale kind {self.kind!r} (known: {', '.join(get_args(ScaleKind))})"
            )
        blocked = self.kind in ("block", "mx")
        if blocked != (self.block is not None):
            needs = "needs a" if blocked else "takes no"
            raise BadInputError(f"scale kind {self.kind!r} {needs} block size")
        if self.block is not None and (min(self.block) < 1 or self.block[1] % GROUP):
            bm, bk = self.block
            raise BadInputError(
                f"scale block {bm}x{bk}: both sides must be positive, columns a multiple of {GROUP}"
            )
        if self.block is not None and max(self.block) > _MOST_SIDE:
            bm, bk = self.block
            raise BadInputError(f"scale block {bm}x{bk}: a side is longer than {_MOST_SIDE}")
        if self.kind == "mx" and self.block != MX_BLOCK:
            bm, bk = cast(tuple[int, int], self.block)
            raise BadInputError(f"scale block {bm}x{bk}: kind 'mx' has 1x32")

    @classmethod
    def parse(cls, kind: str, block_text: str | None = None) -> ScaleSpec:
        """The spec of ``kind`` with a block written ``ROWSxCOLUMNS``, as in ``128x128``; that of
        ``mx`` may be left out."""
        block = MX_BLOCK if kind == "mx" else None
        if block_text is not None:
            sides = re.fullmatch(r"([0-9]{1,20})x([0-9]{1,20})", block_text.lower())
            if sides is None:
                raise BadInputError(f"scale block {block_text!r} is not ROWSxCOLUMNS")
            block = (int(sides[1]), int(sides[2]))
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
    def dtype(self) -> np.dtype[Any]:
        """In what scales are stored: float32, or E8M0 for ``mx``."""
        return _E8M0 if self.kind == "mx" else _F32_TYPE

    @property
    def is_small(self) -> bool:
        """Whether a scale changes within the K of one 8-bit wgmma, which then cannot sum its
        products: weights are widened first, and multiplied by 16-bit activations."""
        return self.block is not None and self.block[1] % WGMMA_K != 0

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


def make_scales(largest: Array, max_finite: float, spec: ScaleSpec) -> Array:
    """The scales of ``spec.dtype`` that take ``largest`` (finite, >= 0) to at most about
    ``max_finite``: `scales_from_amax`, or for ``mx`` the next power of two upward."""
    if spec.kind != "mx":
        return scales_from_amax(largest, max_finite)
    # Exact: amax = m 2^x and max_finite = n 2^y, m and n in [1/2, 1).
    m, x = np.frexp(largest.astype(np.float64))
    n, y = frexp(max_finite)
    return powers(np.where(largest == 0, 0, x - y + (m > n)))


def powers(exponents: Array) -> Array:
    """2^exponents as E8M0, those out of the range of normal float32 brought into it."""
    code = np.clip(exponents, _LEAST_POWER, _MOST_POWER) + _E8M0_BIAS
    return code.astype(np.uint8).view(_E8M0)


def scale_values(scale: Array) -> Array:
    """Stored scales as float32, exactly."""
    return _E8M0_VALUES.take(scale.view(np.uint8)) if scale.dtype == _E8M0 else scale


_E8M0_VALUES = np.arange(256, dtype=np.uint8).view(_E8M0).astype(np.float32)


def quotient(values: Array, scale: Array) -> Array:
    """``values / scale``, broadcast: one IEEE division in float32 (float64 for float64)."""
    wide = widen(values)
    with np.errstate(over="ignore", under="ignore"):
        divided: Array = wide / scale.astype(wide.dtype, copy=False)
    return divided


def expand(
    scale: Array | None, spec: ScaleSpec, rows: slice, cols: slice, *, step: int = 2
) -> Array:
    """The scale of every kept value of a tile: float32, broadcasts to [rows, columns/2].

    ``rows`` and ``cols`` (logical, multiples of 4) place the tile in the tensor that ``scale``
    belongs to. Kept values 2g and 2g+1 of a row belong to group g, columns 4g to 4g+3, which
    lie in one block; ``step`` 4 gives the scale of every group, [rows, columns/4]. ``none``
    gives 1.
    """
    if scale is None:
        return np.ones((1, 1), np.float32)
    if spec.block is None:
        return scale.reshape(-1, 1) if spec.kind == "tensor" else scale[rows]
    bm, bk = spec.block
    bits = scale.view(np.uint8) if scale.dtype == _E8M0 else scale
    across = bits.take(np.arange(cols.start, cols.stop, step) // bk, axis=1)
    found = across.take(np.arange(rows.start, rows.stop) // bm, axis=0)
    return _E8M0_VALUES.take(found) if scale.dtype == _E8M0 else found


def find_bad(scale: Array) -> tuple[int, ...] | None:
    """Index of the first scale that is not a positive, normal, finite float32, or None."""
    scale = scale_values(scale)
    bad = ~((scale >= _F32.tiny) & (scale <= _F32.max))
    if not bad.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(bad.argmax()), scale.shape))
