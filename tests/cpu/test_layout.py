"""Row order <-> block image: against the definition, and against what the hardware reads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sp24cli.layout import (
    decode_fragments,
    find_bad_padding,
    from_sm90,
    image_shape,
    to_sm90,
)
from sp24cli.metadata import decode, encode
from sp24cli.optypes import OPERAND_TYPES, OperandType

PAIRS = np.array([(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)], np.uint8)
#: Those of a group of four halves whose two values are tf32.
PAIRS_OF = {4: PAIRS, 2: PAIRS[[0, 5]]}
every_type = pytest.mark.parametrize("optype", OPERAND_TYPES.values(), ids=OPERAND_TYPES)
SHAPES = [
    (64, 128), (128, 256), (1, 4), (3, 12), (63, 60), (65, 68), (64, 4092), (130, 132), (70, 204),
]  # fmt: skip
every_shape = pytest.mark.parametrize(("m", "k"), SHAPES)


def random_parts(m: int, k: int, optype: OperandType, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Values of random bytes, metadata of random pairs, and the pairs."""
    rng = np.random.default_rng(seed)
    size = m * (k // 2) * optype.itemsize
    values = np.frombuffer(rng.bytes(size), optype.dtype).reshape(m, k // 2)
    legal = PAIRS_OF[optype.group]
    pairs = legal[rng.integers(0, len(legal), (m, k // optype.group))]
    meta = encode(pairs[..., 0], pairs[..., 1])
    # Whoever writes into what it was given fails here.
    meta.flags.writeable = False
    return values, meta, pairs


def image_by_definition(
    values: np.ndarray, meta: np.ndarray, m: int, k: int, optype: OperandType
) -> np.ndarray:
    """The image, a byte and a nibble at a time, as the layout is written down."""
    block_k, size = optype.block_k, optype.itemsize
    first, second = decode(meta, optype.meta_k(k))

    def nibble(row: int, group: int) -> int:
        if row < m and group < k // optype.group:
            return int(first[row, group]) | int(second[row, group]) << 2
        return 0b0100

    raw = np.ascontiguousarray(values).view(np.uint8).reshape(m, -1)
    blocks = []
    for mb in range(-(-m // 64)):
        for kb in range(-(-k // block_k)):
            block = bytearray(4096)
            for i in range(64):
                for b in range(64):
                    row, at = 64 * mb + i, 64 * kb + b
                    chunk, rest = divmod(b, 16)
                    if row < m and at < k // 2 * size:
                        block[i * 64 + (chunk ^ ((i >> 1) & 3)) * 16 + rest] = raw[row, at]
            for t in range(128):
                w, lane = divmod(t, 32)
                r, q = lane >> 2, lane & 3
                group0 = kb * block_k // optype.group
                if size == 1:
                    for s in range(2):
                        row = 64 * mb + 16 * w + r + 8 * (q & 1)
                        k0 = (64 * s + 32 * (q >> 1)) // 4
                        nibbles = [nibble(row, group0 + k0 + n) for n in range(8)]
                        word = sum(n << 4 * i for i, n in enumerate(nibbles))
                        block += word.to_bytes(4, "little")
                else:
                    # q & 1 is a half of a step's columns, q >> 1 the step: 16 columns of a 16-bit
                    # type or 8 of tf32, four groups either way.
                    row, k0 = 64 * mb + 16 * w + r, 4 * q
                    nibbles = [nibble(row, group0 + k0 + n) for n in range(4)]
                    nibbles += [nibble(row + 8, group0 + k0 + n) for n in range(4)]
                    word = sum(n << 4 * i for i, n in enumerate(nibbles))
                    block += word.to_bytes(4, "little")
            blocks.append(np.frombuffer(bytes(block), np.uint8))
    return np.stack(blocks).reshape(image_shape(m, k, optype))


@every_type
def test_image_sizes(optype: OperandType) -> None:
    assert optype.block_bytes == (5120 if optype.itemsize == 1 else 4608)
    blocks = {1: 2, 2: 3, 4: 5}[optype.itemsize]
    assert image_shape(65, 132, optype) == (2, blocks, optype.block_bytes)


@every_type
@pytest.mark.parametrize(("m", "k"), [(64, 128), (3, 12), (65, 68), (70, 204)])
def test_image_is_the_one_written_down(m: int, k: int, optype: OperandType) -> None:
    values, meta, _ = random_parts(m, k, optype)
    image = to_sm90(values, meta, k, optype)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, image_by_definition(values, meta, m, k, optype))


@every_type
@every_shape
def test_round_trip_is_exact(m: int, k: int, optype: OperandType) -> None:
    values, meta, _ = random_parts(m, k, optype)
    image = to_sm90(values, meta, k, optype)
    assert image.shape == image_shape(m, k, optype)
    got_values, got_meta = from_sm90(image, m, k, optype)
    assert got_values.dtype == optype.dtype
    assert got_values.shape == values.shape
    assert got_values.tobytes() == values.tobytes()
    assert got_meta.dtype == np.uint8
    np.testing.assert_array_equal(got_meta, meta)
    again = to_sm90(got_values, got_meta, k, optype)
    np.testing.assert_array_equal(again, image)


@every_type
@every_shape
def test_the_hardware_reads_what_was_packed(m: int, k: int, optype: OperandType) -> None:
    values, meta, pairs = random_parts(m, k, optype)
    codes, first, second = decode_fragments(to_sm90(values, meta, k, optype), optype, m, k)
    assert codes.dtype == optype.dtype
    assert codes.tobytes() == values.tobytes()
    np.testing.assert_array_equal(first, pairs[..., 0])
    np.testing.assert_array_equal(second, pairs[..., 1])


@every_type
def test_each_of_the_six_patterns_at_every_lane(optype: OperandType) -> None:
    groups, legal = optype.block_k // optype.group, PAIRS_OF[optype.group]
    # A block for every group and pattern: that group holds the pattern, all others another
    # one, so that a wrong place cannot look right.
    blocks = groups * len(legal)
    m, k = 64, optype.block_k * blocks
    patterns = np.arange(blocks) % len(legal)
    values = np.zeros((m, k // 2), optype.dtype)
    for row in range(m):
        others = (patterns + 1) % len(legal)
        chosen = np.broadcast_to(others[:, None], (m, blocks, groups)).copy()
        chosen[row, np.arange(blocks), np.arange(blocks) // len(legal)] = patterns
        pairs = legal[chosen.reshape(m, -1)]
        image = to_sm90(values, encode(pairs[..., 0], pairs[..., 1]), k, optype)
        _, first, second = decode_fragments(image, optype, m, k)
        np.testing.assert_array_equal(first, pairs[..., 0])
        np.testing.assert_array_equal(second, pairs[..., 1])


@every_type
def test_every_value_byte_has_its_own_place(optype: OperandType) -> None:
    m, k = 64, optype.block_k
    meta = np.full((m, optype.meta_k(k) // 8), 0x44, np.uint8)
    seen = set()
    for place in range(m * 64):
        raw = np.zeros(m * 64, np.uint8)
        raw[place] = 0xA5
        image = to_sm90(raw.reshape(m, 64).view(optype.dtype), meta, k, optype)
        (at,) = np.flatnonzero(image[0, 0, :4096])
        seen.add(int(at))
    assert len(seen) == 4096


@every_type
@every_shape
def test_padding_is_empty(m: int, k: int, optype: OperandType) -> None:
    values, meta, _ = random_parts(m, k, optype)
    image = to_sm90(values, meta, k, optype)
    mb, kb, _ = image.shape
    assert find_bad_padding(image, m, k, optype) is None
    codes, first, second = decode_fragments(image, optype, 64 * mb, kb * optype.block_k)
    raw = codes.view(np.uint8).reshape(64 * mb, -1)
    assert not raw[m:].any()
    assert not raw[:, k // 2 * optype.itemsize :].any()
    nibbles = first | second << 2
    assert (nibbles[m:] == 0b0100).all()
    assert (nibbles[:, k // optype.group :] == 0b0100).all()


@every_type
@pytest.mark.parametrize(("m", "k"), [(63, 60), (65, 132), (1, 4)])
def test_find_bad_padding_sees_every_fault(m: int, k: int, optype: OperandType) -> None:
    values, meta, _ = random_parts(m, k, optype)
    mb, kb, _ = image_shape(m, k, optype)
    rows, cols, last = 64 * mb, kb * optype.block_k, k // optype.group
    groups = cols // optype.group
    padded_values = np.zeros((rows, cols // 2), optype.dtype)
    padded_values[:m, : k // 2] = values
    first, second = np.zeros((rows, groups), np.uint8), np.ones((rows, groups), np.uint8)
    first[:m, :last], second[:m, :last] = decode(meta, optype.meta_k(k))
    clean = to_sm90(padded_values, encode(first, second), cols, optype)
    np.testing.assert_array_equal(clean, to_sm90(values, meta, k, optype))
    edge = {(m - 1, last), (m, 0), (rows - 1, groups - 1), (m - 1, last - 1), (0, 0)}
    for row, group in edge:
        if row >= rows or group >= groups:
            continue
        want = (row, group) if row >= m or group >= last else None
        # A value, the least bit of it: -0.0 would be a fault as well.
        kept = optype.group // 2
        for at in range(kept * group, kept * group + kept):
            bad = padded_values.copy()
            bad.view(f"u{optype.itemsize}")[row, at] ^= 1 << (8 * optype.itemsize - 1)
            image = to_sm90(bad, encode(first, second), cols, optype)
            assert find_bad_padding(image, m, k, optype) == want
        other = second.copy()
        other[row, group] = 3 if second[row, group] != 3 else 2
        image = to_sm90(padded_values, encode(first, other), cols, optype)
        assert find_bad_padding(image, m, k, optype) == want


@every_type
@pytest.mark.parametrize(("m", "k"), [(0, 128), (64, 0), (0, 0)])
def test_zero_size(m: int, k: int, optype: OperandType) -> None:
    values, meta, _ = random_parts(m, k, optype)
    image = to_sm90(values, meta, k, optype)
    assert image.shape == image_shape(m, k, optype)
    got_values, got_meta = from_sm90(image, m, k, optype)
    assert got_values.shape == values.shape
    assert got_meta.shape == meta.shape
    assert find_bad_padding(image, m, k, optype) is None
    assert decode_fragments(image, optype, m, k)[0].shape == values.shape


@every_type
def test_row_blocks_and_column_blocks_stand_alone(optype: OperandType) -> None:
    m, k, half = 130, 4 * optype.block_k - 4, 2 * optype.block_k
    values, meta, _ = random_parts(m, k, optype)
    whole = to_sm90(values, meta, k, optype)
    built = np.full_like(whole, 0xEE)
    for rows, blocks in ((slice(0, 64), slice(0, 1)), (slice(64, m), slice(1, 3))):
        left, right = built[blocks, :2], built[blocks, 2:]
        of_values, of_meta = np.split(values[rows], [half // 2], 1), meta[rows]
        of_meta = np.split(of_meta, [optype.meta_k(half) // 8], 1)
        assert to_sm90(of_values[0], of_meta[0], half, optype, out=left) is left
        to_sm90(of_values[1], of_meta[1], k - half, optype, out=right)
    np.testing.assert_array_equal(built, whole)


def test_tf32_is_read_as_16_bit_halves() -> None:
    """A matrix of tf32 and that of its halves, twice as wide and kept by twos, are one image."""
    tf32, f16 = OPERAND_TYPES["tf32"], OPERAND_TYPES["f16"]
    for m, k in ((64, 32), (65, 70), (3, 2), (130, 66)):
        values, meta, _ = random_parts(m, k, tf32)
        image = to_sm90(values, meta, k, tf32)
        np.testing.assert_array_equal(image, to_sm90(values.view(np.float16), meta, 2 * k, f16))
        back = from_sm90(image, m, k, tf32)
        assert back[0].tobytes() == values.tobytes()
        np.testing.assert_array_equal(back[1], meta)


def test_tf32_metadata_words_by_hand() -> None:
    """Which nibble of which thread's word speaks for a pair (PTX ISA, metadata of m64nNk16 tf32:
    blocks of 16 x 16, in the order of the 16 x 32 blocks of 16-bit types)."""
    tf32 = OPERAND_TYPES["tf32"]
    # (row, pair): thread, nibble. A word has four pairs of row r and four of row r + 8.
    places = {
        (0, 0): (0, 0), (0, 3): (0, 3), (8, 0): (0, 4), (0, 4): (1, 0), (15, 7): (29, 7),
        (0, 8): (2, 0), (1, 15): (7, 3), (63, 15): (127, 7), (16, 0): (32, 0), (23, 12): (63, 0),
    }  # fmt: skip
    for (row, pair), (thread, nibble) in places.items():
        first, second = np.zeros((64, 16), np.uint8), np.ones((64, 16), np.uint8)
        first[row, pair], second[row, pair] = 2, 3
        image = to_sm90(np.zeros((64, 16), np.float32), encode(first, second), 32, tf32)
        words = image[0, 0, 4096:].copy().view("<u4")
        want = np.full(128, 0x44444444, np.uint32)
        want[thread] ^= np.uint32(0b1010 << 4 * nibble)
        np.testing.assert_array_equal(words, want)


def test_strided_parts() -> None:
    optype = OPERAND_TYPES["bf16"]
    values, meta, _ = random_parts(70, 68, optype)
    want = to_sm90(values, meta, 68, optype)
    apart = np.repeat(values.view(np.uint16), 2, axis=1)[:, ::2].view(ml_dtypes.bfloat16)
    got = to_sm90(apart, np.asfortranarray(meta), 68, optype)
    np.testing.assert_array_equal(got, want)
