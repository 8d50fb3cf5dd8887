"""SparseGPT: prune column by column, and let the columns to come make up for what is lost.

With X the inputs of a layer [K, samples] and H = X Xᵀ, the loss of an output is that of
(W - Ŵ) H (W - Ŵ)ᵀ. H⁻¹ = Uᵀ U with U upper triangular; row i of U holds how the columns from i
on make up for an error in column i when those before it are fixed.

Source: Frantar, Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot" (2023), algorithm 1 and section 3.3 (N:M). All in float64, rounded once at the end.
"""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array, number_type, widen
from sp24cli.errors import BadInputError
from sp24cli.fp8 import round_to
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, check_width, keep_highest
from sp24cli.rowblocks import row_slices

#: The paper's: what is added to the diagonal, as a share of its mean, and columns of a block.
DAMPING = 0.01
BLOCK_SIZE = 128
#: Rows or columns of H worked on at a time.
_STEP = 256
#: How far H may be from symmetric, as a share of its largest diagonal element: a Hessian
#: summed up in 16-bit types is that far at most.
_ASYMMETRY = 1e-2


def check_hessian(hessian: Array, k: int) -> None:
    """Errors: `BadInputError`, with the place, unless ``hessian`` is [K, K], finite, symmetric
    and has no negative diagonal element."""
    if hessian.shape != (k, k):
        raise BadInputError(f"Hessian has shape {list(hessian.shape)}, not {[k, k]}")
    diagonal = widen(hessian.diagonal().copy())
    limit = _ASYMMETRY * float(np.nan_to_num(diagonal.max(initial=0), posinf=0))
    for r in row_slices(k, _STEP):
        rows = widen(hessian[r])
        bad = ~np.isfinite(rows)
        if bad.any():
            i, j = divmod(int(bad.argmax()), k)
            raise BadInputError(f"Hessian is {rows[i, j]} at row {r.start + i}, column {j}")
    for r in row_slices(k, _STEP):
        negative = diagonal[r] < 0
        if negative.any():
            i = r.start + int(negative.argmax())
            raise BadInputError(f"Hessian is negative ({diagonal[i]}) at row {i}, column {i}")
        # Transposed blocks one at a time: a column of the map is a page a row.
        for c in row_slices(r.stop, _STEP):
            apart = np.abs(widen(hessian[r, c]) - widen(hessian[c, r]).T) > limit
            if apart.any():
                i, j = divmod(int(apart.argmax()), apart.shape[1])
                raise BadInputError(
                    f"Hessian is not symmetric at row {r.start + i}, column {c.start + j}"
                )


def inverse_factor(hessian: Array, damping: float = DAMPING) -> tuple[Array, Array]:
    """(U [K, K] with H⁻¹ = Uᵀ U, dead [K]) of ``hessian`` [K, K] after damping, float64.

    U is upper triangular; what lies below its diagonal is not defined. ``dead`` marks the
    channels with no input at all, which count as independent ones. Takes 8 K² bytes. Errors:
    `BadInputError` when the damped Hessian is not positive definite.
    """
    k = len(hessian)
    factor = np.empty((k, k))
    for r in row_slices(k, _STEP):
        factor[r] = widen(hessian[r])
    diagonal = factor.reshape(-1)[:: k + 1]
    dead: Array = diagonal == 0
    diagonal[dead] = 1
    diagonal += damping * diagonal.mean()
    try:
        _reverse_cholesky(factor)
        _invert_upper(factor)
    except np.linalg.LinAlgError:
        raise BadInputError(
            f"Hessian is not positive definite with damping {damping:g}; use a larger one"
        ) from None
    return factor, dead


def _reverse_cholesky(a: Array) -> None:
    """The upper triangle of ``a`` becomes V with V Vᵀ = a, block by block from the last."""
    k = len(a)
    for b in reversed(row_slices(k, _STEP)):
        after = a[b, b.stop :]
        corner = a[b, b] - after @ after.T
        corner = np.linalg.cholesky(corner[::-1, ::-1])[::-1, ::-1]
        a[b, b] = corner
        inverse = np.linalg.inv(corner)
        for r in row_slices(b.start, _STEP):
            a[r, b] -= a[r, b.stop :] @ after.T
            a[r, b] = a[r, b] @ inverse.T


def _invert_upper(a: Array) -> None:
    """The upper triangle of ``a`` becomes its inverse, block column by block column.

    Blocks on the diagonal must be triangular, as `_reverse_cholesky` leaves them.
    """
    for b in row_slices(len(a), _STEP):
        corner = np.linalg.inv(a[b, b])
        # Row block r needs those from r on as they were, so from the top.
        for r in row_slices(b.start, _STEP):
            part = a[r, r] @ a[r, b]
            part += a[r, r.stop : b.start] @ a[r.stop : b.start, b]
            a[r, b] = part
        a[: b.start, b] = -a[: b.start, b] @ corner
        a[b, b] = corner


def prune_sparsegpt(
    dense: Array,
    factor: Array,
    dead: Array,
    pattern: Pattern = TWO_OF_FOUR,
    *,
    block_size: int = BLOCK_SIZE,
) -> Array:
    """``dense`` [M, K] pruned to ``pattern``, what is kept updated, in the same dtype.

    ``factor`` and ``dead`` are those of `inverse_factor`. Within each group those with the
    smallest w² / U_ii² go, by the values that the columns before have left; ties keep the
    lower index. Columns of a block are updated at once, those after it by block. Rows do not
    depend on one another. Errors: `BadInputError` as `pattern.prune_pattern`, and unless
    ``block_size`` is a multiple of the group.
    """
    rows, cols = check_width(dense, pattern)
    if block_size < 1 or block_size % pattern.group:
        raise BadInputError(f"block size {block_size} is not a multiple of {pattern.group}")
    weights = widen(dense).astype(np.float64)
    weights[:, dead] = 0
    for b in row_slices(cols, block_size):
        errors = _prune_block(weights, factor, b, pattern)
        weights[:, b.stop :] -= errors.T @ factor[b, b.stop :]
    pruned = round_to(weights, dense.dtype, "satfinite").reshape(rows, cols)
    kind = number_type(dense.dtype)
    bits = pruned.view(kind.unsigned)
    bits[bits == kind.sign] = 0
    return pruned


def _prune_block(weights: Array, factor: Array, b: slice, pattern: Pattern) -> Array:
    """Prune the columns ``b`` of ``weights``; what is lost in each, over U_ii: [columns, M]."""
    # A channel's weights lie together: every step below works on those of one channel.
    channels = np.ascontiguousarray(weights[:, b].T)
    upper = factor[b, b]
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
    weights[:, b] = channels.T
    return errors


def output_energy(dense: Array, hessian: Array) -> float:
    """The trace of ``dense`` H ``dense``ᵀ in float64: with H = X Xᵀ, ‖``dense`` X‖²."""
    wide = widen(dense).astype(np.float64)
    total = 0.0
    for r in row_slices(len(hessian), _STEP):
        part = wide @ widen(hessian[r]).astype(np.float64).T
        total += float((part * wide[:, r]).sum())
    return total
