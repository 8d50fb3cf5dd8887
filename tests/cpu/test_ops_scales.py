"""Kinds of scales on whole files: what is written, proved, shown, and given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from sp24cli.cli.main import run
from sp24cli.errors import BadInputError
from sp24cli.ops import inspect_file, quantize_file, stream, unpack_file
from sp24cli.ops.convert import convert_file
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import verify_file
from tests.cpu.modelfile import DTYPES, Array, load, naive_pack, naive_prune, normal, save

E4M3 = OPERAND_TYPES["e4m3"]
MX = ScaleSpec.parse("mx")
SPECS = [ScaleSpec("block", b) for b in [(1, 128), (16, 16), (32, 32), (48, 20), (128, 128)]]
SPECS += [MX, ScaleSpec("block", (2**63 - 1, 2**63 - 4))]
#: Not a multiple of any block, along M and along K.
SHAPE = (150, 164)


def spread(scale: Array, spec: ScaleSpec, shape: tuple[int, int]) -> Array:
    """The scale of every element, by its own arithmetic."""
    assert spec.block is not None
    rows, columns = (np.arange(n) // b for n, b in zip(shape, spec.block, strict=True))
    return scale.astype(np.float32)[rows][:, columns]


def naive_scales(weight: Array, spec: ScaleSpec) -> Array:
    """float32 scales by the definition, block by block."""
    assert spec.block is not None
    (bm, bk), (rows, columns) = spec.block, weight.shape
    scales = []
    for i in range(0, rows, bm):
        for j in range(0, columns, bk):
            largest = np.abs(weight[i : i + bm, j : j + bk].astype(np.float32)).max()
            scale = np.float32(largest / np.float32(448))
            if spec.kind == "mx":
                power = 2.0**-126
                while largest > 448 * power:
                    power *= 2
                scale = np.float32(power)
            scales.append(scale if largest else np.float32(1))
    return np.array(scales, np.float32).reshape(-(-rows // bm), -(-columns // bk))


def ragged(dtype: str = "BF16") -> Array:
    weight = normal(3, SHAPE, dtype)
    weight[5] = 0
    weight[16:32, 64:96] = 0
    weight[40, :4] = np.array([3, 0, 0, -7e2])
    return weight


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_blocks_of_any_shape(
    tmp_path: Path, spec: ScaleSpec, layout: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    weight = ragged(dtype)
    source = save(tmp_path / "in", {"a.weight": weight, "b.bias": normal(1, (5,))})
    packed = tmp_path / "out"
    (tensor,) = quantize_file(
        source, packed, optype=E4M3, spec=spec, layout=layout, prune=True
    ).tensors
    pruned = naive_prune(weight)
    want = naive_scales(pruned, spec)
    tensors, metadata = load(packed)
    scale = tensors["a.weight_scale"]
    assert scale.dtype == (DTYPES["F8_E8M0"] if spec.kind == "mx" else np.float32)
    assert scale.astype(np.float32).tolist() == want.tolist()
    codes, meta, back = naive_pack(pruned, spread(scale, spec, SHAPE))
    if layout == "row":
        assert tensors["a.weight_values"].tobytes() == codes.tobytes()
        assert tensors["a.weight_meta"].tobytes() == meta.tobytes()
    described = json.loads(metadata["sp24.tensors"])["a.weight"]
    assert (described["scale"], tuple(described["block"])) == (spec.kind, spec.block)
    assert (tensor.clipped, tensor.scale_min) == (0, want.min())
    assert tensor.scale_max == want.max()

    report = verify_file(packed, source, device="cpu", workers=2)
    assert report.passed, report.failure
    unpack_file(packed, tmp_path / "dense", dtype="f32")
    assert load(tmp_path / "dense")[0]["a.weight"].tobytes() == back.astype(np.float32).tobytes()
    # The library knows the file, its E8M0 too.
    found = dict(safetensors.deserialize(packed.read_bytes()))["a.weight_scale"]
    assert found["dtype"] == ("F8_E8M0" if spec.kind == "mx" else "F32")
    assert bytes(found["data"]) == scale.tobytes()


def test_mx_in_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "in", {"a.weight": ragged()})
    packed = tmp_path / "out"
    arguments = ["quantize", str(source), "-o", str(packed), "--scale", "mx", "--prune"]
    assert run([*arguments, "--report", str(tmp_path / "report.json")]) == 0
    assert "packed 1 of 1 tensors as e4m3, scale by mx, layout row" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["scale"] == "mx"
    (shown,) = inspect_file(packed).packed
    assert (shown.scale, shown.scale_shape) == ("mx", (150, 6))
    assert run(["verify", str(packed), "--against", str(source), "--device", "cpu"]) == 0
    assert " mx " in capsys.readouterr().out
    # The layout changes and comes back; the codes keep their E8M0 scales beside them.
    for layout in ("sm90", "row"):
        convert_file(packed, tmp_path / layout, format="sp24", layout=layout)
        packed = tmp_path / layout
    assert packed.read_bytes() == (tmp_path / "out").read_bytes()
    unpack_file(packed, tmp_path / "codes", codes=True)
    codes = load(tmp_path / "codes")[0]
    assert codes["a.weight_scale"].dtype == DTYPES["F8_E8M0"]
    unpack_file(packed, tmp_path / "dense")
    dense = codes["a.weight"].astype(np.float32) * spread(codes["a.weight_scale"], MX, SHAPE)
    assert np.array_equal(load(tmp_path / "dense")[0]["a.weight"].astype(np.float32), dense)


@pytest.mark.parametrize("format", ["compressed-tensors-fp8", "sparse-24-bitmask"])
def test_no_other_format_has_mx_scales(
    tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(tmp_path / "in", {"a.weight": ragged()})
    packed = tmp_path / "out"
    quantize_file(source, packed, optype=E4M3, spec=MX, prune=True)
    assert run(["convert", str(packed), "-o", str(tmp_path / "c"), "--format", format]) == 4
    words = f"{packed}: tensor 'a.weight': has MX scales (E8M0), which {format} cannot say\n"
    assert capsys.readouterr().err == f"sp24: error: {words}"
    assert not (tmp_path / "c").exists()


def test_a_scale_that_is_none_is_named_with_its_place(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": ragged()})
    packed = tmp_path / "out"
    quantize_file(source, packed, optype=E4M3, spec=MX, prune=True)
    tensors, metadata = load(packed)
    for code, text in ((0, "5.87"), (255, "nan")):
        changed = tensors["a.weight_scale"].copy()
        changed.view(np.uint8)[70, 3] = code
        save(tmp_path / "bad", {**tensors, "a.weight_scale": changed}, metadata)
        failure = verify_file(tmp_path / "bad", device="cpu").failure
        assert failure is not None
        assert failure.startswith(f"a.weight: structure: scale {text}")
        assert "at [70, 3] is not positive, normal and finite" in failure
    # One power too large is a legal scale, but not that of the original.
    changed = tensors["a.weight_scale"].copy()
    changed.view(np.uint8)[70, 3] += 1
    save(tmp_path / "bad", {**tensors, "a.weight_scale": changed}, metadata)
    failure = verify_file(tmp_path / "bad", source, device="cpu").failure
    assert failure is not None
    assert failure.startswith("a.weight: agreement: scale at [70, 3] is ")


@pytest.mark.parametrize("wrong", ["F32", "U8"])
def test_the_dtype_of_an_mx_scale_must_be_e8m0(tmp_path: Path, wrong: str) -> None:
    source = save(tmp_path / "in", {"a.weight": ragged()})
    quantize_file(source, tmp_path / "out", optype=E4M3, spec=MX, prune=True)
    tensors, metadata = load(tmp_path / "out")
    scale = tensors["a.weight_scale"]
    other = scale.astype(np.float32) if wrong == "F32" else scale.view(np.uint8)
    save(tmp_path / "bad", {**tensors, "a.weight_scale": other}, metadata)
    with pytest.raises(BadInputError, match=f"is {wrong} .150, 6., not F8_E8M0 .150, 6."):
        verify_file(tmp_path / "bad", device="cpu")
