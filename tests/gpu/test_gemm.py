"""Every kernel of the manifest, every element of its output, against float64."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from sp24cli.errors import Sp24Error
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight
from sp24cli.gpu.model import residents
from sp24cli.gpu.order import cluster_rows
from sp24cli.gpu.select import MANY_ROWS
from sp24cli.kernels import manifest
from sp24cli.optypes import BLOCK_ROWS, OPERANDS
from sp24cli.verify.compare import Comparison
from sp24cli.verify.gpu import multiply, padded_rows
from sp24cli.verify.tensorcore import element_bound, frobenius_bound
from tests.gpu import problems

ENTRIES = manifest.load().entries

#: How often each product is run, to have the same bits each time. A sanitizer needs to see it once.
RUNS = int(os.environ.get("SP24_RUNS", "2"))
EVERY_KERNEL = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)


def run(
    device: Device,
    entry: manifest.Entry,
    problem: problems.Problem,
    scale_b: problems.Array | None = None,
    bias: problems.Array | None = None,
    scale_b_k: int = 0,
) -> problems.Array:
    """D as [M, N]; run `RUNS` times, which must give the same bits."""
    weight = problems.upload(device, problem.packed, entry.type)
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
            types=OPERANDS[entry.type],
        )
        for _ in range(RUNS)
    ]
    bits = [np.ascontiguousarray(out).view(np.uint8) for out in outs]
    assert all(np.array_equal(bits[0], others) for others in bits), "runs differ"
    return outs[0].T if entry.order == "nm" else outs[0]


def weight_scale(entry: manifest.Entry) -> str:
    """The finest scale of a weight beside the loop's: where that is by rows, none is by row."""
    if entry.weight_scales != "none":
        return problems.operand_scale(entry)
    return "tensor" if entry.loop_scales in ("tile", "block") else "vector"


def assert_close(
    entry: manifest.Entry, d: problems.Array, want: problems.Array, norms: problems.Array, k: int
) -> None:
    types = OPERANDS[entry.type]
    comparison = Comparison(entry.name)
    bound = element_bound(types, k, norms, entry.out_type, want, entry.promote_k)
    comparison.add(d, want, bound)
    check = comparison.check()
    assert check.passed, check
    allowed = frobenius_bound(types, k, entry.out_type, entry.promote_k)
    assert check.rel_frobenius <= allowed, check


@EVERY_KERNEL
@pytest.mark.parametrize("shape", problems.SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_small_integers_are_exact(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    problem = problems.integers(entry.type, *shape, problems.operand_scale(entry))
    d = run(device, entry, problem)
    want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
    assert np.array_equal(d, want)


@EVERY_KERNEL
@pytest.mark.parametrize("shape", problems.SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_random_data_with_scales_and_bias(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    problem = problems.normal(entry.type, m, n, k, weight_scale(entry))
    if not entry.scales:
        # Sums of integers as they are, whatever the weight's scales.
        assert np.array_equal(run(device, entry, problem), problem.sums)
        return
    random = np.random.default_rng(n)
    scale_b = random.uniform(0.5, 2.0, n).astype(np.float32)
    bias = random.standard_normal(m).astype(np.float32)
    d = run(device, entry, problem, scale_b, bias)
    want = problem.exact * scale_b + bias[:, None]
    assert_close(entry, d, want, problem.norms * scale_b, k)


@EVERY_KERNEL
def test_tensor_scales(device: Device, entry: manifest.Entry) -> None:
    problem = problems.normal(entry.type, 192, 40, 640, problems.operand_scale(entry))
    if not entry.scales:
        with pytest.raises(Sp24Error, match="s32 are plain sums"):
            run(device, entry, problem, np.array([0.25], np.float32))
        return
    d = run(device, entry, problem, np.array([0.25], np.float32))
    assert_close(entry, d, problem.exact * 0.25, problem.norms * 0.25, 640)


@EVERY_KERNEL
def test_tokens_that_end_inside_a_tile(device: Device, entry: manifest.Entry) -> None:
    """Each after a product that leaves NaN (-1 in s8) in shared memory: none of it is seen."""
    m, k = 65, (2 * entry.cluster + 1) * entry.tile_k - 4
    weight = problems.operand_scale(entry)
    full = problems.integers(entry.type, m, entry.tile_n, k, weight)
    ones = np.full(full.x.nbytes, 0xFF, np.uint8)
    nan = replace(full, x=ones.view(full.x.dtype).reshape(full.x.shape))
    for n in (1, entry.tile_n - 1, entry.tile_n + 1):
        run(device, entry, nan)
        problem = problems.integers(entry.type, m, n, k, weight)
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), n


@EVERY_KERNEL
def test_every_pattern_at_every_lane_by_the_identity(device: Device, entry: manifest.Entry) -> None:
    """Each of the six index pairs (of tf32 the two places of a pair) stands once at every group of
    two blocks along K."""
    types = OPERANDS[entry.type]
    m, k, wide = 128, 2 * entry.tile_k, types.a.group
    patterns = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] if wide == 4 else [(0,), (1,)]
    pairs = np.array(patterns)
    row, group = np.indices((m, k // wide))
    x = np.eye(k, dtype=types.b.dtype)
    for shift in range(len(pairs)):
        chosen = pairs[(row * 5 + group + shift) % len(pairs)]
        dense = np.zeros((m, k // wide, wide), np.float32)
        # Distinct neighbours.
        which = (row[..., None] + 3 * group[..., None] + [0, 7][: wide // 2]) % 15
        np.put_along_axis(dense, chosen, problems.EXACT[which], axis=2)
        dense = problems.anchored(dense.reshape(m, k), types.a)
        packed = problems.make_packed(dense, entry.a_type, "tensor")
        packed = problems.spread(packed, problems.operand_scale(entry))
        problem = problems.Problem(packed, x, dense, dense, dense)
        assert np.array_equal(run(device, entry, problem).astype(np.float32), dense)


@EVERY_KERNEL
def test_writes_inside_its_rows_alone(device: Device, entry: manifest.Entry) -> None:
    """With a pitch that allows no vectors and a guard around D, nothing beside D is touched."""
    m, n, k = 130, 37, 260
    problem = problems.integers(entry.type, m, n, k, problems.operand_scale(entry))
    weight = problems.upload(device, problem.packed, entry.type)
    rows = padded_rows(problem.x, weight.multiplied)
    lines, width = (n, m) if entry.order == "nm" else (m, n)
    dtype = OUT_DTYPES[entry.out_type]
    for pad, lead in ((3, 1), (8 - width % 8, 8)):
        pitch, total = width + pad, lead + lines * (width + pad) + 16
        x = device.upload(rows.view(np.uint8))
        out = device.alloc(total * dtype.itemsize)
        device.memset(out, 0xAB)
        types = OPERANDS[entry.type]
        plan = weight.plan(n, entry.out_type, entry.order, entry.name, types=types)
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
    problem = problems.normal(entry.type, 2100, 1100, 256, weight_scale(entry))
    weight = problems.upload(device, problem.packed, entry.type)
    x = device.upload(problem.x.view(np.uint8))
    dtype = OUT_DTYPES[entry.out_type]
    seen = set()
    for raster in (1, 3, 8, 64):
        out = device.alloc(2100 * 1100 * dtype.itemsize)
        device.memset(out, 0xFF)
        types = OPERANDS[entry.type]
        plan = weight.plan(1100, entry.out_type, entry.order, entry.name, raster, types=types)
        plan.enqueue(x, 256, out)
        seen.add(device.download(out, np.uint8, (out.nbytes,)).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.split * e.stage_blocks > 1], ids=lambda e: e.name
)
def test_every_number_of_blocks_along_k(device: Device, entry: manifest.Entry) -> None:
    """From one block, which leaves parts without any, to more than two stages a part."""
    for blocks in range(1, 2 * entry.split * entry.stage_blocks + 2):
        k = blocks * entry.tile_k - 4
        problem = problems.integers(entry.type, 130, 35, k, problems.operand_scale(entry))
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), blocks


@pytest.mark.parametrize(
    "entry",
    [e for e in ENTRIES if (e.out_type, e.order) in (("bf16", "nm"), ("f16", "nm"))],
    ids=lambda e: e.name,
)
def test_few_tokens_and_many_rows(device: Device, entry: manifest.Entry) -> None:
    """Each row of tiles begins elsewhere along K (Round in cuda/include/sp24/body.cuh): of parts of
    two stages and one that need not be full; of e4m3 also of more than the ring holds, so that what
    is asked for early and what comes later have to follow one another round the end."""
    stages = [2] if entry.type != "e4m3" or entry.out_type == "f16" else [2, entry.stages + 2]
    for count in stages:
        k = count * entry.split * entry.stage_blocks * entry.tile_k + 4
        problem = problems.integers(entry.type, MANY_ROWS, 19, k, problems.operand_scale(entry))
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), count


@pytest.mark.parametrize(
    "entry",
    [
        e
        for e in ENTRIES
        if (e.type, e.out_type, e.order, e.loop_scales) == ("e4m3", "bf16", "nm", "none")
    ],
    ids=lambda e: e.name,
)
def test_several_tiles_of_few_tokens_a_cta(device: Device, entry: manifest.Entry) -> None:
    """A CTA's next tile begins elsewhere along K than its last."""
    rows = device.sm_count * residents(entry) // entry.cluster_ctas + 1
    m = max(MANY_ROWS, rows * entry.cluster * entry.tile_m)
    k = 3 * entry.stage_blocks * entry.split * entry.tile_k
    problem = problems.integers(entry.type, m, 9, k, problems.operand_scale(entry))
    want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
    assert np.array_equal(run(device, entry, problem), want)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.balanced], ids=lambda e: e.name)
def test_balanced_tiles_of_different_heights(device: Device, entry: manifest.Entry) -> None:
    """Few rows of tiles, for so many columns leave no cluster for more. Of four rows a CTA has
    tiles of every other, and where they are a block short of full, those of one are lower: then
    a warpgroup has rows in some of a CTA's tiles only, before and after others. One block is that
    of a CTA, or of all those of a cluster: then columns begin at different rows too."""
    cols = device.kernel(entry).max_clusters + 1
    full = entry.cluster * entry.tile_m // BLOCK_ROWS
    k = 2 * entry.stage_blocks * entry.split * entry.tile_k + 4
    for blocks in (1, full + 1, 4 * full - 1, 4 * full - entry.cluster):
        m, n = blocks * BLOCK_ROWS - 3, cols * entry.tile_n - 5
        assert cluster_rows(entry, m, cols, cols - 1) == -(-blocks // full)
        problem = problems.integers(entry.type, m, n, k, problems.operand_scale(entry))
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), blocks


@pytest.mark.parametrize(
    "entry",
    [
        e
        for e in ENTRIES
        if e.type in ("e4m3", "e4m3_bf16") and (e.out_type, e.order) == ("bf16", "nm")
    ],
    ids=lambda e: e.name,
)
@pytest.mark.parametrize("shape", [(512, 128, 8192), (2100, 1100, 1024)], ids=lambda s: str(s[0]))
def test_a_hundred_runs_give_the_same_bits(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    """With one tile a CTA and with several, of random data, whose sums depend on their order."""
    m, n, k = shape
    problem = problems.normal(entry.type, m, n, k, weight_scale(entry))
    weight = problems.upload(device, problem.packed, entry.type)
    x = device.upload(problem.x.view(np.uint8))
    plan = weight.plan(n, entry.out_type, entry.order, entry.name)
    out = device.alloc(m * n * OUT_DTYPES[entry.out_type].itemsize)
    seen = set()
    for _ in range(100):
        device.memset(out, 0xFF)
        plan.enqueue(x, k, out)
        seen.add(device.download(out, np.uint8, (out.nbytes,)).tobytes())
    assert len(seen) == 1


@EVERY_KERNEL
@pytest.mark.parametrize("missing", [0, 1])
def test_launches_that_overlap_change_no_bit(
    device: Device, entry: manifest.Entry, missing: int
) -> None:
    """One launch starts while another ends: in a graph, two weights in turn, with a tile a CTA,
    whose columns are tokens but for those ``missing``."""
    n, k = entry.tile_n - missing, 10 * entry.tile_k
    turns = []
    for m in (1100, 1036):
        problem = problems.normal(entry.type, m, n, k, weight_scale(entry))
        weight = problems.upload(device, problem.packed, entry.type)
        types = OPERANDS[entry.type]
        plan = weight.plan(n, entry.out_type, entry.order, entry.name, types=types)
        x = device.upload(padded_rows(problem.x, weight.multiplied).view(np.uint8))
        size = m * n * OUT_DTYPES[entry.out_type].itemsize
        turns.append((plan, x, [device.alloc(size) for _ in range(20)]))
    alone = []
    for plan, x, outs in turns:
        plan.enqueue(x, k, outs[0])
        alone.append(device.download(outs[0], np.uint8, (outs[0].nbytes,)))
        for out in outs:
            device.memset(out, 0xFF)

    def enqueue() -> None:
        for turn in range(20):
            for plan, x, outs in turns:
                plan.enqueue(x, k, outs[turn])

    device.synchronize()
    device.capture(enqueue).launch()
    for (_, _, outs), want in zip(turns, alone, strict=True):
        for out in outs:
            assert np.array_equal(device.download(out, np.uint8, (out.nbytes,)), want)


CHAINED = [
    e
    for e in ENTRIES
    if e.order == "nm" and e.out_type == OPERANDS[e.type].b.name.replace("tf32", "f32")
]


@pytest.mark.parametrize("entry", CHAINED, ids=lambda e: e.name)
def test_a_launch_reads_what_the_one_before_has_written(
    device: Device, entry: manifest.Entry
) -> None:
    """D of a launch is B of the next, in a graph whose launches overlap."""
    n, k = entry.tile_n, 1088
    problem = problems.normal(entry.type, k, n, k, weight_scale(entry))
    types = OPERANDS[entry.type]
    weight = problems.upload(device, problem.packed, entry.type)
    plan = weight.plan(n, entry.out_type, entry.order, entry.name, types=types)
    x = device.upload(padded_rows(problem.x, weight.multiplied).view(np.uint8))
    dtype = OUT_DTYPES[entry.out_type]
    outs = [device.alloc(n * k * np.dtype(dtype).itemsize) for _ in range(12)]
    want = []
    for source, out in zip([x, *outs], outs, strict=False):
        plan.enqueue(source, k, out)
        want.append(device.download(out, dtype, (n, k)))
    assert np.isfinite(want[-1].astype(np.float64)).all() and want[-1].any()
    for out in outs:
        device.memset(out, 0xFF)

    def enqueue() -> None:
        for source, out in zip([x, *outs], outs, strict=False):
            plan.enqueue(source, k, out)

    device.synchronize()
    device.capture(enqueue).launch()
    for out, right in zip(outs, want, strict=True):
        assert device.download(out, dtype, (n, k)).tobytes() == right.tobytes()


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.accumulate == "s32"], ids=lambda e: e.name
)
def test_s8_is_exact_over_its_whole_range(device: Device, entry: manifest.Entry) -> None:
    """Every code from -128 to 127, and the largest sums of a long K: |-128 * -128| * 14336 is
    234881024, a ninth of what s32 holds."""
    m, n, k = 140, 50, 28672
    problem = problems.all_codes(m, n, k)
    sums = problem.sums
    assert sums.max() == 2**14 * (k // 2) and sums.min() == -(2**14 - 2**7) * (k // 2)
    d = run(device, entry, problem)
    if entry.out_type == "s32":
        assert np.array_equal(d, sums)
    else:
        # One rounding to float32, a scale that is a power of two, one to the output.
        want = sums.astype(np.float32) * np.float32(2.0**-13)
        assert np.array_equal(d, want.astype(OUT_DTYPES[entry.out_type]))


def test_sums_in_f16_stay_in_f16(device: Device) -> None:
    """2048 + 1 is 2048 in f16, whichever way it is rounded: what f32 would tell apart is lost, so
    this is the instruction that was asked for."""
    for entry in (e for e in ENTRIES if e.type == "f16_sum16"):
        k = 4 * entry.tile_k
        dense = np.zeros((64, k), np.float32)
        dense[:, 0], dense[:, k - 4] = 2048, 1
        x = np.ones((8, k), np.float16)
        packed = problems.make_packed(dense, "f16", "none")
        d = run(device, entry, problems.Problem(packed, x, dense, dense, dense))
        assert np.array_equal(d, np.full((64, 8), 2048, np.float16))
        # A scale is applied in f32 to the sum, and rounded once more.
        scale = np.linspace(0.5, 1.5, 8, dtype=np.float32)
        bias = np.linspace(-3, 3, 64, dtype=np.float32)
        d = run(device, entry, problems.Problem(packed, x, dense, dense, dense), scale, bias)
        want = (2048.0 * scale.astype(np.float64) + bias[:, None]).astype(np.float32)
        assert np.array_equal(d, want.astype(np.float16))


def test_tf32_ignores_the_bits_that_it_does_not_have(device: Device) -> None:
    """What quantizing and activations must round, for the tensor core cuts: 1 + 2^-11 is 1."""
    entry = next(e for e in ENTRIES if e.type == "tf32" and e.out_type == "f32")
    dense = np.zeros((64, 32), np.float32)
    dense[:, 5] = 1
    x = np.zeros((8, 32), np.float32)
    x[:, 5] = np.array(
        [1 + 2.0**-11, 1 + 2.0**-10, 1 + 2.0**-23, 2.0**-126, 3, -1 - 2.0**-11, 0, 7]
    )
    packed = problems.make_packed(dense, "tf32", "none")
    d = run(device, entry, problems.Problem(packed, x, dense, dense, dense))
    want = (x[:, 5].view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert np.array_equal(d, np.broadcast_to(want, (64, 8)))


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
