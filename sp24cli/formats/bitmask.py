"""The ``sparse-24-bitmask`` format of compressed-tensors, and how its masks become ours.

``M.weight`` [R, C] is stored as ``M.shape`` I64 [2, 1], ``M.compressed`` [R, C/2], the kept
values by ascending column, and ``M.bitmask`` U8 [R, ceil(C/8)], bit j of byte i for column
8i + j. Two bits of every group of four are set, so a stored zero has its place. Source:
compressed-tensors 0.14, ``compressors/sparse_compressors/sparse_24_bitmask.py``.
"""

from __future__ import annotations

import numpy as np

from sp24cli import metadata
from sp24cli.bits import Array
from sp24cli.checkpoint.names import WEIGHT_SUFFIX
from sp24cli.sparsity import GROUP, keep_indices

PARTS = ("shape", "compressed", "bitmask")


def part_name(name: str, part: str) -> str:
    """The tensor that holds a ``part`` of the weight ``name``."""
    return f"{name.removesuffix(WEIGHT_SUFFIX)}.{part}"


def to_bitmask(meta: Array, k: int) -> Array:
    """The bitmask of metadata: uint8 [M, ceil(K/8)] both."""
    return _last_group(_MASK_OF_META.take(meta), k)


def from_bitmask(mask: Array, k: int) -> Array:
    """The metadata of a bitmask without fault (see `find_bad_group`)."""
    return _last_group(_META_OF_MASK.take(mask), k)


def find_bad_group(mask: Array, k: int) -> tuple[int, int] | None:
    """(row, group) of the first group without exactly two bits, or None.

    The unused high half of an odd last byte must be 0 and counts as group K/4.
    """
    halves = np.stack([mask & 0x0F, mask >> 4], axis=2).reshape(mask.shape[0], -1)
    bad = _BITS_OF_HALF.take(halves) != 2
    if k % (2 * GROUP):
        bad[:, -1] = halves[:, -1] != 0
    if not bad.any():
        return None
    row, group = divmod(int(bad.argmax()), bad.shape[1])
    return row, group


def _last_group(packed: Array, k: int) -> Array:
    if k % (2 * GROUP):
        packed[:, -1] &= 0x0F
    return packed


_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_BITS_OF_HALF = np.unpackbits(_BYTES[:16], axis=1).sum(axis=1)


def _mask_of_meta() -> Array:
    first, second = metadata.decode(_BYTES, 2 * GROUP)
    halves = (1 << first | 1 << second).astype(np.uint8)
    mask: Array = halves[:, 0] | halves[:, 1] << 4
    return mask


def _meta_of_mask() -> Array:
    places = np.unpackbits(_BYTES, axis=1, bitorder="little").view(np.int8)
    meta: Array = metadata.encode(*keep_indices(places))[:, 0]
    return meta


_MASK_OF_META = _mask_of_meta()
_META_OF_MASK = _meta_of_mask()
