"""The GPU turns row order into the block image that numpy makes, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight
from sp24cli.sparsity import prune_24
from tests.gpu import problems


@pytest.mark.parametrize("type_name", ["e4m3", "f16", "bf16"])
@pytest.mark.parametrize(
    "shape", [(64, 128), (1, 4), (65, 132), (1000, 4092), (200, 1028), (127, 60)]
)
def test_image_equals_numpys(device: Device, type_name: str, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(shape)
    dense = prune_24(random.standard_normal(shape).astype(np.float32))
    row = problems.make_packed(dense, type_name, "tensor", "row")
    want = row.to_layout("sm90").blocks
    assert want is not None
    got = SparseWeight.upload(device, row).image
    assert np.array_equal(device.download(got, np.uint8, want.shape), want)
