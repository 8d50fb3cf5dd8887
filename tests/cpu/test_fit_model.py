"""The script that fits the time model to measured kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sp24cli.bench.problem import select_shapes
from sp24cli.gpu.model import H200, Constants, Points, times_us
from sp24cli.gpu.select import candidates
from sp24cli.kernels.choices import Measured, Problem, Table, from_text, to_text
from tests.cpu.scripts import script_module

SMS = 132


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("samples/fit_model.py")


def measured(constants: Constants, count: int, type_name: str = "e4m3") -> list[Measured]:
    """Problems as if a card kept to the model with these constants."""
    entries = candidates(type_name, "f16", "nm")
    rows = []
    for shape in select_shapes(count, 5):
        problem = Problem(type_name, "f16", "nm", shape.m, shape.n, shape.k)
        times = times_us(Points.of(((e, problem) for e in entries), SMS), constants)
        rows.append(
            Measured(problem, {e.name: float(us) for e, us in zip(entries, times, strict=True)})
        )
    return rows


def test_the_constants_of_another_card_are_found(script: ModuleType) -> None:
    """At least what they say of times: some of them can stand in for others."""
    other = replace(H200, dram=3000.0, l2=8000.0, launch=1500.0, port=0.7, column=8.0)
    rows = measured(other, 40)
    at, us, behind = script.points(rows, SMS)
    fast = behind < 1.3

    def off(constants: Constants) -> float:
        return float(np.sqrt(np.mean(np.log(times_us(at, constants) / us)[fast] ** 2)))

    assert off(H200) > 0.2
    # The prior, 0.03 for an octave or so of each of five constants, is what keeps it from none.
    assert off(script.fit(rows, SMS)) < 0.02


def test_losses_are_by_the_measured_times(script: ModuleType) -> None:
    (row,) = measured(H200, 1)
    chosen, other = sorted(row.times, key=lambda name: row.times[name])[:2]
    spoiled = Measured(row.problem, {**row.times, other: row.times[chosen] / 1.5})
    assert script.losses([row], [], SMS) == [0.0]
    assert script.losses([spoiled], [], SMS) == pytest.approx([0.5])
    assert script.losses([spoiled], [spoiled] * 20, SMS) == [0.0]


def test_the_command_prints_constants_and_writes_a_table(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def file(name: str, rows: list[Measured], gpu: str = "NVIDIA H200") -> str:
        (tmp_path / name).write_text(to_text([Table(gpu, name, tuple(rows))]))
        return str(tmp_path / name)

    rows = measured(H200, 24)
    fit, test = file("fit", rows[:20]), file("test", rows[20:])
    slow = {**rows[0].times, min(rows[0].times): 1000.0}
    grid, table = file("grid", [Measured(rows[0].problem, slow), rows[21]]), tmp_path / "table"
    monkeypatch.setattr(
        sys, "argv", ["fit_model.py", fit, "--test", test, "--merge", grid, str(table)]
    )
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "these constants: 0.0% off, kernels near the fastest"
    assert [line.split(":")[0].strip() for line in lines[2:5]] == ["port", "a_rows", "throttle"]
    (dram,) = (line.split("=")[1] for line in lines if line.startswith("    dram: float ="))
    assert float(dram) == pytest.approx(H200.dram, rel=1e-3)  # four digits
    assert lines[-1] == (
        "test, corrected: 0.00% from the fastest in the geometric mean over 4 problems, "
        "at worst 0.0%, 0 beyond 3 %"
    )
    (made,) = from_text(table.read_text(), "table")
    assert (made.gpu, made.fatbins, len(made.measured)) == ("NVIDIA H200", "fit", 21)
    first = made.measured[0]
    assert first.problem == rows[0].problem, "of the grid, with the newer times"
    assert first.times == pytest.approx(
        {k: us for k, us in rows[0].times.items() if us < 3 * min(rows[0].times.values())}, abs=1e-3
    )
    mixed = file("mixed", rows, "NVIDIA H100")
    with pytest.raises(SystemExit, match="several GPUs"):
        script.merge([Path(fit), Path(mixed)], table)
