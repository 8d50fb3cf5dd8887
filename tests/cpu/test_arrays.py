"""Device arrays of other libraries, as far as they are looked at before a GPU is."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli.bench.problem import random_weight
from sp24cli.errors import Sp24Error
from sp24cli.gpu.arrays import view
from sp24cli.gpu.matmul import matmul
from sp24cli.optypes import operand_type
from sp24cli.scaling import ScaleSpec

M, N, K = 8, 3, 16


def array(
    shape: tuple[int, ...],
    dtype: str,
    strides: tuple[int, ...] | None = None,
    *,
    read_only: bool = False,
) -> Any:
    """What the CUDA array interface tells of an array; ``strides`` in bytes."""
    interface = {"shape": shape, "typestr": np.dtype(dtype).str, "data": (4096, read_only)}
    return SimpleNamespace(__cuda_array_interface__=interface | {"strides": strides, "version": 3})


#: All of a weight that is asked for before anything is launched.
E4M3 = operand_type("e4m3")
DEVICE = SimpleNamespace(ordinal=1, current=nullcontext())
WEIGHT: Any = SimpleNamespace(
    shape=(M, K), type=E4M3, multiplied=E4M3, widened=None, device=DEVICE, smooth=None
)
OUT = array((N, M), "f4")


def test_views_tell_strides_in_elements() -> None:
    plain = view(array((3, 4), "f4"), "x", 0)
    assert (plain.ptr, plain.shape, plain.strides, plain.is_tight) == (4096, (3, 4), (4, 1), True)
    padded = view(array((3, 4), "f4", (24, 4)), "x", 0)
    assert (padded.strides, padded.is_tight) == ((6, 1), False)
    assert view(array((1, 4), "f4", (4, 4)), "x", 0).is_tight  # one row: its stride means nothing


@pytest.mark.parametrize(
    ("x", "options", "fault"),
    [
        (array((N, K), "u1", (1, N)), {}, "x is not contiguous along K"),
        (array((N, K), "u1", (0, 1)), {}, "rows overlap"),
        (array((N, K), "u1"), {"scale": array((N,), "f4", (8,))}, "scale is not contiguous"),
        (array((N, K), "u1"), {"bias": array((M,), "f4", (64,))}, "bias is not contiguous"),
        (array((N, K), "u1"), {"bias": array((M,), "f8")}, "bias is float64"),
        (array((N, K), "u1"), {"scale": array((N + 1,), "f4")}, r"scale is float32 \[4\]"),
        (array((N, K), "i1"), {}, "x is int8, the weight is float8_e4m3fn"),
        (array((N, K), "u1"), {"accumulate": "f16"}, "not multiplied by e4m3 summed in f16"),
        (array((N, K), "u1"), {"out_dtype": "f64"}, "out_dtype is 'f64', the kernels write bf16"),
        (array((N, K), "u1"), {"out_dtype": "bf16"}, "out is float32, asked for is bf16"),
        (array((N, K), "u1"), {"stream": None}, "stream is None, needed is its address"),
        (array((N, K), "u1"), {"scale": array((N,), "f4", (6,))}, r"strides \[6\], no multiples"),
        (array((N, K), "u1"), {"out": array((N, M), "f4", read_only=True)}, "out is read-only"),
    ],
)
def test_arrays_that_would_be_read_wrong_are_refused(
    x: Any, options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(Sp24Error, match=fault):
        matmul(WEIGHT, x, **{"out": OUT, **options})


def test_a_weight_that_is_not_uploaded_is_named() -> None:
    packed = random_weight(M, K, E4M3, ScaleSpec("tensor"), 24, 1)
    with pytest.raises(Sp24Error, match="not on a GPU: upload it first"):
        matmul(packed, array((N, K), "u1"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (array((N, K), "u1"), "x is uint8, the weight is float8_e4m3fn, uploaded for f16"),
        (array((N, K), "f4"), "x is float32, the weight is float8_e4m3fn, uploaded for f16"),
        (array((N, K), "f2", (2, 2 * N)), "x is not contiguous along K"),
    ],
)
def test_a_widened_weight_takes_activations_of_its_width(x: Any, fault: str) -> None:
    f16 = operand_type("f16")
    weight: Any = SimpleNamespace(**vars(WEIGHT) | {"multiplied": f16, "widened": f16})
    with pytest.raises(Sp24Error, match=fault):
        matmul(weight, x, out=OUT)


class Elsewhere:
    """An array that tells its GPU by DLPack, and must not be asked for more."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("exported")


@pytest.mark.parametrize("name", ["x", "out", "scale", "bias"])
def test_an_array_on_another_gpu_is_named(name: str) -> None:
    arrays: dict[str, Any] = {"x": array((N, K), "u1"), "out": OUT, name: Elsewhere()}
    with pytest.raises(Sp24Error, match=f"{name} is on CUDA device 0, the product on 1"):
        matmul(WEIGHT, **arrays)


@pytest.mark.parametrize("smoothed", [False, True])
def test_what_activations_must_have_gone_through_is_asked_for(smoothed: bool) -> None:
    """Neither can be seen of codes: both would be a wrong product."""
    codes = array((N, K), "u1")
    weight = SimpleNamespace(
        **vars(WEIGHT) | {"smooth": array((K,), "f4"), "column_order": object()}
    )
    fault = "a permuted weight takes one scale of x" if smoothed else "columns are smoothed: x must"
    with pytest.raises(Sp24Error, match=fault):
        # Of K = 16 a scale for every 8 columns.
        matmul(weight, codes, out=OUT, scale=array((N, 2), "f4"), scale_k=8, smoothed=smoothed)
