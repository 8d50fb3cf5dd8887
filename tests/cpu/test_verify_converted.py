"""Verification of what was converted, against the file of another tool that it was made from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sp24cli.cli.main import run
from sp24cli.formats.foreign import BITMASK, FORMATS, FP8, SP24
from sp24cli.ops import quantize_file, stream
from sp24cli.ops.checkpoint import convert_checkpoint
from sp24cli.ops.convert import convert_file
from sp24cli.ops.quantize import QuantizeReport
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import Layout
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import verify_file
from sp24cli.verify.result import VerifyReport
from tests.cpu.checkpoints import write_checkpoint, write_index
from tests.cpu.modelfile import DTYPES, Array, load, naive_prune, normal, save

SHAPE = (200, 260)
CONVERTED = "converted; compared with the codes and scales of the original"


def codes(seed: int = 1) -> Array:
    pruned = naive_prune(normal(seed, SHAPE, deviation=40.0))
    return np.clip(pruned, -448, 448).astype(DTYPES["F8_E4M3"])


def scales(shape: tuple[int, ...], dtype: str = "F32") -> Array:
    found = 0.001 + np.abs(normal(2, shape, deviation=0.01))
    return found.astype(DTYPES[dtype])


#: As DeepSeek, compressed-tensors and ModelOpt have them.
SCALES = {
    "block": ("a.weight_scale_inv", scales((2, 3))),
    "vector": ("a.weight_scale", scales((200, 1), "BF16")),
    "tensor": ("a.weight_scale", scales((), "F32")),
    "mx": ("a.scale", np.full((200, 1), 120, np.uint8).view(DTYPES["F8_E8M0"])),
}


def fp8(path: Path, kind: str = "vector", **more: Array) -> Path:
    name, scale = SCALES[kind]
    norm = normal(3, (40,), "BF16")
    return save(path, {"a.weight": codes(), name: scale, "a.norm.weight": norm} | more)


def convert(source: Path, **options: Any) -> Path:
    packed = source.with_name("packed")
    convert_file(source, packed, format=SP24, overwrite=True, **options)
    return packed


def changed(packed: Path, part: str, place: tuple[int, ...]) -> Path:
    tensors, metadata = load(packed)
    raw = tensors[f"a.weight_{part}"].copy()
    bits = raw.view(f"u{raw.itemsize}")
    bits[place] ^= 2
    return save(packed.with_name("changed"), tensors | {f"a.weight_{part}": raw}, metadata)


def passed(report: VerifyReport) -> bool:
    notes = {v.agreement.note for v in report.tensors if v.agreement is not None}
    return report.failure is None and notes == {CONVERTED}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_fp8_is_compared_with_its_codes_and_scales(
    tmp_path: Path, kind: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    original = fp8(tmp_path / "original", kind)
    report = verify_file(convert(original, layout=layout), original, device="cpu", workers=2)
    assert passed(report)
    assert report.passed_through == 1


def test_what_differs_from_the_codes_and_scales_is_named(tmp_path: Path) -> None:
    original = fp8(tmp_path / "original")
    packed = convert(original)
    for part, place, words in (
        ("values", (130, 7), r"code at row 130, column \d+ is 0x.., in the original 0x..$"),
        (
            "scale",
            (70, 0),
            r"scale at \[0, 0\] is .*, recomputed .*; if it was converted, "
            r"scale at \[70, 0\] is .*, in the original ",
        ),
    ):
        failure = verify_file(changed(packed, part, place), original, device="cpu").failure
        assert failure is not None
        assert re.match(f"a.weight: agreement: {words}", failure)
    tensors, metadata = load(original)
    other = save(tmp_path / "other", tensors | {"a.weight": codes(9)}, metadata)
    failure = verify_file(packed, other, device="cpu").failure
    assert failure is not None
    assert "mask differs at row 0, group" in failure


def test_what_was_packed_anew_is_right_too(tmp_path: Path) -> None:
    original = fp8(tmp_path / "original")
    for spec in (ScaleSpec("vector"), ScaleSpec("block", (64, 8))):
        done: QuantizeReport = quantize_file(
            original,
            tmp_path / "packed",
            optype=OPERAND_TYPES["e4m3"],
            spec=spec,
            dequantize_fp8="BF16",
            overwrite=True,
        )
        assert len(done.tensors) == 1
        report = verify_file(tmp_path / "packed", original, device="cpu")
        assert report.failure is None
        assert not passed(report)


@pytest.mark.parametrize("format", [format for format in FORMATS if format != SP24])
def test_bitmasks_and_shards(tmp_path: Path, format: str) -> None:
    """Blocks whose size the shapes leave open, dtypes that only the origin knows."""
    shards: list[dict[str, Array]] = [
        {"a.weight": naive_prune(normal(1, (100, 44)))},
        {"b.weight": naive_prune(normal(2, (70, 44), "F16")), "b.norm": normal(3, (9,))},
    ]
    model = write_checkpoint(tmp_path / "model", shards, others=False)
    for file in model.glob("*.safetensors"):
        quantize_file(
            file,
            tmp_path / "one",
            optype=OPERAND_TYPES["e4m3"],
            spec=ScaleSpec("block", (48, 12)),
            overwrite=True,
        )
        (tmp_path / "one").replace(file)
    index = {n: f.name for f in model.glob("*.safetensors") for n in load(f)[0]}
    write_index(model, index)
    convert_checkpoint(model, tmp_path / "foreign", format=format)
    convert_checkpoint(tmp_path / "foreign", tmp_path / "back", format=SP24)
    report = verify_file(tmp_path / "back", tmp_path / "foreign", device="cpu")
    assert report.failure is None
    assert passed(report)
    assert len(report.tensors) == 2
    assert report.passed_through == 1


def test_a_scale_in_another_shard(tmp_path: Path) -> None:
    name, scale = SCALES["block"]
    model = write_checkpoint(tmp_path / "model", [{"a.weight": codes()}, {name: scale}])
    convert_checkpoint(model, tmp_path / "packed", format=SP24)
    assert passed(verify_file(tmp_path / "packed", model, device="cpu"))


def test_a_bitmask_that_differs_is_named(tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", {"a.weight": naive_prune(normal(1, (64, 64), "BF16"))})
    spec = ScaleSpec("vector")
    quantize_file(dense, tmp_path / "own", optype=OPERAND_TYPES["e4m3"], spec=spec)
    convert_file(tmp_path / "own", tmp_path / "mask", format=BITMASK)
    packed = convert(tmp_path / "mask")
    assert passed(verify_file(packed, tmp_path / "mask", device="cpu"))
    bad = changed(packed, "values", (5, 3))
    failure = verify_file(bad, tmp_path / "mask", device="cpu").failure
    assert failure is not None
    assert "in the original 0x" in failure
    # Dense FP8 does not say which of two zeros was kept; packing anew must not fail for it.
    convert_file(packed, tmp_path / "fp8", format=FP8)
    assert verify_file(packed, tmp_path / "fp8", device="cpu").passed


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = fp8(tmp_path / "original", "block")
    packed = str(tmp_path / "packed")
    assert run(["convert", str(original), "-o", packed, "--format", "sp24"]) == 0
    capsys.readouterr()
    assert run(["verify", packed, "--against", str(original), "--device", "cpu"]) == 0
    assert CONVERTED in capsys.readouterr().out
