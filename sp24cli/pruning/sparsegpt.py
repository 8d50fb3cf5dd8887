"""SparseGPT: prune column by column, and let the columns to come make up for what is lost.

With X the inputs of a layer [K, samples] and H = X Xᵀ, the loss of an output is that of
(W - Ŵ) H (W - Ŵ)ᵀ. H⁻¹ = Uᵀ U with U upper triangular; row i of U holds how the columns from i
on make up for an error in column i when those before it are fixed.

Source: Frantar, Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot" (2023), algorithm 1 and section 3.3 (N:M). All in float64, rounded once at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from sp24cli.bits import Array, number_type, widen
from sp24cli.errors import BadInputError
from sp24cli.fp8 import round_to
from sp24cli.pruning.pattern import (
    NEVER_ACTIVE,
    TWO_OF_FOUR,
    Pattern,
    check_width,
    keep_highest,
)
from sp24cli.pruning.triangle import Triangle, triangle_bytes
from sp24cli.rowblocks import row_slices, run
from sp24cli.sparsity import energy_exponent, scale_down

#: The paper's: what is added to the diagonal, as a share of its mean, and columns of a block.
DAMPING = 0.01
BLOCK_SIZE = 128
#: A factor of more bytes than that lies in a file.
MEMORY_LIMIT = 640 << 20
#: Rows of H worked on at a time where they are needed whole.
_STEP = 256
#: Rows, and elements if those are more, of a weight that one thread takes at a time: enough for
#: NumPy's cost by call, many a column, not to show.
_PIECE = 256
_PIECE_ELEMENTS = 1 << 20
#: Rows of a weight multiplied with H by one thread.
_ENERGY_PIECE = 128
#: Rows and columns of a tile of H and of the factor. A product of two takes some thirty times as
#: long as to read one that the system has in its cache, and still longer than from a disk.
_TILE = 1024
#: Rows up to which a tile is left to LAPACK, which inverts a triangle as if it were full.
_LEAF = 256
#: Threads at most that work on tiles, each with a few of them in memory.
_MAX_WORKERS = 8
#: How far H may be from symmetric, as a share of its largest diagonal element: a Hessian
#: summed up in 16-bit types is that far at most.
_ASYMMETRY = 1e-2


class Hessian(Protocol):
    """A matrix [K, K] of any float type that is read piece by piece: an array, or what gets its
    pieces from elsewhere."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, place: tuple[slice, slice], /) -> Array: ...


def hessian_diagonal(hessian: Hessian) -> Array:
    """The diagonal [K], as `bits.widen` gives it; of the rest only the tiles around it are read."""
    parts = [hessian[r, r].diagonal().copy() for r in row_slices(hessian.shape[0], _TILE)]
    return np.concatenate([widen(part) for part in parts]) if parts else np.empty(0)


def check_hessian(hessian: Hessian, k: int) -> None:
    """Errors: `BadInputError`, with the place, unless ``hessian`` is [K, K], finite, symmetric
    and has no negative diagonal element, nor only zero ones."""
    if hessian.shape != (k, k):
        raise BadInputError(f"Hessian has shape {list(hessian.shape)}, not {[k, k]}")
    diagonal = hessian_diagonal(hessian)
    if k and not diagonal.any():
        # All of the weight would go, as does that of any channel without an input.
        raise BadInputError(NEVER_ACTIVE)
    limit = _ASYMMETRY * float(np.nan_to_num(diagonal.max(initial=0), posinf=0))
    for r in row_slices(k, _STEP):
        rows = widen(hessian[r, :])
        bad = ~np.isfinite(rows)
        if bad.any():
            i, j = divmod(int(bad.argmax()), k)
            raise BadInputError(f"Hessian is {rows[i, j]} at row {r.start + i}, column {j}")
    for r in row_slices(k, _TILE):
        negative = diagonal[r] < 0
        if negative.any():
            i = r.start + int(negative.argmax())
            raise BadInputError(f"Hessian is negative ({diagonal[i]}) at row {i}, column {i}")
        # Transposed tiles one at a time: a column of the map is a page a row.
        for c in row_slices(r.stop, _TILE):
            apart = np.abs(widen(hessian[r, c]) - widen(hessian[c, r]).T) > limit
            if apart.any():
                i, j = divmod(int(apart.argmax()), apart.shape[1])
                raise BadInputError(
                    f"Hessian is not symmetric at row {r.start + i}, column {c.start + j}"
                )


def piece_rows(k: int) -> int:
    """Rows of a weight [M, K] that one worker of `prune_sparsegpt` takes at a time."""
    return max(_PIECE, _PIECE_ELEMENTS // max(1, k))


def scratch_bytes(k: int) -> int:
    """What `inverse_factor` puts into a file."""
    size = triangle_bytes(k, _TILE)
    return size if size > MEMORY_LIMIT else 0


def inverse_factor(
    hessian: Hessian,
    damping: float = DAMPING,
    *,
    folder: Path | None = None,
    workers: int = 1,
) -> tuple[Triangle, Array]:
    """(U [K, K] with H⁻¹ = Uᵀ U, dead [K]) of ``hessian`` [K, K] after damping, float64.

    U is upper triangular; what lies below its diagonal is not defined. ``dead`` marks the channels
    with no input at all, which count as independent ones of the others' mean. U takes 4 K² bytes:
    of memory, or from `MEMORY_LIMIT` on of a file in ``folder`` (None: where temporary files go)
    and a row of tiles of memory. Its values depend neither on that nor on ``workers``. The caller
    closes it.

    Raises:
        BadInputError: the damped Hessian is not positive definite, or not finite.
        Sp24Error: the file cannot be made, written or read.
    """
    k = hessian.shape[0]
    diagonal = hessian_diagonal(hessian).astype(np.float64)
    dead: Array = diagonal == 0
    # Of the others, so that a factor of the Hessian is one of all of the diagonal.
    with np.errstate(over="ignore"):
        mean = diagonal[~dead].mean() if not dead.all() else 1.0
        diagonal[dead] = mean
        diagonal += damping * mean
    if not np.isfinite(diagonal).all():
        raise BadInputError(f"Hessian is not finite with damping {damping:g}; use a smaller one")
    in_file = scratch_bytes(k) > 0
    factor = Triangle(k, _TILE, (folder or Path(tempfile.gettempdir())) if in_file else None)
    try:
        for i, r in enumerate(factor.parts):
            rows = widen(hessian[r, r.start :])
            for j, c in enumerate(factor.parts[i:], i):
                tile = rows[:, c.start - r.start : c.stop - r.start].astype(np.float64)
                if i == j:
                    np.fill_diagonal(tile, diagonal[r])
                factor.write(i, j, tile)
            # Or there would be two of them.
            del rows
        workers = min(workers, _MAX_WORKERS)
        _reverse_cholesky(factor, workers)
        _invert_upper(factor, workers)
    except BaseException as fault:
        factor.close()
        if isinstance(fault, np.linalg.LinAlgError):
            raise BadInputError(
                f"Hessian is not positive definite with damping {damping:g}; use a larger one"
            ) from None
        raise
    return factor, dead


def _reverse_cholesky(a: Triangle, workers: int) -> None:
    """``a`` becomes V with V Vᵀ = a, column of tiles by column from the last, but that on the
    diagonal stand the inverses of V's tiles."""
    count = len(a.parts)
    for j in reversed(range(count)):
        after = {c: a.read(j, c) for c in range(j + 1, count)}
        corner = a.read(j, j)
        for tile in after.values():
            corner = corner - tile @ tile.T
        inverse = _inverse_of_factor(corner)
        a.write(j, j, inverse)
        run(partial(_solve, a, j, after, inverse), range(j), workers)


def _solve(a: Triangle, j: int, after: Mapping[int, Array], inverse: Array, i: int) -> None:
    part = a.read(i, j)
    for c, tile in after.items():
        part = part - a.read(i, c) @ tile.T
    a.write(i, j, part @ inverse.T)


def _invert_upper(a: Triangle, workers: int) -> None:
    """What `_reverse_cholesky` leaves becomes V⁻¹, column of tiles by column."""
    for j in range(len(a.parts)):
        # Copies: each is needed as it was after others of the column have been written.
        column = [a.read(c, j).copy() for c in range(j)]
        run(partial(_substitute, a, j, column, a.read(j, j)), range(j), workers)


def _substitute(a: Triangle, j: int, column: Sequence[Array], corner: Array, i: int) -> None:
    part = a.read(i, i) @ column[i]
    for c in range(i + 1, j):
        part += a.read(i, c) @ column[c]
    a.write(i, j, -part @ corner)


def _inverse_of_factor(a: Array) -> Array:
    """V⁻¹ of V Vᵀ = ``a``, upper triangular with zeros below, by halves."""
    if len(a) <= _LEAF:
        return np.linalg.inv(np.linalg.cholesky(a[::-1, ::-1])[::-1, ::-1])
    first, last = slice(len(a) // 2), slice(len(a) // 2, None)
    inverse = np.zeros(a.shape)
    inverse[last, last] = _inverse_of_factor(a[last, last])
    part = a[first, last] @ inverse[last, last].T
    inverse[first, first] = _inverse_of_factor(a[first, first] - part @ part.T)
    inverse[first, last] = -inverse[first, first] @ part @ inverse[last, last]
    return inverse


def prune_sparsegpt(
    dense: Array,
    factor: Triangle,
    dead: Array,
    pattern: Pattern = TWO_OF_FOUR,
    *,
    block_size: int = BLOCK_SIZE,
    workers: int = 1,
) -> Array:
    """``dense`` [M, K] pruned to ``pattern``, what is kept updated, in the same dtype.

    ``factor`` and ``dead`` are those of `inverse_factor`. Within each group those with the
    smallest w² / U_ii² go, by the values that the columns before have left; ties keep the
    lower index. Columns of a block are updated at once, those after it by block. Rows do not
    depend on one another, nor the bytes on ``workers``, who share the rows and the factor's
    part of a block. Takes 8 K (M + ``block_size``) bytes. Errors: `BadInputError` as
    `pattern.prune_pattern`, and unless ``block_size`` is a multiple of the group.
    """
    rows, cols = check_width(dense, pattern)
    if block_size < 1 or block_size % pattern.group:
        raise BadInputError(f"block size {block_size} is not a multiple of {pattern.group}")
    parts = row_slices(rows, piece_rows(cols))
    weights = np.empty((rows, cols))
    pruned = np.empty((rows, cols), dense.dtype)
    # All is linear in the weights, so none need be too large or too small to be squared.
    units = [energy_exponent(dense[p]) for p in parts]
    for p, unit in zip(parts, units, strict=True):
        np.copyto(weights[p], scale_down(widen(dense[p]), unit))
        weights[p][:, dead] = 0
    for b in row_slices(cols, block_size):
        upper = factor.rows(b)
        run(partial(_prune_rows, weights, upper, b, pattern), parts, workers)
    for p, unit in zip(parts, units, strict=True):
        with np.errstate(over="ignore", under="ignore"):
            found = scale_down(weights[p], -unit)
        pruned[p] = round_to(found, dense.dtype, "satfinite")
    kind = number_type(dense.dtype)
    bits = pruned.view(kind.unsigned)
    bits[bits == kind.sign] = 0
    return pruned


def _prune_rows(weights: Array, upper: Array, b: slice, pattern: Pattern, p: slice) -> None:
    """Prune the columns ``b`` of the rows ``p`` and update those after; ``upper`` are the factor's
    rows ``b`` from column b.start on."""
    # A thread has settings of its own. What is not finite is found afterwards.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        width = b.stop - b.start
        errors = _prune_block(weights[p, b], upper[:, :width], pattern)
        weights[p, b.stop :] -= errors.T @ upper[:, width:]


def _prune_block(weights: Array, upper: Array, pattern: Pattern) -> Array:
    """Prune the columns ``weights`` of a block; what is lost in each, over U_ii: [columns, M]."""
    # A channel's weights lie together: every step below works on those of one channel.
    channels = np.ascontiguousarray(weights.T)
    errors = np.empty_like(channels)
    for i in range(len(channels)):
        place = i % pattern.group
        if place == 0:
            group = slice(i, i + pattern.group)
            scores = np.square(channels[group] / upper.diagonal()[group, None])
            keep = keep_highest(scores, pattern.kept)
        np.divide(channels[i], upper[i, i], out=errors[i])
        errors[i][keep[place]] = 0
        channels[i][~keep[place]] = 0
        channels[i + 1 :] -= upper[i, i + 1 :, None] * errors[i]
    weights[:] = channels.T
    return errors


def output_energy(dense: Array, hessian: Hessian, *, workers: int = 1) -> float:
    """The trace of ``dense`` H ``dense``ᵀ in float64: with H = X Xᵀ, ‖``dense`` X‖²."""
    wide = widen(dense).astype(np.float64, copy=False)
    parts = row_slices(len(wide), _ENERGY_PIECE)
    total = 0.0
    for r in row_slices(hessian.shape[0], _STEP):
        band = widen(hessian[r, :]).astype(np.float64, copy=False)
        for part in run(partial(_energy, wide, band, r), parts, workers):
            total += part
    return total


def _energy(wide: Array, band: Array, r: slice, p: slice) -> float:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return float(((wide[p] @ band.T) * wide[p, r]).sum())
