"""N:M patterns against a brute force in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.errors import BadInputError
from sp24cli.pruning.pattern import (
    TWO_OF_FOUR,
    Pattern,
    find_crowded,
    keep_mask,
    prune_by,
    prune_pattern,
)
from sp24cli.sparsity import prune_24
from tests.cpu.modelfile import DTYPES, Array, normal

PATTERNS = ["1:2", "2:4", "1:4", "3:4", "4:8", "2:8", "1:3", "5:7", "16:32"]


def brute_force(dense: Array, kept: int, group: int) -> Array:
    out = np.zeros_like(dense)
    wide = dense.astype(np.float64)
    for row in range(dense.shape[0]):
        for start in range(0, dense.shape[1], group):
            order = sorted(range(start, start + group), key=lambda c: (-abs(wide[row, c]), c))
            for column in order[:kept]:
                if wide[row, column] != 0:
                    out[row, column] = dense[row, column]
    return out


def tied(seed: int, shape: tuple[int, int], dtype: str) -> Array:
    """Few different magnitudes, zeros of both signs among them."""
    values = np.random.default_rng(seed).integers(-3, 4, shape) * 0.25
    values[values == 0] = np.where(np.arange(np.count_nonzero(values == 0)) % 2, -0.0, 0.0)
    return values.astype(np.float32).astype(DTYPES[dtype])


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_patterns_against_brute_force(text: str, dtype: str) -> None:
    pattern = Pattern.parse(text)
    for dense in (
        normal(1, (9, 6 * pattern.group), dtype),
        tied(2, (30, 4 * pattern.group), dtype),
    ):
        pruned = prune_pattern(dense, pattern)
        want = brute_force(dense, pattern.kept, pattern.group)
        assert pruned.dtype == dense.dtype
        assert pruned.tobytes() == want.tobytes()
        assert find_crowded(pruned, pattern) is None
        assert prune_pattern(pruned, pattern).tobytes() == pruned.tobytes()


def test_two_of_four_is_that_of_the_fast_path() -> None:
    dense = tied(3, (64, 256), "BF16")
    assert prune_pattern(dense, TWO_OF_FOUR).tobytes() == prune_24(dense).tobytes()


def test_tiles_end_at_whole_groups() -> None:
    """Wider than a tile, with a group that does not divide a tile's width."""
    dense = normal(4, (3, 7 * 2400))
    assert (1 << 14) % 7
    assert prune_pattern(dense, Pattern(3, 7)).tobytes() == brute_force(dense, 3, 7).tobytes()


def test_exactly_n_are_kept_even_of_equals() -> None:
    mask = keep_mask(np.zeros((2, 8), np.float32), Pattern(3, 8))
    assert mask.tolist() == [[True] * 3 + [False] * 5] * 2


def test_scores_decide_and_know_their_columns() -> None:
    dense = np.ones((1, 8), np.float32)
    seen = prune_by(dense, TWO_OF_FOUR, lambda tile, c: np.arange(8.0)[c] * tile)
    assert seen.tolist() == [[0, 0, 1, 1] * 2]


def test_crowded_groups_are_found() -> None:
    dense = np.zeros((5, 16), np.float16)
    dense[3, 8:13] = 1
    assert find_crowded(dense, Pattern(4, 8)) == (3, 1)
    dense[3, 12] = -0.0
    assert find_crowded(dense, Pattern(4, 8)) is None


@pytest.mark.parametrize(
    "text",
    ["", "2", "2:", "2:4:8", "4:4", "5:4", "0:4", "-1:4", "2:33", " 2:4", "２:４", "99999:1"],
)
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(BadInputError, match="pattern"):
        Pattern.parse(text)


def test_width_and_rank() -> None:
    with pytest.raises(BadInputError, match="K = 12 is not a multiple of 8"):
        prune_pattern(np.zeros((2, 12), np.float32), Pattern(4, 8))
    with pytest.raises(BadInputError, match="not a matrix"):
        prune_pattern(np.zeros(8, np.float32), Pattern(4, 8))
