"""Every rung of the ladder, every element of its output, against float64 and the chosen kernel."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.bench import ladder
from sp24cli.bench.rates import Shape
from sp24cli.bench.statistics import Settings
from sp24cli.gpu.device import Device
from sp24cli.gpu.ladder import RungWeight
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight
from sp24cli.gpu.select import candidates
from sp24cli.kernels import manifest
from sp24cli.kernels.manifest import RungEntry
from sp24cli.optypes import operands
from sp24cli.verify.compare import Comparison
from sp24cli.verify.gpu import multiply, padded_rows
from sp24cli.verify.tensorcore import element_bound, frobenius_bound
from tests.gpu import problems

RUNGS = manifest.load().rungs
EVERY_RUNG = pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
EVERY_SHAPE = pytest.mark.parametrize("shape", problems.SHAPES, ids=lambda s: "x".join(map(str, s)))

#: Elements behind D that no rung may touch.
GUARD = 64


def run(
    device: Device,
    rung: RungEntry,
    problem: problems.Problem,
    scale_b: problems.Array | None = None,
    bias: problems.Array | None = None,
    raster: int | None = None,
) -> problems.Array:
    """D as [N, M]; run twice, which must give the same bits, and nothing beside D written."""
    n, m = problem.x.shape[0], problem.packed.shape[0]
    dtype = OUT_DTYPES[rung.out_type]
    weight = RungWeight(SparseWeight.upload(device, problem.packed), problem.packed)
    rows = padded_rows(problem.x, weight.weight.type)
    outs = []
    with (
        device.upload(rows.view(np.uint8)) as x,
        device.alloc((n * m + GUARD) * dtype.itemsize) as out,
        device.upload(np.ones(1, np.float32) if scale_b is None else scale_b) as scales,
        device.upload(np.zeros(1, np.float32) if bias is None else bias) as biases,
    ):
        plan = weight.plan(
            rung,
            n,
            x,
            rows.shape[1],
            out,
            scale_b=None if scale_b is None else scales,
            scale_b_rows=scale_b is not None and scale_b.size > 1,
            bias=None if bias is None else biases,
            raster=raster,
        )
        for _ in range(2):
            device.memset(out, 0xFF)
            plan.enqueue()
            outs.append(device.download(out, dtype, (n * m + GUARD,)))
    weight.free()
    assert np.array_equal(outs[0].view(np.uint16), outs[1].view(np.uint16)), "two runs differ"
    assert (outs[0][n * m :].view(np.uint16) == 0xFFFF).all(), "written beyond D"
    return outs[0][: n * m].reshape(n, m)


def assert_same_bits(
    device: Device,
    rung: RungEntry,
    problem: problems.Problem,
    d: problems.Array,
    scale_b: problems.Array | None,
    bias: problems.Array | None,
) -> None:
    """A rung and the GEMM kernel of its tile sum in one order, and so to the same bits."""
    found = candidates(rung.a_type, rung.out_type, "nm")
    kernel = next(e.name for e in found if e.tile_n == rung.tile_n and e.split == 1)
    weight = SparseWeight.upload(device, problem.packed)
    same = multiply(
        device, weight, problem.x, rung.out_type, "nm", scale_b=scale_b, bias=bias, kernel=kernel
    )
    assert np.array_equal(d.view(np.uint16), same.view(np.uint16))


@EVERY_RUNG
@EVERY_SHAPE
def test_small_integers_are_exact(
    device: Device, rung: RungEntry, shape: tuple[int, int, int]
) -> None:
    problem = problems.integers(rung.a_type, *shape)
    want = problem.exact.astype(np.float32).astype(OUT_DTYPES[rung.out_type])
    assert np.array_equal(run(device, rung, problem).T, want)


@EVERY_RUNG
@EVERY_SHAPE
def test_random_data_with_scales_and_bias(
    device: Device, rung: RungEntry, shape: tuple[int, int, int]
) -> None:
    """Within the derived bound, and with the bits of the kernels that sp24 chooses from."""
    m, n, k = shape
    problem = problems.normal(rung.a_type, m, n, k)
    random = np.random.default_rng(n)
    scale_b = random.uniform(0.5, 2.0, n).astype(np.float32)
    bias = random.standard_normal(m).astype(np.float32)
    d = run(device, rung, problem, scale_b, bias)

    types = operands(rung.a_type)
    want = problem.exact * scale_b + bias[:, None]
    comparison = Comparison(rung.name)
    comparison.add(d.T, want, element_bound(types, k, problem.norms * scale_b, rung.out_type, want))
    check = comparison.check()
    assert check.passed, check
    assert check.rel_frobenius <= frobenius_bound(types, k, rung.out_type), check

    assert_same_bits(device, rung, problem, d, scale_b, bias)


@EVERY_RUNG
def test_tensor_scales(device: Device, rung: RungEntry) -> None:
    problem = problems.normal(rung.a_type, 192, 40, 640, "tensor")
    scale_b = np.array([0.25], np.float32)
    d = run(device, rung, problem, scale_b)
    assert_same_bits(device, rung, problem, d, scale_b, None)


@EVERY_RUNG
def test_six_patterns_at_every_lane_by_the_identity(device: Device, rung: RungEntry) -> None:
    """Each of the six index pairs stands once at every group of two stages along K."""
    m, k = 256, 2 * rung.tile_k
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    row, group = np.indices((m, k // 4))
    x = np.eye(k, dtype=operands(rung.a_type).b.dtype)
    for turn in range(6):
        chosen = pairs[(row + group + turn) % 6]
        dense = np.zeros((m, k), np.float32)
        # Different neighbours, so that a swap of places shows.
        for j in range(2):
            dense[row, 4 * group + chosen[..., j]] = 1 + (row + 2 * group + j) % 7
        dense[0, :4] = [448, 0, 0, 0]
        packed = problems.make_packed(dense, rung.a_type, "tensor")
        problem = problems.Problem(packed, x, dense, dense, dense)
        assert np.array_equal(run(device, rung, problem).T.astype(np.float32), dense)


@pytest.mark.parametrize("rung", [r for r in RUNGS if r.raster], ids=lambda r: r.name)
def test_tile_order_changes_no_bit(device: Device, rung: RungEntry) -> None:
    problem = problems.normal(rung.a_type, 2100, 1100, 256)
    seen = {run(device, rung, problem, raster=raster).tobytes() for raster in (1, 3, 8, 64)}
    assert len(seen) == 1


@EVERY_RUNG
def test_a_wrong_index_pair_is_what_is_multiplied(device: Device, rung: RungEntry) -> None:
    """One nibble changed in one of 128 rows shows there, and nowhere else: comparisons can fail."""
    problem = problems.integers(rung.a_type, 128, 32, 256)
    row = problem.packed.to_layout("row")
    assert row.meta is not None and row.values is not None
    meta = row.meta.copy()
    # 0100 <-> 1110 in a low nibble: the pair (0, 1) becomes (2, 3), or back.
    at = next((i, j) for i, j in np.ndindex(*meta.shape) if i == 77 and meta[i, j] & 15 in (4, 14))
    meta[at] ^= 0b1010
    broken = problems.PackedMatrix(row.info, row.values, meta, None, row.scale)
    # Powers of two in the columns of a group: no two pairs of nonzeros give the same.
    x = np.tile(2.0 ** (np.arange(256) % 4), (32, 1)).astype(problem.x.dtype)
    got = []
    for packed in (row, broken):
        a = packed.dequantize(np.float64)
        d = run(device, rung, problems.Problem(packed, x, a, a, a)).T
        exact = (a @ x.astype(np.float64).T).astype(np.float32).astype(d.dtype)
        assert np.array_equal(d, exact)
        got.append(d)
    assert not np.array_equal(got[0][77], got[1][77])
    assert np.array_equal(np.delete(got[0], 77, 0), np.delete(got[1], 77, 0))


@pytest.mark.parametrize("name", ["e4m3", "f16"])
def test_the_bench_climbs(device: Device, name: str) -> None:
    settings = Settings(idle_ms=1.0, sustained_from_ms=20.0, sustained_to_ms=30.0, rounds=1)
    # The last's chosen kernel begins sums elsewhere than the rungs.
    for shape in (Shape(512, 512, 1024), Shape(1000, 77, 4092), Shape(5120, 200, 512)):
        plan = ladder.plan_ladder(name, RUNGS, (), shape=shape, settings=settings, workers=4)
        result = ladder.run(plan, device)
        assert not result.failures
        assert len(result.rows) == len(plan.rungs) + 1 > 10
        assert all(1.0 < r.row.sustained.us < 1000.0 for r in result.rows)
