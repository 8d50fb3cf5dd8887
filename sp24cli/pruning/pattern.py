"""N:M sparsity along K: of every M neighbours the N of highest score stay.

2:4 by magnitude has a faster way of its own: `sparsity.prune_24`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sp24cli.bits import Array, contiguous_bits, magnitudes, number_type
from sp24cli.errors import BadInputError
from sp24cli.optypes import OperandType
from sp24cli.rowblocks import tiles
from sp24cli.sparsity import find_violation, prune_24

#: Groups are no wider than this: ranks are counted pair by pair.
MAX_GROUP = 32
#: What is wrong with norms or a Hessian without one: every choice would be as good.
NEVER_ACTIVE = "no input channel was ever active in the calibration"


@dataclass(frozen=True)
class Pattern:
    """``kept`` of every ``group`` neighbours along K."""

    kept: int
    group: int

    def __post_init__(self) -> None:
        if not 1 <= self.kept < self.group <= MAX_GROUP:
            raise BadInputError(f"pattern {self} is not N:M with 1 <= N < M <= {MAX_GROUP}")

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"

    @staticmethod
    def parse(text: str) -> Pattern:
        """The pattern written ``N:M``; `BadInputError` for anything else."""
        found = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text)
        if found is None:
            raise BadInputError(f"pattern {text!r} is not N:M")
        return Pattern(int(found[1]), int(found[2]))


#: What the tensor cores run; the second in tf32.
TWO_OF_FOUR = Pattern(2, 4)
ONE_OF_TWO = Pattern(1, 2)


def pattern_of(optype: OperandType) -> Pattern:
    """The pattern that a weight must have to be packed as ``optype``."""
    return TWO_OF_FOUR if optype.group == TWO_OF_FOUR.group else ONE_OF_TWO


def keep_highest(scores: Array, kept: int) -> Array:
    """Where ``scores`` [group, n] are among the ``kept`` highest of their column: bool.

    Exactly ``kept`` of each column; ties keep the lower index.
    """
    group = len(scores)
    # How many of the others come before: a count of lost comparisons.
    losses = np.zeros(scores.shape, np.uint8)
    for low in range(group):
        for high in range(low + 1, group):
            low_wins = scores[low] >= scores[high]
            losses[high] += low_wins
            losses[low] += ~low_wins
    return losses < kept


def keep_mask(scores: Array, pattern: Pattern) -> Array:
    """Where ``scores`` [M, K] are among the highest of their group: bool [M, K]."""
    rows, cols = check_width(scores, pattern)
    planes = np.ascontiguousarray(scores.reshape(-1, pattern.group).T)
    return np.ascontiguousarray(keep_highest(planes, pattern.kept).T).reshape(rows, cols)


def check_width(dense: Array, pattern: Pattern) -> tuple[int, int]:
    """(M, K) of a matrix whose K whole groups fill; `BadInputError` for any other array."""
    if dense.ndim != 2:
        raise BadInputError(f"shape {list(dense.shape)} is not a matrix")
    rows, cols = dense.shape
    if cols % pattern.group:
        raise BadInputError(f"K = {cols} is not a multiple of {pattern.group}")
    return rows, cols


def prune_magnitude(dense: Array, pattern: Pattern) -> Array:
    """`prune_pattern`, by the faster way where there is one."""
    return prune_24(dense) if pattern == TWO_OF_FOUR else prune_pattern(dense, pattern)


def prune_pattern(dense: Array, pattern: Pattern) -> Array:
    """The largest magnitudes of every group of ``dense`` [M, K], zeros (+0.0) elsewhere.

    Magnitudes are compared as values in every type; ties keep the lower index. Errors:
    `BadInputError` unless K is a multiple of the group and the type supported.
    """
    kind = number_type(dense.dtype)
    return prune_by(dense, pattern, lambda tile, c: magnitudes(contiguous_bits(tile), kind))


def prune_by(dense: Array, pattern: Pattern, score: Callable[[Array, slice], Array]) -> Array:
    """``dense`` [M, K] with the values that have the highest ``score``.

    ``score`` of a tile and the columns it stands in is an array of the tile's shape, whose
    order decides; zeros must have the lowest. Errors: as `prune_pattern`.
    """
    rows, cols = check_width(dense, pattern)
    kind = number_type(dense.dtype)
    out = np.empty((rows, cols), dense.dtype)
    into = out.view(kind.unsigned)
    # Tiles end at whole groups, whatever the group.
    for r, c in tiles(rows, cols, width=(1 << 14) // pattern.group * pattern.group):
        bits = contiguous_bits(dense[r, c])
        keep = keep_mask(score(dense[r, c], c), pattern)
        keep &= magnitudes(bits, kind) != 0
        np.multiply(bits, keep, out=into[r, c])
    return out


def violation(pattern: Pattern, row: int, group: int, first_row: int = 0) -> BadInputError:
    """The error of a ``group`` with too many nonzeros in a ``row`` counted from ``first_row``."""
    words = {1: "one nonzero", 2: "two nonzeros"}
    most = words.get(pattern.kept, f"{pattern.kept} nonzeros")
    first = pattern.group * group
    return BadInputError(
        f"more than {most} at row {first_row + row}, group {group} "
        f"(columns {first} to {first + pattern.group - 1}): not {pattern}"
    )


def find_crowded(dense: Array, pattern: Pattern) -> tuple[int, int] | None:
    """(row, group) of the first group of ``dense`` [M, K] with too many nonzeros, or None."""
    if pattern == TWO_OF_FOUR:
        return find_violation(dense)
    rows, cols = check_width(dense, pattern)
    kind = number_type(dense.dtype)
    filled = magnitudes(contiguous_bits(dense), kind) != 0
    counts = filled.reshape(rows, cols // pattern.group, pattern.group).sum(axis=2)
    crowded = counts > pattern.kept
    if not crowded.any():
        return None
    row, group = divmod(int(crowded.argmax()), crowded.shape[1])
    return row, group
