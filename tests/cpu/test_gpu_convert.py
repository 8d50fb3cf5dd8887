"""What drives the conversion kernels: batches, bands, lanes, faults; with kernels made of NumPy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.calibration import ScaleRule
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.gpu import convert
from sp24cli.kernels import manifest
from sp24cli.ops import prune_checkpoint, quantize_checkpoint
from sp24cli.ops import stream as bands
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.ops.prune import prune_file
from sp24cli.ops.quantize import quantize_file
from sp24cli.ops.report import scale_text
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.pruning.pattern import Pattern
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from tests.cpu.checkpoints import contents, write_checkpoint
from tests.cpu.convertdevice import ConvertDevice, made_manifest, refusal_of_both
from tests.cpu.modelfile import normal, save

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
SHAPES = {"one.weight": (1, 4), "many.weight": (300, 52), "wide.weight": (70, 1284)}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> convert.Converter:
    """An engine whose bands and batches are so small that every tensor has several."""
    made = made_manifest()
    monkeypatch.setattr(manifest, "load", lambda: made)
    monkeypatch.setattr(bands, "BAND_ELEMENTS", 1 << 12)
    monkeypatch.setattr(convert, "BATCH_ELEMENTS", 3 << 12)
    return convert.Converter(ConvertDevice())  # type: ignore[arg-type]


@pytest.fixture(params=DTYPES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensors = {
        n: normal(i, s).astype(DTYPES[request.param]) for i, (n, s) in enumerate(SHAPES.items())
    }
    return save(tmp_path / "model.safetensors", {**tensors, "b.bias": np.ones(3, np.float32)})


def by_wanda(model: Path, **options: Any) -> Choice:
    """A choice with norms, some of them zero, for every matrix of ``model``."""
    with SafetensorsFile(model) as file:
        norms = {
            e.name: np.maximum(normal(e.shape[1], e.shape[1:]), 0)
            for e in file.header.entries
            if len(e.shape) == 2
        }
    return Choice("wanda", calibration=save(model.with_name("norms"), norms), **options)


def same_report(one: Any, other: Any) -> None:
    mine, theirs = asdict(one), asdict(other)
    for name in ("output", "device"):
        assert mine.pop(name) != theirs.pop(name)
    assert mine == theirs


@pytest.mark.parametrize("workers", [1, 3])
def test_prunes_to_the_bytes_and_report_of_the_cpu(
    engine: convert.Converter, model: Path, tmp_path: Path, workers: int
) -> None:
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(model, there, engine=engine, workers=workers)
    by_cpu = prune_file(model, here, workers=1)
    assert there.read_bytes() == here.read_bytes()
    same_report(by_gpu, by_cpu)
    assert by_gpu.device == "Simulated H200" and by_gpu.on_cpu == ()
    assert len(engine.device.launches) > len(SHAPES)  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [1, 3])
def test_prunes_by_wanda_to_the_bytes_and_report_of_the_cpu(
    engine: convert.Converter, model: Path, tmp_path: Path, workers: int
) -> None:
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    choice = by_wanda(model)
    by_gpu = prune_file(model, there, choice=choice, engine=engine, workers=workers)
    by_cpu = prune_file(model, here, choice=choice, workers=1)
    assert there.read_bytes() == here.read_bytes()
    same_report(by_gpu, by_cpu)
    assert by_gpu.on_cpu == ()
    assert all(t.weighted_error for t in by_gpu.tensors if t.shape[0] > 1)
    prune_file(model, here, overwrite=True)
    assert there.read_bytes() != here.read_bytes()


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
@pytest.mark.parametrize("pattern", [(1, 2), (3, 4), (2, 5), (4, 8), (13, 32)])
def test_prunes_to_other_patterns(
    engine: convert.Converter, tmp_path: Path, method: str, pattern: tuple[int, int]
) -> None:
    """But what is not read by four, which the CPU does and which is said."""
    wanted = Pattern(*pattern)
    source = save(
        tmp_path / "model",
        {
            "one.weight": normal(1, (70, 8 * wanted.group), "BF16"),
            "two.weight": normal(2, (40, 36 * wanted.group), "F32"),
            "odd.weight": normal(3, (40, 7 * wanted.group), "F32"),
        },
    )
    choice = by_wanda(source, pattern=wanted) if method == "wanda" else Choice(pattern=wanted)
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = prune_file(source, there, choice=choice, engine=engine, workers=2)
    prune_file(source, here, choice=choice)
    assert there.read_bytes() == here.read_bytes()
    assert by_gpu.on_cpu == (("odd.weight",) if wanted.group % 4 else ())
    assert f"prune_{method}_nm_bf16" in engine.device.launches  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("prune", ["magnitude", "wanda", "given"])
@pytest.mark.parametrize(
    ("type_name", "spec"),
    [
        ("e4m3", ScaleSpec("tensor")),
        ("e4m3", ScaleSpec("vector")),
        ("e4m3", ScaleSpec("block", (96, 20))),
        ("e4m3", ScaleSpec("block", (1 << 40, 1 << 40))),
        ("e4m3", ScaleSpec.parse("mx")),
        ("e5m2", ScaleSpec("tensor")),
        ("s8", ScaleSpec("vector")),
        ("f16", ScaleSpec("none")),
        ("bf16", ScaleSpec("none")),
    ],
    ids=lambda v: v if isinstance(v, str) else scale_text(v),
)
def test_packs_to_the_bytes_and_report_of_the_cpu(
    engine: convert.Converter,
    model: Path,
    tmp_path: Path,
    type_name: str,
    spec: ScaleSpec,
    prune: str,
    layout: Any,
) -> None:
    source = model
    if prune == "given":
        source = tmp_path / "pruned"
        prune_file(model, source)
    options: dict[str, Any] = {
        "optype": OPERAND_TYPES[type_name],
        "spec": spec,
        "layout": layout,
        "prune": prune != "given",
        "choice": by_wanda(model) if prune == "wanda" else None,
        "histograms": True,
    }
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    by_gpu = quantize_file(source, there, engine=engine, workers=2, **options)
    by_cpu = quantize_file(source, here, workers=1, **options)
    assert there.read_bytes() == here.read_bytes()
    same_report(by_gpu, by_cpu)
    assert by_gpu.on_cpu == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 150, 299])
def test_a_value_that_is_not_finite_is_named_alike(
    engine: convert.Converter, tmp_path: Path, bad: float, row: int
) -> None:
    weight = normal(1, (300, 52)).astype(np.float16)
    weight[row, 17], weight[row, 18] = bad, np.nan
    source = save(tmp_path / "model.safetensors", {"a.weight": weight})
    options: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector")}
    wanda = by_wanda(source)
    for run in (
        lambda **how: prune_file(source, tmp_path / "out", **how),
        lambda **how: prune_file(source, tmp_path / "out", choice=wanda, **how),
        lambda **how: quantize_file(source, tmp_path / "out", prune=True, **options, **how),
        lambda **how: quantize_file(
            source, tmp_path / "out", prune=True, choice=wanda, **options, **how
        ),
    ):
        assert f"at row {row}, column 1" in refusal_of_both(run, engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("group", [[np.nan, 1, 1, 1], [np.inf, np.nan, np.nan, 1]])
@pytest.mark.parametrize("spec", [ScaleSpec("tensor"), ScaleSpec("vector")], ids=scale_text)
def test_what_wanda_or_magnitude_would_drop_is_named_alike(
    engine: convert.Converter, tmp_path: Path, group: list[float], spec: ScaleSpec
) -> None:
    weight = normal(1, (300, 52)).astype(np.float16)
    weight[201, 16:20] = group
    source = save(tmp_path / "model.safetensors", {"a.weight": weight})
    for how in ({}, {"engine": engine}):
        with pytest.raises(BadInputError, match=r"(nan|inf) at row 201, column 16"):
            quantize_file(
                source,
                tmp_path / "out",
                optype=OPERAND_TYPES["e4m3"],
                spec=spec,
                prune=True,
                choice=by_wanda(source),
                **how,  # type: ignore[arg-type]
            )


def test_a_crowded_group_is_named_alike(engine: convert.Converter, tmp_path: Path) -> None:
    weight = prune_24(normal(1, (300, 52)).astype(np.float16))
    weight[201, 4:8] = 1
    source = save(tmp_path / "model.safetensors", {"a.weight": weight})
    for how in ({}, {"engine": engine}):
        with pytest.raises(BadInputError, match="at row 201, group 1 "):
            quantize_file(
                source,
                tmp_path / "out",
                optype=OPERAND_TYPES["f16"],
                spec=ScaleSpec("none"),
                **how,  # type: ignore[arg-type]
            )


def test_what_it_has_no_kernel_for_is_left_to_the_cpu_and_said(
    engine: convert.Converter, tmp_path: Path
) -> None:
    weights = {"a.weight": normal(1, (64, 52)), "b.weight": normal(2, (64, 52)).astype(np.float16)}
    weights["a.weight"] = weights["a.weight"].astype(np.float64)
    source = save(tmp_path / "model.safetensors", weights)
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    report = prune_file(source, there, engine=engine)
    prune_file(source, here)
    assert report.on_cpu == ("a.weight",)
    assert there.read_bytes() == here.read_bytes()
    permuted = prune_file(source, there, engine=engine, choice=Choice(permute=True), overwrite=True)
    assert permuted.on_cpu == ("a.weight", "b.weight")
    packed = quantize_file(
        there,
        here,
        optype=OPERAND_TYPES["e4m3"],
        spec=ScaleSpec("vector"),
        engine=engine,
        overwrite=True,
    )
    assert packed.on_cpu == ("a.weight", "b.weight")


@pytest.mark.parametrize(
    ("choose", "rule"),
    [
        (lambda model: Choice(), ScaleRule("percentile", percentile=99.0)),
        (by_wanda, ScaleRule("mse")),
        (lambda model: by_wanda(model, permute=True), ScaleRule("amax")),
    ],
    ids=["percentile", "mse", "permuted"],
)
def test_what_it_does_not_choose_is_left_to_the_cpu(
    engine: convert.Converter, tmp_path: Path, choose: Any, rule: ScaleRule
) -> None:
    source = save(tmp_path / "model", {"a.weight": normal(1, (64, 64), "BF16")})
    options: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "prune": True}
    options |= {"spec": ScaleSpec("vector"), "choice": choose(source)}
    options["calibration"] = Calibration(rule)
    there, here = tmp_path / "gpu", tmp_path / "cpu"
    report = quantize_file(source, there, engine=engine, **options)
    quantize_file(source, here, **options)
    assert report.on_cpu == ("a.weight",)
    assert there.read_bytes() == here.read_bytes()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    write_checkpoint(folder)
    return folder


def test_a_run_begun_on_the_cpu_is_resumed_on_the_gpu(
    engine: convert.Converter, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sp24cli.ops import shards

    options: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector")}
    options["prune"] = True
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    quantize_checkpoint(checkpoint, whole, **options)
    carry = shards._carry_over
    monkeypatch.setattr(shards, "_carry_over", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, parts, **options)
    monkeypatch.setattr(shards, "_carry_over", carry)
    done = quantize_checkpoint(checkpoint, parts, resume=True, engine=engine, **options)
    assert done.folder is not None and done.folder.resumed == len(done.folder.shards)
    assert contents(parts) == contents(whole)


def test_a_checkpoint_is_looked_through_on_the_gpu_first(
    engine: convert.Converter, checkpoint: Path, tmp_path: Path
) -> None:
    prune_checkpoint(checkpoint, tmp_path / "gpu", engine=engine)
    prune_checkpoint(checkpoint, tmp_path / "cpu")
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")
    launches = engine.device.launches  # type: ignore[attr-defined]
    assert launches.index("quantize_bf16_bf16") < launches.index("prune_magnitude_24_bf16")


def test_a_checkpoint_is_packed_on_the_gpu(
    engine: convert.Converter, checkpoint: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("tensor")}
    options["prune"] = True
    quantize_checkpoint(checkpoint, tmp_path / "gpu", engine=engine, **options)
    quantize_checkpoint(checkpoint, tmp_path / "cpu", **options)
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")
    assert "quantize_e4m3_bf16" in engine.device.launches  # type: ignore[attr-defined]


def test_a_checkpoint_of_pairs_is_left_to_the_cpu(
    engine: convert.Converter, tmp_path: Path
) -> None:
    """K of 1:2 need not be a multiple of 4, which the kernels need."""
    source = write_checkpoint(tmp_path / "in", [{"a.weight": normal(1, (64, 30), "BF16")}])
    options: dict[str, Any] = {"optype": OPERAND_TYPES["tf32"], "spec": ScaleSpec("none")}
    options["prune"] = True
    done = quantize_checkpoint(source, tmp_path / "gpu", engine=engine, **options)
    quantize_checkpoint(source, tmp_path / "cpu", **options)
    assert done.report.on_cpu == ("a.weight",)
    assert not engine.device.launches  # type: ignore[attr-defined]
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")


def test_a_fault_in_a_late_shard_is_found_before_anything_is_written(
    engine: convert.Converter, tmp_path: Path
) -> None:
    weight = normal(1, (300, 52), "F16")
    weight[290, 5] = np.inf
    shards = [{"a.weight": normal(2, (64, 32), "F16")}, {"b.weight": weight}]
    source = write_checkpoint(tmp_path / "in", shards)
    for how in ({}, {"engine": engine}):
        with pytest.raises(BadInputError, match=r"tensor 'b\.weight': inf at row 290, column 5"):
            prune_checkpoint(source, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
