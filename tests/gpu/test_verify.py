"""Verification by the kernels passes what is right and finds what is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sp24cli.gpu.device import Device
from sp24cli.kernels.manifest import load
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.pruning.pattern import pattern_of, prune_magnitude
from sp24cli.verify import cpu
from sp24cli.verify.gpu import verify_matrix
from tests.gpu import problems


def packed(type_name: str, scale: str, layout: str) -> problems.PackedMatrix:
    random = np.random.default_rng(5)
    values = random.standard_normal((200, 420), np.float32)
    dense = prune_magnitude(values, pattern_of(OPERAND_TYPES[type_name]))
    return problems.make_packed(dense, type_name, scale, layout)


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize(
    ("type_name", "scale"),
    [
        (name, scale)
        for name, optype in OPERAND_TYPES.items()
        for scale in (("tensor", "vector") if optype.scaled else ("none",))
    ],
)
def test_right_matrices_pass(device: Device, type_name: str, scale: str, layout: str) -> None:
    result = verify_matrix(packed(type_name, scale, layout), 1)
    assert result.passed, result
    # By every kernel whose A is of this type, but for those of scales that change along K.
    ran = {check.name for check in result.checks}
    kernels = [e for e in load().entries if e.a_type == type_name and e.loop_scales == "none"]
    assert ran == {"identity"} | {e.name for e in kernels}
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
