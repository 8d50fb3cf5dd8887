"""Results of the bench, made without running it."""

from __future__ import annotations

from dataclasses import replace

from sp24cli.bench.candidates import Role
from sp24cli.bench.rates import Shape, rates
from sp24cli.bench.result import BenchResult, CaseResult, Environment, Figure, Row
from sp24cli.bench.statistics import Settings
from sp24cli.verify.result import Check

LARGE, DECODE = Shape(4096, 8192, 8192), Shape(28672, 16, 8192)

OURS = Role("sp24", "sp24", "gemm_a", "nm", True)
DENSE = Role("cuBLASLt dense", "cublaslt", "heuristic's first", "nm", False)
DEFAULT = Role("cuSPARSELt default", "cusparselt", "id 0 of 25", "nm", True)
BEST = Role("cuSPARSELt id 7 mn", "cusparselt", "id 7 of 25", "mn", True, default=False)


def figure(shape: Shape, us: float, *, sparse: bool = True, noise=0.001, drift=0.002) -> Figure:
    rate = rates(shape, "e4m3", "bf16", us, sparse=sparse, sm_count=132, clock_khz=1_980_000)
    return Figure(
        us, 0.99 * us, 1.01 * us, noise, drift, 50, rate.tflops, rate.gbps, rate.peak_share,
        1500.0, 3201.0, 600.0, 700.0, 50.0, ("power cap",), us * 600e-6, rate.tflops / 600, (),
    )  # fmt: skip


def row(role: Role, shape: Shape, burst: float, sustained: float) -> Row:
    return Row(
        role,
        Check(role.label, True, 0.5, 1.0, 0.002),
        figure(shape, burst, sparse=role.sparse),
        figure(shape, sustained, sparse=role.sparse),
        4,
    )


def case(shape: Shape, *rows: Row) -> CaseResult:
    return CaseResult(
        shape, "e4m3", "bf16", "nm", "random normal, seed 24", "random normal", 4, 88_000_000,
        True, "float64 product by cuBLASLt", (rows[0].check,), rows, 50, (("id 9", "refused"),),
        "table", "tensor", "fast",
    )  # fmt: skip


def result(*cases: CaseResult, copy_tbps: float | None = None) -> BenchResult:
    environment = Environment(
        "2026-01-31 12:00 UTC", "NVIDIA H200", 132, 62914560, 1980.0, "CUDA 13.0", "ab" * 32,
        "0.1.0", None, {"cuBLASLt": "13.1.0", "cuSPARSELt": "0.8.0"}, copy_tbps,
    )  # fmt: skip
    return BenchResult(environment, Settings(), cases, (), ())


def two_cases(copy_tbps: float | None = 4.0) -> BenchResult:
    return result(
        case(
            LARGE,
            row(OURS, LARGE, 260.0, 300.0),
            row(DENSE, LARGE, 370.0, 430.0),
            row(DEFAULT, LARGE, 540.0, 610.0),
            row(BEST, LARGE, 265.0, 305.0),
        ),
        case(
            DECODE,
            row(OURS, DECODE, 36.7, 40.0),
            row(DENSE, DECODE, 56.0, 57.0),
            row(DEFAULT, DECODE, 39.9, 40.7),
        ),
        copy_tbps=copy_tbps,
    )


def faster(one: CaseResult, factor: float, family: str = "sp24", **figures: float) -> CaseResult:
    """``one`` with the times of a family divided by ``factor``, and fields of its figures set."""

    def change(of: Row) -> Row:
        if of.role.family != family:
            return of
        return replace(
            of,
            burst=replace(of.burst, us=of.burst.us / factor, **figures),
            sustained=replace(of.sustained, us=of.sustained.us / factor, **figures),
        )

    return replace(one, rows=tuple(change(of) for of in one.rows))
