"""Promoted sums and scales in the loop over K: what sets them apart from the other kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from sp24cli.bits import widen
from sp24cli.errors import Sp24Error
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight, matmul
from sp24cli.kernels import manifest
from sp24cli.scaling import ScaleSpec
from sp24cli.verify.gpu import multiply
from tests.gpu import problems
from tests.gpu.test_gemm import assert_close, run

#: (M, N, K): less than a tile, ragged with a last block of K cut short, K of one block, an odd
#: number of 64s, and several tiles a CTA.
SHAPES = [
    (64, 8, 128),
    (300, 230, 1412),
    (65, 300, 132),
    (1000, 77, 4092),
    (200, 390, 1344),
    (4300, 1100, 640),
]

#: Scales of A (rows, columns; None: one a row) and columns of a scale of B (0: one a row).
BLOCKS = [
    ((128, 128), 128),
    ((1, 128), 128),
    ((128, 128), 0),
    ((64, 256), 128),
    ((192, 384), 256),
    ((256, 384), 128),
    (None, 128),
    ((128, 64), 64),
    ((1, 192), 128),
    ((48, 320), 192),
]

SCALED = [e for e in manifest.load().entries if e.loop_scales != "none"]
EVERY_SCALED = pytest.mark.parametrize("entry", SCALED, ids=lambda e: e.name)


@lru_cache(2 * len(BLOCKS))
def scaled_problem(
    type_name: str, m: int, n: int, k: int, block: tuple[int, int] | None, scale_k: int
) -> tuple[problems.Problem, problems.Array]:
    """Small integers under scales of 1, 2, 4 or 8, which differ from those of every neighbour: each
    sum is exact in float32, and one that takes another block's scale is another integer."""
    whole = problems.integers(type_name, m, n, k)
    spec = ScaleSpec("vector") if block is None else ScaleSpec("block", block)
    rows, columns = spec.shape(m, k)
    row, column = np.indices((rows, columns))
    scale_a = np.exp2((3 * (row % 5) + column + column // 3) % 4).astype(np.float32)
    columns = -(-k // scale_k) if scale_k else 1
    row, column = np.indices((n, columns))
    scale_b = np.exp2((row + row // 7 + 3 * column + column // 5) % 4).astype(np.float32)
    packed = replace(whole.packed, info=replace(whole.packed.info, scale=spec), scale=scale_a)
    a = packed.dequantize(np.float64)
    b = widen(whole.x).astype(np.float64) * np.repeat(scale_b, scale_k or k, axis=1)[:, :k]
    exact = a @ b.T
    return problems.Problem(packed, whole.x, a, exact, exact), scale_b


@lru_cache(problems.KEPT)
def random_problem(
    type_name: str, m: int, n: int, k: int, rows: int, columns: int
) -> tuple[problems.Problem, problems.Array]:
    """Normal values under random scales of blocks of A and of rows and as many columns of B."""
    random = np.random.default_rng(k)
    spec = ScaleSpec("block", (rows, columns))
    whole = problems.normal(type_name, m, n, k)
    scale_a = random.uniform(0.5, 2.0, spec.shape(m, k)).astype(np.float32)
    packed = replace(whole.packed, info=replace(whole.packed.info, scale=spec), scale=scale_a)
    scale_b = random.uniform(0.5, 2.0, (n, -(-k // columns))).astype(np.float32)
    a = packed.dequantize(np.float64)
    b = widen(whole.x).astype(np.float64) * np.repeat(scale_b, columns, axis=1)[:, :k]
    norms = np.sqrt((a * a) @ (b * b).T)
    return problems.Problem(packed, whole.x, a, a @ b.T, norms), scale_b


def takes(entry: manifest.Entry, block: tuple[int, int] | None, scale_k: int) -> bool:
    rows, columns = block or (1, 0)
    together = {"tile": 128, "block": 64, "row": 1}[entry.loop_scales]
    return int(np.gcd(columns, scale_k)) % entry.promote_k == 0 and rows % together == 0


@EVERY_SCALED
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_every_blocks_scale_is_its_own(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    tried = 0
    for block, scale_k in BLOCKS:
        if not takes(entry, block, scale_k):
            continue
        problem, scale_b = scaled_problem(entry.a_type, *shape, block, scale_k)
        d = run(device, entry, problem, scale_b, scale_b_k=scale_k)
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(d, want), (block, scale_k)
        tried += 1
    assert tried >= 3


@EVERY_SCALED
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_random_scales_of_blocks_and_bias(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    rows = 1 if entry.loop_scales == "row" else 128
    problem, scale_b = random_problem(entry.a_type, m, n, k, rows, entry.promote_k)
    bias = np.random.default_rng(n).standard_normal(m).astype(np.float32)
    d = run(device, entry, problem, scale_b, bias, scale_b_k=entry.promote_k)
    assert_close(entry, d, problem.exact + bias[:, None], problem.norms, k)


def that_reads_scales(entry: manifest.Entry) -> manifest.Entry | None:
    """A kernel that adds the same pieces in the same order as one whose scales a wgmma spreads."""
    wanted = (entry.out_type, entry.order, entry.split)
    found = (e for e in SCALED if e.loop_scales == "block")
    return next((e for e in found if (e.out_type, e.order, e.split) == wanted), None)


@pytest.mark.parametrize(
    "entry",
    [e for e in SCALED if e.loop_scales == "tile"],
    ids=lambda e: e.name,
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_scales_that_a_wgmma_spreads_are_those_that_are_read(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    """Bit for bit, with all 24 bits of a scale and far apart: the kernels that read each column's
    scale add the same pieces in the same order."""
    m, n, k = shape
    random = np.random.default_rng(m)
    problem, _ = random_problem(entry.a_type, m, n, k, 128, 128)
    packed = problem.packed
    assert packed.scale is not None
    far = [
        (random.uniform(1, 2, of) * 2.0 ** random.integers(-53, 30, of)).astype(np.float32)
        for of in (packed.scale.shape, (n, -(-k // 128)))
    ]
    problem = replace(problem, packed=replace(packed, scale=far[0]))
    other = that_reads_scales(entry)
    assert other is not None
    one, two = (run(device, e, problem, far[1], scale_b_k=128) for e in (entry, other))
    # Of the memory's order: the other is a transposed view, which cannot be read as bytes.
    bits = [np.ascontiguousarray(d).view(np.uint8) for d in (one, two)]
    assert np.array_equal(*bits)


@EVERY_SCALED
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_stays_with_its_token(
    device: Device, entry: manifest.Entry, bad: float
) -> None:
    """One token's, in one block along K: every other token has the bits that it has without."""
    m, n, k = 200, 390, 640
    rows = 1 if entry.loop_scales == "row" else 128
    problem, scale_b = random_problem(entry.a_type, m, n, k, rows, entry.promote_k)
    spoilt = scale_b.copy()
    spoilt[100, 1] = bad
    one, two = (
        run(device, entry, problem, b, scale_b_k=entry.promote_k) for b in (scale_b, spoilt)
    )
    others = np.arange(n) != 100
    bits = [np.ascontiguousarray(d[:, others]).view(np.uint8) for d in (one, two)]
    assert np.array_equal(*bits)
    assert not np.isfinite(two[:, 100].astype(np.float32)).all()


def test_a_scale_of_the_next_block_does_not_pass(device: Device) -> None:
    """The comparison can fail: scales of A moved by one block along K."""
    problem, scale_b = scaled_problem("e4m3", 200, 64, 1024, (128, 128), 128)
    packed = problem.packed
    assert packed.scale is not None
    moved = replace(packed, scale=np.roll(packed.scale, 1, axis=1))
    out = [
        multiply(
            device, SparseWeight.upload(device, p), problem.x, "f32", "mn",
            scale_b=scale_b, scale_b_k=128,
        )
        for p in (packed, moved)
    ]  # fmt: skip
    assert np.array_equal(out[0], problem.exact)
    assert not np.array_equal(out[1], problem.exact)


def test_precise_keeps_what_fast_loses(device: Device) -> None:
    """The mark: an f32 output at K = 28672 within 3e-4, where the tensor cores' own sum is near
    2.7e-3. By emulation of the cuts (tensorcore.py) precise sums are at 1.0e-4."""
    m, n, k = 256, 192, 28672
    problem = problems.normal("e4m3", m, n, k)
    weight = SparseWeight.upload(device, problem.packed)

    def error(accumulate: str) -> float:
        d = multiply(device, weight, problem.x, "f32", "mn", accumulate=accumulate)
        return float(np.linalg.norm(d - problem.exact) / np.linalg.norm(problem.exact))

    assert error("fast") > 1e-3
    assert error("precise") < 3e-4


def test_matmul_takes_scales_by_token_and_block(device: Device) -> None:
    torch = pytest.importorskip("torch")
    problem, scale_b = scaled_problem("e4m3", 200, 50, 644, (128, 128), 128)
    weight = SparseWeight.upload(device, problem.packed)
    x = torch.tensor(problem.x.view(np.uint8), device="cuda")
    scale = torch.tensor(scale_b, device="cuda")
    wide = torch.zeros((50, 13), device="cuda")
    wide[:, ::2][:, :6] = scale
    for given in (scale, scale.t().contiguous().t(), wide[:, ::2][:, :6]):
        out = torch.from_dlpack(matmul(weight, x, scale=given, out_dtype="f32"))
        assert np.array_equal(out.cpu().numpy(), problem.exact.T)
    with pytest.raises(Sp24Error, match=r"scale is float32 \[50, 5\]"):
        matmul(weight, x, scale=scale[:, :5].contiguous())
    with pytest.raises(Sp24Error, match="scales that change every 32 of K need a kernel"):
        matmul(weight, x, scale=torch.ones((50, 21), device="cuda"), scale_k=32)


def test_precise_is_taken_when_asked_for(device: Device) -> None:
    weight = SparseWeight.upload(device, problems.normal("e4m3", 256, 64, 1024).packed)
    assert weight.plan(64, "bf16").kernel.summation == "fast"
    assert weight.plan(64, "bf16", accumulate="precise").kernel.summation == "precise"
    with pytest.raises(Sp24Error, match="fast, precise or f16, not 'exact'"):
        weight.plan(64, "bf16", accumulate="exact")
