"""Verification by the kernels passes what is right and finds what is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sp24cli.gpu.device import Device
from sp24cli.sparsity import prune_24
from sp24cli.verify import cpu
from sp24cli.verify.gpu import verify_matrix
from tests.gpu import problems


def packed(type_name: str, scale: str, layout: str) -> problems.PackedMatrix:
    random = np.random.default_rng(5)
    dense = prune_24(random.standard_normal((200, 420), np.float32))
    return problems.make_packed(dense, type_name, scale, layout)


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize(
    ("type_name", "scale"),
    [("e4m3", "tensor"), ("e4m3", "vector"), ("f16", "none"), ("bf16", "none")],
)
def test_right_matrices_pass(device: Device, type_name: str, scale: str, layout: str) -> None:
    result = verify_matrix(packed(type_name, scale, layout), 1)
    assert result.passed, result
    assert cpu.verify_matrix(packed(type_name, scale, layout), 1).passed


def test_one_wrong_bit_on_the_way_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded differs by one index pair from what is verified."""
    from sp24cli.verify import gpu

    good = packed("e4m3", "vector", "row")
    assert good.meta is not None and good.values is not None
    meta = good.meta.copy()
    used = np.flatnonzero((meta[123] & 15) == 0b1110)[0]
    meta[123, used] = (meta[123, used] & 0xF0) | 0b1101
    upload = gpu.SparseWeight.upload
    monkeypatch.setattr(
        gpu.SparseWeight, "upload", lambda dev, _: upload(dev, replace(good, meta=meta))
    )
    result = verify_matrix(good, 1)
    identity = result.checks[0]
    assert identity.name == "identity" and not identity.passed
    assert identity.first_bad is not None and identity.first_bad[0] == 123
