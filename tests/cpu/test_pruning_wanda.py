"""Wanda against a loop over every weight."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.errors import BadInputError
from sp24cli.pruning.pattern import Pattern
from sp24cli.pruning.wanda import check_norms, prune_wanda, weighted_energy
from sp24cli.sparsity import fold, patch_energies, prune_24
from tests.cpu.modelfile import Array, normal


def naive_wanda(dense: Array, norms: Array, kept: int, group: int) -> Array:
    """Section 3 of the paper: S_ij = |W_ij| * ||X_j||, compared within every group."""
    out = np.zeros_like(dense)
    for row in range(dense.shape[0]):
        for start in range(0, dense.shape[1], group):
            scores = {
                c: abs(float(dense[row, c])) * float(norms[c])
                for c in range(start, start + group)
                if float(dense[row, c]) != 0
            }
            for column in sorted(scores, key=lambda c: (-scores[c], c))[:kept]:
                out[row, column] = dense[row, column]
    return out


@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 2), (4, 8)])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_against_a_naive_loop(dtype: str, kept: int, group: int) -> None:
    dense = normal(1, (40, 48), dtype)
    dense[::3, ::5] = 0
    norms = np.abs(normal(2, (48,), "F32", deviation=3.0))
    norms[7] = norms[20:24] = 0
    pruned = prune_wanda(dense, check_norms(norms, 48), Pattern(kept, group))
    assert pruned.tobytes() == naive_wanda(dense, norms, kept, group).tobytes()
    assert pruned.tobytes() != naive_wanda(dense, np.ones(48), kept, group).tobytes()


def test_equal_norms_are_magnitude() -> None:
    dense = normal(1, (64, 128), "BF16")
    norms = check_norms(np.full(128, 7.3, np.float32), 128)
    assert prune_wanda(dense, norms).tobytes() == prune_24(dense).tobytes()


def test_a_mask_that_is_there_is_kept() -> None:
    """Zero norms give no score, and yet no nonzero gives way to a zero."""
    dense = prune_24(normal(1, (64, 128)))
    dense[:, ::8] = 0
    norms = np.abs(normal(2, (128,)))
    norms[::2] = 0
    assert prune_wanda(dense, check_norms(norms, 128)).tobytes() == dense.tobytes()


def test_every_tile_has_its_own_norms() -> None:
    dense = normal(1, (2, 3 * (1 << 14)))
    norms = np.abs(normal(2, (dense.shape[1],)))
    pruned = prune_wanda(dense, check_norms(norms, dense.shape[1]))
    assert pruned.tobytes() == naive_wanda(dense, norms, 2, 4).tobytes()


@pytest.mark.parametrize("factor", [1e-300, 1e300])
def test_only_the_ratios_of_norms_count(factor: float) -> None:
    dense = normal(1, (8, 64), "F64") * factor**0.1
    norms = np.abs(normal(2, (64,), "F64"))
    want = prune_wanda(dense, check_norms(norms, 64))
    assert prune_wanda(dense, check_norms(norms * factor, 64)).tobytes() == want.tobytes()


def test_weighted_energy() -> None:
    dense, norms = normal(1, (5, 8)), np.abs(normal(2, (8,), "F64"))
    want = sum((float(dense[i, j]) * norms[j]) ** 2 for i in range(5) for j in range(8))
    assert weighted_energy(dense, norms) == pytest.approx(want, rel=1e-12)
    wide, many = normal(3, (33, 1300)), np.abs(normal(4, (1300,), "F64"))
    products = wide.astype(np.float64) * many
    assert weighted_energy(wide, many) == fold(patch_energies(products)), "the order of a GPU"


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_norms_that_cannot_be(value: float) -> None:
    norms = np.ones(8, np.float32)
    norms[5] = value
    with pytest.raises(BadInputError, match=r"norm of channel 5 is (nan|inf|-1.0)"):
        check_norms(norms, 8)
    with pytest.raises(BadInputError, match=r"shape \[8\], not \[12\]"):
        check_norms(norms, 12)
