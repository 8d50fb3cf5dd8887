"""Shares and ratios of F64 weights whose squares float64 does not hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sp24cli.cli.main import run
from sp24cli.ops import prune_checkpoint, prune_file, quantize_file, stream
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.pruning import permute
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import energy_exponent
from tests.cpu.checkpoints import write_checkpoint
from tests.cpu.modelfile import Array, normal, save

SHAPE = (48, 64)
#: Their squares are infinite, zero, subnormal.
POWERS = (1010, -990, -530)


def weight(power: int = 0, seed: int = 1) -> Array:
    return np.ldexp(normal(seed, SHAPE).astype(np.float64), power)


def choices(folder: Path) -> dict[str, Choice]:
    x = np.random.default_rng(5).standard_normal((SHAPE[1], 200))
    norms = save(folder / "norms", {"a.weight": np.linalg.norm(x, axis=1)})
    hessian = save(folder / "hessian", {"a.weight": x @ x.T})
    return {
        "magnitude": Choice(),
        "permute": Choice(permute=True),
        "wanda": Choice("wanda", calibration=norms),
        "sparsegpt": Choice("sparsegpt", calibration=hessian),
    }


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("method", ["magnitude", "permute", "wanda", "sparsegpt"])
def test_what_pruning_keeps_does_not_depend_on_the_size_of_values(
    tmp_path: Path, method: str, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that what was sampled is compared with all rows.
    monkeypatch.setattr(permute, "SAMPLE_ELEMENTS", 1000)
    choice = choices(tmp_path)[method]
    found = []
    for number in (0, power):
        source = save(tmp_path / f"{number}", {"a.weight": weight(number)})
        (tensor,) = prune_file(source, tmp_path / "out", choice=choice, overwrite=True).tensors
        found.append((tensor.kept_energy, tensor.weighted_error))
    assert found[1] == found[0]


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize(
    ("name", "kind", "smooth"),
    [
        ("e4m3", "vector", False),
        ("e4m3", "vector", True),
        ("s8", "tensor", False),
        ("s8", "tensor", True),
        ("bf16", "none", False),
    ],
)
def test_what_quantizing_keeps_does_not(
    tmp_path: Path, name: str, kind: Any, power: int, smooth: bool
) -> None:
    amax = save(tmp_path / "amax", {"a.weight": np.abs(normal(2, SHAPE[1:])) + 1})
    found = []
    for number in (0, power):
        source = save(tmp_path / f"{number}", {"a.weight": weight(number)})
        options: dict[str, Any] = {"optype": OPERAND_TYPES[name], "spec": ScaleSpec(kind)}
        if smooth:
            options["calibration"] = Calibration(activations=amax)
        (tensor,) = quantize_file(source, None, prune=True, **options).tensors
        found.append(tensor)
    assert found[1].kept_energy == found[0].kept_energy
    # Scales are float32: all of it is lost, or all but nothing.
    assert found[1].snr_db == pytest.approx(0, abs=1e-9)
    assert found[1].error_energy > 0


def test_bands_of_all_sizes_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    tall = np.concatenate([weight(p, seed) for seed, p in enumerate((-990, 0, 1010, 20, -990))])
    assert [energy_exponent(tall[i : i + 48]) != 0 for i in range(0, 240, 48)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    spec = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector"), "prune": True}
    largest = save(tmp_path / "one", {"a.weight": weight(1010, 2)})
    for tensors in ({"a.weight": tall}, {"a.weight": tall[::-1].copy()}):
        source = save(tmp_path / "in", tensors)
        for operation in (lambda s: prune_file(s, None), lambda s: quantize_file(s, None, **spec)):
            (tensor,), (want,) = operation(source).tensors, operation(largest).tensors
            assert tensor.kept_energy == pytest.approx(want.kept_energy, rel=1e-12)
    zeros = save(tmp_path / "zeros", {"a.weight": np.concatenate([weight(-990), 0 * weight()])})
    kept = prune_file(save(tmp_path / "x", {"a.weight": weight(-990)}), None).kept_energy
    assert prune_file(zeros, None).kept_energy == kept


@pytest.mark.parametrize(("power", "which"), [(1010, 1), (-990, 0)])
def test_the_whole_is_that_of_the_largest(tmp_path: Path, power: int, which: int) -> None:
    tensors = [{"a.weight": weight(0, 1)}, {"b.weight": weight(power, 2)}]
    source = save(tmp_path / "in", tensors[0] | tensors[1])
    report = prune_file(source, None)
    model = write_checkpoint(tmp_path / "model", tensors)
    for found in (report, prune_checkpoint(model, tmp_path / "out").report):
        want = found.tensors[which]
        assert 0.8 < want.kept_energy < 0.95
        assert found.kept_energy == pytest.approx(want.kept_energy, rel=1e-12)
        energy = math.log2(want.energy) + 2 * want.energy_exponent
        squares = np.square(weight(0, 1 + which)).sum()
        assert energy == pytest.approx(math.log2(squares) + 2 * power * which)


def test_the_tables_show_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for power in POWERS:
        source = str(save(tmp_path / "in", {"a.weight": weight(power)}))
        assert run(["prune", source, "--dry-run"]) == 0
        assert run(["quantize", source, "--dry-run", "--prune", "--scale", "vector"]) == 0
        out = capsys.readouterr().out
        assert not any(word in out for word in ("nan", "inf", "exact", "100.00 %"))
