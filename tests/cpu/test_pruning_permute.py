"""The search over column orders against all orders there are, where there are few."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from sp24cli.errors import BadInputError
from sp24cli.pruning import permute
from sp24cli.pruning.permute import apply, check_order, inverse, search
from tests.cpu.modelfile import Array, normal


def kept(scores: Array, order: Array | list[int] | None = None) -> float:
    arranged = scores if order is None else scores[:, order]
    groups = np.sort(arranged.reshape(len(scores), -1, 4), axis=2)
    return float(groups[:, :, 2:].sum())


def partitions(columns: list[int]) -> Iterator[list[int]]:
    """All ways to make groups of four, each once."""
    if not columns:
        yield []
        return
    first, rest = columns[0], columns[1:]
    for others in combinations(rest, 3):
        left = [c for c in rest if c not in others]
        for tail in partitions(left):
            yield [first, *others, *tail]


def squares(seed: int, shape: tuple[int, int]) -> Array:
    """Squares of weights whose columns differ as those of real layers do."""
    random = np.random.default_rng(seed)
    columns = np.exp(random.standard_normal(shape[1]))
    parts = np.exp(random.standard_normal((4, shape[1]))).repeat(-(-shape[0] // 4), axis=0)
    values = random.standard_normal(shape) * columns * parts[: shape[0]]
    return np.square(values)


@pytest.mark.parametrize("seed", range(8))
def test_eight_columns_get_the_best_of_all_orders(seed: int) -> None:
    scores = squares(seed, (16, 8))
    order = search(scores)
    best = max(kept(scores, each) for each in partitions(list(range(8))))
    assert kept(scores, order) == pytest.approx(best, rel=1e-10)
    assert sorted(order) == list(range(8))


@pytest.mark.parametrize("seed", range(4))
def test_twelve_columns_come_close_to_the_best(seed: int) -> None:
    """No pair of groups can be made better, which need not be the best of all three."""
    scores = squares(seed, (12, 12))
    order = search(scores)
    found, given = kept(scores, order), kept(scores)
    best = max(kept(scores, each) for each in partitions(list(range(12))))
    assert given <= found <= best * (1 + 1e-12)
    assert found - given >= 0.8 * (best - given)
    for a, b in combinations(range(3), 2):
        eight = [*order[4 * a : 4 * a + 4], *order[4 * b : 4 * b + 4]]
        top = max(kept(scores[:, eight], each) for each in partitions(list(range(8))))
        assert kept(scores[:, eight]) == pytest.approx(top, rel=1e-10)


def test_more_rounds_never_keep_less() -> None:
    scores = squares(1, (32, 64))
    gains = [kept(scores, search(scores, rounds=rounds)) for rounds in range(20)]
    assert gains[0] == kept(scores)
    assert gains == sorted(gains)
    assert gains[-1] > gains[1] > gains[0]


def test_an_order_that_is_best_already_stays() -> None:
    scores = np.tile([9.0, 8.0, 0.1, 0.2], (6, 5))
    assert search(scores).tolist() == list(range(20))
    assert search(np.zeros((3, 12))).tolist() == list(range(12))
    assert search(np.ones((3, 4))).tolist() == [0, 1, 2, 3]


def test_the_structure_that_hurts_most_is_resolved() -> None:
    """Four large columns in one group, four small in the next: half of the large are lost."""
    scores = np.array([[4.0] * 4 + [1.0] * 4] * 3)
    assert kept(scores) == 3 * (8 + 2)
    assert kept(scores, search(scores)) == 3 * 16


@pytest.mark.parametrize("columns", [16, 20, 44])
def test_the_order_depends_on_the_scores_alone(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = squares(2, (40, columns))
    want = search(scores)
    assert want.dtype == np.int32
    monkeypatch.setattr(permute, "_BATCH", 1)
    for workers in (1, 2, 5):
        assert np.array_equal(search(scores, workers=workers), want)
    # Not on the order in which rows are added up either.
    assert np.array_equal(search(scores[::-1]), want)
    assert np.array_equal(search(np.asfortranarray(scores * 2.0**-700)), want)


def test_there_and_back() -> None:
    matrix = normal(1, (5, 12), "BF16")
    order = np.array([3, 1, 2, 0, 11, 10, 9, 8, 7, 6, 5, 4], np.int32)
    there = apply(matrix, order)
    assert there.dtype == matrix.dtype
    assert there[2, 4] == matrix[2, 11]
    assert apply(there, inverse(order)).tobytes() == matrix.tobytes()


@pytest.mark.parametrize("order", [[0, 1, 1, 3], [0, 1, 2, 4], [0, -1, 2, 3]])
def test_what_is_no_order_has_no_inverse(order: list[int]) -> None:
    with pytest.raises(BadInputError, match="permutation has"):
        inverse(np.array(order, np.int32))


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ([0, 1, 2], r"shape \[3\], not \[4\]"),
        ([0, 1, 2, 4], "4 at 3, outside 0 to 3"),
        ([0, -1, 2, 3], "-1 at 1, outside"),
        ([0, 1, 1, 3], "column 1 twice"),
    ],
)
def test_what_is_no_permutation(order: list[int], fault: str) -> None:
    with pytest.raises(BadInputError, match=fault):
        check_order(np.array(order, np.int32), 4)
