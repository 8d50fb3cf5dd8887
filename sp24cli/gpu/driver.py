"""The CUDA driver API by cuda-python, with its errors as ours."""

from __future__ import annotations

from functools import cache
from typing import Any

from sp24cli.errors import NoGpuError, Sp24Error


@cache
def api() -> Any:
    """``cuda.bindings.driver``, initialised; `NoGpuError` where that cannot be."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoGpuError(f"no usable GPU: cuda-python cannot be imported ({error})") from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:
        raise NoGpuError("no usable GPU: the NVIDIA driver is not installed") from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise NoGpuError(f"no usable GPU: the NVIDIA driver says {status.name}")
    return driver


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call; `Sp24Error` if it failed."""
    status, *values = result
    if status.value:
        _, name = api().cuGetErrorName(status)
        _, text = api().cuGetErrorString(status)
        raise Sp24Error(f"CUDA error {name.decode()}: {text.decode()}")
    return values[0] if len(values) == 1 else tuple(values)
