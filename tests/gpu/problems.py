"""Seeded matrices for the GPU tests, with their exact products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.bits import widen
from sp24cli.fp8 import convert
from sp24cli.optypes import operand_type
from sp24cli.packed import PackedMatrix, pack
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24

Array = npt.NDArray[Any]

#: (M, N, K): one tile and less, whole clusters, ragged in every direction, K of one short block,
#: K long enough that a tile is stored while the next is multiplied, several tiles a CTA, and an odd
#: number of blocks whichever the type.
SHAPES = [
    (64, 8, 128),
    (192, 256, 1280),
    (65, 300, 1412),
    (256, 256, 512),
    (65, 300, 132),
    (1000, 77, 4092),
    (8, 1, 4),
    (300, 1030, 2500),
    (8500, 1100, 2304),
    (200, 40, 1044),
]


@dataclass(frozen=True)
class Problem:
    packed: PackedMatrix
    x: Array
    a64: Array
    exact: Array
    norms: Array


def make_packed(dense: Array, type_name: str, scale: str, layout: str = "sm90") -> PackedMatrix:
    optype = operand_type(type_name)
    spec = ScaleSpec.parse(scale if optype.scaled else "none", None)
    packed, _ = pack(dense, optype, spec, source_dtype="F32")
    return packed.to_layout(layout)


@cache
def integers(type_name: str, m: int, n: int, k: int) -> Problem:
    """Small integers: every partial sum is exact in the tensor core, so D is too."""
    random = np.random.default_rng([m, n, k])
    dense = prune_24(random.integers(-3, 4, (m, k)).astype(np.float32))
    # 448 somewhere makes the tensor scale 1, so that codes are the integers themselves.
    dense[0, : min(4, k)] = [448, 0, 0, 0][: min(4, k)]
    x = convert(random.integers(-1, 2, (n, k)).astype(np.float32), operand_type(type_name))
    return _problem(make_packed(dense, type_name, "tensor"), x)


@cache
def normal(type_name: str, m: int, n: int, k: int, scale: str = "vector") -> Problem:
    """Random normal values pruned by magnitude."""
    random = np.random.default_rng([k, n, m])
    dense = prune_24(random.standard_normal((m, k), np.float32) * 0.05)
    x = convert(random.standard_normal((n, k), np.float32), operand_type(type_name))
    return _problem(make_packed(dense, type_name, scale), x)


def _problem(packed: PackedMatrix, x: Array) -> Problem:
    a = packed.dequantize(np.float64)
    b = widen(x).astype(np.float64)
    return Problem(packed, x, a, a @ b.T, np.sqrt((a * a) @ (b * b).T))
