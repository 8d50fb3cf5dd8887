"""The product for arrays of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sp24cli.errors import Sp24Error
from sp24cli.gpu.activations import quantize_tokens
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight, matmul
from sp24cli.gpu.select import outputs
from sp24cli.optypes import OPERANDS, operand_type
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


def test_a_graph_of_torch_quantizes_and_multiplies_again(device: Device) -> None:
    """Into memory that is there: nothing is allocated, freed or waited for while it captures."""
    torch = torch_or_skip()
    k = 384  # a multiple of 16, or rows would be copied
    weight = SparseWeight.upload(device, problems.integers("e4m3", M, N, k).packed)
    x = torch.randn(N, k, dtype=torch.bfloat16, device="cuda")
    codes = torch.empty(N, k, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(N, device="cuda")
    out = torch.empty(N, M, dtype=torch.bfloat16, device="cuda")

    def step() -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        quantize_tokens(device, x, out=(codes, scale), stream=stream)
        matmul(weight, codes, scale=scale, out=out, stream=stream)
        return out

    first = step().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.copy_(torch.randn(N, k, device="cuda"))
    graph.replay()
    replayed = out.clone()
    again = step().clone()
    torch.cuda.synchronize()
    assert torch.equal(replayed, again)
    assert not torch.equal(replayed, first)


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


@pytest.mark.parametrize("types", list(OPERANDS))
def test_the_types_follow_from_weight_and_x(device: Device, types: str) -> None:
    """x says its own type; the output may be any that the kernels have."""
    operands = OPERANDS[types]
    problem = problems.integers(types, 130, 40, 264)
    weight = problems.upload(device, problem.packed, types)
    x = problems.on_device(device, problem.x)
    accumulate = "f16" if operands.accumulate == "f16" else "fast"
    d = matmul(weight, x, accumulate=accumulate)
    in_f16 = accumulate == "f16" or types == "e4m3_f16"
    assert d.dtype == OUT_DTYPES["f16" if in_f16 else "bf16"]
    assert np.array_equal(d.numpy(), problem.exact.T.astype(np.float32).astype(d.dtype))
    for out in outputs(types):
        d = DeviceArray(device, (130, 40), OUT_DTYPES[out])
        matmul(weight, x, out=d, order="mn", accumulate=accumulate)
        want = problem.sums if out == "s32" else problem.exact
        assert np.array_equal(d.numpy(), want.astype(np.float32).astype(d.dtype))


def test_faults_of_types_are_named(device: Device) -> None:
    s8 = SparseWeight.upload(device, problems.integers("s8", M, N, K).packed)
    x = DeviceArray(device, (N, K), np.int8)
    with pytest.raises(Sp24Error, match="s32 are plain sums"):
        matmul(s8, x, out_dtype="s32", bias=DeviceArray(device, (M,), np.float32))
    tf32 = SparseWeight.upload(device, problems.integers("tf32", M, N, K).packed)
    with pytest.raises(Sp24Error, match=r"no kernel multiplies tf32 into f16 nm \(only into f32"):
        matmul(tf32, DeviceArray(device, (N, K), np.float32), out_dtype="f16")
    with pytest.raises(Sp24Error, match="x is float8_e5m2, the weight is int8"):
        matmul(s8, DeviceArray(device, (N, K), operand_type("e5m2").dtype))


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
