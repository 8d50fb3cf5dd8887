"""What a bench found, as frozen values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sp24cli.bench.candidates import Role
from sp24cli.bench.rates import Shape
from sp24cli.bench.statistics import Settings
from sp24cli.errors import Interrupted, Sp24Error
from sp24cli.ops.report import document
from sp24cli.verify.result import Check

#: Version of the JSON document.
SCHEMA = 1


@dataclass(frozen=True)
class Figure:
    """One figure of one candidate: its time, rates and the chip meanwhile.

    ``us`` is the median over ``samples`` samples, ``p5``, ``p95`` their quantiles, ``noise`` the
    median absolute deviation and ``drift`` the distance between rounds, both relative.
    ``tflops`` is dense-equivalent (2MNK/t), ``gbps`` counts A as stored, B and D once each,
    ``peak_share`` is of the tensor cores at the highest clock. ``joules`` is the power of a
    sustained run times the time of one product; it and ``power_w`` are None for a burst, and where
    power cannot be read.
    """

    us: float
    p5: float
    p95: float
    noise: float
    drift: float
    samples: int
    tflops: float
    gbps: float
    peak_share: float
    sm_mhz: float | None
    mem_mhz: float | None
    power_w: float | None
    limit_w: float | None
    temp_c: float | None
    throttle: tuple[str, ...]
    joules: float | None
    tflops_per_watt: float | None
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A candidate's figures. ``launches`` is how many products one sample averages."""

    role: Role
    check: Check
    burst: Figure
    sustained: Figure
    launches: int


@dataclass(frozen=True)
class CaseResult:
    """One problem: what was verified, the candidates, and those that could not be timed.

    ``slots`` copies of the inputs (``input_bytes`` each: packed A and B) were cycled through;
    ``past_l2`` is false where even so they fit in the L2. ``searched`` counts the algorithms
    of cuSPARSELt that were ranked. ``skipped`` is (label, reason). ``chosen_by`` says what the
    choice of our kernel rests on (see gpu/select.py); ``scale`` is the kind of the weight's scales
    and their block, ``accumulate`` as for `BenchPlan`. These are None in results that are older.
    """

    shape: Shape
    type: str
    out: str
    order: str
    weight: str
    activations: str
    slots: int
    input_bytes: int
    past_l2: bool
    reference: str
    checks: tuple[Check, ...]
    rows: tuple[Row, ...]
    searched: int
    skipped: tuple[tuple[str, str], ...]
    chosen_by: str | None = None
    scale: str | None = None
    accumulate: str | None = None

    @property
    def name(self) -> str:
        """The problem in words; scales and sums are said where they are not the usual ones."""
        parts = [f"{self.shape} {self.type} -> {self.out} {self.order}"]
        if self.scale not in (None, "none", "tensor"):
            parts.append(f"scale {self.scale}")
        if self.accumulate not in (None, "fast"):
            parts.append(f"{self.accumulate} sums")
        return ", ".join(parts)

    def best(self, family: str, figure: str, *, default: bool | None = None) -> Row | None:
        """The fastest row of a family by ``figure`` ("burst" or "sustained")."""
        rows = [
            row
            for row in self.rows
            if row.role.family == family and (default is None or row.role.default == default)
        ]
        return min(rows, key=lambda row: getattr(row, figure).us, default=None)

    def speedup(self, family: str, figure: str, *, default: bool | None = None) -> float | None:
        """The peer's time over ours; None where either is missing."""
        ours, peer = self.best("sp24", figure), self.best(family, figure, default=default)
        if ours is None or peer is None:
            return None
        return float(getattr(peer, figure).us / getattr(ours, figure).us)


@dataclass(frozen=True)
class WgmmaCeiling:
    """The rate of a kernel of nothing but sparse wgmmas on data that is already there.

    ``source`` is where it takes A from: "ss", shared memory, or "rs", registers. TFLOPS are
    dense-equivalent; clock and power are of the sustained figure, None where they cannot be read.
    """

    type: str
    source: str
    burst_tflops: float
    sustained_tflops: float
    sm_mhz: float | None
    power_w: float | None


@dataclass(frozen=True)
class Environment:
    """Where and with what it was measured. ``peers`` maps a library to its version, or to the
    reason it was not used. ``copy_tbps`` is the rate of a copy in device memory, terabytes a
    second read and written, None where it was not asked for; ``wgmma`` what the tensor cores do
    at most, as far as that was asked for. ``unread`` says what of the card could not be read, and
    why; ``uuid`` which card it is, None in results that are older. ``clock`` is where clocks come
    from: "counted" by the SMs (gpu/clocks.py), or "nvml" in results that are older."""

    date: str
    gpu: str
    sm_count: int
    l2_bytes: int
    clock_mhz_max: float
    driver: str
    fatbin_sha256: str
    sp24: str
    commit: str | None
    peers: dict[str, str]
    copy_tbps: float | None = None
    wgmma: tuple[WgmmaCeiling, ...] = ()
    unread: str | None = None
    uuid: str | None = None
    clock: str = "nvml"


@dataclass(frozen=True)
class Failure:
    """A case that gave no figures; ``exit_code`` is that of its error (3: a wrong product)."""

    shape: Shape
    message: str
    exit_code: int


def failed(shape: Shape, error: Sp24Error | MemoryError) -> Failure:
    """The case that an error ended; the others go on."""
    if isinstance(error, MemoryError):
        return Failure(shape, "out of memory", Sp24Error.exit_code)
    return Failure(shape, str(error), error.exit_code)


def interrupted(shape: Shape) -> Failure:
    """The case at which the user stopped a run."""
    return Failure(shape, "interrupted", Interrupted.exit_code)


@dataclass(frozen=True)
class BenchResult:
    """Everything one run of the bench found."""

    environment: Environment
    settings: Settings
    cases: tuple[CaseResult, ...]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"sp24.bench": SCHEMA, **document(self)}

    def speedups(
        self, family: str, figure: str, *, default: bool | None = None
    ) -> tuple[float, float] | None:
        """Geometric mean and minimum over the cases of ours against a peer."""
        ratios = [case.speedup(family, figure, default=default) for case in self.cases]
        return mean_and_least([ratio for ratio in ratios if ratio is not None])


def mean_and_least(ratios: Iterable[float]) -> tuple[float, float] | None:
    """Geometric mean and minimum; None of nothing."""
    values = list(ratios)
    if not values:
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values)), min(values)


Progress = Callable[[str], None]
