"""Row order <-> the block image that the kernels read (layout ``sm90``).

A block is 64 rows by 64 bytes of kept values, then the metadata words of those rows. Values
lie under the 64-byte swizzle: 16-byte chunk c of row i at chunk c ^ ((i >> 1) & 3). Metadata
words lie by thread of the warpgroup, as one ``wgmma.mma_async.sp`` after the other takes them
(PTX ISA, sparse wgmma fragments and metadata; descriptor layout type 2). Rows and columns that
only pad hold value 0 and nibble 0100.

tf32 differs from a 16-bit type in nothing but that two of its halves are a value: the metadata of
a wgmma of K 16 are those of K 32 halves, in the same lanes.
"""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array
from sp24cli.metadata import EMPTY_NIBBLE, meta_bytes
from sp24cli.optypes import BLOCK_ROW_BYTES, BLOCK_ROWS, OperandType

_CHUNK = 16
_CHUNKS = BLOCK_ROW_BYTES // _CHUNK
_VALUE_BYTES = BLOCK_ROWS * BLOCK_ROW_BYTES
_EMPTY_BYTE = EMPTY_NIBBLE * 0x11

#: Row-order metadata of a block, split so that `_WORD_ORDER` sorts it by thread. Rows are
#: (warp, +8, row of the quad); 8-bit bytes are (step, q>>1, 4) and +8 is q&1; those of wider types
#: are (q, 2) and +8 is the upper half of the word.
_WORD_SPLIT = {1: (4, 2, 8, 2, 2, 4), 2: (4, 2, 8, 4, 2)}
_WORD_ORDER = {1: (0, 2, 4, 1, 3, 5), 2: (0, 2, 3, 1, 4)}


def _word_kind(optype: OperandType) -> int:
    """The key of an operand type in `_WORD_SPLIT` and `_WORD_ORDER`."""
    return min(optype.itemsize, 2)


def image_shape(m: int, k: int, optype: OperandType) -> tuple[int, int, int]:
    """[row blocks, K blocks, bytes of a block] of the image of a tensor [m, k]."""
    return -(-m // BLOCK_ROWS), -(-k // optype.block_k), optype.block_bytes


def to_sm90(
    values: Array, meta: Array, k: int, optype: OperandType, *, out: Array | None = None
) -> Array:
    """The image, uint8 [Mb, Kb, block_bytes], of row-order ``values`` [M, K/2] and ``meta``.

    ``meta`` is uint8 [M, ceil(K/8)] (K/4 for tf32). Mb = ceil(M/64), Kb = ceil(K/block_k).
    ``out`` receives and is the result when given.
    """
    m = values.shape[0]
    shape = mb, kb, _ = image_shape(m, k, optype)
    image = np.empty(shape, np.uint8) if out is None else out

    raw = np.ascontiguousarray(values).view(np.uint8)
    row_bytes = _padded(raw, mb, kb * BLOCK_ROW_BYTES, 0)
    chunks = row_bytes.view("V16").reshape(mb, 8, _CHUNKS, 2, kb, _CHUNKS)
    swizzled = _swizzled_chunks(image)
    for turn in range(_CHUNKS):
        # (block row, row / 8, row % 2, K block, chunk), the chunks turned.
        turned = chunks[:, :, turn].take(np.arange(_CHUNKS) ^ turn, axis=-1)
        swizzled[:, :, :, turn] = turned.transpose(0, 3, 1, 2, 4)

    image[:, :, _VALUE_BYTES:] = meta_words(meta, k, (mb, kb), optype)
    return image


def meta_words(meta: Array, k: int, blocks: tuple[int, int], optype: OperandType) -> Array:
    """The metadata words, uint8 [Mb, Kb, meta_bytes], of ``blocks`` = (Mb, Kb) of a tensor whose
    row-order metadata are ``meta``, as for `to_sm90`."""
    mb, kb = blocks
    width = optype.meta_k(optype.block_k) // 8
    nibbles = _padded(meta, mb, kb * width, _EMPTY_BYTE)
    if optype.meta_k(k) % 8:
        # The last byte may be the last of its block, so that this is still the caller's.
        nibbles = nibbles.copy()
        nibbles[: meta.shape[0], meta_bytes(optype.meta_k(k)) - 1] |= EMPTY_NIBBLE << 4
    by_block = nibbles.reshape(mb, BLOCK_ROWS, kb, width).swapaxes(1, 2)
    split, order = _WORD_SPLIT[_word_kind(optype)], _WORD_ORDER[_word_kind(optype)]
    words = by_block.reshape(mb, kb, *split).transpose(0, 1, *(i + 2 for i in order))
    return words.reshape(mb, kb, optype.meta_bytes)


def from_sm90(image: Array, m: int, k: int, optype: OperandType) -> tuple[Array, Array]:
    """Row-order (values [m, k/2] of ``optype.dtype``, meta as for `to_sm90`) of ``image``."""
    row_bytes, nibbles = _row_order(image, optype)
    values = np.ascontiguousarray(row_bytes[:m, : k // 2 * optype.itemsize]).view(optype.dtype)
    meta = np.ascontiguousarray(nibbles[:m, : meta_bytes(optype.meta_k(k))])
    if optype.meta_k(k) % 8:
        meta[:, -1] &= 0x0F
    return values, meta


def find_bad_padding(image: Array, m: int, k: int, optype: OperandType) -> tuple[int, int] | None:
    """(row, group), counted in the padded tensor, of the first padding that is not empty.

    Padding is every group at row >= m or past column k; it must hold value bytes 0 and 0100.
    """
    row_bytes, nibbles = _row_order(image, optype)
    group_bytes = optype.group // 2 * optype.itemsize
    rows, groups = row_bytes.shape[0], row_bytes.shape[1] // group_bytes
    bad: Array = np.any(row_bytes.reshape(rows, groups, group_bytes), axis=2)
    bad[:, 0::2] |= nibbles & 0x0F != EMPTY_NIBBLE
    bad[:, 1::2] |= nibbles >> 4 != EMPTY_NIBBLE
    bad[:m, : k // optype.group] = False
    if not bad.any():
        return None
    row, group = divmod(int(bad.argmax()), groups)
    return row, group


def _swizzled_chunks(image: Array) -> Array:
    """The chunks of ``image``, a view: [Mb, Kb, row / 8, turn = row / 2 % 4, row % 2, chunk]."""
    mb, kb, _ = image.shape
    chunks: Array = image[:, :, :_VALUE_BYTES].view("V16")
    return chunks.reshape(mb, kb, 8, _CHUNKS, 2, _CHUNKS)


def _padded(rows: Array, mb: int, width: int, fill: int) -> Array:
    """``rows`` filled up to whole blocks; ``rows`` itself if they are whole."""
    if rows.shape == (mb * BLOCK_ROWS, width):
        return np.ascontiguousarray(rows)
    padded = np.full((mb * BLOCK_ROWS, width), fill, np.uint8)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return padded


def _row_order(image: Array, optype: OperandType) -> tuple[Array, Array]:
    """Value bytes and metadata bytes of ``image`` by row, padding included."""
    mb, kb, _ = image.shape
    swizzled = _swizzled_chunks(image)
    chunks = np.empty((mb, 8, _CHUNKS, 2, kb, _CHUNKS), "V16")
    for turn in range(_CHUNKS):
        # The turn is its own inverse.
        turned = swizzled[:, :, :, turn].take(np.arange(_CHUNKS) ^ turn, axis=-1)
        chunks[:, :, turn] = turned.transpose(0, 2, 3, 1, 4)
    row_bytes = chunks.view(np.uint8).reshape(mb * BLOCK_ROWS, kb * BLOCK_ROW_BYTES)

    split, order = _WORD_SPLIT[_word_kind(optype)], _WORD_ORDER[_word_kind(optype)]
    words = image[:, :, _VALUE_BYTES:].reshape(mb, kb, *(split[i] for i in order))
    by_block = words.transpose(0, 1, *(order.index(i) + 2 for i in range(len(order))))
    width = optype.meta_k(optype.block_k) // 8
    nibbles = by_block.reshape(mb, kb, BLOCK_ROWS, width).swapaxes(1, 2)
    return row_bytes, nibbles.reshape(mb * BLOCK_ROWS, kb * width)


def decode_fragments(
    image: Array, optype: OperandType, m: int, k: int
) -> tuple[Array, Array, Array]:
    """What the tensor core would read: (codes [m, k/2], first, second uint8 [m, groups]).

    The indices are those of the metadata: of tf32 (0, 1) is the first of a pair, (2, 3) the second.

    Walks every step, thread and register through the addresses that the descriptor forms
    (PTX ISA, sparse ``wgmma`` fragments), shares nothing with `to_sm90`, and so checks it.
    """
    mb, kb, _ = image.shape
    steps = optype.block_k // optype.step_k
    step, thread = np.meshgrid(np.arange(steps), np.arange(128), indexing="ij")
    warp, lane = thread // 32, thread % 32
    quad_row, q = lane >> 2, lane & 3

    # Values. Register j of a thread holds four bytes of row 16 warp + quad_row + 8 (j & 1),
    # bytes 4q + 16 (j >> 1) of the step's 32. The step advances the descriptor by 32 bytes;
    # the 64-byte swizzle exchanges address bits 5:4 with bits 8:7 by xor.
    codes = np.empty((mb, kb, BLOCK_ROWS, BLOCK_ROW_BYTES), np.uint8)
    for j in range(4):
        row = 16 * warp + quad_row + 8 * (j & 1)
        for byte in range(4):
            column = 32 * step + 4 * q + 16 * (j >> 1) + byte
            address = BLOCK_ROW_BYTES * row + column
            codes[:, :, row, column] = image[:, :, address ^ ((address >> 7 & 3) << 4)]

    # Metadata words follow the values.
    words = np.ascontiguousarray(image[:, :, BLOCK_ROWS * BLOCK_ROW_BYTES :]).view("<u4")
    pairs = np.empty((mb, kb, BLOCK_ROWS, optype.block_k // optype.group), np.uint8)
    if optype.itemsize == 1:
        # One word a thread a step: eight groups of one row.
        word = words[:, :, 2 * thread + step]
        row = 16 * warp + quad_row + 8 * (q & 1)
        for n in range(8):
            group = (64 * step + 32 * (q >> 1)) // 4 + n
            pairs[:, :, row, group] = word >> (4 * n) & 15
    else:
        # Selector s reads lanes q = 2s and 2s+1: four groups of one row and of the row 8 below,
        # 16 columns of 16-bit types from 16 (q & 1) on, 8 of tf32 from 8 (q & 1).
        reads = q >> 1 == step
        word = words[:, :, thread[reads]]
        for half in range(2):
            row = (16 * warp + quad_row + 8 * half)[reads]
            for n in range(4):
                group = (8 * step + 4 * (q & 1) + n)[reads]
                pairs[:, :, row, group] = word >> (16 * half + 4 * n) & 15

    by_row = codes.swapaxes(1, 2).reshape(mb * BLOCK_ROWS, kb * BLOCK_ROW_BYTES)
    by_row = np.ascontiguousarray(by_row[:m, : k // 2 * optype.itemsize])
    nibbles = pairs.swapaxes(1, 2).reshape(mb * BLOCK_ROWS, kb * pairs.shape[3])
    nibbles = nibbles[:m, : k // optype.group]
    return by_row.view(optype.dtype), nibbles & 3, nibbles >> 2
