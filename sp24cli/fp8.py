"""Conversion to the operand types: to nearest even, once, from every source type.

float32 and narrower need no care beyond one rounding. float64 goes through float32 *rounded to
odd*, whose last bit remembers whether anything was cut off, so that the second rounding
decides as if it saw the whole value (S. Boldo, G. Melquiond, "Emulation of FMA and correctly
rounded sums", 2008: exact if the middle format has two bits more). The same step takes
float32 to 16 bits, which index a table of all codes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np

from sp24cli.bits import NUMBER_TYPES, Array, contiguous_bits, number_type, widen
from sp24cli.errors import BadInputError
from sp24cli.optypes import OperandType

Overflow = Literal["satfinite", "nan"]

#: mantissa bits, least exponent, code of the largest value, code past the end (NaN, infinity)
_FORMATS = {"F8_E4M3": (3, -6, 0x7E, 0x7F), "F8_E5M2": (2, -14, 0x7B, 0x7C)}
_NAN_CODE = 0x7F
#: Bits that tf32 has less than float32, and the bits of its largest value.
_TF32_CUT = 13
_TF32_LARGEST = np.uint32(0x7F7FE000)
#: Values converted at a time, so that the temporaries stay in cache.
_CHUNK = 1 << 17


def to_e4m3(x: Array, *, overflow: Overflow = "satfinite") -> Array:
    """``x`` of any supported type and shape as float8_e4m3fn.

    ``satfinite`` maps what is beyond 448, infinity included, to 448 of the same sign; ``nan``
    maps what rounds beyond 448 (above 464; the tie goes down) to NaN. NaN becomes 0x7F in both.
    As PTX ``cvt.rn[.satfinite].e4m3x2``.
    """
    return _to_fp8(x, "F8_E4M3", overflow)


def to_e5m2(x: Array, *, overflow: Overflow = "satfinite") -> Array:
    """``x`` as float8_e5m2: as `to_e4m3` with 57344, and ``nan`` gives infinity past the end."""
    return _to_fp8(x, "F8_E5M2", overflow)


def to_s8(x: Array) -> Array:
    """``x`` as int8, clipped to -127..127, so that every code has its negative. NaN becomes 0."""
    rounded = np.rint(np.clip(widen(x.reshape(-1)), -127, 127))
    rounded[np.isnan(rounded)] = 0
    return rounded.astype(np.int8).reshape(x.shape)


def to_tf32(x: Array, *, overflow: Overflow = "satfinite") -> Array:
    """``x`` as float32 that tf32 holds: eleven significant bits, the lowest 13 bits zero.

    As PTX ``cvt.rn.tf32.f32``. The tensor core ignores those 13 bits, so what was not rounded it
    would cut. ``satfinite`` maps what is beyond the largest to that, ``nan`` to infinity.
    """
    v = _to_f32_odd(widen(x.reshape(-1)))
    bits = v.view(np.uint32)
    rounded = bits + ((bits >> _TF32_CUT & 1) + np.uint32((1 << (_TF32_CUT - 1)) - 1))
    rounded &= np.uint32(0xFFFFFFFF << _TF32_CUT & 0xFFFFFFFF)
    if overflow == "satfinite":
        magnitude = rounded & np.uint32(0x7FFFFFFF)
        rounded = np.minimum(magnitude, _TF32_LARGEST) | (rounded & np.uint32(0x80000000))
    # A NaN's mantissa must not carry into the exponent and sign.
    rounded[np.isnan(v)] = 0x7FFFE000
    return rounded.view(np.float32).reshape(x.shape)


def convert(x: Array, optype: OperandType, overflow: Overflow = "satfinite") -> Array:
    """``x`` of any supported type and shape as ``optype.dtype``: see `round_to`.

    `BadInputError` for s8 with ``nan``, for it has none.
    """
    if optype.name == "s8":
        check_overflow(optype, overflow)
        return to_s8(x)
    if optype.name == "tf32":
        return to_tf32(x, overflow=overflow)
    return round_to(x, optype.dtype, overflow)


def find_unrounded(values: Array) -> tuple[int, int] | None:
    """(row, column) of the first float32 of ``values`` [M, N] that tf32 does not hold, or None."""
    bad = contiguous_bits(values) & np.uint32((1 << _TF32_CUT) - 1) != 0
    if not bad.any():
        return None
    row, column = divmod(int(bad.argmax()), bad.shape[1])
    return row, column


def check_overflow(optype: OperandType, overflow: Overflow) -> None:
    """`BadInputError` unless the type has what ``overflow`` makes of values beyond its range."""
    if overflow == "nan" and optype.name == "s8":
        raise BadInputError("s8 has neither NaN nor infinity: overflow is satfinite only")


def round_to(x: Array, dtype: np.dtype[Any], overflow: Overflow = "satfinite") -> Array:
    """``x`` of any supported type and shape as ``dtype``, rounded to nearest even once.

    ``satfinite`` clamps to the largest finite value of ``dtype``; ``nan`` gives infinity there,
    or NaN where the type has none. NaN stays NaN. `BadInputError` for a type that no value is
    rounded to (I8).
    """
    name = number_type(dtype).name
    if name in _FORMATS:
        return _to_fp8(x, name, overflow)
    if name == "I8":
        raise BadInputError("values are not rounded to I8")
    v = widen(x.reshape(-1))
    if name == "F64":
        v = v.astype(np.float64)
    elif name != "F32":
        v = _to_f32_odd(v)
    if overflow == "satfinite":
        limit = v.dtype.type(ml_dtypes.finfo(dtype).max)
        v = np.clip(v, -limit, limit)
    if name == "BF16":
        return _f32_to_bf16(v).reshape(x.shape)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return v.astype(dtype).reshape(x.shape)


def _to_fp8(x: Array, name: str, overflow: Overflow) -> Array:
    table = _code_table(name, overflow)
    flat = x.reshape(-1)
    codes = np.empty(flat.shape, np.uint8)
    for start in range(0, flat.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        bits = _to_f32_odd(widen(flat[chunk])).view(np.uint32)
        # The upper 16 bits, rounded to odd: a carry tells that the lower ones are not all 0.
        index = bits & np.uint32(0xFFFF)
        index += np.uint32(0xFFFF)
        index |= bits
        index >>= np.uint32(16)
        table.take(index, out=codes[chunk], mode="clip")
    return codes.view(NUMBER_TYPES[name].dtype).reshape(x.shape)


@cache
def _code_table(name: str, overflow: Overflow) -> Array:
    """The code of every bfloat16 bit pattern, uint8 [65536]."""
    mantissa, least, largest, past_end = _FORMATS[name]
    value = widen(np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16))
    magnitude = np.where(np.isfinite(value), np.abs(value), 0).astype(np.float64)
    exponent = np.where(magnitude == 0, least, np.maximum(np.frexp(magnitude)[1] - 1, least))
    # A carry out of the mantissa runs into the exponent, as it must.
    code = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)
    code += (exponent - least) << mantissa
    code[np.isinf(value)] = largest + 1
    sign = np.signbit(value).astype(np.int64) << 7
    code = np.where(code > largest, largest if overflow == "satfinite" else past_end, code) | sign
    code[(code & 0x7F == 0x7F) | np.isnan(value)] = _NAN_CODE
    table: Array = code.astype(np.uint8)
    table.flags.writeable = False
    return table


def _to_f32_odd(x: Array) -> Array:
    """float32 rounded to odd from float64; float32 passes as it is."""
    if x.dtype == np.float32:
        return x
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = x.astype(np.float32)
        back = near.astype(np.float64)
    bits = near.view(np.uint32)
    # Infinity from a finite value steps back to the largest float32, which is odd.
    bits -= np.abs(back) > np.abs(x)
    bits |= back != x
    return near


def _f32_to_bf16(v: Array) -> Array:
    bits = v.view(np.uint32)
    rounded = bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))
    out = (rounded >> 16).astype(np.uint16)
    # A NaN's mantissa must not carry into the exponent and sign.
    out[np.isnan(v)] = 0x7FFF
    return out.view(ml_dtypes.bfloat16)
