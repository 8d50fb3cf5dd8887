"""The Python API without a GPU."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import sp24cli
from sp24cli.checkpoint.names import Selection
from sp24cli.errors import BadInputError, NoGpuError
from sp24cli.ops.quantize import quantize_file
from sp24cli.optypes import operand_type
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from tests.cpu.modelfile import normal, save


@pytest.fixture
def packed_file(tmp_path: Path) -> Path:
    weight = normal(1, (24, 36))
    source = save(tmp_path / "model.safetensors", {"a.weight": weight, "b.bias": weight[0]})
    quantize_file(
        source,
        tmp_path / "packed.safetensors",
        optype=operand_type("f16"),
        spec=ScaleSpec("none"),
        prune=True,
        selection=Selection(),
    )
    return tmp_path / "packed.safetensors"


def test_load_and_unpack(packed_file: Path) -> None:
    every = sp24cli.load(packed_file)
    assert list(every) == ["a.weight"]
    one = sp24cli.load(packed_file, "a.weight")
    want = prune_24(normal(1, (24, 36))).astype(np.float16)
    for name, dtype in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16), ("f64", np.float64)):
        dense = sp24cli.unpack(one, name)
        assert dense.dtype == dtype
        assert np.array_equal(dense, want.astype(np.float32).astype(dtype))
    with pytest.raises(BadInputError, match="unknown dtype 'f8'"):
        sp24cli.unpack(one, "f8")


def test_a_missing_weight_is_named(packed_file: Path) -> None:
    with pytest.raises(BadInputError, match=r"packed\.safetensors: no packed tensor 'b\.bias'"):
        sp24cli.load(packed_file, "b.bias")


def test_upload_needs_a_gpu(packed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sp24cli.gpu.device import Device

    def none(ordinal: int = 0) -> Device:
        raise NoGpuError("no usable GPU: none here")

    monkeypatch.setattr(Device, "open", none)
    with pytest.raises(NoGpuError):
        sp24cli.upload(sp24cli.load(packed_file, "a.weight"))


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sp24cli.nothing  # noqa: B018
