"""The product for arrays of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sp24cli.errors import Sp24Error
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight, matmul
from tests.gpu import problems

M, N, K = 200, 50, 388


@pytest.fixture(scope="module")
def problem() -> problems.Problem:
    return problems.integers("e4m3", M, N, K)


@pytest.fixture(scope="module")
def weight(device: Device, problem: problems.Problem) -> SparseWeight:
    return SparseWeight.upload(device, problem.packed)


def torch_or_skip() -> Any:
    return pytest.importorskip("torch")


def test_torch_tensors_by_dlpack(weight: SparseWeight, problem: problems.Problem) -> None:
    torch = torch_or_skip()
    # K = 388 bytes a row: no multiple of 16, so the rows are copied on the way.
    bits = torch.tensor(problem.x.view(np.uint8), device="cuda")
    for x in (bits, bits.view(torch.float8_e4m3fn)):
        for order, shape in (("nm", (N, M)), ("mn", (M, N))):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                out = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
                assert matmul(weight, x, out=out, order=order) is out
                want = torch.tensor(problem.exact).to(dtype)
                d = out.cpu()
                assert torch.equal(d.T if order == "nm" else d, want)


def test_torch_reads_our_output(weight: SparseWeight, problem: problems.Problem) -> None:
    torch = torch_or_skip()
    x = torch.tensor(problem.x.view(np.uint8), device="cuda")
    scale = torch.arange(1, N + 1, dtype=torch.float32, device="cuda")
    bias = torch.arange(M, dtype=torch.float32, device="cuda")
    out = torch.from_dlpack(matmul(weight, x, scale=scale, bias=bias, out_dtype="f32"))
    want = (problem.exact * np.arange(1, N + 1) + np.arange(M)[:, None]).T
    assert np.array_equal(out.cpu().numpy(), want)
    bf16 = torch.from_dlpack(matmul(weight, x))
    assert bf16.dtype == torch.bfloat16
    assert torch.equal(bf16.cpu(), torch.tensor(problem.exact.T).to(torch.bfloat16))


def test_cupy_arrays(weight: SparseWeight, problem: problems.Problem) -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(problem.x.view(np.uint8))
    out = matmul(weight, x, out_dtype="f32", order="mn")
    assert isinstance(out, DeviceArray)
    assert np.array_equal(cupy.asnumpy(cupy.asarray(out)), problem.exact)


def test_strided_input_and_output(weight: SparseWeight, problem: problems.Problem) -> None:
    torch = torch_or_skip()
    wide = torch.zeros((N, K + 28), dtype=torch.uint8, device="cuda")
    wide[:, 12 : 12 + K] = torch.tensor(problem.x.view(np.uint8), device="cuda")
    out = torch.full((N, M + 5), -7.0, dtype=torch.float32, device="cuda")
    matmul(weight, wide[:, 12 : 12 + K], out=out[:, 2 : 2 + M])
    assert np.array_equal(out[:, 2 : 2 + M].cpu().numpy(), problem.exact.T)
    assert (out[:, :2] == -7).all() and (out[:, 2 + M :] == -7).all()


def test_faults_are_named(weight: SparseWeight, device: Device) -> None:
    x = DeviceArray(device, (N, K), np.uint8)
    with pytest.raises(Sp24Error, match="x is float16"):
        matmul(weight, DeviceArray(device, (N, K), np.float16))
    with pytest.raises(Sp24Error, match=r"x is \[50, 387\]"):
        matmul(weight, DeviceArray(device, (N, K - 1), np.uint8))
    with pytest.raises(Sp24Error, match=r"out is \[50, 199\]"):
        matmul(weight, x, out=DeviceArray(device, (N, M - 1), np.float32))
    with pytest.raises(Sp24Error, match="out is int8"):
        matmul(weight, x, out=DeviceArray(device, (N, M), np.int8))
    with pytest.raises(Sp24Error, match="bias is float32"):
        matmul(weight, x, bias=DeviceArray(device, (M + 1,), np.float32))
    with pytest.raises(Sp24Error, match="neither __dlpack__"):
        matmul(weight, [1, 2, 3])
    with pytest.raises(Sp24Error, match="not on a CUDA device"):
        matmul(weight, np.zeros((N, K), np.uint8))
    with pytest.raises(Sp24Error, match="no kernel 'nonsense'"):
        matmul(weight, x, kernel="nonsense")
