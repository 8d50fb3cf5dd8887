"""Packing whole files, against an oracle in plain Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sp24cli.errors import BadInputError, UsageError
from sp24cli.ops import QuantizeReport, plan, prune_file, quantize_file, stream, unpack_file
from sp24cli.ops.choose import Choice
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.pruning.pattern import ONE_OF_TWO, prune_pattern
from sp24cli.scaling import ScaleSpec
from tests.cpu.modelfile import DTYPES, Array, load, naive_pack, naive_prune, normal, save

E4M3 = OPERAND_TYPES["e4m3"]
TINY = float(np.finfo(np.float32).tiny)
SPECS = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "block": ScaleSpec("block", (48, 8)),
}


def naive_scale(weight: Array, kind: str, end: float = 448) -> Array:
    """F32 scales [..] of the file; a block is 48x8."""
    magnitude = np.abs(weight.astype(np.float64))
    if kind == "tensor":
        largest = magnitude.max(keepdims=True).reshape(1)
    elif kind == "vector":
        largest = magnitude.max(axis=1, keepdims=True)
    else:
        rows, columns = weight.shape
        largest = np.array(
            [
                [magnitude[i : i + 48, j : j + 8].max() for j in range(0, columns, 8)]
                for i in range(0, rows, 48)
            ]
        )
    scale = largest.astype(np.float32) / np.float32(end)
    return np.where(largest == 0, np.float32(1), np.maximum(scale, np.float32(TINY)))


def spread(scale: Array, kind: str, shape: tuple[int, int]) -> Array:
    if kind == "block":
        scale = np.repeat(np.repeat(scale, 48, axis=0), 8, axis=1)[: shape[0], : shape[1]]
    return np.broadcast_to(scale, shape)


def hard_weight(dtype: str, columns: int = 44) -> Array:
    """Zero rows and blocks, lone values, ties, negatives, tiny and large values."""
    weight = normal(3, (150, columns), dtype)
    weight[5] = 0
    weight[48:96, 8:16] = 0
    weight[40, 0:4] = np.array([0, 0, 0, -0.5])
    weight[41, 0:4] = np.array([0, 1e-7, 0, 0])
    weight[42, 0:4] = np.array([-0.0, 0.25, -0.0, 0.25])
    weight[43] = np.array([1e3, -6e3, 0.001, 30] * (columns // 4))
    return weight


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("given", [True, False])
def test_codes_masks_and_scales_are_those_of_the_oracle(
    tmp_path: Path, kind: str, dtype: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    weight = hard_weight(dtype)
    pruned = naive_prune(weight)
    source = save(tmp_path / "in", {"a.weight": pruned if given else weight})
    report = quantize_file(source, tmp_path / "out", optype=E4M3, spec=SPECS[kind], prune=not given)
    tensors, metadata = load(tmp_path / "out")
    scale = naive_scale(pruned, kind)
    codes, meta, back = naive_pack(pruned, spread(scale, kind, weight.shape))

    assert tensors["a.weight_scale"].dtype == np.float32
    assert np.array_equal(tensors["a.weight_scale"], scale)
    assert tensors["a.weight_values"].dtype == E4M3.dtype
    assert np.array_equal(tensors["a.weight_meta"], meta)
    assert np.array_equal(tensors["a.weight_values"].view(np.uint8), codes)
    assert set(tensors) == {"a.weight_values", "a.weight_meta", "a.weight_scale"}
    described = json.loads(metadata["sp24.tensors"])["a.weight"]
    assert described["pruned"] == ("given" if given else "magnitude")
    assert described["source_dtype"] == dtype
    assert described["shape"] == [150, 44]

    _check_stats(report, weight, pruned, codes, back, given=given)


def _check_stats(
    report: QuantizeReport, weight: Array, pruned: Array, codes: Array, back: Array, *, given: bool
) -> None:
    (tensor,) = report.tensors
    wide = pruned.astype(np.float64)
    error = np.square(back - wide).sum()
    assert tensor.error_energy == pytest.approx(error, rel=1e-9)
    assert tensor.snr_db == pytest.approx(10 * np.log10(np.square(wide).sum() / error), rel=1e-9)
    assert tensor.kept == np.count_nonzero(wide)
    assert tensor.clipped == 0
    assert tensor.underflowed == np.count_nonzero(wide) - np.count_nonzero(codes & 0x7F)
    assert tensor.amax == np.abs(wide).max()
    if given:
        assert tensor.kept_energy is None
    else:
        whole = np.square(weight.astype(np.float64)).sum()
        assert tensor.kept_energy == pytest.approx(np.square(wide).sum() / whole, rel=1e-12)


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_the_bytes_do_not_depend_on_workers_or_bands(
    tmp_path: Path, kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (333, 152), "BF16")})
    files = []
    for band, workers in ((1 << 19, 1), (1, 1), (1, 3), (20000, 2)):
        monkeypatch.setattr(stream, "BAND_ELEMENTS", band)
        output = tmp_path / f"{band}-{workers}"
        quantize_file(
            source,
            output,
            optype=E4M3,
            spec=SPECS[kind],
            layout=layout,
            prune=True,
            workers=workers,
        )
        files.append(output.read_bytes())
    assert len(set(files)) == 1


def test_pruning_first_or_on_the_way_gives_the_same_parts(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": hard_weight("BF16")})
    prune_file(source, tmp_path / "pruned")
    spec = SPECS["vector"]
    quantize_file(tmp_path / "pruned", tmp_path / "two", optype=E4M3, spec=spec)
    quantize_file(source, tmp_path / "one", optype=E4M3, spec=spec, prune=True)
    first, second = load(tmp_path / "one")[0], load(tmp_path / "two")[0]
    assert {n: a.tobytes() for n, a in first.items()} == {n: a.tobytes() for n, a in second.items()}


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_unscaled_types_hold_the_values_themselves(tmp_path: Path, name: str) -> None:
    optype = OPERAND_TYPES[name]
    pruned = naive_prune(normal(1, (20, 24), optype.safetensors))
    source = save(tmp_path / "in", {"a.weight": pruned})
    report = quantize_file(source, tmp_path / "out", optype=optype, spec=ScaleSpec("none"))
    tensors, _ = load(tmp_path / "out")
    assert set(tensors) == {"a.weight_values", "a.weight_meta"}
    assert tensors["a.weight_values"].dtype == optype.dtype
    kept = sorted(v for v in tensors["a.weight_values"].astype(float).flat if v)
    assert kept == sorted(v for v in pruned.astype(float).flat if v)
    assert report.tensors[0].snr_db == np.inf
    assert report.to_json()["tensors"][0]["snr_db"] is None


def test_a_weight_that_is_not_sparse_is_an_error_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    weight = naive_prune(normal(1, (200, 16)))
    weight[130, 8:12] = 1
    good = naive_prune(normal(2, (8, 8)))
    source = save(tmp_path / "in", {"a.weight": good, "b.weight": weight})
    for spec in SPECS.values():
        with pytest.raises(BadInputError) as raised:
            quantize_file(source, tmp_path / "out", optype=E4M3, spec=spec)
        assert str(raised.value).startswith(f"{source}: tensor 'b.weight': ")
        assert "row 130, group 2" in str(raised.value)
        assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [*SPECS, "none"])
@pytest.mark.parametrize("prune", [True, False])
def test_nan_and_infinity_are_named(
    tmp_path: Path, value: float, kind: str, prune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    weight = naive_prune(normal(1, (100, 16), "F16"))
    weight[70, 4:8] = np.array([0, 0, value, 0])
    source = save(tmp_path / "in", {"a.weight": weight})
    optype = OPERAND_TYPES["f16"] if kind == "none" else E4M3
    spec = SPECS.get(kind, ScaleSpec("none"))
    with pytest.raises(BadInputError, match=r"'a\.weight': .* row 70, column 6"):
        quantize_file(source, tmp_path / "out", optype=optype, spec=spec, prune=prune)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("source", ["F32", "F64", "BF16", "F16"])
@pytest.mark.parametrize(("name", "largest"), [("e5m2", 57344), ("s8", 127)])
def test_8_bit_types_by_their_definition(
    tmp_path: Path, kind: str, source: str, name: str, largest: int
) -> None:
    """scale = amax / largest, the code nearest to value / scale, ties to even, value by value."""
    weight = naive_prune(hard_weight(source))
    path = save(tmp_path / "in", {"a.weight": weight})
    quantize_file(path, tmp_path / "out", optype=OPERAND_TYPES[name], spec=SPECS[kind])
    tensors, _ = load(tmp_path / "out")
    scale = naive_scale(weight, kind, largest)
    assert tensors["a.weight_scale"].tobytes() == scale.astype(np.float32).tobytes()
    unpack_file(tmp_path / "out", tmp_path / "codes", codes=True)
    codes = load(tmp_path / "codes")[0]["a.weight"]
    assert codes.dtype == (np.int8 if name == "s8" else DTYPES["F8_E5M2"])
    wide = np.float64 if source == "F64" else np.float32
    quotient = weight.astype(wide) / spread(scale, kind, weight.shape).astype(wide)
    if name == "s8":
        want = np.clip(np.rint(quotient), -127, 127)
    else:
        exponent = np.maximum(np.frexp(quotient)[1] - 1, -14)
        want = np.ldexp(np.rint(np.ldexp(quotient.astype(np.float64), 2 - exponent)), exponent - 2)
        want = np.clip(want, -57344, 57344)
    assert np.array_equal(codes.astype(np.float64), want)
    assert np.abs(want).max() == largest


def test_tf32_keeps_the_larger_of_each_pair(tmp_path: Path) -> None:
    weight = normal(1, (70, 38))  # K of whole pairs, no whole fours
    weight[3, 4:8] = np.array([2.0, -2.0, 0, -0.0])
    weight[4, :2] = np.array([1 + 2.0**-11, 0])
    source = save(tmp_path / "in", {"a.weight": weight})
    optype, spec = OPERAND_TYPES["tf32"], ScaleSpec("none")
    report = quantize_file(source, tmp_path / "out", optype=optype, spec=spec, prune=True)
    tensors, _ = load(tmp_path / "out")
    assert set(tensors) == {"a.weight_values", "a.weight_meta"}
    values, meta = tensors["a.weight_values"], tensors["a.weight_meta"]
    assert (values.dtype, values.shape, meta.shape) == (np.float32, (70, 19), (70, 10))
    pairs = weight.reshape(70, 19, 2)
    second = np.abs(pairs[..., 1]) > np.abs(pairs[..., 0])
    nibbles = np.where(second, 0b1110, 0b0100)
    nibbles = np.concatenate([nibbles, np.zeros((70, 1), int)], 1)
    assert np.array_equal(meta, nibbles[:, ::2] | nibbles[:, 1::2] << 4)
    kept = np.where(second, pairs[..., 1], pairs[..., 0]).astype(np.float64)
    fraction, exponent = np.frexp(kept)
    assert np.array_equal(values, np.ldexp(np.rint(np.ldexp(fraction, 11)), exponent - 11))
    assert values[3, 2] == 2 and values[3, 3] == 0 and values[4, 0] == 1
    # Pruning first is the same, and what is only 2:4 is refused.
    prune_file(source, tmp_path / "pruned", choice=Choice(pattern=ONE_OF_TWO))
    quantize_file(tmp_path / "pruned", tmp_path / "two", optype=optype, spec=spec)
    assert load(tmp_path / "two")[0]["a.weight_values"].tobytes() == values.tobytes()
    assert report.tensors[0].kept == np.count_nonzero(kept)
    lone = save(tmp_path / "24", {"a.weight": naive_prune(normal(1, (8, 8)))})
    with pytest.raises(BadInputError, match=r"one nonzero at row 2, group 3 .*not 1:2"):
        quantize_file(lone, tmp_path / "no", optype=optype, spec=spec)


def test_tf32_comes_back(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (70, 38))})
    for layout in ("row", "sm90"):
        quantize_file(
            source,
            tmp_path / layout,
            optype=OPERAND_TYPES["tf32"],
            spec=ScaleSpec("none"),
            prune=True,
            layout=layout,
        )
        unpack_file(tmp_path / layout, tmp_path / f"{layout} dense")
    dense = load(tmp_path / "row dense")[0]["a.weight"]
    assert dense.tobytes() == load(tmp_path / "sm90 dense")[0]["a.weight"].tobytes()
    pruned = prune_pattern(normal(1, (70, 38)), ONE_OF_TWO)
    assert np.array_equal(dense != 0, pruned != 0)
    assert (np.abs(dense - pruned) <= 2.0**-11 * np.abs(pruned)).all()


@pytest.mark.parametrize(("overflow", "code"), [("satfinite", 65504.0), ("nan", np.inf)])
def test_overflow_modes(tmp_path: Path, overflow: str, code: float) -> None:
    weight = np.array([[1e5, 0, 0, 1.0]], np.float32)
    source = save(tmp_path / "in", {"a.weight": weight})
    report = quantize_file(
        source,
        tmp_path / "out",
        optype=OPERAND_TYPES["f16"],
        spec=ScaleSpec("none"),
        overflow=overflow,
    )
    values = load(tmp_path / "out")[0]["a.weight_values"]
    assert np.array_equal(values.astype(float), [[code, 1.0]])
    assert report.tensors[0].clipped == 1


def test_values_past_448_are_scaled_into_range(tmp_path: Path) -> None:
    weight = np.array([[3e38, 0, 0, -1e38], [1e-30, 0, 0, 1e-38]], np.float32)
    source = save(tmp_path / "in", {"a.weight": weight})
    quantize_file(source, tmp_path / "out", optype=E4M3, spec=SPECS["vector"])
    tensors, _ = load(tmp_path / "out")
    assert tensors["a.weight_values"].astype(float)[0, 0] == 448
    assert tensors["a.weight_values"].astype(float)[1, 0] == 448
    assert np.isfinite(tensors["a.weight_scale"]).all()
    assert (tensors["a.weight_scale"] >= TINY).all()


def test_others_pass_through_with_the_users_metadata(tmp_path: Path) -> None:
    others = {
        "old.weight": normal(1, (8, 8), "F8_E4M3"),
        "old.weight_scale": np.array([0.5], np.float32),
        "fnuz.weight": np.arange(16, dtype=np.uint8).view(DTYPES["F8_E4M3FNUZ"]).reshape(4, 4),
        "embed.weight": normal(2, (8, 8), "BF16"),
        "été.bias": normal(3, (8,), "F16"),
    }
    source = save(tmp_path / "in", {"été.weight": normal(4, (8, 8)), **others}, {"k": "ü"})
    report = quantize_file(source, tmp_path / "out", optype=E4M3, spec=SPECS["tensor"], prune=True)
    tensors, metadata = load(tmp_path / "out")
    for name, array in others.items():
        assert tensors[name].tobytes() == array.tobytes()
        assert tensors[name].dtype == array.dtype
    assert metadata["k"] == "ü"
    assert metadata["format"] == "pt"
    assert metadata["sp24.version"] == "1"
    assert {item.name for item in report.skipped} == set(others)


def test_large_tensors_are_copied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_COPY_BYTES", 7)
    tensor = np.arange(50, dtype=np.uint8)
    source = save(tmp_path / "in", {"x": tensor})
    quantize_file(source, tmp_path / "out", optype=E4M3, spec=SPECS["tensor"])
    assert load(tmp_path / "out")[0]["x"].tobytes() == tensor.tobytes()


def test_a_part_whose_name_is_taken_is_an_error(tmp_path: Path) -> None:
    tensors = {"a.weight": normal(1, (4, 4)), "a.weight_scale": normal(2, (1,))}
    source = save(tmp_path / "in", tensors)
    with pytest.raises(BadInputError, match=r"'a\.weight'.*'a\.weight_scale' already"):
        quantize_file(source, tmp_path / "out", optype=E4M3, spec=SPECS["tensor"], prune=True)


def test_dry_run_writes_nothing_and_knows_the_size(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (70, 20)), "x": normal(2, (3,))})
    options = {"optype": E4M3, "spec": SPECS["vector"], "layout": "sm90", "prune": True}
    dry = quantize_file(source, None, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    real = quantize_file(source, tmp_path / "out", **options)
    assert dry.tensors == real.tensors
    assert dry.output_bytes == (tmp_path / "out").stat().st_size


@pytest.mark.parametrize("kind", list(SPECS))
def test_progress_reaches_the_end_and_no_further(tmp_path: Path, kind: str) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (300, 16)), "x": normal(2, (77,))})
    seen: list[tuple[int, int]] = []
    quantize_file(
        source,
        None,
        optype=E4M3,
        spec=SPECS[kind],
        prune=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(
    ("option", "type_name"),
    [
        ("optype", "optypes.OperandType"),
        ("spec", "scaling.ScaleSpec"),
        ("choice", "ops.choose.Choice"),
        ("calibration", "ops.calibrate.Calibration"),
        ("selection", "checkpoint.names.Selection"),
    ],
)
def test_a_name_in_place_of_an_object_is_a_type_error(
    tmp_path: Path, option: str, type_name: str
) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4))})
    options = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector")} | {option: "some"}
    with pytest.raises(TypeError, match=rf"^{option} is 'some', not a sp24cli\.{type_name}$"):
        quantize_file(source, None, prune=True, **options)
    if option in ("choice", "selection"):
        with pytest.raises(TypeError, match=f"^{option} is 'some'"):
            prune_file(source, None, **{option: "some"})


def test_an_unknown_dtype_of_fp8_weights_is_a_usage_error(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4))})
    known = r"unknown dequantize_fp8 'bf16' \(known: F64, F32, F16, BF16\)"
    with pytest.raises(UsageError, match=known):
        prune_file(source, None, dequantize_fp8="bf16")
    optype, spec = OPERAND_TYPES["e4m3"], ScaleSpec("vector")
    with pytest.raises(UsageError, match=known):
        quantize_file(source, None, optype=optype, spec=spec, dequantize_fp8="bf16")
