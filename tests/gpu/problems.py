"""Seeded matrices for the GPU tests, with their exact products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.bits import widen
from sp24cli.fp8 import convert
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight
from sp24cli.kernels.manifest import Entry
from sp24cli.optypes import OPERANDS, OperandType, operand_type
from sp24cli.packed import PackedMatrix, pack
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from sp24cli.reference import widened
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from sp24cli.verify.cpu import random_activations

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
    (4300, 1100, 2304),
    (200, 40, 1044),
]


#: A value beside small ones that makes the tensor scale a power of two, so that codes are exactly
#: the values, or these times another.
ANCHOR = {"e4m3": 448, "e5m2": 28, "s8": 127}

#: Problems that a process keeps. Tests of one size follow one another, by type; those of balanced
#: tiles hold 400 MB each, and fifteen processes that kept all of theirs would not fit 128 GB.
KEPT = 8

#: Values that every type holds exactly: three significant bits.
EXACT = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28], np.float32)


@dataclass(frozen=True)
class Problem:
    """``x`` is of type B, ``exact`` the product of the dequantized weight ``a64`` with it (of the
    widened one, where that is what is multiplied), ``sums`` that of the codes."""

    packed: PackedMatrix
    x: Array
    a64: Array
    exact: Array
    norms: Array

    @cached_property
    def sums(self) -> Array:
        codes = widen(self.packed.codes()).astype(np.float64)
        product: Array = codes @ widen(self.x).astype(np.float64).T
        return product


def upload(device: Device, packed: PackedMatrix, types: str) -> SparseWeight:
    """The weight as kernels of these operands, a name of `optypes.OPERANDS`, read it."""
    found = OPERANDS[types]
    wide = found.b.name if found.widened else None
    return SparseWeight.upload(device, packed, activations=wide)


def make_packed(dense: Array, type_name: str, scale: str, layout: str = "sm90") -> PackedMatrix:
    """``scale`` is a kind, or a block as in 32x32."""
    optype = operand_type(type_name)
    kind, block = ("block", scale) if scale[0].isdigit() else (scale, None)
    spec = ScaleSpec.parse(kind if optype.scaled else "none", block)
    packed, _ = pack(dense, optype, spec, source_dtype="F32")
    return packed.to_layout(layout)


def operand_scale(entry: Entry) -> str:
    """The scales, as `make_packed` takes them, that a kernel applies to a weight before it is
    multiplied; "tensor" where it applies none."""
    return {"none": "tensor", "block": "32x32", "mx": "mx"}[entry.weight_scales]


def spread(packed: PackedMatrix, scale: str) -> PackedMatrix:
    """The same values where the one scale, a power of two, is written for every block of
    ``scale``, as `make_packed` takes it."""
    if scale == "tensor":
        return packed
    kind, block = ("block", scale) if scale[0].isdigit() else (scale, None)
    spec = ScaleSpec.parse(kind, block)
    assert packed.scale is not None
    filled = np.full(spec.shape(*packed.shape), packed.scale[0]).astype(spec.dtype)
    return replace(packed, info=replace(packed.info, scale=spec), scale=filled)


def anchored(dense: Array, optype: OperandType) -> Array:
    """``dense`` with the `ANCHOR` of its type in place of its first four values."""
    dense[0, :4] = [ANCHOR.get(optype.name, 448), 0, 0, 0]
    return dense


@lru_cache(KEPT)
def integers(types: str, m: int, n: int, k: int, scale: str = "tensor") -> Problem:
    """Small integers: every partial sum is exact in the tensor core (in f16, too: below 2048), so
    D is. ``types`` is a name of `optypes.OPERANDS`, ``scale`` as for `spread`."""
    a, b = OPERANDS[types].a, OPERANDS[types].b
    random = np.random.default_rng([m, n, k])
    dense = prune_magnitude(random.integers(-3, 4, (m, k)).astype(np.float32), pattern_of(a))
    x = convert(random.integers(-1, 2, (n, k)).astype(np.float32), b)
    return _problem(spread(make_packed(anchored(dense, a), a.name, "tensor"), scale), x)


@lru_cache(KEPT)
def normal(types: str, m: int, n: int, k: int, scale: str = "vector") -> Problem:
    """Random normal values pruned by magnitude; activations of s8 over its whole range."""
    a, b = OPERANDS[types].a, OPERANDS[types].b
    random = np.random.default_rng([k, n, m])
    dense = prune_magnitude(random.standard_normal((m, k), np.float32) * 0.05, pattern_of(a))
    return _problem(make_packed(dense, a.name, scale), random_activations(random, n, k, b))


def all_codes(m: int, n: int, k: int) -> Problem:
    """s8 from -128 to 127 in weight and activations; the first rows hold the largest sums there
    are: of 2^14 and -2^14 + 2^7 alone."""
    random = np.random.default_rng([n, k, m])
    dense = prune_24(random.standard_normal((m, k), np.float32))
    packed = make_packed(dense, "s8", "vector", "row")
    values = random.integers(-128, 128, (m, k // 2), np.int8)
    x = random.integers(-128, 128, (n, k), np.int8)
    values[:2], x[0], x[1] = -128, -128, 127
    # A scale that brings the largest sums into f16.
    scale = np.full((m, 1), 2.0**-13, np.float32)
    return _problem(replace(packed, values=values, scale=scale).to_layout("sm90"), x)


def _problem(packed: PackedMatrix, x: Array) -> Problem:
    in_operand = packed.info.scale.block is not None and x.dtype.itemsize > 1
    a = widen(widened(packed, x.dtype)) if in_operand else packed.dequantize(np.float64)
    a = a.astype(np.float64)
    b = widen(x).astype(np.float64)
    return Problem(packed, x, a, a @ b.T, np.sqrt((a * a) @ (b * b).T))


def on_device(device: Device, array: Array) -> DeviceArray:
    return DeviceArray(device, array.shape, array.dtype, device.upload(array.view(np.uint8)))
