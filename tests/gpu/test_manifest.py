"""What the driver says of the loaded kernels is what the manifest says."""

from __future__ import annotations

import itertools

import pytest

from sp24cli.gpu.device import Device
from sp24cli.gpu.driver import api, check
from sp24cli.kernels import manifest

LOADED = manifest.load()


@pytest.mark.parametrize("entry", LOADED.everything, ids=lambda e: e.name)
def test_parameters_registers_and_local_memory(device: Device, entry: manifest.AnyEntry) -> None:
    cu = api()
    handle = device.kernel(entry).handle
    layout = LOADED.args[entry.args]
    want = [layout.tensor_map_bytes] if layout.tensor_map_bytes else []
    want.append(layout.bytes)
    found = [check(cu.cuFuncGetParamInfo(handle, i)) for i in range(len(want))]
    assert [int(size) for _, size in found] == want
    # The first may be moved for its alignment; the second follows it without a gap.
    assert all(int(b[0]) == int(a[0]) + int(a[1]) for a, b in itertools.pairwise(found))
    status, *_ = cu.cuFuncGetParamInfo(handle, len(want))
    assert status == cu.CUresult.CUDA_ERROR_INVALID_VALUE, "there are more parameters"

    def attribute(name: str) -> int:
        key = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(check(cu.cuFuncGetAttribute(key, handle)))

    assert attribute("NUM_REGS") == entry.registers
    assert attribute("LOCAL_SIZE_BYTES") == 0 == entry.local_bytes
    assert attribute("MAX_THREADS_PER_BLOCK") >= entry.threads
