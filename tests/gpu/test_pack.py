"""The GPU turns row order into the block image that numpy makes, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from tests.gpu import problems


@pytest.mark.parametrize("type_name", list(OPERAND_TYPES))
@pytest.mark.parametrize(
    "shape", [(64, 128), (1, 4), (65, 132), (1000, 4092), (200, 1028), (127, 60), (70, 36)]
)
def test_image_equals_numpys(device: Device, type_name: str, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(shape)
    values = random.standard_normal(shape).astype(np.float32)
    dense = prune_magnitude(values, pattern_of(OPERAND_TYPES[type_name]))
    row = problems.make_packed(dense, type_name, "tensor", "row")
    want = row.to_layout("sm90").blocks
    assert want is not None
    got = SparseWeight.upload(device, row).image
    assert np.array_equal(device.download(got, np.uint8, want.shape), want)
