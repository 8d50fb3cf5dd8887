"""What drives the kernels for activations, with kernels made of NumPy."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli.activations import quantize_tokens as on_cpu
from sp24cli.errors import Sp24Error
from sp24cli.gpu.activations import gather_columns, quantize_tokens
from sp24cli.kernels import manifest
from sp24cli.optypes import operand_type
from tests.cpu.convertdevice import ConvertDevice, Memory, made_manifest, memory


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = made_manifest()
    monkeypatch.setattr(manifest, "load", lambda: made)
    return ConvertDevice()


def held(array: np.ndarray) -> Memory:
    result = Memory(array.nbytes)
    result.array[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return result


def shown(
    buffer: Memory, shape: tuple[int, ...], dtype: Any, strides: Any = None, at: int = 0
) -> Any:
    interface = {
        "shape": shape,
        "typestr": np.dtype(dtype).str,
        "data": (buffer.ptr + at, False),
        "strides": strides,
        "version": 3,
    }
    return SimpleNamespace(__cuda_array_interface__=interface, buffer=buffer)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("pitch", "lead"), [(64, 0), (67, 0), (72, 8), (72, 1)])
def test_rows_of_any_stride_are_quantized(device: Any, dtype: Any, pitch: int, lead: int) -> None:
    x = np.random.default_rng(1).standard_normal((5, pitch)).astype(dtype)
    columns = pitch - lead
    array = shown(held(x), (5, columns), dtype, x.strides, lead * x.itemsize)
    codes, scale = quantize_tokens(device, array)
    want = on_cpu(x[:, lead:], operand_type("e4m3"), 1)
    assert codes.shape == (5, columns) and codes.dtype == operand_type("e4m3").dtype
    assert np.array_equal(codes.numpy().view(np.uint8), want.codes.view(np.uint8))
    assert np.array_equal(scale.numpy(), want.scale)
    assert device.launches == [f"tokens_e4m3_{'f16' if dtype == np.float16 else 'f32'}"]
    assert device.threads == {threading.get_ident()}, "launched on whichever GPU is current"


@pytest.mark.parametrize("type_name", ["e4m3", "e5m2", "s8"])
@pytest.mark.parametrize(("pitch", "lead"), [(64, 0), (67, 0), (72, 8)])
@pytest.mark.parametrize("odd", [0, 4])
def test_columns_are_divided_by_factors_first(
    device: Any, type_name: str, pitch: int, lead: int, odd: int
) -> None:
    random = np.random.default_rng(2)
    x = random.standard_normal((5, pitch)).astype(np.float16)
    columns = pitch - lead
    factors = np.exp(random.normal(0, 4, columns)).astype(np.float32)
    # Factors that do not start at a multiple of 16 bytes are read one by one.
    where = held(np.concatenate([np.zeros(odd // 4, np.float32), factors]))
    codes, scale = quantize_tokens(
        device,
        shown(held(x), (5, columns), np.float16, x.strides, lead * 2),
        smooth=shown(where, (columns,), np.float32, at=odd),
        type_name=type_name,
    )
    # By hand: float32, rounded once.
    moved = x[:, lead:].astype(np.float32) / factors
    want = on_cpu(moved, operand_type(type_name), 1)
    assert np.array_equal(codes.numpy().view(np.uint8), want.codes.view(np.uint8))
    assert np.array_equal(scale.numpy(), want.scale)
    assert device.launches == [f"smooth_tokens_{type_name}_f16"]


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "fault"),
    [
        ((8,), np.float16, None, r"smooth is float16 \[8\], needed is f32 of 8"),
        ((4,), np.float32, None, r"smooth is float32 \[4\], needed is f32 of 8"),
        ((8,), np.float32, (8,), "smooth is not contiguous"),
    ],
)
def test_factors_that_do_not_fit_are_named(
    device: Any, shape: Any, dtype: Any, strides: Any, fault: str
) -> None:
    x = shown(Memory(256), (4, 8), np.float32)
    with pytest.raises(Sp24Error, match=fault):
        quantize_tokens(device, x, smooth=shown(Memory(256), shape, dtype, strides))
    assert not device.launches


@pytest.mark.parametrize("odd", [0, 4, 8])
@pytest.mark.parametrize("bits", [False, True])
def test_results_go_into_arrays_that_are_given(device: Any, odd: int, bits: bool) -> None:
    """Codes that do not start at a multiple of 8 bytes are written one by one."""
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float16)
    want = on_cpu(x, operand_type("s8"), 1)
    into = shown(Memory(odd + 5 * 64), (5, 64), np.uint8 if bits else np.int8, at=odd)
    scale = shown(Memory(20), (5,), np.float32)
    given = shown(held(x), x.shape, np.float16)
    found = quantize_tokens(device, given, type_name="s8", out=(into, scale))
    assert found == (into, scale)
    assert np.array_equal(into.buffer.array[odd:].view(np.int8).reshape(5, 64), want.codes)
    assert np.array_equal(scale.buffer.array.view(np.float32), want.scale)
    (vector,) = device.vectors
    assert vector == (odd % 8 == 0)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "strides", "fault"),
    [
        (((4, 8), (4,)), (np.float16, np.float32), None, "codes are float16, not float8_e4m3fn"),
        (((4, 7), (4,)), (np.uint8, np.float32), None, r"codes are \[4, 7\], needed is \[4, 8\]"),
        (((4, 8), (4,)), (np.uint8, np.float32), (16, 1), "contiguous"),
        (
            ((4, 8), (5,)),
            (np.uint8, np.float32),
            None,
            r"scale is float32 \[5\], needed is f32 of 4",
        ),
        (((4, 8), (4,)), (np.uint8, np.int32), None, r"scale is int32 \[4\], needed is f32 of 4"),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    device: Any, shapes: Any, dtypes: Any, strides: Any, fault: str
) -> None:
    out = (
        shown(Memory(256), shapes[0], dtypes[0], strides),
        shown(Memory(256), shapes[1], dtypes[1]),
    )
    with pytest.raises(Sp24Error, match=fault):
        quantize_tokens(device, shown(Memory(256), (4, 8), np.float16), out=out)
    assert not device.launches


def test_no_rows_are_no_launch(device: Any) -> None:
    codes, scale = quantize_tokens(device, shown(Memory(4), (0, 8), np.float16))
    assert (codes.shape, scale.shape, device.launches) == ((0, 8), (0,), [])


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "fault"),
    [
        ((4, 8), np.uint8, None, "no kernel quantizes uint8 to e4m3"),
        ((8,), np.float16, None, r"x is \[8\], not \[N, K\]"),
        ((4, 8), np.float16, (2, 8), "not contiguous along K"),
        ((4, 8), np.float16, (2, 2), "rows overlap"),
    ],
)
def test_what_does_not_fit_is_named(
    device: Any, shape: Any, dtype: Any, strides: Any, fault: str
) -> None:
    with pytest.raises(Sp24Error, match=fault):
        quantize_tokens(device, shown(Memory(256), shape, dtype, strides))


@pytest.mark.parametrize("item", [1, 2, 4])
@pytest.mark.parametrize(
    ("n", "k", "pitch", "sms"),
    [(1, 4, 4, 132), (40, 132, 132, 2), (33, 1028, 1040, 1), (9, 100000, 100000, 1)],
)
def test_columns_are_gathered(device: Any, item: int, n: int, k: int, pitch: int, sms: int) -> None:
    device.sm_count = sms
    random = np.random.default_rng(k)
    x = random.integers(0, 1 << (8 * item), (n, pitch), np.uint64).astype(f"u{item}")
    order = random.permutation(k).astype(np.int32)
    out_pitch = -(-k * item // 16) * 16
    source, where, out = held(x), held(order), Memory(n * out_pitch)
    gather_columns(device, where.ptr, source.ptr, pitch * item, out.ptr, out_pitch, (n, k), item, 0)
    rows = memory(out.ptr, np.uint8, (n, out_pitch))
    assert np.array_equal(rows[:, : k * item].copy().view(x.dtype), x[:, order])
    assert device.launches == [f"gather_{8 * item}"]
