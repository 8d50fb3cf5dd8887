"""Permuting the input channels before pruning, so that 2:4 keeps more.

Two groups of four columns are eight columns, and there are 35 ways to make two groups of them:
all are tried, and the best taken when it keeps more than the one at hand. Pairs of groups meet
as in a tournament, round by round, until no pair gains or the rounds are used up.

Source: Pool, Yu, "Channel Permutations for N:M Sparsity" (2021), whose exhaustive search of
two stripes this is; the order of the pairs is ours. Nothing is random.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from sp24cli.bits import Array, contiguous_bits
from sp24cli.errors import BadInputError
from sp24cli.rowblocks import row_slices, run
from sp24cli.sparsity import GROUP

#: Rounds of a search: in each all groups meet one other.
ROUNDS = 64
#: Elements that a search looks at: of larger matrices, rows at even distances.
SAMPLE_ELEMENTS = 1 << 21
#: Values of one batch of pairs, to stay in cache.
_BATCH = 1 << 16

_EIGHT = range(2 * GROUP)
#: Every four of eight columns, and all ways to halve the eight, as indices into these. The
#: first half that is tried, with the lowest columns, is that at hand.
_FOURS = list(combinations(_EIGHT, GROUP))
_HALVES = np.array([(i, len(_FOURS) - 1 - i) for i in range(len(_FOURS) // 2)])
_ORDERS = np.array([[*_FOURS[i], *_FOURS[j]] for i, j in _HALVES])


def search(scores: Array, *, rounds: int = ROUNDS, workers: int = 1) -> Array:
    """An order of the columns of ``scores`` [M, K] (not negative): int32 [K].

    ``scores[:, order]`` keeps, by the two highest of every group, at least what ``scores``
    does (to within 2**-40 of the largest a row); each step of the search keeps more than the
    one before. Groups and the columns in them are in ascending order. The result depends on
    ``scores`` and ``rounds`` alone.
    """
    rows, k = scores.shape
    if k % GROUP:
        raise BadInputError(f"K = {k} is not a multiple of {GROUP}")
    groups = np.arange(k).reshape(-1, GROUP)
    # Whole numbers whose sums float64 holds exactly, in whatever order they are added.
    room = 2.0**53 / (2 * GROUP * max(1, rows))
    largest = scores.max(initial=0)
    shift = np.frexp(room / largest)[1] - 1 if 0 < largest < np.inf else 0
    channels = np.rint(np.ldexp(np.ascontiguousarray(scores.T, dtype=np.float64), shift))
    # A circle of groups, with an empty seat for an odd number; the first stays where it is.
    seats = list(range(len(groups))) + [-1] * (len(groups) % 2)
    half = len(seats) // 2
    quiet = 0
    for _ in range(rounds if len(groups) > 1 else 0):
        pairs = [
            (min(a, b), max(a, b))
            for a, b in zip(seats[:half], seats[: half - 1 : -1], strict=True)
            if min(a, b) >= 0
        ]
        gained = _play(channels, groups, np.array(pairs), workers)
        quiet = 0 if gained else quiet + 1
        if quiet == len(seats) - 1:
            break  # every pair has met since the last gain
        seats[1:] = [seats[-1], *seats[1:-1]]
    order = np.sort(groups, axis=1)
    return order[order[:, 0].argsort()].reshape(-1).astype(np.int32)


def _play(channels: Array, groups: Array, pairs: Array, workers: int) -> bool:
    """Regroup every pair of ``groups`` for the best; whether any gained."""

    def regroup(part: slice) -> bool:
        met = pairs[part]
        columns = groups[met].reshape(len(met), 2 * GROUP)
        kept = _kept_of_halves(channels[columns])
        best = kept.argmax(axis=1)  # the first, that at hand, unless another keeps more
        groups[met] = np.take_along_axis(columns, _ORDERS[best], axis=1).reshape(-1, 2, GROUP)
        return bool(best.any())

    batch = max(1, _BATCH // (2 * GROUP * max(1, channels.shape[1])))
    return any(run(regroup, row_slices(len(pairs), batch), workers))


def _kept_of_halves(eight: Array) -> Array:
    """What the 35 halvings of ``eight`` [pairs, 8, M] columns keep: [pairs, 35]."""
    high, total = {}, {}
    for a, b in combinations(_EIGHT, 2):
        high[a, b] = np.maximum(eight[:, a], eight[:, b])
        total[a, b] = eight[:, a] + eight[:, b]
    of_four = np.empty((len(eight), len(_FOURS)))
    for i, (a, b, c, d) in enumerate(_FOURS):
        # The two highest are one of each pair, or both of one.
        top = high[a, b] + high[c, d]
        np.maximum(top, total[a, b], out=top)
        np.maximum(top, total[c, d], out=top)
        top.sum(axis=1, out=of_four[:, i])
    return of_four[:, _HALVES].sum(axis=2)


def check_order(order: Array, k: int) -> Array:
    """``order`` as intp; `BadInputError` unless it holds every column of ``k`` once."""
    if order.shape != (k,):
        raise BadInputError(f"permutation has shape {list(order.shape)}, not {[k]}")
    outside = (order < 0) | (order >= k)
    if outside.any():
        place = int(outside.argmax())
        raise BadInputError(f"permutation has {order[place]} at {place}, outside 0 to {k - 1}")
    counts = np.bincount(order, minlength=k)
    if (counts != 1).any():
        raise BadInputError(f"permutation has column {int((counts > 1).argmax())} twice")
    return order.astype(np.intp)


def apply(matrix: Array, order: Array) -> Array:
    """The columns of ``matrix`` [M, K] of any weight type in the ``order`` given."""
    taken: Array = contiguous_bits(matrix).take(order, axis=1)
    return taken.view(matrix.dtype)


def inverse(order: Array) -> Array:
    """Where each column went: ``matrix[:, order][:, inverse(order)]`` is ``matrix``.

    `BadInputError` for an ``order`` that lacks a column: nothing would say where that went.
    """
    back = np.empty(len(order), np.intp)
    back[check_order(order, len(order))] = np.arange(len(order))
    return back
