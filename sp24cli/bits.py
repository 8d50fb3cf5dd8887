"""Number types as plain unsigned integers.

NumPy orders, copies and gathers unsigned integers fast and without the interpreter lock, and
the bits below the sign of every type here sort exactly as the magnitudes do. So the numeric
modules look at bits and never at ml_dtypes' own loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli.errors import BadInputError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class NumberType:
    """A source type: its safetensors name and how its bits read.

    ``magnitude_mask`` clears the sign; ``nonfinite`` is the smallest magnitude that is infinite
    or NaN, None where every value is finite.
    """

    name: str
    dtype: np.dtype[Any]
    nonfinite: int | None

    @property
    def unsigned(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.dtype.itemsize}")

    @property
    def sign(self) -> int:
        return 1 << (8 * self.dtype.itemsize - 1)

    @property
    def magnitude_mask(self) -> int:
        return self.sign - 1


#: The types a weight may have, by safetensors name.
NUMBER_TYPES: dict[str, NumberType] = {
    t.name: t
    for t in (
        NumberType("F64", np.dtype(np.float64), 0x7FF0_0000_0000_0000),
        NumberType("F32", np.dtype(np.float32), 0x7F80_0000),
        NumberType("F16", np.dtype(np.float16), 0x7C00),
        NumberType("BF16", np.dtype(ml_dtypes.bfloat16), 0x7F80),
        NumberType("F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 0x7F),
        NumberType("F8_E5M2", np.dtype(ml_dtypes.float8_e5m2), 0x7C),
        NumberType("I8", np.dtype(np.int8), None),
    )
}
_BY_DTYPE = {t.dtype: t for t in NUMBER_TYPES.values()}


def number_type(dtype: np.dtype[Any]) -> NumberType:
    """The entry of ``dtype``; `BadInputError` naming a type that is not supported."""
    found = _BY_DTYPE.get(dtype)
    if found is None:
        known = ", ".join(NUMBER_TYPES)
        raise BadInputError(f"unsupported weight type {dtype.name} (supported: {known})")
    return found


def contiguous_bits(values: Array) -> Array:
    """The bits of ``values`` as unsigned integers, aligned and C-ordered; copies only if needed."""
    plain = np.require(values, requirements=["C", "A"])
    return plain.view(number_type(values.dtype).unsigned)


def magnitudes(bits: Array, kind: NumberType, *, out: Array | None = None) -> Array:
    """Integers that sort as the magnitudes of the values whose ``bits`` these are.

    For floats the bits without their sign, for int8 the magnitude itself (so -128 is 128).
    ``out`` (as ``bits``) receives and is the result when given.
    """
    if kind.dtype == np.int8:
        signed = None if out is None else out.view(np.int8)
        return np.abs(bits.view(np.int8), out=signed).view(np.uint8)
    unsigned: Array = np.bitwise_and(bits, bits.dtype.type(kind.magnitude_mask), out=out)
    return unsigned


def magnitude_values(magnitude: Array, kind: NumberType, *, out: Array | None = None) -> Array:
    """What `magnitudes` stand for, as `widen` gives it."""
    if kind.dtype != np.int8:
        return widen(magnitude.view(kind.dtype), out=out)
    if out is None:
        return magnitude.astype(np.float32)
    np.copyto(out, magnitude)
    return out


def widen(values: Array, *, out: Array | None = None) -> Array:
    """``values`` as float32, exactly; float64 stays float64. ``out`` (of that type and the shape,
    contiguous) receives and is the result when given."""
    kind = number_type(values.dtype)
    if kind.name == "BF16":
        bits = np.empty(values.shape, np.uint32) if out is None else out.view(np.uint32)
        np.left_shift(values.view(np.uint16), np.uint32(16), out=bits, dtype=np.uint32)
        return bits.view(np.float32)
    if kind.name in ("F64", "F32"):
        wide = values
    elif kind.name in ("F16", "I8"):
        # A signalling NaN is no reason for a warning.
        with np.errstate(invalid="ignore"):
            wide = values.astype(np.float32)
    else:
        wide = _fp8_values(kind).take(contiguous_bits(values))
    if out is None:
        return wide
    np.copyto(out, wide)
    return out


@cache
def _fp8_values(kind: NumberType) -> Array:
    return np.arange(256, dtype=np.uint8).view(kind.dtype).astype(np.float32)
