"""Verification by kernels that NumPy stands in for: what is compared, band by band."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli.bits import Array, widen
from sp24cli.fragments import weight_scales
from sp24cli.gpu import select
from sp24cli.gpu.matmul import OUT_DTYPES
from sp24cli.ops import stream
from sp24cli.optypes import OPERAND_TYPES, operand_type
from sp24cli.packed import PackedMatrix, pack
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from sp24cli.reference import widened
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import gpu

M, K = 200, 140


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[PackedMatrix]:
    """What the kernels multiply instead of what is verified, if anything; bands of 64 rows."""
    spoiled: list[PackedMatrix] = []

    def upload(device: Any, packed: PackedMatrix, *, activations: str | None = None) -> Any:
        actual = spoiled[0] if spoiled else packed
        wide = None if activations is None else operand_type(activations)
        scales = weight_scales(packed.info.scale) if wide else "none"
        block = None if wide else packed.info.scale.block

        def summation(accumulate: str, scale_b_k: int) -> str:
            rows = packed.info.scale.kind == "vector"
            return select.summation(accumulate, block, rows, scale_b_k, scales if wide else None)

        return SimpleNamespace(
            packed=actual,
            type=packed.info.optype,
            multiplied=wide or packed.info.optype,
            widened=wide,
            weight_scales=scales,
            block=block,
            summation=summation,
        )

    def multiply(
        device: Any,
        weight: Any,
        x: Array,
        out: str,
        order: str,
        *,
        scale_b: Array | None = None,
        scale_b_k: int = 0,
        bias: Array | None = None,
        **_: Any,
    ) -> Array:
        packed = weight.packed
        a = packed.codes() if out == "s32" else None
        if a is None and weight.weight_scales != "none":
            a = widened(packed, weight.multiplied.dtype)
        a = packed.dequantize(np.float64) if a is None else widen(a).astype(np.float64)
        b = packed.original_order(np.arange(K)[None])[0]  # column j of x is stored at b[j]
        rows = np.zeros((len(x), K))
        rows[:, b] = widen(x)
        if scale_b is not None:
            rows *= np.repeat(scale_b.reshape(len(x), -1), scale_b_k or K, axis=1)[:, :K]
        d = a @ rows.T
        if bias is not None:
            d += bias[:, None]
        return (d.T if order == "nm" else d).astype(OUT_DTYPES[out])

    monkeypatch.setattr(gpu.Device, "open", lambda: SimpleNamespace(name="Host"))
    monkeypatch.setattr(gpu.SparseWeight, "upload", upload)
    monkeypatch.setattr(gpu, "multiply", multiply)
    monkeypatch.setattr(gpu, "TOKENS", 21)
    monkeypatch.setattr(gpu, "MANY_ROWS", M)
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 64 * K)
    return spoiled


def make(type_name: str, scale: str) -> PackedMatrix:
    optype = operand_type(type_name)
    values = np.random.default_rng(5).standard_normal((M, K), np.float32)
    dense = prune_magnitude(values, pattern_of(optype))
    kind, block = ("block", scale) if scale[0].isdigit() else (scale, None)
    return pack(dense, optype, ScaleSpec.parse(kind, block), source_dtype="F32")[0]


CASES = [
    *((name, "vector" if optype.scaled else "none") for name, optype in OPERAND_TYPES.items()),
    ("e4m3", "tensor"),
    ("e4m3", "64x128"),
    ("e4m3", "16x16"),
    ("e4m3", "mx"),
]


@pytest.mark.parametrize(("type_name", "scale"), CASES)
def test_a_right_matrix_passes_by_every_kernel(
    uploaded: list[PackedMatrix], type_name: str, scale: str
) -> None:
    result = gpu.verify_matrix(make(type_name, scale), 1)
    assert result.passed, result
    kernels = [check for check in result.checks if check.name.startswith("gemm_")]
    assert len(kernels) > 5


@pytest.mark.parametrize(("type_name", "scale"), CASES)
def test_a_wrong_value_is_found_where_it_is(
    uploaded: list[PackedMatrix], type_name: str, scale: str
) -> None:
    """In the third band of rows, by the identity and by every kernel."""
    good = make(type_name, scale)
    assert good.values is not None
    values = good.values.copy()
    values[150] = 0
    uploaded.append(replace(good, values=values))
    result = gpu.verify_matrix(good, 1)
    assert len(result.checks) > 5
    for check in result.checks:
        assert not check.passed, check
        assert check.first_bad is not None and check.first_bad[0] == 150, check


def test_a_kernel_that_is_wrong_for_few_tokens_alone_is_found(
    uploaded: list[PackedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu.multiply

    def wrong(device: Any, weight: Any, x: Array, out: str, order: str, **rest: Any) -> Array:
        d = right(device, weight, x, out, order, **rest)
        if len(x) == gpu.DECODED:
            (d if order == "nm" else d.T)[3, 77] = 1e4
        return d

    monkeypatch.setattr(gpu, "multiply", wrong)
    identity, *kernels = gpu.verify_matrix(make("bf16", "none"), 1).checks
    assert identity.passed and len(kernels) > 5
    for check in kernels:
        assert check.name.endswith(f", {gpu.DECODED} tokens")
        assert not check.passed and check.first_bad == (77, 3), check
    # Of a weight of fewer rows few tokens are summed as many are.
    monkeypatch.setattr(gpu, "MANY_ROWS", M + 1)
    assert gpu.verify_matrix(make("bf16", "none"), 1).passed
