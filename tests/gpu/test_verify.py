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
    kernels = [
        e
        for e in load().entries
        if (e.a_type, e.loop_scales, e.layout) == (type_name, "none", "sm90")
    ]
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
        gpu.SparseWeight,
        "upload",
        lambda dev, _, **options: upload(dev, replace(good, meta=meta), **options),
    )
    result = verify_matrix(good, 1)
    identity = result.checks[0]
    assert identity.name == "identity" and not identity.passed
    assert identity.first_bad is not None and identity.first_bad[0] == 123


@pytest.mark.parametrize("scale", ["16x16", "32x32", "mx"])
@pytest.mark.parametrize("overflow", ["satfinite", "nan"])
def test_weights_with_small_scales_are_widened(device: Device, scale: str, overflow: str) -> None:
    matrix = packed("e4m3", scale, "row")
    matrix = replace(matrix, info=replace(matrix.info, overflow=overflow))
    result = verify_matrix(matrix, 1)
    assert result.passed, result
    kind = "mx" if scale == "mx" else "block"
    kernels = {e.name for e in load().entries if e.weight_scales == kind}
    names = {check.name for check in result.checks}
    assert names == {"bf16 identity", "f16 identity"} | kernels
    assert cpu.verify_matrix(matrix, 1).passed


def test_any_e4m3_weight_may_be_widened(device: Device) -> None:
    for scale, kind in (("vector", "none"), ("128x128", "block")):
        result = verify_matrix(packed("e4m3", scale, "row"), 1, ("f16",))
        assert result.passed, result
        kernels = [e for e in load().entries if (e.type, e.weight_scales) == ("e4m3_f16", kind)]
        assert len(result.checks) == 1 + len(kernels)


def test_an_infinite_operand_is_verified_too(device: Device) -> None:
    """A weight beyond f16 is infinite with ``nan``: the identity knows, and no sum is judged."""
    matrix = packed("e4m3", "16x16", "row")
    assert matrix.scale is not None
    scale = matrix.scale.copy()
    scale[3, 7] *= 2.0**30
    info = replace(matrix.info, overflow="nan")
    result = verify_matrix(replace(matrix, info=info, scale=scale), 1, ("f16",))
    assert result.passed, result
    assert [check.name for check in result.checks] == ["f16 identity"]
    saturated = verify_matrix(replace(matrix, scale=scale), 1, ("f16",))
    assert saturated.passed and len(saturated.checks) > 1, saturated


def test_a_wrong_scale_of_a_widened_weight_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sp24cli.verify import gpu

    good = packed("e4m3", "16x16", "row")
    assert good.scale is not None
    scale = good.scale.copy()
    scale[5, 9] = np.nextafter(scale[5, 9], np.float32(1)) * np.float32(1 + 2.0**-7)
    upload = gpu.SparseWeight.upload
    monkeypatch.setattr(
        gpu.SparseWeight,
        "upload",
        lambda dev, _, **options: upload(dev, replace(good, scale=scale), **options),
    )
    identity = verify_matrix(good, 1).checks[0]
    assert identity.name == "bf16 identity" and not identity.passed
    assert identity.first_bad is not None
    assert 80 <= identity.first_bad[0] < 96 and 144 <= identity.first_bad[1] < 160
