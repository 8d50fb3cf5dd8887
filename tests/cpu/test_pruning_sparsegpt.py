"""SparseGPT against the update it stands for, with a Hessian inverted anew for every column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sp24cli.errors import BadInputError
from sp24cli.pruning import sparsegpt
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, find_crowded
from sp24cli.pruning.sparsegpt import (
    check_hessian,
    inverse_factor,
    output_energy,
    prune_sparsegpt,
    scratch_bytes,
)
from sp24cli.pruning.wanda import check_norms, prune_wanda
from sp24cli.sparsity import prune_24
from tests.cpu.modelfile import Array, normal


def inputs(seed: int, k: int, samples: int | None = None) -> Array:
    """Activations [k, samples] of unlike, correlated channels."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((k, k)) + 2 * np.eye(k)
    return mixed @ random.standard_normal((k, samples or 3 * k))


def naive_sparsegpt(dense: Array, hessian: Array, kept: int, group: int, damping: float) -> Array:
    """Row by row, column by column: optimal brain surgery among the columns not yet fixed."""
    k = len(hessian)
    damped = np.array(hessian, np.float64)
    dead = damped.diagonal() == 0
    mean = damped.diagonal()[~dead].mean()
    damped[dead, dead] = mean
    damped += damping * mean * np.eye(k)
    inverses = [np.linalg.inv(damped[i:, i:]) for i in range(k)]
    out = np.array(dense, np.float64)
    out[:, dead] = 0
    for row in out:
        for i in range(k):
            if i % group == 0:
                scores = {j: row[j] ** 2 / inverses[j][0, 0] for j in range(i, i + group)}
                held = sorted(scores, key=lambda j: (-scores[j], j))[:kept]
            if i not in held:
                row[i:] -= row[i] / inverses[i][0, 0] * inverses[i][0]
                row[i] = 0
    return out


@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 2), (4, 8)])
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("tile", [12, 1024])
def test_against_a_hessian_inverted_for_every_column(
    kept: int, group: int, block_size: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsegpt, "_TILE", tile)
    dense = normal(1, (12, 40), "F64")
    x = inputs(2, 40)
    x[13] = 0  # a channel without any input
    hessian = x @ x.T
    factor, dead = inverse_factor(hessian, 0.01)
    pattern = Pattern(kept, group)
    pruned = prune_sparsegpt(dense, factor, dead, pattern, block_size=block_size)
    want = naive_sparsegpt(dense, hessian, kept, group, 0.01)
    assert np.array_equal(pruned != 0, want != 0)
    np.testing.assert_allclose(pruned, want, rtol=1e-9, atol=1e-12)
    assert find_crowded(pruned, pattern) is None
    assert not pruned[:, 13].any()


@pytest.mark.parametrize("k", [4, 12, 100])
@pytest.mark.parametrize(("tile", "leaf"), [(8, 256), (8, 3), (64, 5), (1024, 256), (1024, 7)])
def test_the_factor_is_that_of_the_inverse(
    k: int, tile: int, leaf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsegpt, "_TILE", tile)
    monkeypatch.setattr(sparsegpt, "_LEAF", leaf)
    x = inputs(3, k)
    hessian = (x @ x.T).astype(np.float32)
    factor, dead = inverse_factor(hessian, 0.05)
    assert not dead.any()
    upper = np.triu(factor.rows(slice(0, k)))
    damped = hessian + 0.05 * hessian.diagonal().astype(np.float64).mean() * np.eye(k)
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(k), atol=1e-10)
    assert (upper.diagonal() > 0).all()


def test_memory_and_file_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many share the work: with two, tiles of a column are written in any order."""
    monkeypatch.setattr(sparsegpt, "_TILE", 64)
    monkeypatch.setattr(sparsegpt, "_PIECE", 16)
    monkeypatch.setattr(sparsegpt, "_PIECE_ELEMENTS", 0)
    monkeypatch.setattr(sparsegpt, "_ENERGY_PIECE", 16)
    x = inputs(3, 500)
    hessian, dense = x @ x.T, normal(4, (50, 500))
    found = []
    for limit, workers in ((1 << 30, 1), (1 << 30, 3), (0, 1), (0, 3)):
        monkeypatch.setattr(sparsegpt, "MEMORY_LIMIT", limit)
        assert bool(scratch_bytes(500)) == (limit == 0)
        factor, dead = inverse_factor(hessian, folder=tmp_path, workers=workers)
        with factor:
            pruned = prune_sparsegpt(dense, factor, dead, workers=workers)
            upper = np.triu(factor.rows(slice(0, 500)))
        energy = output_energy(pruned, hessian, workers=workers)
        found.append((upper.tobytes(), pruned.tobytes(), energy))
    assert len(set(found)) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_outputs_lose_less_than_by_magnitude(dtype: str) -> None:
    dense = normal(1, (64, 128), dtype)
    x = inputs(2, 128)
    hessian = (x @ x.T).astype(np.float32)
    factor, dead = inverse_factor(hessian)
    norms = check_norms(np.linalg.norm(x, axis=1), 128)

    def loss(pruned: Array) -> float:
        difference = dense.astype(np.float64) - pruned.astype(np.float64)
        direct = float(np.square(difference @ x).sum())
        assert output_energy(difference, hessian) == pytest.approx(direct, rel=1e-5)
        return direct

    calibrated = prune_sparsegpt(dense, factor, dead)
    assert calibrated.dtype == dense.dtype
    assert find_crowded(calibrated, TWO_OF_FOUR) is None
    assert loss(calibrated) < 0.6 * loss(prune_wanda(dense, norms))
    assert loss(calibrated) < 0.6 * loss(prune_24(dense))


@pytest.mark.parametrize("power", [-1000, -20, 10, 900])
def test_a_factor_of_the_hessian_changes_nothing(power: int) -> None:
    dense, x = normal(1, (16, 64)), inputs(2, 64)
    x[[3, 40]] = 0
    want = prune_sparsegpt(dense, *inverse_factor(x @ x.T))
    again = prune_sparsegpt(dense, *inverse_factor(np.ldexp(x @ x.T, power)))
    assert again.tobytes() == want.tobytes()


def test_channels_without_any_input_are_all_pruned() -> None:
    factor, dead = inverse_factor(np.zeros((8, 8)))
    assert dead.all() and not prune_sparsegpt(normal(1, (4, 8)), factor, dead).any()


def test_with_independent_inputs_nothing_is_updated() -> None:
    """A diagonal Hessian leaves nothing to make up with: what stays is wanda's choice."""
    dense = normal(1, (16, 32))
    norms = np.abs(normal(2, (32,), "F64")) + 0.1
    factor, dead = inverse_factor(np.diag(norms**2), damping=0.0)
    want = prune_wanda(dense, check_norms(norms, 32))
    assert prune_sparsegpt(dense, factor, dead).tobytes() == want.tobytes()


def test_values_that_round_to_zero_are_plain_zeros() -> None:
    dense = np.random.default_rng(1).choice([-(2.0**-24), 2.0**-24], (64, 16)).astype(np.float16)
    x = inputs(2, 16)
    exact = prune_sparsegpt(dense.astype(np.float64), *inverse_factor(x @ x.T))
    assert ((exact < 0) & (exact > -(2.0**-26))).any()
    pruned = prune_sparsegpt(dense, *inverse_factor(x @ x.T))
    assert not np.signbit(pruned[pruned == 0].astype(np.float32)).any()


def test_rows_do_not_depend_on_the_others() -> None:
    dense, x = normal(1, (48, 64)), inputs(2, 64)
    factor, dead = inverse_factor(x @ x.T)
    whole = prune_sparsegpt(dense, factor, dead)
    parts = [prune_sparsegpt(dense[i : i + 16], factor, dead) for i in (0, 16, 32)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6)


def test_hessians_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsegpt, "_STEP", 4)
    monkeypatch.setattr(sparsegpt, "_TILE", 4)
    x = inputs(1, 12)
    good = (x @ x.T).astype(np.float32)
    check_hessian(good, 12)
    check_hessian(good[:0, :0], 0)
    for value in (np.nan, np.inf):
        bad = good.copy()
        bad[9, 2] = value
        with pytest.raises(BadInputError, match=r"(nan|inf) at row 9, column 2"):
            check_hessian(bad, 12)
    bad = good.copy()
    bad[3, 10] += good.max()
    with pytest.raises(BadInputError, match="not symmetric at row 10, column 3"):
        check_hessian(bad, 12)
    bad = good.copy()
    bad[5, 5] *= -1
    with pytest.raises(BadInputError, match=r"negative .* at row 5, column 5"):
        check_hessian(bad, 12)
    with pytest.raises(BadInputError, match=r"shape \[12, 12\], not \[16, 16\]"):
        check_hessian(good, 16)


def test_a_hessian_that_needs_more_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    hessian = np.ones((8, 8)) + np.eye(8)
    hessian[0, 1] = hessian[1, 0] = 3
    for limit in (sparsegpt.MEMORY_LIMIT, 0):
        monkeypatch.setattr(sparsegpt, "MEMORY_LIMIT", limit)
        with pytest.raises(BadInputError, match=r"not positive definite with damping 0\.01"):
            inverse_factor(hessian, 0.01)
        inverse_factor(hessian, 2.0)[0].close()
    with pytest.raises(BadInputError, match=r"not finite with damping 1e\+16; use a smaller one"):
        inverse_factor(np.ldexp(hessian, 1000), 1e16)


def test_blocks_are_whole_groups() -> None:
    factor, dead = inverse_factor(np.eye(8))
    with pytest.raises(BadInputError, match="block size 6 is not a multiple of 4"):
        prune_sparsegpt(normal(1, (4, 8)), factor, dead, block_size=6)
