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
    packed tensor of this type carries a scale.
    """

    name: str
    safetensors: str
    dtype: np.dtype
    step_k: int
    scaled: bool
    max_finite: float

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def block_k(self) -> int:
        return 2 * BLOCK_ROW_BYTES // self.itemsize

    @property
    def meta_bytes(self) -> int:
        return BLOCK_ROWS * self.block_k // 8

    @property
    def block_bytes(self) -> int:
        return BLOCK_ROWS * BLOCK_ROW_BYTES + self.meta_bytes


OPERAND_TYPES: dict[str, OperandType] = {
    t.name: t
    for t in (
        OperandType("e4m3", "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 64, True, 448.0),
        OperandType("f16", "F16", np.dtype(np.float16), 32, False, 65504.0),
        OperandType(
            "bf16",
            "BF16",
            np.dtype(ml_dtypes.bfloat16),
            32,
            False,
            float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
        ),
    )
}


def operand_type(name: str) -> OperandType:
    """The operand type called ``name``; `BadInputError` for one this version does not know."""
    try:
        return OPERAND_TYPES[name]
    except KeyError:
        known = ", ".join(OPERAND_TYPES)
        raise BadInputError(f"unknown operand type {name!r} (known: {known})") from None
