"""Metadata nibbles: their bytes, both ways, and what is illegal."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.metadata import LEGAL_NIBBLES, decode, encode, find_illegal, kept_places, meta_bytes

PAIRS = np.array([(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)], np.uint8)


def random_pairs(rows: int, groups: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    chosen = PAIRS[np.random.default_rng(seed).integers(0, 6, (rows, groups))]
    return chosen[..., 0], chosen[..., 1]


def test_the_legal_nibbles_are_the_ascending_pairs() -> None:
    assert list(LEGAL_NIBBLES) == [first | second << 2 for first, second in PAIRS.tolist()]
    assert {0b0000, 0b0101, 0b1010, 0b1111}.isdisjoint(LEGAL_NIBBLES)


def test_encode_by_hand() -> None:
    # (0,1) 0100 low, (2,3) 1110 high; (1,3) 1101 low, nothing high.
    meta = encode(np.array([[0, 2, 1]], np.uint8), np.array([[1, 3, 3]], np.uint8))
    assert meta.dtype == np.uint8
    assert meta.tolist() == [[0b1110_0100, 0b0000_1101]]


@pytest.mark.parametrize("groups", [0, 1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_decode_undoes_encode(rows: int, groups: int) -> None:
    first, second = random_pairs(rows, groups)
    meta = encode(first, second)
    assert meta.shape == (rows, meta_bytes(4 * groups))
    got_first, got_second = decode(meta, 4 * groups)
    assert got_first.dtype == got_second.dtype == np.uint8
    np.testing.assert_array_equal(got_first, first)
    np.testing.assert_array_equal(got_second, second)
    assert find_illegal(meta, 4 * groups) is None


def test_decode_of_every_byte() -> None:
    first, second = decode(np.arange(256, dtype=np.uint8)[:, None], 8)
    for byte in range(256):
        assert first[byte].tolist() == [byte & 3, byte >> 4 & 3]
        assert second[byte].tolist() == [byte >> 2 & 3, byte >> 6]


def test_find_illegal_knows_every_byte() -> None:
    legal = {first | second << 2 for first, second in PAIRS.tolist()}
    for byte in range(256):
        faults = [group for group, n in enumerate((byte & 15, byte >> 4)) if n not in legal]
        meta = np.array([[0x44, 0x44], [0x44, byte]], np.uint8)
        assert find_illegal(meta, 16) == ((1, 2 + faults[0]) if faults else None)


def test_the_high_nibble_of_an_odd_last_byte_must_be_zero() -> None:
    for high in range(16):
        meta = np.array([[0x4E, 0x0D], [0x4E, high << 4 | 0xD]], np.uint8)
        assert find_illegal(meta, 12) == ((1, 3) if high else None)
    # The low one counts as ever.
    assert find_illegal(np.array([[0x4E, 0x05]], np.uint8), 12) == (0, 2)


@pytest.mark.parametrize("groups", [1, 2, 5, 16])
def test_kept_places_are_those_of_the_pairs(groups: int) -> None:
    first, second = random_pairs(3, groups)
    places = kept_places(encode(first, second), 4 * groups)
    want = [
        [row * 4 * groups + 4 * g + int(i[row, g]) for g in range(groups) for i in (first, second)]
        for row in range(3)
    ]
    assert places.tolist() == want


def test_groups_of_two_have_two_nibbles() -> None:
    for byte in range(256):
        faults = [g for g, n in enumerate((byte & 15, byte >> 4)) if n not in (0b0100, 0b1110)]
        meta = np.array([[0x44, 0xE4], [0x4E, byte]], np.uint8)
        assert find_illegal(meta, 16, 2) == ((1, 2 + faults[0]) if faults else None)


@pytest.mark.parametrize("k", [2, 6, 14, 32])
def test_the_kept_value_of_a_pair_is_its_half(k: int) -> None:
    rng = np.random.default_rng(k)
    second = rng.random((5, k // 2)) < 0.5
    meta = encode(np.where(second, 2, 0).astype(np.uint8), np.where(second, 3, 1).astype(np.uint8))
    places = kept_places(meta, k, 2)
    want = np.arange(5)[:, None] * k + np.arange(0, k, 2) + second
    np.testing.assert_array_equal(places, want)
