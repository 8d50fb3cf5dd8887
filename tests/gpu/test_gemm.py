"""Every kernel of the manifest, every element of its output, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight
from sp24cli.kernels import manifest
from sp24cli.optypes import operand_type
from sp24cli.verify.compare import Comparison
from sp24cli.verify.gpu import multiply, padded_rows
from sp24cli.verify.tensorcore import element_bound, frobenius_bound
from tests.gpu import problems

ENTRIES = manifest.load().entries
EVERY_KERNEL = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)


def run(
    device: Device,
    entry: manifest.Entry,
    problem: problems.Problem,
    scale_b: problems.Array | None = None,
    bias: problems.Array | None = None,
    scale_b_k: int = 0,
) -> problems.Array:
    """D as [M, N]; run twice, which must give the same bits."""
    weight = SparseWeight.upload(device, problem.packed)
    outs = [
        multiply(
            device,
            weight,
            problem.x,
            entry.out_type,
            entry.order,
            scale_b=scale_b,
            scale_b_k=scale_b_k,
            bias=bias,
            kernel=entry.name,
        )
        for _ in range(2)
    ]
    bits = [np.ascontiguousarray(out).view(np.uint8) for out in outs]
    assert np.array_equal(*bits), "two runs differ"
    return outs[0].T if entry.order == "nm" else outs[0]


def assert_close(
    entry: manifest.Entry, d: problems.Array, want: problems.Array, norms: problems.Array, k: int
) -> None:
    optype = operand_type(entry.a_type)
    comparison = Comparison(entry.name)
    bound = element_bound(optype, k, norms, entry.out_type, want, entry.promote_k)
    comparison.add(d, want, bound)
    check = comparison.check()
    assert check.passed, check
    allowed = frobenius_bound(optype, k, entry.out_type, entry.promote_k)
    assert check.rel_frobenius <= allowed, check


@EVERY_KERNEL
@pytest.mark.parametrize("shape", problems.SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_small_integers_are_exact(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    problem = problems.integers(entry.a_type, *shape)
    d = run(device, entry, problem)
    want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
    assert np.array_equal(d, want)


@EVERY_KERNEL
@pytest.mark.parametrize("shape", problems.SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_random_data_with_scales_and_bias(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    problem = problems.normal(entry.a_type, m, n, k)
    random = np.random.default_rng(n)
    scale_b = random.uniform(0.5, 2.0, n).astype(np.float32)
    bias = random.standard_normal(m).astype(np.float32)
    d = run(device, entry, problem, scale_b, bias)
    want = problem.exact * scale_b + bias[:, None]
    assert_close(entry, d, want, problem.norms * scale_b, k)


@EVERY_KERNEL
def test_tensor_scales(device: Device, entry: manifest.Entry) -> None:
    problem = problems.normal(entry.a_type, 192, 40, 640, "tensor")
    d = run(device, entry, problem, np.array([0.25], np.float32))
    assert_close(entry, d, problem.exact * 0.25, problem.norms * 0.25, 640)


@EVERY_KERNEL
def test_six_patterns_at_every_lane_by_the_identity(device: Device, entry: manifest.Entry) -> None:
    """Each of the six index pairs stands once at every group of two blocks along K."""
    m, k = 128, 2 * entry.tile_k
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    row, group = np.indices((m, k // 4))
    x = np.eye(k, dtype=operand_type(entry.a_type).dtype)
    for shift in range(6):
        chosen = pairs[(row * 5 + group + shift) % 6]
        dense = np.zeros((m, k // 4, 4), np.float32)
        # Distinct neighbours, exact in every type.
        values = 1 + (row[..., None] + 3 * group[..., None] + [0, 7]) % 15
        np.put_along_axis(dense, chosen, values.astype(np.float32), axis=2)
        dense = dense.reshape(m, k)
        dense[0, :4] = [448, 0, 0, 0]
        problem = problems.Problem(
            problems.make_packed(dense, entry.a_type, "tensor"), x, dense, dense, dense
        )
        assert np.array_equal(run(device, entry, problem).astype(np.float32), dense)


@EVERY_KERNEL
def test_writes_inside_its_rows_alone(device: Device, entry: manifest.Entry) -> None:
    """With a pitch that allows no vectors and a guard around D, nothing beside D is touched."""
    m, n, k = 130, 37, 260
    problem = problems.integers(entry.a_type, m, n, k)
    weight = SparseWeight.upload(device, problem.packed)
    rows = padded_rows(problem.x, weight.type)
    lines, width = (n, m) if entry.order == "nm" else (m, n)
    dtype = OUT_DTYPES[entry.out_type]
    for pad, lead in ((3, 1), (8 - width % 8, 8)):
        pitch, total = width + pad, lead + lines * (width + pad) + 16
        x = device.upload(rows.view(np.uint8))
        out = device.alloc(total * dtype.itemsize)
        device.memset(out, 0xAB)
        plan = weight.plan(n, entry.out_type, entry.order, entry.name)
        plan.enqueue(x, rows.shape[1], out.ptr + lead * dtype.itemsize, pitch)
        raw = device.download(out, dtype, (total,))
        body = raw[lead : lead + lines * pitch].reshape(lines, pitch)
        want = problem.exact.astype(np.float32).astype(dtype)
        assert np.array_equal(body[:, :width], want.T if entry.order == "nm" else want)
        guard = np.full(1, 0xABABABAB, np.uint32).view(dtype)[0].tobytes()
        outside = [raw[:lead], body[:, width:].ravel(), raw[lead + lines * pitch :]]
        for part in outside:
            assert part.tobytes() == guard * part.size


@EVERY_KERNEL
def test_tile_order_changes_no_bit(device: Device, entry: manifest.Entry) -> None:
    problem = problems.normal(entry.a_type, 2100, 1100, 256)
    weight = SparseWeight.upload(device, problem.packed)
    x = device.upload(problem.x.view(np.uint8))
    dtype = OUT_DTYPES[entry.out_type]
    seen = set()
    for raster in (1, 3, 8, 64):
        out = device.alloc(2100 * 1100 * dtype.itemsize)
        device.memset(out, 0xFF)
        plan = weight.plan(1100, entry.out_type, entry.order, entry.name, raster)
        plan.enqueue(x, 256, out)
        seen.add(device.download(out, np.uint8, (out.nbytes,)).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.split > 1], ids=lambda e: e.name)
def test_every_number_of_blocks_is_split(device: Device, entry: manifest.Entry) -> None:
    """From one block, which leaves parts without any, to more than two a part."""
    for blocks in range(1, 2 * entry.split + 2):
        problem = problems.integers(entry.a_type, 130, 35, blocks * entry.tile_k - 4)
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), blocks


@pytest.mark.parametrize(
    "entry",
    [e for e in ENTRIES if (e.a_type, e.out_type, e.order) == ("e4m3", "bf16", "nm")],
    ids=lambda e: e.name,
)
@pytest.mark.parametrize("shape", [(512, 128, 8192), (2100, 1100, 1024)], ids=lambda s: str(s[0]))
def test_a_hundred_runs_give_the_same_bits(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    """With one tile a CTA and with several, of random data, whose sums depend on their order."""
    m, n, k = shape
    problem = problems.normal(entry.a_type, m, n, k)
    weight = SparseWeight.upload(device, problem.packed)
    x = device.upload(problem.x.view(np.uint8))
    plan = weight.plan(n, entry.out_type, entry.order, entry.name)
    out = device.alloc(m * n * OUT_DTYPES[entry.out_type].itemsize)
    seen = set()
    for _ in range(100):
        device.memset(out, 0xFF)
        plan.enqueue(x, k, out)
        seen.add(device.download(out, np.uint8, (out.nbytes,)).tobytes())
    assert len(seen) == 1


def test_a_wrong_index_pair_does_not_pass(device: Device) -> None:
    """The comparison can fail: one nibble changed in one of 128 rows."""
    entry = ENTRIES[0]
    problem = problems.integers(entry.a_type, 128, 32, 256)
    row = problem.packed.to_layout("row")
    assert row.meta is not None and row.values is not None
    meta = row.meta.copy()
    meta[77, 5] ^= 0b1010  # 0100 <-> 1110 in the low nibble: another legal pair, or none
    broken = problems.PackedMatrix(row.info, row.values, meta, None, row.scale)
    x = problem.x.copy()
    x[:] = np.arange(1, 33)[:, None] % 3 + np.arange(256) % 5
    a = problem.packed.dequantize(np.float64)
    want = a @ x.astype(np.float64).T
    good = multiply(device, SparseWeight.upload(device, problem.packed), x, "f32", "mn")
    bad = multiply(device, SparseWeight.upload(device, broken), x, "f32", "mn")
    assert np.array_equal(good, want)
    assert not np.array_equal(bad[77], want[77])
    assert np.array_equal(np.delete(bad, 77, 0), np.delete(want, 77, 0))
