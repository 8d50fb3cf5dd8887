"""From packed files back to dense ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sp24cli.errors import BadInputError, Sp24Error, UsageError
from sp24cli.ops import quantize_file, stream, unpack_checkpoint, unpack_file
from sp24cli.ops.dequantize import dequantize_file
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from tests.cpu.modelfile import DTYPES, Array, load, naive_pack, naive_prune, normal, save

SPEC = ScaleSpec("vector")


def pack(tmp_path: Path, weight: Array, **options: object) -> Path:
    source = save(tmp_path / "in", {"a.weight": weight, "b": normal(9, (5,), "BF16")}, {"k": "v"})
    arguments = {"optype": OPERAND_TYPES["e4m3"], "spec": SPEC, "prune": True} | options
    quantize_file(source, tmp_path / "packed", **arguments)
    return tmp_path / "packed"


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize(("dtype", "name"), [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")])
def test_values_are_code_times_scale_rounded_once(
    tmp_path: Path, layout: str, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    weight = normal(1, (200, 44))
    packed = pack(tmp_path, weight, layout=layout)
    report = unpack_file(packed, tmp_path / "dense", dtype=dtype)
    tensors, metadata = load(tmp_path / "dense")

    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)
    _, _, exact = naive_pack(naive_prune(weight), scale)
    assert tensors["a.weight"].dtype == DTYPES[name]
    if name == "BF16":
        # ml_dtypes rounds float64 twice; the nearest of the neighbours is the right one.
        got = tensors["a.weight"].astype(np.float64)
        up = np.nextafter(tensors["a.weight"], ml_dtypes.bfloat16(np.inf)).astype(np.float64)
        down = np.nextafter(tensors["a.weight"], ml_dtypes.bfloat16(-np.inf)).astype(np.float64)
        error = np.abs(got - exact)
        assert (error <= np.abs(up - exact)).all()
        assert (error <= np.abs(down - exact)).all()
    else:
        assert np.array_equal(tensors["a.weight"], exact.astype(DTYPES[name]))
    assert tensors["b"].tobytes() == normal(9, (5,), "BF16").tobytes()
    assert metadata == {"k": "v", "format": "pt"}
    assert report.copied == 1
    assert report.output_bytes == (tmp_path / "dense").stat().st_size


@pytest.mark.parametrize(
    ("source", "target"), [("F64", "F32"), ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16")]
)
def test_the_dtype_is_that_of_the_original_by_default(
    tmp_path: Path, source: str, target: str
) -> None:
    packed = pack(tmp_path, normal(1, (8, 8), source))
    unpack_file(packed, tmp_path / "dense")
    assert load(tmp_path / "dense")[0]["a.weight"].dtype == DTYPES[target]


@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_an_unscaled_type_comes_back_exactly(tmp_path: Path, layout: str) -> None:
    weight = normal(1, (70, 36), "BF16")
    bf16 = OPERAND_TYPES["bf16"]
    packed = pack(tmp_path, weight, optype=bf16, spec=ScaleSpec("none"), layout=layout)
    unpack_file(packed, tmp_path / "dense")
    assert load(tmp_path / "dense")[0]["a.weight"].tobytes() == naive_prune(weight).tobytes()


@pytest.mark.parametrize("spec", [ScaleSpec("tensor"), SPEC, ScaleSpec("block", (16, 8))])
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_codes_come_with_their_scale(tmp_path: Path, spec: ScaleSpec, layout: str) -> None:
    packed = pack(tmp_path, normal(1, (70, 24), "BF16"), spec=spec, layout=layout)
    unpack_file(packed, tmp_path / "codes", codes=True)
    unpack_file(packed, tmp_path / "dense", dtype="f32")
    codes, metadata = load(tmp_path / "codes")
    assert set(codes) == {"a.weight", "a.weight_scale", "b"}
    assert codes["a.weight"].dtype == DTYPES["F8_E4M3"]
    scale = codes["a.weight_scale"]
    assert scale.tobytes() == load(packed)[0]["a.weight_scale"].tobytes()
    if spec.block:
        scale = np.repeat(np.repeat(scale, 16, axis=0), 8, axis=1)[:70, :24]
    dense = codes["a.weight"].astype(np.float32) * scale
    assert np.array_equal(dense, load(tmp_path / "dense")[0]["a.weight"])
    assert "sp24.version" not in metadata


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize(
    ("source", "dtype", "amax", "last"),
    # With the largest value that rounds to the end of the dtype.
    [
        ("F32", "f16", 1e6, 65504 + 16),
        ("F64", None, 3.5e38, 2.0**128 - 2.0**103),
        ("F32", "bf16", 3.4e38, 2.0**128 - 2.0**119),
    ],
)
def test_values_beyond_the_dtype_are_counted(
    tmp_path: Path,
    layout: str,
    source: str,
    dtype: str | None,
    amax: float,
    last: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    weight = normal(1, (200, 44)).astype(np.float64)
    weight *= amax / np.abs(weight).max(axis=1, keepdims=True)
    packed = pack(tmp_path, weight.astype(DTYPES[source]), layout=layout)
    (tensor,) = unpack_file(packed, tmp_path / "dense", dtype=dtype).tensors
    unpack_file(packed, tmp_path / "codes", codes=True)
    codes, _ = load(tmp_path / "codes")
    exact = codes["a.weight"].astype(np.float64) * codes["a.weight_scale"].astype(np.float64)
    dense = load(tmp_path / "dense")[0]["a.weight"]
    beyond = np.abs(exact) >= last
    assert tensor.saturated == beyond.sum() >= 200
    largest = float(ml_dtypes.finfo(dense.dtype).max)
    assert (np.abs(dense[beyond].astype(np.float64)) == largest).all()
    assert np.isfinite(dense.astype(np.float64)).all()


def test_the_largest_value_itself_is_not_beyond(tmp_path: Path) -> None:
    weight = np.zeros((2, 8), np.float32)
    weight[0, 0], weight[1, 2] = 65504, -65536
    packed = pack(tmp_path, weight, optype=OPERAND_TYPES["tf32"], spec=ScaleSpec("none"))
    (tensor,) = unpack_file(packed, tmp_path / "dense", dtype="f16").tensors
    dense = load(tmp_path / "dense")[0]["a.weight"]
    assert (dense[0, 0], dense[1, 2]) == (65504, -65504)
    assert tensor.saturated == 1


@pytest.mark.parametrize("function", [unpack_file, unpack_checkpoint, dequantize_file])
def test_an_unknown_dtype_is_a_usage_error(tmp_path: Path, function: Callable[..., object]) -> None:
    packed = pack(tmp_path, normal(1, (4, 4)))
    with pytest.raises(UsageError, match=r"unknown dtype 'f8' \(known: bf16, f16, f32\)"):
        function(packed, tmp_path / "dense", dtype="f8")
    assert not (tmp_path / "dense").exists()


def test_a_plain_file_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4))})
    with pytest.raises(BadInputError, match="not a packed file"):
        unpack_file(source, tmp_path / "out")


def test_the_packed_file_is_never_replaced(tmp_path: Path) -> None:
    packed = pack(tmp_path, normal(1, (4, 4)))
    before = packed.read_bytes()
    with pytest.raises(Sp24Error, match="is the input"):
        unpack_file(packed, packed, overwrite=True)
    assert packed.read_bytes() == before


def test_unpacked_and_packed_again_is_the_same_for_a_power_of_two_scale(tmp_path: Path) -> None:
    weight = naive_prune(normal(1, (16, 16)))
    weight[:, :4] = np.array([448 * 2.0**-9, 0, 0, 0])  # amax, hence scale 2^-9
    packed = pack(tmp_path, weight)
    unpack_file(packed, tmp_path / "dense", dtype="f32")
    quantize_file(tmp_path / "dense", tmp_path / "again", optype=OPERAND_TYPES["e4m3"], spec=SPEC)
    first, second = load(packed)[0], load(tmp_path / "again")[0]
    for part in ("values", "scale"):
        name = f"a.weight_{part}"
        assert first[name].tobytes() == second[name].tobytes()


@pytest.mark.parametrize("codes", [True, False])
def test_progress_reaches_the_end_and_no_further(tmp_path: Path, codes: bool) -> None:
    packed = pack(tmp_path, normal(1, (130, 16)))
    seen: list[tuple[int, int]] = []
    unpack_file(
        packed,
        tmp_path / "out",
        codes=codes,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(
    ("part", "value", "fault"),
    [
        ("scale", np.float32(-1), r"scale -1.0 at \[1, 0\] is not positive, normal and finite"),
        ("scale", np.float32(np.nan), r"scale nan at \[1, 0\] is not positive"),
        ("meta", np.uint8(0x00), "metadata at row 1, group 0 is no ascending pair"),
        ("values", np.uint8(0x7F), "value at row 1, kept column 0 is not finite"),
    ],
)
def test_parts_that_cannot_be_right_are_refused(
    tmp_path: Path, part: str, value: Array, fault: str
) -> None:
    """Else a damaged file would become a dense one that looks whole."""
    tensors, metadata = load(pack(tmp_path, normal(3, (8, 16))))
    broken = tensors[f"a.weight_{part}"].copy()
    broken.view(value.dtype)[1, 0] = value
    tensors[f"a.weight_{part}"] = broken
    packed = save(tmp_path / "broken", tensors, metadata)
    with pytest.raises(BadInputError, match=f"a.weight': {fault}"):
        unpack_file(packed, tmp_path / "dense")
    assert not (tmp_path / "dense").exists()
