"""Calibrated scales and smoothed columns on whole files, from quantizing to unpacking."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sp24cli
from sp24cli import calibration
from sp24cli.calibration import ScaleRule
from sp24cli.checkpoint.names import Selection
from sp24cli.cli.main import run
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.gpu.matmul import SparseWeight
from sp24cli.ops import (
    inspect_file,
    prune_checkpoint,
    prune_file,
    quantize_checkpoint,
    quantize_file,
    stream,
    unpack_file,
)
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.ops.convert import convert_file
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import PackInfo
from sp24cli.reporting import summarize
from sp24cli.scaling import ScaleSpec, make_scales, scale_values
from sp24cli.scaling import amax as amax_of
from sp24cli.smoothing import factors
from sp24cli.verify import verify_file
from tests.cpu.checkpoints import shard, small_model, write_checkpoint
from tests.cpu.convertdevice import ConvertDevice
from tests.cpu.modelfile import DTYPES, Array, load, naive_pack, naive_prune, normal, save

E4M3 = OPERAND_TYPES["e4m3"]
SPECS = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "block": ScaleSpec("block", (16, 16)),
    "mx": ScaleSpec.parse("mx"),
}
every_kind = pytest.mark.parametrize("kind", SPECS)
RULES = {
    "amax": ScaleRule(),
    "percentile": ScaleRule("percentile", 99.0),
    "mse": ScaleRule("mse"),
}
SHAPES = {"a.weight": (150, 84), "b.weight": (70, 44)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Weights of unlike columns, with what calibrates them beside them."""
    tensors: dict[str, Array] = {}
    amax, history = {}, {}
    random = np.random.default_rng(3)
    for seed, (name, (rows, columns)) in enumerate(SHAPES.items()):
        tensors[name] = normal(seed, (rows, columns)) * np.where(
            random.random(columns) < 0.1, np.float32(7), np.float32(1)
        )
        tensors[name][9] = 0
        tensors[name][:, 5] = 0
        amax[name] = np.abs(normal(seed + 5, (columns,), "F32", 4.0))
        amax[name][8] = 0
        history[name] = np.array([0.02, 0.05, 0.0, 0.04], np.float32)
    tensors["b.weight"] = tensors["b.weight"].astype(DTYPES["BF16"])
    tensors["a.bias"] = normal(3, (50,))
    save(tmp_path / "amax", amax)
    save(tmp_path / "history", history)
    return save(tmp_path / "in", tensors, {"who": "me"})


def beside(model: Path, name: str) -> Path:
    return model.with_name(name)


def smooth(model: Path, alpha: float = 0.5, rule: ScaleRule = RULES["amax"]) -> Calibration:
    return Calibration(rule, activations=beside(model, "amax"), alpha=alpha)


def delayed(model: Path, pick: Any = "max") -> Calibration:
    return Calibration(ScaleRule("history", pick=pick), beside(model, "history"))


def quantize(model: Path, output: Path | None, kind: str, how: Calibration, **options: Any) -> Any:
    arguments: dict[str, Any] = {"optype": E4M3, "spec": SPECS[kind], "prune": True}
    return quantize_file(model, output, calibration=how, **(arguments | options))


@every_kind
def test_mse_raises_the_ratio_and_percentiles_clip(model: Path, kind: str) -> None:
    found = {name: quantize(model, None, kind, Calibration(rule)) for name, rule in RULES.items()}
    for plain, least, cut in zip(
        *(found[name].tensors for name in ("amax", "mse", "percentile")), strict=True
    ):
        assert least.snr_db >= plain.snr_db
        assert plain.clipped == 0
        # In rows of 42 or 16 values, 99 % is the largest of them.
        assert (cut.clipped > 0) == (kind in ("tensor", "block"))
    if kind in ("vector", "block"):
        assert all(m.snr_db > p.snr_db + 0.2 for m, p in zip(
            found["mse"].tensors, found["amax"].tensors, strict=True))  # fmt: skip
    assert found["percentile"].calibration == "percentile 99.0"
    assert found["amax"].calibration == "amax"


@every_kind
@pytest.mark.parametrize("name", ["percentile", "mse"])
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_the_file_says_how_and_is_proved(
    model: Path, tmp_path: Path, kind: str, name: str, layout: str
) -> None:
    packed = tmp_path / "packed"
    rule = RULES[name]
    quantize(model, packed, kind, Calibration(rule), layout=layout)
    described = json.loads(load(packed)[1]["sp24.tensors"])["a.weight"]
    assert described["calibration"] == rule.text
    assert {p.calibration for p in inspect_file(packed).packed} == {rule.text}
    prune_file(model, tmp_path / "pruned")
    for against in (model, tmp_path / "pruned"):
        report = verify_file(packed, against, device="cpu")
        assert report.passed, report.failure
        assert [v.agreement.note for v in report.tensors if v.agreement] == ["", ""]
    # Of the pruned model the same parts come.
    quantize(tmp_path / "pruned", tmp_path / "two", kind, Calibration(rule), layout=layout,
             prune=False)  # fmt: skip
    one, two = load(packed)[0], load(tmp_path / "two")[0]
    assert {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in two.items()}
    # Said to be another choice, the scales are wrong.
    tensors, metadata = load(packed)
    other = json.loads(metadata["sp24.tensors"])
    for info in other.values():
        info["calibration"] = "percentile 20.0"
    save(tmp_path / "bad", tensors, {**metadata, "sp24.tensors": json.dumps(other)})
    failure = verify_file(tmp_path / "bad", model, device="cpu").failure
    assert failure is not None
    assert failure.startswith("a.weight: agreement: scale at ")


@every_kind
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("smoothed", [False, True])
def test_the_bytes_do_not_depend_on_workers_or_bands(
    model: Path, tmp_path: Path, kind: str, name: str, smoothed: bool, monkeypatch: Any
) -> None:
    how = smooth(model, rule=RULES[name]) if smoothed else Calibration(RULES[name])
    files = set()
    for band, workers, chunk in ((1 << 20, 1, 1 << 15), (1, 1, 64), (1, 3, 1 << 20), (5000, 2, 1)):
        monkeypatch.setattr(stream, "BAND_ELEMENTS", band)
        monkeypatch.setattr(calibration, "_CHUNK", chunk)
        output = tmp_path / f"{band}-{workers}"
        quantize(model, output, kind, how, workers=workers)
        files.add(output.read_bytes())
    assert len(files) == 1


@every_kind
@pytest.mark.parametrize(
    "optype", [t for t in OPERAND_TYPES.values() if t.scaled], ids=lambda t: t.name
)
def test_every_scaled_type(model: Path, tmp_path: Path, kind: str, optype: OperandType) -> None:
    found = {}
    for name, rule in RULES.items():
        how = smooth(model, rule=rule)
        done = quantize(model, tmp_path / f"{name}.out", kind, how, optype=optype)
        found[name] = [tensor.snr_db for tensor in done.tensors]
        report = verify_file(
            tmp_path / f"{name}.out", model, activations=beside(model, "amax"), device="cpu"
        )
        assert report.passed, report.failure
    assert all(m >= p for m, p in zip(found["mse"], found["amax"], strict=True))
    if kind == "tensor":
        done = quantize(model, tmp_path / "delayed", kind, delayed(model), optype=optype)
        assert all(tensor.clipped for tensor in done.tensors)
        assert verify_file(tmp_path / "delayed", model, device="cpu").passed


@pytest.mark.parametrize("pick", ["max", "most_recent"])
def test_delayed_scaling(model: Path, tmp_path: Path, pick: Any) -> None:
    packed = tmp_path / "packed"
    report = quantize(model, packed, "tensor", delayed(model, pick))
    assert report.calibration == f"history {pick}"
    largest = np.float32(0.05 if pick == "max" else 0.02)
    before, tensors = load(model)[0], load(packed)[0]
    for tensor in report.tensors:
        scale = tensors[f"{tensor.name}_scale"]
        assert scale.tolist() == [largest / np.float32(448)]
        pruned = naive_prune(before[tensor.name])
        codes, _, _ = naive_pack(pruned, scale)
        assert tensors[f"{tensor.name}_values"].tobytes() == codes.tobytes()
        beyond = np.abs(pruned.astype(np.float32)) / scale
        # 464, the middle of 448 and what would come next, still rounds to 448.
        assert tensor.clipped == np.count_nonzero(beyond > 464) > 0

    report = verify_file(packed, model, device="cpu")
    assert report.passed, report.failure
    assert {v.agreement.note for v in report.tensors if v.agreement} == {
        "scales of an amax history taken as stored"
    }
    proved = verify_file(packed, model, history=beside(model, "history"), device="cpu")
    assert proved.passed
    assert {v.agreement.note for v in proved.tensors if v.agreement} == {""}
    other = {
        name: array * np.float32(2) for name, array in load(beside(model, "history"))[0].items()
    }
    wrong = verify_file(packed, model, history=save(tmp_path / "other", other), device="cpu")
    assert wrong.failure is not None
    assert wrong.failure.startswith("a.weight: agreement: scale at [0] is ")


def naive_smooth(weight: Array, amax: Array, alpha: float) -> tuple[Array, Array]:
    """(factors [K], smoothed float32 weight) of a pruned weight."""
    of_columns = np.abs(weight.astype(np.float64)).max(axis=0)
    by = factors(amax.astype(np.float64), of_columns, alpha)
    return by, (weight.astype(np.float32) * by).astype(np.float32)


@every_kind
@pytest.mark.parametrize("name", ["e4m3", "s8"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_is_beyond_float32_saturates_and_is_proved(
    tmp_path: Path, kind: str, name: str, rule: ScaleRule
) -> None:
    weight = normal(1, (64, 64)).astype(np.float64) * 1e200
    source = save(tmp_path / "in", {"a.weight": weight})
    quantize(source, tmp_path / "packed", kind, Calibration(rule), optype=OPERAND_TYPES[name])
    report = verify_file(tmp_path / "packed", source, device="cpu")
    assert report.passed, report.failure


@every_kind
@pytest.mark.parametrize("permute", [False, True])
def test_kept_energy_is_that_of_the_weight_before_smoothing(
    model: Path, kind: str, permute: bool
) -> None:
    choice = Choice(permute=permute)
    plain = prune_file(model, None, choice=choice)
    report = quantize(model, None, kind, smooth(model), choice=choice)
    assert [t.kept_energy for t in report.tensors] == pytest.approx(
        [t.kept_energy for t in plain.tensors]
    )
    for layer in summarize(report).layers:
        assert layer.kept_energy is not None
        # Rounding adds a little to what pruning takes.
        assert layer.error == pytest.approx(math.sqrt(1 - layer.kept_energy), rel=0.05)


@every_kind
@pytest.mark.parametrize("alpha", [0.5, 0.85])
@pytest.mark.parametrize("prune", [True, False])
def test_smoothing(
    model: Path, tmp_path: Path, kind: str, alpha: float, prune: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    source, packed = model, tmp_path / "packed"
    if not prune:
        source = tmp_path / "pruned"
        prune_file(model, source)
    report = quantize(source, packed, kind, smooth(model, alpha), prune=prune)
    assert report.smooth == alpha
    assert {p.smooth for p in inspect_file(packed).packed} == {alpha}
    before, amax, (tensors, metadata) = load(model)[0], load(beside(model, "amax"))[0], load(packed)
    unpack_file(packed, tmp_path / "dense", dtype="f32")
    dense = load(tmp_path / "dense")[0]
    assert set(dense) == set(before)
    for name in SHAPES:
        assert json.loads(metadata["sp24.tensors"])[name]["smooth"] == alpha
        pruned = naive_prune(before[name])
        by, smoothed = naive_smooth(pruned, amax[name], alpha)
        assert tensors[f"{name}_smooth"].dtype == np.float32
        assert tensors[f"{name}_smooth"].tolist() == by.tolist()
        # Without a weight, or without an activation, nothing moves.
        assert by[5] == by[8] == 1
        spec = SPECS[kind]
        want = make_scales(amax_of(smoothed, spec), 448.0, spec)
        assert tensors[f"{name}_scale"].tobytes() == want.tobytes()
        scale = want.astype(np.float32)
        if spec.block is not None:
            (m, k), (bm, bk) = SHAPES[name], spec.block
            scale = scale[np.arange(m) // bm][:, np.arange(k) // bk]
        codes, meta, back = naive_pack(smoothed, scale)
        assert tensors[f"{name}_values"].tobytes() == codes.tobytes()
        assert tensors[f"{name}_meta"].tobytes() == meta.tobytes()
        assert dense[name].tobytes() == (back / by.astype(np.float64)).astype(np.float32).tobytes()
        assert np.array_equal(dense[name] != 0, back != 0)
    for against in (model, source):
        report = verify_file(packed, against, device="cpu")
        assert report.passed, report.failure
        assert all("factors taken as stored" in v.agreement.note for v in report.tensors)
        proved = verify_file(packed, against, activations=beside(model, "amax"), device="cpu")
        assert proved.passed, proved.failure
        assert not any("factors" in v.agreement.note for v in proved.tensors)


def test_smoothing_makes_the_layer_better(tmp_path: Path) -> None:
    """Where activations have outliers and eight bits would spend their range on them."""
    x = normal(1, (256, 64), "F32", 1.0)
    x[:, ::16] *= 200
    w = naive_prune(normal(2, (128, 64)))
    source = save(tmp_path / "in", {"a.weight": w})
    save(tmp_path / "amax", {"a.weight": np.abs(x).max(axis=0)})
    want = x.astype(np.float64) @ w.astype(np.float64).T

    def error(output: Path, how: Calibration) -> float:
        quantize_file(source, output, optype=E4M3, spec=SPECS["tensor"], calibration=how)
        matrix = sp24cli.load(output, "a.weight")
        # What rounding the activations costs, to 127 levels up to their amax, after the division.
        moved = x if matrix.smooth is None else x / matrix.smooth
        step = np.abs(moved).max() / 127
        lost = (np.rint(moved / step) * step - moved) @ matrix.dequantize(np.float64).T
        return float(np.linalg.norm(lost) / np.linalg.norm(want))

    plain = error(tmp_path / "plain", Calibration())
    assert error(tmp_path / "smooth", Calibration(activations=tmp_path / "amax")) < plain / 2


def test_damaged_factors_are_found(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantize(model, packed, "vector", smooth(model))
    tensors, metadata = load(packed)
    for value, words in (
        (np.nan, "structure: smooth nan at [7] is not positive, normal and finite"),
        (0.0, "structure: smooth 0.0 at [7] is not positive, normal and finite"),
        (-1.0, "structure: smooth -1.0 at [7] is not positive, normal and finite"),
        (3.0, "agreement: "),
    ):
        changed = tensors["a.weight_smooth"].copy()
        changed[7] = value
        bad = save(tmp_path / "bad", {**tensors, "a.weight_smooth": changed}, metadata)
        failure = verify_file(bad, model, device="cpu").failure
        assert failure is not None
        assert failure.startswith(f"a.weight: {words}")
        if value != 3:
            with pytest.raises(BadInputError, match=r"'a.weight': smooth .* at \[7\] is not"):
                unpack_file(bad, tmp_path / "no")
    proved = verify_file(bad, model, activations=beside(model, "amax"), device="cpu")
    assert proved.failure is not None
    assert proved.failure.startswith("a.weight: agreement: smooth at [7] is 3.0, recomputed ")
    del tensors["a.weight_smooth"]
    with pytest.raises(BadInputError, match=r"its part 'a\.weight_smooth' is missing"):
        verify_file(save(tmp_path / "bad", tensors, metadata))


@pytest.mark.parametrize("field", [{"smooth": "0.5"}, {"smooth": None}, {"smooth": 2.0},
    {"smooth": True}, {"calibration": 3}, {"calibration": "magic"}])  # fmt: skip
def test_what_a_file_says_is_checked(model: Path, tmp_path: Path, field: dict[str, Any]) -> None:
    quantize(model, tmp_path / "packed", "vector", smooth(model))
    tensors, metadata = load(tmp_path / "packed")
    infos = json.loads(metadata["sp24.tensors"])
    infos["b.weight"] |= field
    bad = save(tmp_path / "bad", tensors, {**metadata, "sp24.tensors": json.dumps(infos)})
    with pytest.raises(BadInputError, match=r"bad: tensor 'b\.weight': "):
        inspect_file(bad)


@every_kind
def test_with_wanda_and_a_permutation(model: Path, tmp_path: Path, kind: str) -> None:
    choice = Choice("wanda", calibration=beside(model, "amax"), permute=True)
    packed = tmp_path / "packed"
    for rule in RULES.values():
        how = smooth(model, 0.4, rule)
        quantize(model, packed, kind, how, choice=choice, overwrite=True, layout="sm90")
        report = verify_file(packed, model, activations=beside(model, "amax"), device="cpu")
        assert report.passed, report.failure
    tensors = load(packed)[0]
    assert {"a.weight_perm", "a.weight_smooth", "a.weight_scale", "a.weight_blocks"} <= set(tensors)
    # Factors are by channel of the original, wherever its column went.
    matrix = sp24cli.load(packed, "a.weight")
    assert not np.array_equal(tensors["a.weight_perm"], np.arange(84))
    before, dense = load(model)[0]["a.weight"], sp24cli.unpack(matrix)
    kept = dense != 0
    amax = load(beside(model, "amax"))[0]["a.weight"]
    by, _ = naive_smooth(np.where(kept, before, 0), amax, 0.4)
    assert tensors["a.weight_smooth"].tolist() == by.tolist()
    assert np.abs(dense[kept] / before[kept] - 1).max() < 2.0**-3
    stored = matrix.original_order(matrix.dequantize())
    ratio = stored[kept] / before[kept]
    by = np.broadcast_to(matrix.smooth, dense.shape)[kept]
    assert np.abs(ratio / by - 1).max() < 2.0**-3


def test_codes_keep_the_factors_beside_them(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "packed", "vector", smooth(model))
    unpack_file(tmp_path / "packed", tmp_path / "codes", codes=True)
    packed, codes = load(tmp_path / "packed")[0], load(tmp_path / "codes")[0]
    for name in SHAPES:
        assert codes[f"{name}_smooth"].tobytes() == packed[f"{name}_smooth"].tobytes()
        assert codes[f"{name}_scale"].tobytes() == packed[f"{name}_scale"].tobytes()


@pytest.mark.parametrize("format", ["compressed-tensors-fp8", "sparse-24-bitmask"])
def test_other_formats_refuse_factors(model: Path, tmp_path: Path, format: str) -> None:
    quantize(model, tmp_path / "packed", "vector", smooth(model))
    words = f"packed: tensor 'a.weight': has its columns smoothed, which {format} cannot say"
    with pytest.raises(BadInputError, match=words):
        convert_file(tmp_path / "packed", tmp_path / "out", format=format)
    convert_file(tmp_path / "packed", tmp_path / "sm90", format="sp24", layout="sm90")
    convert_file(tmp_path / "sm90", tmp_path / "row", format="sp24")
    assert (tmp_path / "row").read_bytes() == (tmp_path / "packed").read_bytes()


def test_calibrated_scales_go_where_others_go(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "packed", "vector", Calibration(RULES["mse"]))
    for format in ("sparse-24-bitmask", "sp24"):
        convert_file(tmp_path / "packed", tmp_path / format, format=format)
    convert_file(tmp_path / "sparse-24-bitmask", tmp_path / "back", format="sp24")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "packed").read_bytes()


@pytest.mark.parametrize("type_name", ["e4m3", "e5m2", "s8"])
@pytest.mark.parametrize("kind", ["vector", "mx"])
def test_unpacking_gives_the_original_back(
    model: Path, tmp_path: Path, type_name: str, kind: str
) -> None:
    """Each kept weight to within half a step of its code, divided by its factor."""
    optype = OPERAND_TYPES[type_name]
    packed = tmp_path / "packed"
    quantize(model, packed, kind, smooth(model), optype=optype)
    unpack_file(packed, tmp_path / "dense", dtype="f32")
    before, dense = load(model)[0], load(tmp_path / "dense")[0]
    info = None if type_name == "s8" else ml_dtypes.finfo(optype.dtype)
    share = 0.0 if info is None else float(info.eps) / 2
    half = 0.5 if info is None else float(info.smallest_subnormal) / 2
    for name, (rows, columns) in SHAPES.items():
        matrix = sp24cli.load(packed, name)
        scale = scale_values(matrix.scale).astype(np.float64)
        if kind == "mx":
            scale = np.repeat(scale, 32, axis=1)[:, :columns]
        want = naive_prune(before[name]).astype(np.float64)
        # Besides the code's rounding: float32, of the smoothed weight, its quotient and the result.
        step = half * np.broadcast_to(scale, (rows, columns)) / matrix.smooth
        allowed = np.maximum(share * np.abs(want), step) * (1 + 2.0**-20) + 2.0**-22 * np.abs(want)
        off = np.abs(dense[name].astype(np.float64) - want)
        assert (off <= allowed).all()
        assert (off / np.where(allowed > 0, allowed, 1)).max() > 0.8


def test_a_product_asks_for_divided_activations(model: Path, tmp_path: Path) -> None:
    """What is uploaded carries its factors, and no product is made of who knows what."""
    quantize(model, tmp_path / "packed", "vector", smooth(model))
    packed = sp24cli.load(tmp_path / "packed", "a.weight")
    device = ConvertDevice()
    weight = SparseWeight.upload(device, packed.to_layout("sm90"))
    assert weight.smooth is not None
    assert (
        weight.smooth.numpy().tobytes() == load(tmp_path / "packed")[0]["a.weight_smooth"].tobytes()
    )
    words = r"columns are smoothed: x must be divided .* smooth=weight\.smooth.* smoothed=True"
    with pytest.raises(Sp24Error, match=words):
        sp24cli.matmul(weight, np.zeros((4, 84)))
    # Said to be divided, it is asked of as any other.
    with pytest.raises(Sp24Error, match="x has neither __dlpack__ nor __cuda_array"):
        sp24cli.matmul(weight, SimpleNamespace(), smoothed=True)
    bad = packed.smooth.copy()
    bad[7] = 0
    with pytest.raises(BadInputError, match=r"smooth 0\.0 at \[7\] is not positive"):
        SparseWeight.upload(device, replace(packed.to_layout("sm90"), smooth=bad))
    quantize(model, tmp_path / "plain", "vector", Calibration())
    plain = sp24cli.load(tmp_path / "plain", "a.weight").to_layout("sm90")
    weight = SparseWeight.upload(device, plain)
    assert weight.smooth is None
    for smoothed in (False, True):
        with pytest.raises(Sp24Error, match="x has neither __dlpack__ nor __cuda_array"):
            sp24cli.matmul(weight, SimpleNamespace(), smoothed=smoothed)


@pytest.mark.parametrize("type_name", ["f16", "bf16", "tf32"])
def test_types_without_a_scale_take_no_factors(type_name: str) -> None:
    info = PackInfo((8, 8), "F32", type_name, ScaleSpec("none"), "given", "row", "satfinite")
    with pytest.raises(BadInputError, match=f"'{type_name}' takes no calibration or smoothing"):
        replace(info, smooth=0.5)


def broken(model: Path, which: str, change: Any) -> Path:
    """The side file ``which`` with ``b.weight`` changed, or gone for None."""
    tensors = load(beside(model, which))[0]
    tensors["b.weight"] = change(tensors["b.weight"])
    if tensors["b.weight"] is None:
        del tensors["b.weight"]
    return save(beside(model, f"bad-{which}"), tensors)


def put(value: float) -> Any:
    def change(array: Array) -> Array:
        array = array.copy()
        array[2] = value
        return array

    return change


@pytest.mark.parametrize(
    ("which", "change", "words"),
    [
        ("amax", lambda a: None, "has no tensor 'b.weight'"),
        ("amax", lambda a: a.astype(np.int32), "I32 are no amax (F64, F32, F16 or BF16)"),
        ("amax", lambda a: a[:-1], "of a weight [70, 44] must be [44], not [43]"),
        ("amax", lambda a: a[None], "of a weight [70, 44] must be [44], not [1, 44]"),
        ("amax", put(np.nan), "amax of channel 2 is nan"),
        ("amax", put(np.inf), "amax of channel 2 is inf"),
        ("amax", put(-1), "amax of channel 2 is -1.0"),
        ("history", lambda a: None, "has no tensor 'b.weight'"),
        ("history", lambda a: a.astype(np.int32), "I32 is no history (F64, F32, F16 or BF16)"),
        ("history", lambda a: a[:0], "a history must be [H], H > 0, not [0]"),
        ("history", lambda a: a[None], "a history must be [H], H > 0, not [1, 4]"),
        ("history", put(np.nan), "amax 2 of the history is nan"),
        ("history", put(np.inf), "amax 2 of the history is inf"),
        ("history", put(-1), "amax 2 of the history is -1.0"),
        ("history", lambda a: a * 0, "its max amax is 0, which gives no scale"),
    ],
)
def test_side_files_are_checked_before_anything_is_written(
    model: Path, which: str, change: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = broken(model, which, change)
    option = {"amax": "--smooth", "history": "--amax-history"}[which]
    output = beside(model, "out")
    arguments = ["quantize", str(model), "-o", str(output), "--scale", "tensor", "--prune"]
    assert run([*arguments, option, str(bad)]) == 4
    error = capsys.readouterr().err
    assert error.startswith(f"sp24: error: {bad}: ")
    assert error.count("\n") == 1
    assert words in error
    assert "'b.weight'" in error
    assert not output.exists()
    # A file that is there but is none, and one that is not there.
    beside(model, "text").write_text("no tensors")
    for name in ("text", "missing"):
        assert run([*arguments, option, str(beside(model, name))]) == 4
        assert f"sp24: error: {beside(model, name)}: " in capsys.readouterr().err


@pytest.mark.parametrize("which", ["norms", "amax", "history"])
def test_what_calibrates_is_no_output(model: Path, tmp_path: Path, which: str) -> None:
    """Neither a file, nor in a checkpoint that is to be written."""
    folder = write_checkpoint(tmp_path / "model")
    side = tmp_path / "side" / shard(1)
    side.parent.mkdir()
    taken = quantize_checkpoint(folder, None, prune=True, optype=E4M3, spec=SPECS["tensor"])
    names = [t.name for t in taken.report.tensors]
    both = load(beside(model, "amax" if which == "norms" else which))[0]
    save(side, both | {name: np.ones(64, np.float32) for name in names})
    choice, how = Choice(), Calibration()
    if which == "norms":
        choice = Choice("wanda", calibration=side)
    elif which == "amax":
        how = Calibration(activations=side)
    else:
        how = Calibration(ScaleRule("history", pick="max"), side)
    options: dict[str, Any] = {"choice": choice, "calibration": how, "overwrite": True}
    options |= {"prune": True, "optype": E4M3, "spec": SPECS["tensor"]}
    before = side.read_bytes()
    with pytest.raises(Sp24Error, match="is the input"):
        quantize_file(model, side, **options)
    with pytest.raises(Sp24Error, match="side: holds the input"):
        quantize_checkpoint(folder, side.parent, **options)
    if which == "norms":
        with pytest.raises(Sp24Error, match="is the input"):
            prune_file(model, side, choice=choice, overwrite=True)
        with pytest.raises(Sp24Error, match="side: holds the input"):
            prune_checkpoint(folder, side.parent, choice=choice, overwrite=True)
    assert side.read_bytes() == before
    assert list(side.parent.iterdir()) == [side]


def test_the_most_recent_amax_must_not_be_zero(model: Path, tmp_path: Path) -> None:
    """As Transformer Engine leaves the newest after a step."""
    bad = broken(model, "history", lambda a: np.roll(a, 2))
    how = Calibration(ScaleRule("history", pick="most_recent"), bad)
    with pytest.raises(BadInputError, match=r"'b\.weight': its most_recent amax is 0"):
        quantize(model, tmp_path / "out", "tensor", how)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scale", "tensor", "--calibrate", "magic"], "'magic' is not one of"),
        (["--scale", "tensor", "--percentile", "99"], "--calibrate percentile only"),
        (["--scale", "tensor", "--calibrate", "mse", "--percentile", "9"], "percentile only"),
        (["--scale", "tensor", "--calibrate", "percentile", "--percentile", "0"], "0.0 is not"),
        (["--scale", "tensor", "--calibrate", "percentile", "--percentile", "101"], "101.0 is not"),
        (["--scale", "tensor", "--calibrate", "percentile", "--percentile", "nan"], "nan is not"),
        (
            ["--scale", "tensor", "--calibrate", "percentile", "--overflow", "nan"],
            "--overflow satfinite only",
        ),
        (["--scale", "vector", "--amax-history", "h"], "--scale tensor only"),
        (["--scale", "tensor", "--amax-history", "h", "--calibrate", "mse"], "not go together"),
        (["--scale", "tensor", "--amax-compute", "max"], "--amax-history only"),
        (["--scale", "tensor", "--alpha", "0.5"], "--smooth only"),
        (["--scale", "tensor", "--smooth", "a", "--alpha", "1.5"], "--alpha: alpha 1.5"),
        (["--scale", "tensor", "--smooth", "a", "--alpha", "nan"], "--alpha: alpha nan"),
        (["--type", "f16", "--calibrate", "mse"], "types that have a scale"),
        (["--type", "bf16", "--smooth", "a"], "types that have a scale"),
        (["--scale", "mx", "--block", "1x32"], "--block goes with --scale block only"),
    ],
)
def test_options_that_do_not_go_together(
    model: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", str(model), "-o", str(beside(model, "o")), *arguments, "--prune"]) == 2
    assert words in capsys.readouterr().err
    assert not beside(model, "o").exists()


def test_from_the_command_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = beside(model, "out")
    command = ["quantize", str(model), "-o", str(output), "--prune", "--force", "--scale"]
    assert run([*command, "tensor", "--calibrate", "percentile"]) == 0
    assert "e4m3, scale by tensor (percentile 99.9), layout" in capsys.readouterr().out
    assert run([*command, "mx", "--calibrate", "mse"]) == 0
    assert "e4m3, scale by mx (mse), layout" in capsys.readouterr().out
    history = str(beside(model, "history"))
    assert (
        run([*command, "tensor", "--amax-history", history, "--amax-compute", "most_recent"]) == 0
    )
    assert "e4m3, scale by tensor (history most_recent), layout" in capsys.readouterr().out
    check = ["verify", str(output), "--device", "cpu"]
    assert run([*check, "--against", str(model), "--amax-history", history]) == 0
    amax = str(beside(model, "amax"))
    assert run([*command, "vector", "--smooth", amax, "--alpha", "0.7", "--json"]) == 0
    capsys.readouterr()
    assert run([*check, "--against", str(model), "--smooth", amax]) == 0
    assert "taken as stored" not in capsys.readouterr().out
    assert run([*check, "--against", str(model)]) == 0
    assert "smooth factors taken as stored" in capsys.readouterr().out
    assert run([*check, "--smooth", amax]) == 2
    capsys.readouterr()
    assert run([*check, "--against", str(model), "--amax-history", history]) == 2
    assert capsys.readouterr().err == (
        f"sp24: error: {history}: proves nothing, no scale in {output} is from a history\n"
    )
    assert run([*command, "vector", "--smooth", amax, "--report", str(beside(model, "r.md"))]) == 0
    assert run([*command, "vector"]) == 0
    capsys.readouterr()
    assert run([*check, "--against", str(model), "--smooth", amax]) == 2
    assert capsys.readouterr().err == (
        f"sp24: error: {amax}: proves nothing, no column in {output} is smoothed\n"
    )
    text = beside(model, "r.md").read_text()
    assert "smoothed, alpha" in text
    assert "calibration" in text


def test_progress_reaches_the_end_and_no_further(model: Path) -> None:
    for kind in SPECS:
        for how in [Calibration(r) for r in RULES.values()] + [smooth(model, rule=RULES["mse"])]:
            seen: list[tuple[int, int]] = []
            quantize(model, None, kind, how, progress=lambda d, t, seen=seen: seen.append((d, t)))
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)
            assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("name", ["percentile", "mse", "smooth"])
def test_nan_and_dense_groups_are_named(model: Path, tmp_path: Path, name: str) -> None:
    how = smooth(model) if name == "smooth" else Calibration(RULES[name])
    tensors = load(model)[0]
    for value, words in ((np.nan, "nan at row 33, column 6"), (np.inf, "inf at row 33, column 6")):
        weight = tensors["a.weight"].copy()
        weight[33, 6] = value
        bad = save(tmp_path / "bad", {**tensors, "a.weight": weight})
        for kind in SPECS:
            with pytest.raises(BadInputError, match=rf"'a\.weight': {words}"):
                quantize(bad, tmp_path / "out", kind, how)
    for kind in SPECS:
        with pytest.raises(BadInputError, match=r"'a\.weight': more than two .* row 0, group 0 "):
            quantize(model, tmp_path / "out", kind, how, prune=False)


def test_factors_beyond_float32_are_named(tmp_path: Path) -> None:
    weight = naive_prune(normal(1, (8, 8)))
    weight[3] = 0, 0, 3e38, 0, 0, 0, 0, 0
    source = save(tmp_path / "in", {"a.weight": weight})
    amax = save(tmp_path / "amax", {"a.weight": np.full(8, 3e38, np.float32)})
    how = Calibration(activations=amax, alpha=1.0)
    with pytest.raises(BadInputError, match="smoothing takes row 3, column 2 beyond float32"):
        quantize_file(source, None, optype=E4M3, spec=SPECS["vector"], calibration=how)


def test_experts_and_shards(tmp_path: Path) -> None:
    """A checkpoint with a stack of experts, its side files by their names; cut off and resumed."""
    folder = write_checkpoint(tmp_path / "model")
    amax = {}
    for tensors in small_model():
        for name, array in tensors.items():
            if array.ndim == 3:
                amax |= {f"{name}.{e}": np.ones(array.shape[2], np.float32) * 3 for e in range(3)}
            elif array.ndim == 2:
                amax[name] = np.ones(array.shape[1], np.float32)
    side = save(tmp_path / "amax", amax)
    options: dict[str, Any] = {
        "optype": E4M3,
        "spec": SPECS["mx"],
        "prune": True,
        "calibration": Calibration(RULES["mse"], activations=side),
        "selection": Selection(experts=True),
    }
    done = quantize_checkpoint(folder, tmp_path / "out", **options)
    assert any(t.name.endswith("gate_up_proj.2") for t in done.report.tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["calibration"], config["smooth"]) == ("mse", 0.5)
    report = verify_file(tmp_path / "out", folder, activations=side, device="cpu")
    assert report.passed, report.failure
