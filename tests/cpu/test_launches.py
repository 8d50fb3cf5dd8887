"""Launches: what the driver is given, and when one that was put together is started again."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from sp24cli.gpu import device, matmul
from sp24cli.kernels import manifest
from sp24cli.optypes import OPERANDS

ENTRIES = {e.name: e for e in manifest.load().entries}
DECODE = ENTRIES["gemm_e4m3_bf16_nm_n16_w4_c2_s9"]


class Driver:
    """The driver's types, and a launch that notes what it is given."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuLaunchKernelEx(self, config: Any, handle: Any, parameters: int, extra: Any) -> Any:
        pointers = (ctypes.c_void_p * 2).from_address(parameters)
        values = tuple(ctypes.c_uint32.from_address(p or 0).value for p in pointers)
        sizes = (config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream))
        overlaps = [
            attribute.value.programmaticStreamSerializationAllowed for attribute in config.attrs
        ]
        self.started.append((handle, sizes, config.numAttrs, overlaps, values))
        return (driver.CUresult.CUDA_SUCCESS,)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_start_gives_the_driver_the_same(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Driver()
    monkeypatch.setattr(device, "api", lambda: fake)
    entry = SimpleNamespace(threads=640, smem_bytes=1000)
    kernel = device.Kernel(77, entry, 0)  # type: ignore[arg-type]
    launch = device.Launch(
        kernel, 132, [np.array([5], np.uint32), np.array([6], np.uint32)], 9, overlap
    )
    launch.start()
    launch.start()
    want = (77, (132, 640, 1000, 9), int(overlap), [1] * overlap, (5, 6))
    assert fake.started == [want, want]


class Started:
    """Stands for `device.Launch`: those made, and those started, in turn."""

    made: list[Started]
    begun: list[Started]

    def __init__(self, loaded: Any, grid: int, parameters: Any, stream: int, overlap: bool) -> None:
        self.args, self.stream = parameters[1], stream
        self.made.append(self)

    def start(self) -> None:
        self.begun.append(self)

    def field(self, name: str) -> int:
        types = {"uint64_t": np.uint64, "int64_t": np.int64, "int32_t": np.int32}
        ((kind, at),) = (
            (kind, at) for n, kind, at in manifest.load().args["gemm"].fields if n == name
        )
        return int(np.frombuffer(self.args, types[kind], 1, at)[0])


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch) -> Any:
    Started.made, Started.begun = [], []
    monkeypatch.setattr(matmul, "Launch", Started)
    monkeypatch.setattr(matmul, "tensor_map", lambda *_: np.zeros(16, np.uint64))
    image = SimpleNamespace(ptr=1 << 20, nbytes=4096 * 1024 * 5 // 8)
    gpu = SimpleNamespace(l2_bytes=50 << 20, stream=3)
    return matmul.SparseWeight(gpu, OPERANDS["e4m3"].a, (4096, 1024), image, None, False)  # type: ignore[arg-type]


def plan(weight: Any, n: int = 16, entry: manifest.Entry = DECODE, **more: Any) -> matmul.Plan:
    return matmul.Plan(weight, entry, SimpleNamespace(max_clusters=66), n, **more)  # type: ignore[arg-type]


def test_the_same_product_again_is_put_together_once(weight: Any) -> None:
    for _ in range(3):
        plan(weight).enqueue(16, 1024, 32, scale_b=48, bias=64)  # every time by a plan of its own
    (made,) = Started.made
    assert Started.begun == [made] * 3
    assert [made.field(name) for name in ("d", "scale_b", "bias", "ldd")] == [32, 48, 64, 4096]
    assert made.stream == 3


def test_whatever_differs_is_another_launch(weight: Any) -> None:
    given: dict[str, Any] = {"x": 16, "ldx": 1024, "out": 32, "scale_b": 48, "bias": 64}
    plan(weight).enqueue(**given)
    for change in (
        {"x": 160}, {"ldx": 2048}, {"out": 320}, {"ldd": 8192}, {"scale_b": 480},
        {"scale_b": None}, {"scale_b_rows": True}, {"bias": 640}, {"bias": None}, {"stream": 0},
    ):  # fmt: skip
        plan(weight).enqueue(**given | change)
    plan(weight, n=15).enqueue(**given)
    plan(weight, raster=2).enqueue(**given)
    plan(weight, entry=ENTRIES["gemm_e4m3_bf16_nm_n16_w2_c1_s8"]).enqueue(**given)
    block = ENTRIES["gemm_e4m3_bf16_nm_n16_w2_c1_s14_k2_row64"]
    plan(weight, entry=block, scale_b_k=64).enqueue(**given)
    plan(weight, entry=block, scale_b_k=128).enqueue(**given)
    plan(weight, entry=block, scale_b_k=128).enqueue(**given, scale_b_strides=(1, 16))
    assert len(Started.made) == len(set(map(id, Started.begun))) == 17
    assert [made.field("scale_b") for made in Started.made[5:7]] == [480, 0]
    assert [made.field("n") for made in Started.made[10:12]] == [16, 15]
    assert Started.made[10].stream == 0


def test_no_more_launches_are_kept_than_are_worth_it(weight: Any) -> None:
    for x in range(300):
        plan(weight).enqueue(16 * (x + 1), 1024, 32)
        assert len(weight.launches) <= matmul._KEPT_LAUNCHES
    assert len(Started.begun) == 300


def test_another_weight_has_launches_of_its_own(weight: Any) -> None:
    other = matmul.SparseWeight(
        weight.device,
        weight.type,
        weight.shape,
        SimpleNamespace(ptr=1 << 21, nbytes=8),
        None,
        False,  # type: ignore[arg-type]
    )
    plan(weight).enqueue(16, 1024, 32)
    plan(other).enqueue(16, 1024, 32)
    assert [made.field("a") for made in Started.begun] == [1 << 20, 1 << 21]
