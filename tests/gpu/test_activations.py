"""Activations on the GPU: quantized by row as numpy does it, and in the order of a weight."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from sp24cli import smoothing
from sp24cli.activations import quantize_tokens as on_cpu
from sp24cli.bits import widen
from sp24cli.errors import Sp24Error
from sp24cli.fp8 import convert
from sp24cli.gpu.activations import gather_columns, quantize_tokens
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight, matmul
from sp24cli.optypes import OPERANDS, operand_type
from sp24cli.packed import PackedMatrix, pack
from sp24cli.pruning import permute
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from sp24cli.verify.compare import Comparison
from sp24cli.verify.gpu import verify_matrix
from sp24cli.verify.result import NumericsResult
from sp24cli.verify.smoothed import SmoothedTokens
from sp24cli.verify.tensorcore import element_bound

Array = npt.NDArray[Any]
E4M3 = operand_type("e4m3")
DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)


def uploaded(device: Device, array: Array) -> DeviceArray:
    result = DeviceArray(device, array.shape, array.dtype)
    result.buffer = device.upload(array)
    return result


def assert_quantized_alike(
    device: Device,
    x: Array,
    on_gpu: Any = None,
    type_name: str = "e4m3",
    by: Array | None = None,
    by_on_gpu: Any = None,
) -> None:
    """Bit for bit as on the CPU, divided by the factors ``by`` where they are given."""
    given = uploaded(device, x) if on_gpu is None else on_gpu
    factors = uploaded(device, by) if by is not None and by_on_gpu is None else by_on_gpu
    codes, scale = quantize_tokens(device, given, smooth=factors, type_name=type_name)
    with np.errstate(all="ignore"):
        want = on_cpu(x, operand_type(type_name), 1, smooth=by)
    assert want.scale is not None
    assert np.array_equal(codes.numpy().view(np.uint8), want.codes.view(np.uint8))
    assert np.array_equal(scale.numpy().view(np.uint32), want.scale.view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("columns", [1, 4, 64, 2048])
@pytest.mark.parametrize("type_name", ["e4m3", "e5m2", "s8"])
def test_every_16_bit_value_in_rows_of_every_kind(
    device: Device, dtype: Any, columns: int, type_name: str
) -> None:
    """NaN and infinity too: they make their row's scale."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    assert_quantized_alike(device, every.reshape(-1, columns), None, type_name)
    finite = np.where(np.isfinite(every.astype(np.float32)), every, np.zeros(1, dtype))
    assert_quantized_alike(device, finite.reshape(-1, columns), None, type_name)
    # Beside small values and large ones, so that each value meets many scales.
    rows = np.tile(finite.reshape(-1, 64), (1, 3))
    rows[:, 0] = np.resize(np.array([0.5, 3, 448, 1000, 6e4], dtype), len(rows))
    assert_quantized_alike(device, rows, None, type_name)


@every_dtype
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 37), (5, 4100), (300, 4096), (2, 28672), (4, 0), (0, 8)]
)
def test_shapes(device: Device, dtype: Any, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(shape[1])
    x = random.standard_normal(shape) * np.exp(random.normal(0, 8, (shape[0], 1)))
    if shape[0] > 2:
        x[1] = 0
        x[2] = -0.0
    with np.errstate(over="ignore"):
        x = x.astype(np.float32).astype(dtype)
    assert_quantized_alike(device, x)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("pitch", "lead"), [(136, 0), (131, 0), (136, 8), (136, 3)])
def test_strided_rows(device: Device, dtype: Any, pitch: int, lead: int) -> None:
    x = np.random.default_rng(4).standard_normal((9, pitch + lead)).astype(dtype)
    held = device.upload(x)
    item = x.itemsize
    interface = {
        "shape": (9, 128),
        "typestr": x.dtype.str,
        "data": (held.ptr + lead * item, False),
        "strides": (x.strides[0], item),
        "version": 3,
    }
    assert_quantized_alike(
        device, x[:, lead : lead + 128], SimpleNamespace(__cuda_array_interface__=interface)
    )


# --- divided by factors ------------------------------------------------------------------------

TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def some_factors(k: int, kind: str) -> Array:
    """float32 [k] of which every one is positive and normal."""
    random = np.random.default_rng(k)
    if kind == "ones":
        return np.ones(k, np.float32)
    if kind == "usual":
        return np.exp(random.normal(0, 2, k)).astype(np.float32)
    # All exponents and random mantissas, and both ends.
    bits = random.integers(1 << 23, 0xFF << 23, k).astype(np.uint32)
    by = bits.view(np.float32)
    by[: min(k, 4)] = np.array([TINY, HUGE, 1, TINY], np.float32)[: min(k, 4)]
    return by


every_kind = pytest.mark.parametrize("kind", ["ones", "usual", "extreme"])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("columns", [1, 4, 64, 2048])
@pytest.mark.parametrize("type_name", ["e4m3", "e5m2", "s8"])
@every_kind
def test_every_16_bit_value_divided(
    device: Device, dtype: Any, columns: int, type_name: str, kind: str
) -> None:
    """NaN, with its payload, infinity, and what becomes it: they make their row's scale."""
    by = some_factors(columns, kind)
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(-1, columns)
    assert_quantized_alike(device, every, None, type_name, by)
    with np.errstate(all="ignore"):
        quotients = every.astype(np.float32) / by
    finite = np.where(np.isfinite(quotients), every, np.zeros(1, dtype))
    assert_quantized_alike(device, finite, None, type_name, by)
    # Every value by every factor that is here: each row turned by one more.
    turned = np.take_along_axis(
        finite, (np.arange(columns) + np.arange(len(finite))[:, None]) % columns, axis=1
    )
    assert_quantized_alike(device, turned, None, type_name, by)


@every_dtype
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 37), (5, 4100), (300, 4096), (2, 28672), (70, 1028), (4, 0), (0, 8)]
)
@every_kind
def test_shapes_divided(device: Device, dtype: Any, shape: tuple[int, int], kind: str) -> None:
    random = np.random.default_rng(shape[1])
    x = random.standard_normal(shape) * np.exp(random.normal(0, 8, (shape[0], 1)))
    if shape[0] > 2:
        x[1], x[2] = 0, -0.0
    with np.errstate(over="ignore"):
        x = x.astype(np.float32).astype(dtype)
    assert_quantized_alike(device, x, by=some_factors(shape[1], kind))


def test_every_exponent_of_float32_divided(device: Device) -> None:
    """Quotients that are subnormal, zero, infinite: no approximation, and nothing flushed."""
    random = np.random.default_rng(11)
    bits = random.integers(0, 0x7F800000, (512, 1024)).astype(np.uint32)
    bits |= random.integers(0, 2, bits.shape).astype(np.uint32) << 31
    bits[:, ::7] &= 0x807FFFFF  # subnormal
    x = bits.view(np.float32)
    by = some_factors(1024, "extreme")
    assert_quantized_alike(device, x, by=by)
    # A row of one value a factor, so that its quotient is the amax and shows in the scale.
    alone = np.zeros_like(x)
    place = np.arange(512)
    alone[place, 2 * place] = x[place, 2 * place]
    assert_quantized_alike(device, alone, by=by)
    assert_quantized_alike(device, alone[:, :1021].copy(), by=by[:1021].copy())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("pitch", "lead"), [(136, 0), (131, 0), (136, 8), (136, 3)])
@pytest.mark.parametrize("odd", [0, 1])
def test_strided_rows_divided(device: Device, dtype: Any, pitch: int, lead: int, odd: int) -> None:
    """And factors that do not lie at a multiple of 16 bytes."""
    x = np.random.default_rng(4).standard_normal((9, pitch + lead)).astype(dtype)
    by = some_factors(128 + odd, "usual")
    held, factors = device.upload(x), device.upload(by)

    def shown(at: int, shape: tuple[int, ...], of: Array, strides: Any) -> Any:
        interface = {"shape": shape, "typestr": of.dtype.str, "data": (at, False),
                     "strides": strides, "version": 3}  # fmt: skip
        return SimpleNamespace(__cuda_array_interface__=interface)

    assert_quantized_alike(
        device,
        x[:, lead : lead + 128],
        shown(held.ptr + lead * x.itemsize, (9, 128), x, (x.strides[0], x.itemsize)),
        by=by[odd:],
        by_on_gpu=shown(factors.ptr + 4 * odd, (128,), by, None),
    )


@pytest.mark.parametrize("odd", [0, 4, 8])
@pytest.mark.parametrize("smoothed", [False, True])
def test_results_go_into_arrays_that_are_given(device: Device, odd: int, smoothed: bool) -> None:
    """Codes that do not start at a multiple of 8 bytes too; and nothing beside them is written."""
    x = np.random.default_rng(5).standard_normal((9, 128)).astype(np.float16)
    by = some_factors(128, "usual") if smoothed else None
    factors = None if by is None else uploaded(device, by)
    held = device.upload(np.full(odd + x.size + 8, 7, np.uint8))
    interface = {"shape": x.shape, "typestr": "|u1", "data": (held.ptr + odd, False),
                 "strides": None, "version": 3}  # fmt: skip
    codes = SimpleNamespace(__cuda_array_interface__=interface)
    scale = DeviceArray(device, (9,), np.float32)
    given = uploaded(device, x)
    assert quantize_tokens(device, given, smooth=factors, out=(codes, scale)) == (codes, scale)
    want = on_cpu(x, E4M3, 1, smooth=by)
    written = device.download(held, np.uint8, (odd + x.size + 8,))
    assert np.array_equal(written[odd:-8].reshape(x.shape), want.codes.view(np.uint8))
    assert (written[:odd] == 7).all() and (written[-8:] == 7).all()
    assert np.array_equal(scale.numpy(), want.scale)


def test_factors_of_one_divide_by_nothing(device: Device) -> None:
    x = uploaded(device, np.random.default_rng(6).standard_normal((40, 1028)).astype(np.float16))
    ones = uploaded(device, np.ones(1028, np.float32))
    for found, plain in zip(
        quantize_tokens(device, x, smooth=ones), quantize_tokens(device, x), strict=True
    ):
        assert found.numpy().tobytes() == plain.numpy().tobytes()


def test_faults_are_named(device: Device) -> None:
    with pytest.raises(Sp24Error, match="no kernel quantizes uint8 to e4m3"):
        quantize_tokens(device, DeviceArray(device, (2, 8), np.uint8))
    with pytest.raises(Sp24Error, match=r"x is \[8\], not \[N, K\]"):
        quantize_tokens(device, DeviceArray(device, (8,), np.float16))


def test_codes_and_scale_go_into_the_product(device: Device) -> None:
    m, n, k = 130, 77, 388
    random = np.random.default_rng(7)
    dense = prune_24(random.standard_normal((m, k), np.float32))
    packed, _ = pack(dense, E4M3, ScaleSpec("vector"))
    x = random.standard_normal((n, k)).astype(np.float16)
    codes, scale = quantize_tokens(device, uploaded(device, x))
    d = matmul(SparseWeight.upload(device, packed), codes, scale=scale, out_dtype="f32")
    a = packed.dequantize(np.float64)
    b = widen(codes.numpy()).astype(np.float64) * scale.numpy()[:, None]
    assert_close(d.numpy().T, a, b, "e4m3", "f32")


def assert_close(d: Array, a: Array, b: Array, type_name: str, out: str) -> None:
    want = a @ b.T
    comparison = Comparison("product")
    norms = np.sqrt((a * a) @ (b * b).T)
    bound = element_bound(OPERANDS[type_name], a.shape[1], norms, out, want)
    comparison.add(d, want, bound)
    assert comparison.check().passed, comparison.check()


# --- columns in another order ----------------------------------------------------------------


@pytest.mark.parametrize("item", [1, 2, 4])
@pytest.mark.parametrize(
    ("n", "k", "pitch"),
    [
        (1, 4, 4),
        (5, 12, 16),
        (40, 132, 132),
        (600, 1028, 1040),  # several rows a CTA, ragged
        (700, 388, 388),  # rows that are not aligned
        (3000, 4096, 4096),
        (7, 28672, 28672),  # several CTAs a row
        (300, 100000, 100000),  # a row that shared memory does not hold
    ],
)
def test_gather(device: Device, item: int, n: int, k: int, pitch: int) -> None:
    random = np.random.default_rng(n)
    x = random.integers(0, 1 << (8 * item), (n, pitch), np.uint64).astype(f"u{item}")
    order = random.permutation(k).astype(np.int32)
    out_pitch = -(-k * item // 16) * 16
    with device.upload(x) as source, device.upload(order) as where:
        out = device.alloc(n * out_pitch + 64)
        device.memset(out, 0xAB)
        gather_columns(
            device,
            where.ptr,
            source.ptr,
            pitch * item,
            out.ptr,
            out_pitch,
            (n, k),
            item,
            device.stream,
        )
        got = device.download(out, np.uint8, (n * out_pitch + 64,))
    assert (got[n * out_pitch :] == 0xAB).all()
    rows = got[: n * out_pitch].reshape(n, out_pitch)
    assert not rows[:, k * item :].any()
    assert np.array_equal(rows[:, : k * item].copy().view(x.dtype), x[:, order])


def permuted(type_name: str, m: int, k: int, layout: Any = "row") -> PackedMatrix:
    """A packed weight whose columns are in a random order."""
    random = np.random.default_rng(m)
    dense = random.standard_normal((m, k), np.float32)
    order = random.permutation(k).astype(np.int32)
    optype = operand_type(type_name)
    spec = ScaleSpec("vector" if optype.scaled else "none")
    packed, _ = pack(prune_24(permute.apply(dense, order)), optype, spec, source_dtype="F32")
    packed = packed.to_layout(layout)
    return replace(packed, perm=order, info=replace(packed.info, permuted=True))


@pytest.mark.parametrize("type_name", ["e4m3", "f16", "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(130, 1, 132), (200, 77, 1028), (256, 1100, 2048)])
@pytest.mark.parametrize("order", ["nm", "mn"])
def test_the_product_of_a_permuted_weight(
    device: Device, type_name: str, m: int, n: int, k: int, order: str
) -> None:
    packed = permuted(type_name, m, k)
    x = convert(
        np.random.default_rng(n).standard_normal((n, k), np.float32), operand_type(type_name)
    )
    weight = SparseWeight.upload(device, packed)
    d = matmul(weight, uploaded(device, x), out_dtype="f32", order=order).numpy()
    a = packed.original_order(packed.dequantize(np.float64))
    assert_close(d.T if order == "nm" else d, a, widen(x).astype(np.float64), type_name, "f32")
    again = matmul(weight, uploaded(device, x), out_dtype="f32", order=order).numpy()
    assert np.array_equal(d, again)


def smoothed(
    type_name: str, m: int, k: int, spec: ScaleSpec, *, is_permuted: bool = True
) -> PackedMatrix:
    """A packed weight whose columns were multiplied by factors and are in a random order."""
    random = np.random.default_rng(m)
    by = some_factors(k, "usual")
    dense = smoothing.apply(random.standard_normal((m, k), np.float32) / by, by)
    order = random.permutation(k) if is_permuted else np.arange(k)
    optype = operand_type(type_name)
    packed, _ = pack(prune_24(permute.apply(dense, order)), optype, spec, source_dtype="F32")
    info = replace(packed.info, permuted=is_permuted, smooth=0.5)
    perm = order.astype(np.int32) if is_permuted else None
    return replace(packed, perm=perm, smooth=by, info=info)


SPECS = [ScaleSpec("tensor"), ScaleSpec("vector"), ScaleSpec("block", (128, 128))]


@pytest.mark.parametrize("type_name", ["e4m3", "e5m2", "s8"])
@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda s: s.kind)
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("order", ["nm", "mn"])
def test_the_product_of_a_smoothed_weight_is_that_of_the_original(
    device: Device, type_name: str, spec: ScaleSpec, is_permuted: bool, order: str
) -> None:
    """From activations as a model has them to D, as the README says."""
    m, n, k = 200, 77, 1028
    packed = smoothed(type_name, m, k, spec, is_permuted=is_permuted)
    assert packed.smooth is not None
    tokens = SmoothedTokens.random(
        np.random.default_rng(n), n, packed.smooth, operand_type(type_name)
    )
    weight = SparseWeight.upload(device, packed)
    x = uploaded(device, tokens.given)
    codes, scale = quantize_tokens(device, x, smooth=weight.smooth, type_name=type_name)
    with pytest.raises(Sp24Error, match="columns are smoothed"):
        matmul(weight, codes, scale=scale)
    d = matmul(weight, codes, scale=scale, out_dtype="f32", order=order, smoothed=True).numpy()
    d = d.T if order == "nm" else d
    # By the codes, as close as the kernel sums; by the original, as activations are rounded.
    a = packed.original_order(packed.dequantize(np.float64))
    b = widen(codes.numpy()).astype(np.float64) * scale.numpy()[:, None]
    assert_close(d, a, b, type_name, "f32")
    want, off = tokens.original_product(packed, m)
    norms = np.sqrt((a * a) @ (b * b).T)
    comparison = Comparison("original product")
    comparison.add(d, want, element_bound(OPERANDS[type_name], k, norms, "f32", a @ b.T) + off)
    assert comparison.check().passed, comparison.check()
    # Not divided, the same steps give something else.
    codes, scale = quantize_tokens(device, x, type_name=type_name)
    wrong = matmul(weight, codes, scale=scale, out_dtype="f32", order=order, smoothed=True).numpy()
    comparison = Comparison("not divided")
    comparison.add(wrong.T if order == "nm" else wrong, want, off)
    assert not comparison.check().passed


def verified_as_if(packed: PackedMatrix, **wrong: Array) -> NumericsResult:
    """What `verify_matrix` finds if these parts are not what reaches the GPU."""
    upload = SparseWeight.upload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SparseWeight,
            "upload",
            lambda device, packed, **how: upload(device, replace(packed, **wrong), **how),
        )
        return verify_matrix(packed, 1)


@pytest.mark.parametrize(
    ("type_name", "spec"),
    [
        ("e4m3", SPECS[0]), ("e4m3", SPECS[1]), ("e4m3", SPECS[2]), ("e5m2", SPECS[1]),
        ("s8", SPECS[0]), ("s8", SPECS[1]),
    ],
    ids=lambda v: getattr(v, "kind", v),
)  # fmt: skip
@pytest.mark.parametrize("is_permuted", [False, True])
def test_smoothed_weights_are_verified(
    device: Device, type_name: str, spec: ScaleSpec, is_permuted: bool
) -> None:
    packed = smoothed(type_name, 200, 420, spec, is_permuted=is_permuted)
    result = verify_matrix(packed, 1)
    assert result.passed, result
    names = [check.name for check in result.checks]
    for types in OPERANDS.values():
        if types.a.name != type_name or types.widened:
            continue
        # Block scales have kernels of one type alone.
        if spec.block is None or types.b == types.a:
            assert f"smooth_tokens_{types.b.name}_f32" in names
            assert f"original product by {types.b.name}" in names
    assert packed.smooth is not None
    wrong = packed.smooth.copy()
    wrong[3] *= np.float32(1.5)
    result = verified_as_if(packed, smooth=wrong)
    failed = [check.name for check in result.checks if not check.passed]
    assert f"smooth_tokens_{type_name}_f32" in failed


def test_scales_by_block_do_not_follow_a_permutation(device: Device) -> None:
    packed = permuted("e4m3", 130, 420)
    weight = SparseWeight.upload(device, packed)
    codes = uploaded(device, np.zeros((8, 420), E4M3.dtype))
    scale = uploaded(device, np.ones((8, 4), np.float32))
    with pytest.raises(Sp24Error, match="a permuted weight takes one scale of x, or one a row"):
        matmul(weight, codes, scale=scale)


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("type_name", ["e4m3", "s8", "f16", "bf16"])
def test_permuted_weights_are_verified(device: Device, type_name: str, layout: str) -> None:
    packed = permuted(type_name, 200, 420, layout)
    assert verify_matrix(packed, 1).passed
    assert packed.perm is not None
    wrong = packed.perm.copy()
    wrong[[3, 300]] = wrong[[300, 3]]
    result = verified_as_if(packed, perm=wrong)
    assert not result.checks[0].passed


def test_a_graph_of_a_permuted_product_runs_again(device: Device) -> None:
    """As the bench does it: memory for the reordered activations comes and goes in the graph."""
    packed = permuted("e4m3", 200, 420, "sm90")
    weight = SparseWeight.upload(device, packed)
    x = convert(np.random.default_rng(1).standard_normal((64, 420), np.float32), E4M3)
    source = device.upload(x.view(np.uint8))
    out = device.alloc(64 * 200 * 4)
    plan = weight.plan(64, "f32")
    plan.enqueue(source, 420, out)
    want = device.download(out, np.float32, (64, 200))

    def three() -> None:
        for _ in range(3):
            plan.enqueue(source, 420, out)

    graph = device.capture(three)
    device.memset(out, 0xFF)
    graph.launch()
    graph.launch()
    assert np.array_equal(device.download(out, np.float32, (64, 200)), want)
