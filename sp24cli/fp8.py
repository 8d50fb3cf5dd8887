"""Conversion to the operand types: to nearest even, once, from every source type.

float32 and narrower need no care beyond one rounding. float64 goes through float32 *rounded to
odd*, whose last bit remembers whether anything was cut off, so that the second rounding
decides as if it saw the whole value (S. Boldo, G. Melquiond, "Emulation of FMA and correctly
rounded sums", 2008: exact if the middle format has two bits more).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from sp24cli.bits import NUMBER_TYPES, Array, contiguous_bits, number_type, widen
from sp24cli.errors import BadInputError
from sp24cli.optypes import OperandType

Overflow = Literal["satfinite", "nan"]


@dataclass(frozen=True)
class _Format:
    """An FP8 type: ``mantissa`` bits, the ``least`` exponent of a normal value, the codes of the
    ``largest`` value and of what is past it (NaN or infinity), and the power of two beyond."""

    mantissa: int
    least: int
    largest: int
    past_end: int
    beyond: float


_FORMATS = {
    "F8_E4M3": _Format(3, -6, 0x7E, 0x7F, 512.0),
    "F8_E5M2": _Format(2, -14, 0x7B, 0x7C, 65536.0),
}
#: The types that `round_fp8` knows, by safetensors name.
FP8_NAMES = tuple(_FORMATS)
_NAN_CODE = 0x7F
_F32_MANTISSA, _F32_BIAS = 23, 127
_F32_EXPONENT = 0x7F800000
#: Bits that tf32 has less than float32, and the bits of its largest value.
_TF32_CUT = 13
_TF32_LARGEST = np.uint32(0x7F7FE000)
#: Values converted at a time, so that the temporaries stay in cache.
_CHUNK = 1 << 16


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
    v = to_f32_odd(widen(x.reshape(-1)))
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
        v = to_f32_odd(v)
    if overflow == "satfinite":
        limit = v.dtype.type(ml_dtypes.finfo(dtype).max)
        v = np.clip(v, -limit, limit)
    if name == "BF16":
        return _f32_to_bf16(v).reshape(x.shape)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return v.astype(dtype).reshape(x.shape)


def _to_fp8(x: Array, name: str, overflow: Overflow) -> Array:
    flat = x.reshape(-1)
    codes = np.empty(flat.shape, np.uint8)
    scratch = np.empty(min(flat.size, _CHUNK), np.uint32)
    for start in range(0, flat.size, _CHUNK):
        part = codes[start : start + _CHUNK]
        value = to_f32_odd(widen(flat[start : start + _CHUNK]))
        sign = (value.view(np.uint32) >> np.uint32(24)).astype(np.uint8)
        with np.errstate(invalid="ignore"):
            round_fp8(np.abs(value), sign, name, overflow, part, scratch[: part.size])
        part[np.isnan(value)] = _NAN_CODE
    return codes.view(NUMBER_TYPES[name].dtype).reshape(x.shape)


def round_fp8(
    values: Array, sign: Array, name: str, overflow: Overflow, codes: Array, scratch: Array
) -> tuple[int, int]:
    """Round magnitudes to "F8_E4M3" or "F8_E5M2"; how many are past the largest, how many not zero.

    ``values`` are float32 of any shape, infinity among them, and become what the codes stand for
    (the largest value where they are past it). ``codes`` (uint8) receives the codes, with bit 7
    of ``sign`` (uint8, overwritten). ``scratch`` is uint32; all have one shape and are contiguous.
    Of NaN any code comes.

    The sum of v and 2^(e + 23 - m), e the exponent of v or the least, is rounded to multiples of
    2^(e - m), ties to even, by the one addition: what FP8 with m mantissa bits holds there. Its
    lowest bits are that multiple, and to subtract the power again is exact.
    """
    form = _FORMATS[name]
    cut = _F32_MANTISSA - form.mantissa
    largest = np.uint8(form.largest).view(NUMBER_TYPES[name].dtype).astype(np.float32)
    bits = values.view(np.uint32)
    # Below the middle between the largest and the next, of which the tie may go either way.
    in_range = bits.max(initial=0) < int(largest.view(np.uint32)) + (1 << (cut - 1))
    if not in_range:
        # Enough to be past the end, and a byte still holds its code.
        np.minimum(values, np.float32(form.beyond), out=values)
    least = _F32_BIAS + form.least
    power = scratch.view(np.float32)
    np.bitwise_and(bits, np.uint32(_F32_EXPONENT), out=scratch)
    # NumPy's clip takes scalars at full speed, its maximum does not.
    np.clip(scratch, np.uint32(least << _F32_MANTISSA), np.uint32(_F32_EXPONENT), out=scratch)
    np.add(scratch, np.uint32(cut << _F32_MANTISSA), out=scratch)
    np.add(values, power, out=values)
    np.copyto(codes, bits, casting="unsafe")
    np.subtract(values, power, out=values)
    # The code is (e - least) 2^m + the multiple, the lowest byte of these sums.
    np.right_shift(scratch, np.uint32(cut), out=scratch)
    np.add(codes, scratch, out=codes, dtype=np.uint8, casting="unsafe")
    np.subtract(codes, np.uint8(((least + cut) << form.mantissa) & 0xFF), out=codes)
    past = 0
    if not in_range:
        beyond = codes > form.largest
        past = int(np.count_nonzero(beyond))
        codes[beyond] = form.largest if overflow == "satfinite" else form.past_end
        values[beyond] = largest
    nonzero = int(np.count_nonzero(codes))
    np.bitwise_and(sign, np.uint8(0x80), out=sign)
    np.bitwise_or(codes, sign, out=codes)
    if past and form.past_end == _NAN_CODE and overflow == "nan":
        codes[codes == 0x80 | _NAN_CODE] = _NAN_CODE
    return past, nonzero


def to_f32_odd(x: Array) -> Array:
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
