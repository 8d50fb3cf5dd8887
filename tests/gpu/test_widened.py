"""Weights that are widened to 16 bits: what sets their kernels apart. They take part in the tests
of every kernel (test_gemm.py) as well."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli import fragments
from sp24cli.bits import widen
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight, matmul
from sp24cli.kernels import manifest
from sp24cli.metadata import encode
from sp24cli.optypes import OPERANDS, operand_type
from sp24cli.packed import PackedMatrix, PackInfo
from sp24cli.reference import widened
from sp24cli.scaling import ScaleSpec, powers
from sp24cli.verify.gpu import multiply
from tests.gpu import problems
from tests.gpu.test_gemm import run

E4M3 = operand_type("e4m3")
PAIRS = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint8)

WIDENING = [e for e in manifest.load().entries if e.layout == "widened"]
#: Those with scales in the operand; of these, those whose output shows every bit of a weight.
SCALED = [e for e in WIDENING if e.weight_scales != "none"]
IN_F32 = [e for e in WIDENING if e.out_type == "f32"]
every_scaled = pytest.mark.parametrize("entry", SCALED, ids=lambda e: e.name)
in_f32 = pytest.mark.parametrize("entry", IN_F32, ids=lambda e: e.name)

#: (M, N, K): less than a tile, ragged in every direction, K of one block and not a multiple of 64,
#: several tiles a CTA.
SHAPES = [
    (64, 8, 64),
    (300, 230, 1412),
    (65, 300, 132),
    (1000, 77, 4092),
    (200, 390, 1344),
    (8, 1, 4),
    (4300, 1100, 640),
]

#: Blocks of every kind that kernels take, by the scales in the image.
BLOCKS: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "block": [(16, 16), (32, 32), (48, 16), (16, 96), (128, 128), (64, 16)],
    "mx": [(1, 32)],
}


def spec_of(kind: str, block: tuple[int, int] | None) -> ScaleSpec:
    """Scales of an image of that kind; by row where there are none in it."""
    return ScaleSpec("vector") if kind == "none" else ScaleSpec(kind, block)  # type: ignore[arg-type]


def of_codes(
    codes: problems.Array, pairs: problems.Array, spec: ScaleSpec, scale: problems.Array, over: str
) -> PackedMatrix:
    """A matrix of given ``codes`` uint8 [M, K/2] at ``pairs`` [M, K/4, 2]."""
    m, k = codes.shape[0], 2 * codes.shape[1]
    info = PackInfo((m, k), "F32", "e4m3", spec, "given", "row", over)  # type: ignore[arg-type]
    meta = encode(pairs[..., 0], pairs[..., 1])
    return PackedMatrix(info, codes.view(E4M3.dtype), meta, None, scale)


def pairs_of(m: int, k: int) -> problems.Array:
    row, group = np.indices((m, k // 4))
    return PAIRS[(row * 5 + group) % 6]


def scales_of(spec: ScaleSpec, shape: tuple[int, ...], exponents: problems.Array) -> problems.Array:
    """2^exponents in turn; of float32 with a random mantissa each."""
    found = np.resize(exponents, shape)
    if spec.kind == "mx":
        return powers(found)
    mantissa = 1 + np.random.default_rng(shape).random(shape, np.float32) * np.float32(0.99)
    return np.ldexp(mantissa, found).astype(np.float32)


def identity_product(
    device: Device, entry: manifest.Entry, packed: PackedMatrix, gain: float = 1.0
) -> problems.Array:
    """A times ``gain`` by the kernel, float32 [M, K]."""
    k = packed.shape[1]
    x = (np.eye(k) * gain).astype(OPERANDS[entry.type].b.dtype)
    return run(device, entry, problems.Problem(packed, x, x, x, x))


def operand(entry: manifest.Entry, packed: PackedMatrix) -> problems.Array:
    """What a product with 1 must give, float32 [M, K]."""
    if entry.weight_scales == "none":
        return packed.dequantize(np.float32)
    return widen(widened(packed, OPERANDS[entry.type].b.dtype))


def assert_same_bits(got: problems.Array, want: problems.Array) -> None:
    """Bit for bit, but that a zero has no sign and a NaN no payload."""
    zero, nan = want == 0, np.isnan(want)
    assert np.array_equal(got == 0, zero) and np.array_equal(np.isnan(got), nan)
    rest = ~(zero | nan)
    assert np.array_equal(got[rest].view(np.uint32), want[rest].view(np.uint32))


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize(
    "shape", [(64, 64), (1, 4), (65, 132), (1000, 4092), (200, 1028), (127, 60), (70, 36)]
)
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_image_equals_numpys(
    device: Device, kind: str, shape: tuple[int, int], layout: str
) -> None:
    """The GPU makes the blocks that numpy makes, byte for byte, of every kind of scales."""
    random = np.random.default_rng(shape)
    m, k = shape
    codes = random.integers(0, 256, (m, k // 2), np.uint8)
    for block in BLOCKS[kind] or [None]:
        spec = spec_of(kind, block)
        scale = scales_of(spec, spec.shape(m, k), np.arange(-60, 63))
        packed = of_codes(codes, pairs_of(m, k), spec, scale, "satfinite")
        values, meta = packed.row_order()
        want = fragments.to_fragments(values, meta, k, scale, spec)
        given = packed.to_layout(layout)  # type: ignore[arg-type]
        got = SparseWeight.upload(device, given, activations="f16").image
        assert np.array_equal(device.download(got, np.uint8, want.shape), want), block


#: Exponents of scales that reach from where every product is 0 (f16) or nearly subnormal (bf16: its
#: least product is 2^-9 times the scale) to far past the end of the type; and to where none is.
#: "plain" ends where kernels need no limit.
EXPONENTS = {
    ("bf16", "plain"): np.arange(-117, 118),
    ("f16", "plain"): np.arange(-24, 7),
    ("bf16", "satfinite"): np.arange(-117, 128),
    ("f16", "satfinite"): np.arange(-126, 128),
    ("bf16", "nan"): np.arange(-117, 118),
    ("f16", "nan"): np.arange(-126, 7),
}


@in_f32
@pytest.mark.parametrize("scales", ["satfinite", "nan", "plain"])
def test_every_code_at_every_place_under_extreme_scales(
    device: Device, entry: manifest.Entry, scales: str
) -> None:
    """Each row holds all codes but NaN, at other places than its neighbours, and every block of
    scales another exponent: the product with the identity is the operand, bit for bit."""
    m, k = 256, 508  # 254 codes a row, and a last block of columns that is cut short
    finite = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    codes = np.stack([np.roll(finite, 7 * row) for row in range(m)])
    for block in BLOCKS[entry.weight_scales][:2] or [None]:
        spec = spec_of(entry.weight_scales, block)
        exponents = np.random.default_rng(3).permutation(EXPONENTS[entry.b_type, scales])
        if entry.weight_scales == "none":
            exponents = exponents[exponents < 118]  # what float32 holds
        scale = scales_of(spec, spec.shape(m, k), exponents)
        overflow = "nan" if scales == "nan" else "satfinite"
        packed = of_codes(codes, pairs_of(m, k), spec, scale, overflow)
        if scales != "nan":
            assert fragments.plain(scale, entry.weight_scales, entry.b_type) == (
                scales == "plain" or spec.block is None
            )
        want = operand(entry, packed)
        assert np.isfinite(want).all()
        if scales == "satfinite" and spec.block is not None:
            largest = float(ml_dtypes.finfo(OPERANDS[entry.type].b.dtype).max)
            assert (np.abs(want) == largest).any()
        assert_same_bits(identity_product(device, entry, packed), want)


@in_f32
@pytest.mark.parametrize("overflow", ["satfinite", "nan"])
def test_infinities_and_nan(device: Device, entry: manifest.Entry, overflow: str) -> None:
    """All codes under scales of all sizes, one a row, at every place of a block: what is infinite
    or NaN takes the rest of its row along, as in any product with zeros."""
    if entry.weight_scales == "none":
        exponents = np.array([-20, 0, 5])
    else:
        exponents = np.array([-126, -100, -20, 0, 5, 7, 8, 15, 40, 100, 118, 119, 120, 126, 127])
        if entry.b_type == "bf16":
            exponents = exponents[1:]  # products of less are subnormal: a test of its own
    m, k = 256 * len(exponents), 64
    row = np.arange(m)
    codes = np.zeros((m, k // 2), np.uint8)
    codes[row, row * 7 % (k // 2)] = row % 256
    spec = spec_of(entry.weight_scales, (16, 16) if entry.weight_scales == "block" else (1, 32))
    count = spec.shape(m, k)[0]
    of_row = np.repeat(exponents, count // len(exponents))[:, None]
    scale = scales_of(spec, spec.shape(m, k), np.broadcast_to(of_row, spec.shape(m, k)))
    packed = of_codes(codes, pairs_of(m, k), spec, scale, overflow)
    want = operand(entry, packed)
    with np.errstate(invalid="ignore"):
        want = (want[:, :, None] * np.eye(k, dtype=np.float32)).sum(axis=1)
    assert np.isnan(want).any()
    assert np.isinf(want).any() == (overflow == "nan" and spec.block is not None)
    assert_same_bits(identity_product(device, entry, packed), want)


@pytest.mark.parametrize("gain", [1.0, 2.0**64])
def test_subnormal_bf16_operands(device: Device, gain: float) -> None:
    """Operands below 2^-126 are not flushed: with a product of 1 (a subnormal float32), and where
    that of 2^64 lifts the sum out of the subnormal range."""
    m, k = 64, 64
    random = np.random.default_rng(9)
    codes = random.integers(0, 127, (m, k // 2), np.uint8)
    for entry in (e for e in IN_F32 if e.b_type == "bf16" and e.weight_scales != "none"):
        spec = spec_of(entry.weight_scales, BLOCKS[entry.weight_scales][0])
        scale = scales_of(spec, spec.shape(m, k), np.arange(-126, -120))
        packed = of_codes(codes, pairs_of(m, k), spec, scale, "satfinite")
        want = operand(entry, packed) * np.float32(gain)
        assert (np.abs(operand(entry, packed)[want != 0]) < 2.0**-126).any()
        assert_same_bits(identity_product(device, entry, packed, gain), want)


@cache
def scaled_problem(
    types: str, m: int, n: int, k: int, block: tuple[int, int], kind: str
) -> problems.Problem:
    """Small integers under scales of 1, 2, 4 or 8, which differ from those of every neighbour: each
    sum is exact, and one that takes another block's scale is another integer."""
    whole = problems.integers(types, m, n, k)
    spec = spec_of(kind, block)
    row, column = np.indices(spec.shape(m, k))
    exponents = (3 * (row % 5) + column + column // 3) % 4
    scale = powers(exponents) if kind == "mx" else np.exp2(exponents).astype(np.float32)
    info = replace(whole.packed.info, scale=spec)
    return problems._problem(replace(whole.packed, info=info, scale=scale), whole.x)


@every_scaled
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_every_blocks_scale_is_its_own(
    device: Device, entry: manifest.Entry, shape: tuple[int, int, int]
) -> None:
    for block in BLOCKS[entry.weight_scales]:
        problem = scaled_problem(entry.type, *shape, block, entry.weight_scales)
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), block


@every_scaled
def test_every_number_of_blocks_along_k(device: Device, entry: manifest.Entry) -> None:
    """Fragments alternate between two sets of registers, and a stage may hold several blocks: sums
    of every number of these, and of more than the ring holds."""
    block = BLOCKS[entry.weight_scales][0]
    ring = entry.stages * entry.stage_blocks
    for blocks in (*range(1, 12), ring, ring + 1, ring + 4, 2 * ring + 3):
        problem = scaled_problem(entry.type, 130, 35, 64 * blocks - 4, block, entry.weight_scales)
        want = problem.exact.astype(np.float32).astype(OUT_DTYPES[entry.out_type])
        assert np.array_equal(run(device, entry, problem), want), blocks


def test_a_scale_of_the_next_block_does_not_pass(device: Device) -> None:
    """The comparison can fail: scales moved by one block along K, and along M."""
    for kind, block in (("block", (16, 16)), ("mx", (1, 32))):
        problem = scaled_problem("e4m3_bf16", 200, 64, 1024, block, kind)
        packed = problem.packed
        assert packed.scale is not None

        def product(p: PackedMatrix, x: problems.Array = problem.x) -> problems.Array:
            weight = SparseWeight.upload(device, p, activations="bf16")
            return multiply(device, weight, x, "f32", "mn")

        assert np.array_equal(product(packed), problem.exact)
        for axis in (0, 1):
            moved = np.roll(packed.scale.view(f"u{packed.scale.itemsize}"), 1, axis=axis)
            wrong = replace(packed, scale=moved.view(packed.scale.dtype))
            assert not np.array_equal(product(wrong), problem.exact)


def test_columns_in_another_order(device: Device) -> None:
    """Of a permuted weight the activations are put in its order, 16 bits each."""
    problem = scaled_problem("e4m3_f16", 130, 40, 268, (16, 16), "block")
    order = np.random.default_rng(1).permutation(268).astype(np.int32)
    info = replace(problem.packed.info, permuted=True)
    packed = replace(problem.packed, info=info, perm=order)
    weight = SparseWeight.upload(device, packed, activations="f16")
    given = np.empty_like(problem.x)
    given[:, order] = problem.x
    assert np.array_equal(multiply(device, weight, given, "f32", "mn"), problem.exact)


@pytest.mark.parametrize("name", fragments.WIDENED)
def test_matmul_takes_16_bits_for_such_a_weight(device: Device, name: str) -> None:
    types = f"e4m3_{name}"
    problem = scaled_problem(types, 200, 50, 644, (32, 32), "block")
    weight = SparseWeight.upload(device, problem.packed, activations=name)
    x = problems.on_device(device, problem.x)
    d = matmul(weight, x)
    assert d.dtype == OUT_DTYPES[name]
    assert np.array_equal(d.numpy(), problem.exact.T.astype(np.float32).astype(d.dtype))
    out = DeviceArray(device, (200, 50), OUT_DTYPES["f32"])
    scale = problems.on_device(device, np.exp2(np.arange(50) % 5).astype(np.float32))
    bias = problems.on_device(device, np.arange(200, dtype=np.float32))
    matmul(weight, x, out=out, order="mn", scale=scale, bias=bias)
    want = problem.exact * np.exp2(np.arange(50) % 5) + np.arange(200)[:, None]
    assert np.array_equal(out.numpy(), want)
    bits = problems.on_device(device, problem.x.view(np.uint16))
    assert np.array_equal(matmul(weight, bits).numpy(), d.numpy())


def test_faults_are_named(device: Device) -> None:
    def upload(spec: ScaleSpec, activations: str | None) -> SparseWeight:
        m, k = 64, 64
        scale = scales_of(spec, spec.shape(m, k), np.zeros(1, np.int64))
        codes = np.zeros((m, k // 2), np.uint8)
        packed = of_codes(codes, pairs_of(m, k), spec, scale, "satfinite")
        return SparseWeight.upload(device, packed, activations=activations)

    small = ScaleSpec("block", (32, 32))
    cases: list[tuple[ScaleSpec, str | None, Any, str]] = [
        (small, None, Sp24Error, "scales of 32x32 is multiplied by activations of 16 bits alone"),
        (ScaleSpec.parse("mx"), None, Sp24Error, "upload it with activations=bf16 or f16"),
        (ScaleSpec("block", (1, 32)), None, Sp24Error, "scales of 1x32 need a kernel"),
        (ScaleSpec("block", (1, 128)), "f16", Sp24Error, "scales of 1x128 need a kernel"),
        (small, "tf32", BadInputError, "e4m3 is not multiplied by tf32"),
    ]
    for spec, activations, kind, fault in cases:
        with pytest.raises(kind, match=fault):
            upload(spec, activations)
    weight = upload(small, "f16")
    with pytest.raises(Sp24Error, match="x is bfloat16, the weight is float8_e4m3fn, uploaded for"):
        matmul(weight, DeviceArray(device, (3, 64), OUT_DTYPES["bf16"]))
    x = DeviceArray(device, (3, 64), OUT_DTYPES["f16"])
    with pytest.raises(Sp24Error, match="no kernel that widens weights has precise sums"):
        matmul(weight, x, accumulate="precise")
    with pytest.raises(Sp24Error, match="no kernel multiplies e4m3_f16 into bf16 nm"):
        matmul(weight, x, out_dtype="bf16")
    with pytest.raises(Sp24Error, match="was uploaded for f16, not for bf16"):
        weight.plan(3, types=OPERANDS["e4m3_bf16"])
    plain = upload(ScaleSpec("vector"), None)
    with pytest.raises(Sp24Error, match="x is float16, the weight is float8_e4m3fn"):
        matmul(plain, x)
