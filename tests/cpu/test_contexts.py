"""Several GPUs, and threads: what a call does on its own GPU, and what it leaves current."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import sp24cli
import sp24cli.gpu.arguments
import sp24cli.gpu.device
import sp24cli.gpu.driver
from sp24cli.bench.problem import random_weight
from sp24cli.errors import Sp24Error
from sp24cli.gpu.activations import quantize_tokens
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight, matmul
from sp24cli.optypes import operand_type
from sp24cli.scaling import ScaleSpec

OK, NO_CONTEXT = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
M, N, K = 64, 8, 256


class Driver:
    """Two GPUs, with a stack of contexts (their numbers) for every thread. ``done`` is (call,
    GPU that was current) of what needs the right one."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.done: list[tuple[str, int]] = []
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in _NEED_CONTEXT:
            return lambda *arguments: self.need(name)
        return getattr(driver, name)

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def need(self, name: str, *values: Any) -> tuple[Any, ...]:
        if not self.stack:
            return (NO_CONTEXT, *([0] * len(values)))
        self.done.append((name, self.stack[-1]))
        return (OK, *values)

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:
        return OK, self.stack.pop()

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.stack[-1:] = [context]
        return (OK,)

    def cuMemAlloc(self, nbytes: int) -> Any:
        memory = ctypes.create_string_buffer(nbytes + 512)
        self.kept.append(memory)
        return self.need("cuMemAlloc", (ctypes.addressof(memory) + 511) // 512 * 512)

    def cuStreamCreate(self, flags: Any) -> Any:
        return self.need("cuStreamCreate", 90 + self.stack[-1] if self.stack else 0)

    def cuModuleLoadData(self, image: bytes) -> Any:
        return self.need("cuModuleLoadData", 1)

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        return OK, 7

    def cuFuncSetAttribute(self, *arguments: Any) -> Any:
        return (OK,)

    def cuOccupancyMaxActiveClusters(self, *arguments: Any) -> Any:
        return OK, 66

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        return OK, SimpleNamespace(opaque=[0] * 16)

    def cuDeviceGetCount(self) -> Any:
        return OK, 2

    def cuDeviceGet(self, ordinal: int) -> Any:
        return OK, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, b"NVIDIA H200\0"

    def cuDeviceGetAttribute(self, key: Any, device: int) -> Any:
        of = {"CAPABILITY_MAJOR": 9, "CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
        return OK, next((v for k, v in of.items() if key.name.endswith(k)), 50 << 20)

    def cuDriverGetVersion(self) -> Any:
        return OK, 13000

    def cuDeviceGetUuid(self, device: int) -> Any:
        return OK, SimpleNamespace(bytes=bytes([device] * 16))

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return OK, device

    def cuDeviceTotalMem(self, device: int) -> Any:
        return OK, 1 << 37


_NEED_CONTEXT = (
    "cuMemFree", "cuCtxSynchronize", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuLaunchKernelEx",
    "cuMemsetD8Async",
)  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (sp24cli.gpu.device, sp24cli.gpu.driver, sp24cli.gpu.arguments):
        monkeypatch.setattr(module, "api", lambda: made)
    monkeypatch.setattr(sp24cli.gpu.device, "_opened", {})
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    return made


def gpus(fake: Driver, work: Callable[[], Any]) -> tuple[Any, set[int]]:
    """What ``work`` gives, and the GPUs that its calls went to."""
    fake.done.clear()
    found = work()
    return found, {gpu for _, gpu in fake.done}


@pytest.mark.parametrize("current", [[], [0], [1]])
def test_every_call_goes_to_its_gpu_and_leaves_the_other_current(
    fake: Driver, current: list[int]
) -> None:
    first = Device.open(0, current=False)
    assert fake.stack == []
    fake.stack[:] = current
    packed = random_weight(M, K, operand_type("e4m3"), ScaleSpec("vector"), 24, 1)
    weight, went = gpus(fake, lambda: SparseWeight.upload(first, packed))
    assert (went, fake.stack) == ({0}, current)
    x = DeviceArray(first, (N, K), np.float32)
    (codes, scale), went = gpus(fake, lambda: quantize_tokens(first, x))
    assert (went, fake.stack) == ({0}, current)
    y, went = gpus(fake, lambda: matmul(weight, codes, scale=scale))
    assert (went, fake.stack) == ({0}, current)
    for use in (y.numpy, y.__dlpack__, y.buffer.free):
        _, went = gpus(fake, use)
        assert (went, fake.stack) == ({0}, current), use


def test_the_library_leaves_the_callers_gpu_current(fake: Driver) -> None:
    fake.stack[:] = [0]
    packed = random_weight(M, K, operand_type("e4m3"), ScaleSpec("vector"), 24, 1)
    weight, went = gpus(fake, lambda: sp24cli.upload(packed, 1))
    assert (went, fake.stack) == ({1}, [0])
    x = DeviceArray(weight.device, (N, K), np.float32)
    _, went = gpus(fake, lambda: sp24cli.quantize_tokens(x, device=1))
    assert (went, fake.stack) == ({1}, [0])


def test_an_error_leaves_what_was_current(fake: Driver) -> None:
    first = Device.open(0, current=False)
    packed = random_weight(M, K, operand_type("e4m3"), ScaleSpec("vector"), 24, 1)
    weight = SparseWeight.upload(first, packed)
    fake.stack[:] = [1]
    with pytest.raises(Sp24Error, match="needs"):
        matmul(weight, DeviceArray(first, (N, K + 4), np.uint8))
    assert fake.stack == [1]


def test_opened_to_be_current_it_is(fake: Driver) -> None:
    fake.stack[:] = [0]
    Device.open(1)
    assert fake.stack == [1]
    Device.open(0, current=False)
    assert fake.stack == [1]


def test_results_are_read_and_freed_in_any_thread(fake: Driver) -> None:
    first = Device.open(0, current=False)
    arrays = [DeviceArray(first, (N, K), np.uint8)]
    found: list[Any] = []

    def other() -> None:
        found.append(gpus(fake, arrays[0].numpy)[1])
        found.append(gpus(fake, arrays.clear)[1])
        found.append([name for name, _ in fake.done])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [{0}, {0}, ["cuMemFree"]]


def test_memory_is_lent_out_as_it_is_or_not_at_all(fake: Driver) -> None:
    array = DeviceArray(Device.open(0, current=False), (N, K), np.uint8)
    assert array.__dlpack__(dl_device=(2, 0), copy=False, max_version=(1, 0)) is not None
    for asked in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="only this memory is lent out"):
            array.__dlpack__(**asked)  # type: ignore[arg-type]
