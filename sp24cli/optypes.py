"""The operand types of the sparse kernels and the sizes that follow from them.

Source: PTX ISA, ``wgmma.mma_async.sp`` (shapes and metadata by operand type).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from sp24cli.errors import BadInputError

#: Rows of one block of the ``sm90`` layout (the M of one wgmma).
BLOCK_ROWS = 64
#: Bytes of kept values in one row of a block (one 64-byte swizzle span).
BLOCK_ROW_BYTES = 64


@dataclass(frozen=True)
class OperandType:
    """What a kernel multiplies.

    ``step_k`` is the logical K of one wgmma, ``block_k`` that of one ``sm90`` block,
    ``meta_bytes`` the metadata of one such block. ``max_finite`` is the magnitude that
    ``scale = amax / max_finite`` maps the largest value to; ``scaled`` says whether a
    packed tensor of this type carries a scale. Of every ``group`` neighbours along K half are
    kept: 2:4, or 1:2 for tf32.
    """

    name: str
    safetensors: str
    dtype: np.dtype
    step_k: int
    scaled: bool
    max_finite: float
    group: int = 4

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def block_k(self) -> int:
        return 2 * BLOCK_ROW_BYTES // self.itemsize

    @property
    def meta_bytes(self) -> int:
        return BLOCK_ROWS * self.meta_k(self.block_k) // 8

    def meta_k(self, k: int) -> int:
        """K as metadata counts it, a nibble four. A pair of tf32 is four halves to the hardware,
        of which it keeps the first two (nibble 0100) or the last two (1110)."""
        return k * 4 // self.group

    @property
    def block_bytes(self) -> int:
        return BLOCK_ROWS * BLOCK_ROW_BYTES + self.meta_bytes


OPERAND_TYPES: dict[str, OperandType] = {
    t.name: t
    for t in (
        OperandType("e4m3", "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 64, True, 448.0),
        OperandType("e5m2", "F8_E5M2", np.dtype(ml_dtypes.float8_e5m2), 64, True, 57344.0),
        OperandType("f16", "F16", np.dtype(np.float16), 32, False, 65504.0),
        OperandType(
            "bf16",
            "BF16",
            np.dtype(ml_dtypes.bfloat16),
            32,
            False,
            float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
        ),
        # Symmetric: -128 is never written.
        OperandType("s8", "I8", np.dtype(np.int8), 64, True, 127.0),
        # Kept as float32 whose lowest 13 bits, which the tensor core does not read, are zero.
        OperandType(
            "tf32", "F32", np.dtype(np.float32), 16, False, (2 - 2.0**-10) * 2.0**127, group=2
        ),
    )
}


def operands_name(a: str, b: str, accumulate: str) -> str:
    """What kernels, results and tables of times call the types of A and B and of their sums."""
    name = a if a == b else f"{a}_{b}"
    return f"{name}_sum16" if accumulate == "f16" else name


@dataclass(frozen=True)
class Operands:
    """The types of A and B, and what the tensor core sums in: "f32", "s32" or "f16"."""

    a: OperandType
    b: OperandType
    accumulate: str

    @property
    def name(self) -> str:
        return operands_name(self.a.name, self.b.name, self.accumulate)

    @property
    def widened(self) -> bool:
        """Whether A is widened to the type of B before it is multiplied."""
        return self.a.itemsize < self.b.itemsize

    @property
    def multiplied(self) -> OperandType:
        """The type of A as the tensor core multiplies it."""
        return self.b if self.widened else self.a


#: Every combination that the kernels have, by name; of an A type the default first.
OPERANDS: dict[str, Operands] = {
    found.name: found
    for found in (
        Operands(OPERAND_TYPES[a], OPERAND_TYPES[b], accumulate)
        for a, b, accumulate in (
            ("e4m3", "e4m3", "f32"),
            ("e4m3", "e5m2", "f32"),
            ("e5m2", "e5m2", "f32"),
            ("e5m2", "e4m3", "f32"),
            ("f16", "f16", "f32"),
            ("f16", "f16", "f16"),
            ("bf16", "bf16", "f32"),
            ("s8", "s8", "s32"),
            ("tf32", "tf32", "f32"),
            ("e4m3", "bf16", "f32"),
            ("e4m3", "f16", "f32"),
        )
    )
}


def operands(a: str, b: str | None = None, accumulate: str | None = None) -> Operands:
    """The operands with A of type ``a``; B of the same type and the widest sum unless named.

    `BadInputError` for a combination that there is not.
    """
    for found in OPERANDS.values():
        if (found.a.name, found.b.name) == (a, b or a) and accumulate in (None, found.accumulate):
            return found
    known = ", ".join(
        f"{o.b.name} summed in {o.accumulate}" for o in OPERANDS.values() if o.a.name == a
    )
    wanted = f" summed in {accumulate}" if accumulate else ""
    raise BadInputError(f"{a} is not multiplied by {b or a}{wanted} (it is by {known})")


def operand_type(name: str) -> OperandType:
    """The operand type called ``name``; `BadInputError` for one this version does not know."""
    try:
        return OPERAND_TYPES[name]
    except KeyError:
        known = ", ".join(OPERAND_TYPES)
        raise BadInputError(f"unknown operand type {name!r} (known: {known})") from None
