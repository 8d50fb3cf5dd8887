"""Metadata nibbles: which two of a group's four values are kept.

A nibble holds the first index in bits 1:0 and the second in bits 3:2, ascending; the lower of
two groups lies in the low nibble of a byte. Source: PTX ISA, sparse ``wgmma``: only the six
ascending pairs are defined. tf32 has a nibble for each group of two, of which it keeps the first
(0100) or the second (1110): the nibble of a 16-bit group in which a value is two neighbours. So
``k`` here is `OperandType.meta_k` of its K, and `kept_places` alone has to know.
"""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array

#: The nibbles the hardware defines, pairs (0,1) (0,2) (1,2) (0,3) (1,3) (2,3).
LEGAL_NIBBLES = (0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110)
#: The nibble of a group without a nonzero, and of padding: pair (0,1).
EMPTY_NIBBLE = 0b0100
#: The nibbles of a group of two.
PAIR_NIBBLES = (0b0100, 0b1110)

_IS_LEGAL = {
    4: np.isin(np.arange(16), LEGAL_NIBBLES),
    2: np.isin(np.arange(16), PAIR_NIBBLES),
}


def meta_bytes(k: int) -> int:
    """Bytes a row of logical width ``k`` takes."""
    return -(-k // 8)


def encode(first: Array, second: Array) -> Array:
    """Pairs, uint8 [M, K/4] each, as bytes: uint8 [M, ceil(K/8)].

    An odd last group leaves the high nibble 0. The pairs are not checked: see `find_illegal`.
    """
    rows, groups = first.shape
    nibbles = np.zeros((rows, groups + groups % 2), np.uint8)
    np.left_shift(second, 2, out=nibbles[:, :groups])
    nibbles[:, :groups] |= first
    words = nibbles.view("<u2")
    packed: Array = (words | words >> 4).astype(np.uint8)
    return packed


def decode(meta: Array, k: int) -> tuple[Array, Array]:
    """(first, second), uint8 [M, K/4] each, of the bytes ``meta`` [M, ceil(K/8)]."""
    nibbles = _nibbles(meta)[:, : k // 4]
    return nibbles & 3, nibbles >> 2


def find_illegal(meta: Array, k: int, group: int = 4) -> tuple[int, int] | None:
    """(row, group) of the first nibble that groups of ``group`` do not have, or None.

    The unused high nibble of an odd last byte must be 0 and counts as group K/4.
    """
    nibbles = _nibbles(meta)
    bad = ~_IS_LEGAL[group].take(nibbles)
    if k % 8:
        bad[:, -1] = nibbles[:, -1] != 0
    if not bad.any():
        return None
    row, group = divmod(int(bad.argmax()), bad.shape[1])
    return row, group


def kept_places(meta: Array, k: int, group: int = 4) -> Array:
    """Where the kept values stand in a flat [M, k]: intp [M, k/2], ascending in every row.

    ``k`` counts values, in groups of ``group``.
    """
    if group == 2:
        halves: Array = kept_places(meta, 2 * k)[:, ::2] >> 1
        return halves
    rows, width = meta.shape
    places = _PLACES.take(meta, axis=0).reshape(rows, 4 * width)
    places += np.arange(0, 8 * width, 8).repeat(4)
    places += (np.arange(rows) * k)[:, None]
    kept: Array = places[:, : k // 2]
    return kept


def _nibbles(meta: Array) -> Array:
    """One byte a nibble, low nibble first: uint8 [M, 2 * bytes]."""
    words = meta.astype("<u2")
    words |= words << 4
    words &= 0x0F0F
    return words.view(np.uint8)


def _places_of_bytes() -> Array:
    """The four kept columns, of eight, of every byte: intp [256, 4]."""
    first, second = decode(np.arange(256, dtype=np.uint8)[:, None], 8)
    columns: Array = np.stack([first, second], axis=2).astype(np.intp)
    columns[:, 1] += 4
    return columns.reshape(256, 4)


_PLACES = _places_of_bytes()
