"""The script that shows what the hardware counts, as far as it goes without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from sp24cli.bench.rates import Shape
from sp24cli.bench.reading import read_result
from sp24cli.errors import Sp24Error
from tests.cpu.benchdevice import libraries, simulate
from tests.cpu.benchresult import BEST, DEFAULT, DENSE, OURS, case, row
from tests.cpu.console import ROOT
from tests.cpu.scripts import script_module

RESULTS = ROOT / "samples" / "results"
#: As ncu writes it: a line of its own, the headings, the units, a row a kernel.
CSV = """==PROF== Connected to process 1
"ID","Kernel Name","sm__cycles_elapsed.avg",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed","dram__bytes_read.sum",\
"dram__bytes_write.sum","l1tex__m_xbar2l1tex_read_bytes.sum","gpu__time_duration.sum"
"","","cycle","%","byte","byte","byte","ns"
"0","gemm_a","1,234.50","68.15","212,000,000","52,600,000","2,282,619,136","239,744"
"1","sm90_b","2,000","91.38","1,000,000","0","5,000,000","1,500"
"""
SAID = """launched 4096x8192x8192|sp24|gemm_a
==PROF== Profiling
launched 4096x8192x8192|cuSPARSELt id 21 mn|id 21 of 24
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("samples/counters.py")


def test_rows_of_ncu_are_of_what_was_launched(script: ModuleType) -> None:
    ours, peer = script.counted(CSV, SAID)
    assert (ours["shape"], ours["label"], ours["kernel"]) == ("4096x8192x8192", "sp24", "gemm_a")
    assert (ours["cycles"], ours["tensor cores busy, %"]) == (1234.5, 68.15)
    assert (ours["DRAM read, MB"], ours["DRAM written, MB"]) == (212.0, 52.6)
    assert (ours["L2 to SMs, MB"], ours["us"]) == (2282.619136, 239.744)
    assert (peer["label"], peer["detail"]) == ("cuSPARSELt id 21 mn", "id 21 of 24")
    assert (peer["us"], peer["DRAM written, MB"]) == (1.5, 0.0)


def test_a_product_of_two_kernels_is_no_row(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ncu saw 2 kernels of 1 products"):
        script.counted(CSV, SAID.splitlines()[0])


def test_the_table_that_stands_in_the_results_is_of_the_counts_beside_it(
    script: ModuleType,
) -> None:
    name = RESULTS / "h200-2026-11-30-counters-e4m3"
    document = json.loads(name.with_suffix(".json").read_text())
    assert script.table(document) == name.with_suffix(".md").read_text()
    assert len({row["shape"] for row in document["rows"]}) == 9


def test_beside_ours_stand_the_fastest_algorithm_and_the_dense_one(script: ModuleType) -> None:
    """Of 28672x4096x8192, where nm leads in the burst and mn is the faster one sustained."""
    cases = read_result(str(RESULTS / "h200-2026-12-01-llm-e4m3.json")).cases
    case = next(c for c in cases if str(c.shape) == "28672x4096x8192")
    asked: list[object] = []

    def sparse(library: object, order: str, number: int) -> str:
        asked.append((library, order, number))
        return "sparse"

    peers = SimpleNamespace(sparse=sparse, dense=lambda library: None)
    both = SimpleNamespace(cusparselt="lt", cublaslt="blas")
    assert script.beside(case, peers, both) == ["sparse"]  # cuBLASLt refused
    assert asked == [("lt", "mn", 21)]
    neither = SimpleNamespace(cusparselt=None, cublaslt=None)
    assert script.beside(case, peers, neither) == []


def test_each_is_launched_once_between_the_marks(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a device of host memory: once before, so that nothing is loaded while ncu counts."""
    shape = Shape(256, 16, 512)
    best = replace(BEST, detail="id 1 of 2", order="mn")
    times = {("nm", None): 20.0, ("mn", None): 20.0, ("nm", 1): 14.0, ("mn", 1): 13.0}
    device = simulate(monkeypatch)
    libraries(monkeypatch, dense=30.0, sparse=(times,))
    monkeypatch.setattr(script.Device, "open", lambda: device)

    def profiler(mark: str) -> tuple[SimpleNamespace]:
        device.log.append(mark)
        return (SimpleNamespace(value=0),)

    calls = {f"cuProfiler{mark}": partial(profiler, mark) for mark in ("Start", "Stop")}
    monkeypatch.setattr(script, "api", lambda: SimpleNamespace(**calls))
    rows = (row(role, shape, 10.0, 12.0) for role in (OURS, DENSE, DEFAULT, best))
    script.launch((case(shape, *rows),))
    sparse, dense = ("mn", 1), ("nm", None)
    assert device.log == [
        step for who in ("sp24", sparse, dense) for step in (who, "Start", who, "Stop")
    ]
    assert capsys.readouterr().out.splitlines() == [
        "launched 256x16x512|sp24|kernel_of_choice",
        "launched 256x16x512|cuSPARSELt id 1 mn|id 1 of 2",
        "launched 256x16x512|cuBLASLt dense|heuristic's first",
    ]
    assert not device.buffers
    widened = replace(case(shape, row(OURS, shape, 10.0, 12.0)), type="e4m3_bf16")
    with pytest.raises(Sp24Error, match=r"^256x16x512 e4m3_bf16: no peer multiplies widened"):
        script.launch((widened,))


def test_a_file_that_is_no_result_and_an_absent_ncu_are_one_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    monkeypatch.setattr(script.sys, "argv", ["counters.py", "no-such.json"])
    with pytest.raises(SystemExit, match=r"^counters: no-such\.json: "):
        script.main()
    monkeypatch.setattr(
        script.sys, "argv", ["counters.py", str(RESULTS / "h200-2026-12-01-llm-e4m3.json")]
    )
    with pytest.raises(SystemExit, match=r"^counters: ncu \(Nsight Compute\) is not on the PATH$"):
        script.main()
