"""What verification says of smoothed columns: right products pass, wrong divisions do not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli import activations, smoothing
from sp24cli.activations import quantize_tokens
from sp24cli.bits import Array, widen
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.kernels import manifest
from sp24cli.optypes import OPERANDS, operand_type
from sp24cli.packed import PackedMatrix, pack
from sp24cli.pruning import permute
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from sp24cli.verify import cpu, gpu
from sp24cli.verify.smoothed import SmoothedTokens
from tests.cpu.convertdevice import ConvertDevice, made_manifest

M, K = 70, 132
SPECS = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "block": ScaleSpec("block", (64, 64)),
    "mx": ScaleSpec.parse("mx"),
}
TYPES = ("e4m3", "e5m2", "s8")
every_type = pytest.mark.parametrize("type_name", TYPES)


def factors(spread: float = 2.0) -> Array:
    return np.exp(np.random.default_rng(8).normal(0, spread, K)).astype(np.float32)


def smoothed(
    type_name: str = "e4m3", scale: str = "vector", permuted: bool = True, by: Array | None = None
) -> PackedMatrix:
    """A weight that was pruned, smoothed, its columns moved, and packed."""
    random = np.random.default_rng(9)
    by = factors() if by is None else by
    dense = random.standard_normal((M, K), np.float32)
    # As large in each channel as is left when activations of the factors' size give their share.
    dense /= by
    order = random.permutation(K) if permuted else np.arange(K)
    stored = prune_24(permute.apply(smoothing.apply(dense, by), order))
    packed, _ = pack(stored, operand_type(type_name), SPECS[scale], source_dtype="F32")
    info = replace(packed.info, smooth=0.5, permuted=permuted)
    perm = order.astype(np.int32) if permuted else None
    return replace(packed, info=info, smooth=by, perm=perm)


@every_type
@pytest.mark.parametrize("spread", [0.0, 2.0, 30.0])
def test_an_element_is_off_by_no_more_than_is_said(type_name: str, spread: float) -> None:
    optype = operand_type(type_name)
    by = np.clip(factors(spread), np.finfo(np.float32).tiny, np.finfo(np.float32).max)
    divided = SmoothedTokens.random(np.random.default_rng(1), 400, by, optype)
    given = divided.given
    given[3], given[5, 1:], given[7] = 0, 0, given[7] * np.float32(1e-30)
    divided = replace(divided, tokens=quantize_tokens(given, optype, 1, smooth=by))
    y = given.astype(np.float64) / by.astype(np.float64)
    found = np.abs(widen(divided.tokens.codes).astype(np.float64) * divided.scale[:, None] - y)
    allowed = divided._errors(y, np.abs(y).max(axis=1, keepdims=True))
    assert (found <= allowed).all()
    # And not much less: halfway between two codes it is nearly reached.
    assert (found / allowed).max() > 0.9


@every_type
@pytest.mark.parametrize("scale", SPECS)
@pytest.mark.parametrize("permuted", [False, True])
def test_right_matrices_pass_on_the_cpu(type_name: str, scale: str, permuted: bool) -> None:
    packed = smoothed(type_name, scale, permuted)
    result = cpu.verify_matrix(packed, 1)
    assert result.passed, result
    (check,) = (c for c in result.checks if c.name == "original product")
    # What rounding activations to the type costs, and no more than a bound that says something.
    assert {"e4m3": 0.01, "e5m2": 0.02, "s8": 0.003}[type_name] < check.rel_frobenius
    assert check.rel_frobenius < {"e4m3": 0.04, "e5m2": 0.08, "s8": 0.02}[type_name]
    plain = replace(packed, smooth=None, info=replace(packed.info, smooth=None))
    assert "original product" not in {c.name for c in cpu.verify_matrix(plain, 1).checks}


def test_factors_at_the_ends_of_float32_pass() -> None:
    by = np.where(np.arange(K) % 2, np.float32(3e38), np.finfo(np.float32).tiny)
    optype = operand_type("e4m3")
    stored = prune_24(np.random.default_rng(2).standard_normal((M, K), np.float32))
    packed, _ = pack(stored, optype, SPECS["vector"], source_dtype="F32")
    packed = replace(packed, info=replace(packed.info, smooth=0.5), smooth=by)
    result = cpu.verify_matrix(packed, 1)
    assert result.passed, result


WRONG = {
    "not divided": lambda x, by: x.astype(np.float32),
    "multiplied": lambda x, by: x * by,
    "by those of another column": lambda x, by: x / np.roll(by, 1),
    "one factor for another": lambda x, by: x / np.where(np.arange(len(by)) == 5, by * 9, by),
}


@pytest.mark.parametrize(
    ("how", "type_name"),
    # A single factor of so many moves a product by less than rounding to e5m2 may.
    [(h, t) for h in WRONG for t in TYPES if (h, t) != ("one factor for another", "e5m2")],
)
def test_a_wrong_division_is_found_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, how: str, type_name: str
) -> None:
    packed = smoothed(type_name)
    monkeypatch.setattr(activations, "divide", WRONG[how])
    result = cpu.verify_matrix(packed, 1)
    failed = {check.name for check in result.checks if not check.passed}
    assert failed == {"original product"}


def test_factors_in_the_order_of_the_packed_columns_are_found() -> None:
    packed = smoothed()
    assert packed.smooth is not None and packed.perm is not None
    # As if a reader took X.weight_smooth to be in the order of the stored columns.
    moved = replace(packed, smooth=packed.smooth[packed.perm])
    x = SmoothedTokens.random(np.random.default_rng(1), 32, packed.smooth, operand_type("e4m3"))
    want, off = x.original_product(packed, M)
    a = packed.original_order(packed.dequantize(np.float64))
    b = widen(x.tokens.codes).astype(np.float64) * x.scale[:, None]
    assert (np.abs(a @ b.T - want) <= off).all()
    other, off = x.original_product(moved, M)
    assert not (np.abs(a @ b.T - other) <= off).all()


# --- what drives the GPU, with kernels made of NumPy --------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = made_manifest()
    monkeypatch.setattr(manifest, "load", lambda: made)
    return ConvertDevice()


def weight_on(device: Any, packed: PackedMatrix) -> Any:
    """As `SparseWeight`, as far as the check asks it."""
    smooth = DeviceArray(device, (K,), np.float32, device.upload(packed.smooth))
    kernel = SimpleNamespace(name="numpy", promote_k=0)
    return SimpleNamespace(
        widened=None,
        smooth=smooth,
        block=packed.info.scale.block,
        plan=lambda *_, **__: SimpleNamespace(kernel=kernel),
    )


def run(monkeypatch: pytest.MonkeyPatch, device: Any, packed: PackedMatrix, types: str) -> Any:
    def product(_: Any, weight: Any, x: Array, *names: str, scale_b: Array, **__: Any) -> Array:
        blocks = scale_b.shape[1]
        assert blocks == (1 if weight.block is None else -(-K // 128))
        assert names == ("f32", "mn")
        b = (
            widen(x).astype(np.float64)
            * np.repeat(scale_b, 128 if blocks > 1 else K, axis=1)[:, :K]
        )
        a = packed.original_order(packed.dequantize(np.float64))
        return (a @ b.T).astype(np.float32)

    monkeypatch.setattr(gpu, "multiply", product)
    monkeypatch.setattr(gpu, "_kernels", lambda *_: [None])
    return gpu._original(device, weight_on(device, packed), packed, OPERANDS[types], 1)


def test_types_without_a_kernel_are_left_out(device: Any) -> None:
    packed = smoothed("e4m3", "block")
    weight = weight_on(device, packed)
    weight.summation = lambda accumulate, scale_b_k: "block128"
    assert gpu._original(device, weight, packed, OPERANDS["e4m3_e5m2"], 1) == []
    assert not device.launches


@pytest.mark.parametrize("types", ["e4m3", "e4m3_e5m2", "e5m2", "s8"])
@pytest.mark.parametrize("scale", ["vector", "block"])
def test_right_kernels_pass(device: Any, monkeypatch: Any, types: str, scale: str) -> None:
    b = OPERANDS[types].b.name
    checks = run(monkeypatch, device, smoothed(OPERANDS[types].a.name, scale), types)
    assert [c.name for c in checks] == [f"smooth_tokens_{b}_f32", f"original product by {b}"]
    assert all(c.passed for c in checks), checks
    assert device.launches == [f"smooth_tokens_{b}_f32"]


def test_a_quantizer_with_other_factors_is_found(device: Any, monkeypatch: Any) -> None:
    packed = smoothed()
    assert packed.smooth is not None
    ours = weight_on(device, packed)
    by = packed.smooth.copy()
    by[7] *= np.float32(1 + 2.0**-3)
    ours.smooth = DeviceArray(device, (K,), np.float32, device.upload(by))
    monkeypatch.setitem(globals(), "weight_on", lambda *_: ours)
    quantized, _ = run(monkeypatch, device, packed, "e4m3")
    assert not quantized.passed and quantized.first_bad[1] == 7
    # Altogether another: the product shows it as well.
    ours.smooth = DeviceArray(device, (K,), np.float32, device.upload(np.roll(by, 1)))
    assert not any(check.passed for check in run(monkeypatch, device, packed, "e4m3"))
