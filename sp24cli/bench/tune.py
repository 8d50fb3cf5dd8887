"""Which kernel is fastest on this card: all that may be, timed quickly, problem by problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sp24cli.bench.candidates import Operands, Ours
from sp24cli.bench.check import result_values, tolerance
from sp24cli.bench.instrument import DeviceTimer, Instrument
from sp24cli.bench.plan import BenchPlan, Case
from sp24cli.bench.report import align, significant
from sp24cli.bench.result import Failure, Progress, failed, interrupted, mean_and_least
from sp24cli.bench.statistics import rotation
from sp24cli.errors import Sp24Error, VerificationError
from sp24cli.gpu.select import Choice, Selector, candidates
from sp24cli.kernels import manifest
from sp24cli.kernels.choices import Measured, Problem, Table, shipped

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

Array = npt.NDArray[Any]

#: Graphs of each kernel, of which the fastest counts, and how often all take their turn.
_REPEATS, _ROUNDS = 5, 3

#: A kernel that the model puts so many times behind the best is not timed: tiles of 8 columns
#: at 8192 tokens take a hundred times as long, and so would the tuning.
_HOPELESS = 2.0


@dataclass(frozen=True)
class TunedCase:
    """One problem: what each kernel took, and which one would have been chosen by the package's
    table and the model, without this measurement."""

    measured: Measured
    chosen: str
    chosen_by: str

    @property
    def loss(self) -> float:
        """How much longer the chosen kernel takes than the fastest, relative."""
        times = self.measured.times
        return times[self.chosen] / times[self.measured.kernel] - 1.0


@dataclass(frozen=True)
class TuneResult:
    """What a tuning run found."""

    gpu: str
    fatbins: str
    cases: tuple[TunedCase, ...]
    failures: tuple[Failure, ...]

    @property
    def table(self) -> Table:
        return Table(self.gpu, self.fatbins, tuple(case.measured for case in self.cases))


def tune(
    plan: BenchPlan,
    device: Device,
    *,
    progress: Progress | None = None,
    finished: Callable[[TunedCase], None] | None = None,
) -> TuneResult:
    """Time every kernel that may be the fastest of each case of ``plan``. Nothing is kept: see
    kernels/choices.py for that.

    The kernels of a case must agree with one another before they are timed; which one is right
    is for `sp24cli.bench.run.run` to prove. A case in which they do not is a failure.
    """
    say = progress or (lambda text: None)
    instrument = Instrument(DeviceTimer(device), plan.settings)
    cases: list[TunedCase] = []
    failures: list[Failure] = []
    known = [("table", table) for table in shipped() if table.gpu == device.name]
    selector = Selector(device.sm_count, known)
    for i, case in enumerate(plan.cases, 1):
        say(f"[{i}/{len(plan.cases)}] {case.shape} {case.type}")
        try:
            cases.append(_tuned(case, plan, device, instrument, selector))
        except (Sp24Error, MemoryError) as error:
            failures.append(failed(case.shape, error))
            continue
        except KeyboardInterrupt:
            if not cases:
                raise
            failures.append(interrupted(case.shape))
            break
        if finished is not None:
            finished(cases[-1])
    return TuneResult(device.name, manifest.load().sha256, tuple(cases), tuple(failures))


def _tuned(
    case: Case,
    plan: BenchPlan,
    device: Device,
    instrument: Instrument,
    selector: Selector,
) -> TunedCase:
    """Times every kernel that may be the fastest, and the one that ``selector`` chooses."""
    packed, tokens = case.load()
    types, shape = case.operands, case.shape
    turn = rotation(case.input_bytes, case.output_bytes, device.l2_bytes, device.mem_bytes // 8)
    with ExitStack() as stack:
        operands = Operands(device, shape, packed, tokens, types, case.out, turn.slots)
        stack.callback(operands.free)
        summation = operands.weights[0].summation(plan.accumulate, operands.scale_k)
        problem = Problem(case.type, case.out, plan.order, shape.m, shape.n, shape.k, summation)
        choice: Choice = selector.choose(problem)
        likely = selector.times_us(problem)
        limit = _HOPELESS * min(likely.values())
        kernels = []
        for entry in candidates(case.type, case.out, plan.order, summation):
            if entry == choice.kernel or likely[entry.name] <= limit:
                kernels.append(Ours(operands, plan.order, entry.name, plan.accumulate))
                stack.callback(kernels[-1].free)
        _agree(case, plan, device, operands, kernels)
        found = instrument.quick_all_us(kernels, _REPEATS, _ROUNDS)
        # Nanoseconds: finer is noise.
        times = {ours.kernel.name: round(us, 3) for ours, us in zip(kernels, found, strict=True)}
    return TunedCase(Measured(problem, times), choice.kernel.name, choice.by)


def _agree(
    case: Case, plan: BenchPlan, device: Device, operands: Operands, kernels: Sequence[Ours]
) -> None:
    """`VerificationError` unless all kernels give one product, to within twice the rounding that
    each is allowed."""
    limit = 2 * tolerance(case.operands, case.out, case.shape.k, normal=case.normal).frobenius
    first: Array | None = None
    for ours in kernels:
        operands.poison()
        device.synchronize()
        ours.enqueue(0)
        output = operands.output(0, plan.order)
        bits = output.view(f"u{output.itemsize}")
        # Bits first: many kernels sum in one order, and comparing values takes ten times as long.
        if first is not None and np.array_equal(bits, first.view(bits.dtype)):
            continue
        first = output if first is None else first
        values, wanted = result_values(output), result_values(first)
        error = float(np.linalg.norm(values - wanted))
        # Not `error > ...`: an element that nobody wrote is NaN.
        if not error <= limit * float(np.linalg.norm(wanted)):
            raise VerificationError(
                f"{ours.kernel.name} and {kernels[0].kernel.name} at {case.shape} {case.type} "
                f"differ by {error:.3g}"
            )


def table(result: TuneResult) -> str:
    """What the command prints: every kernel's time, and what the choice without tuning costs."""
    lines = [f"{result.gpu}, kernels {result.fatbins[:12]}; least of quick timings, microseconds"]
    for case in result.cases:
        problem, times = case.measured.problem, case.measured.times
        lines.append("")
        lines.append(
            f"{problem.m}x{problem.n}x{problem.k} {problem.type} -> {problem.out} {problem.order}: "
            f"{case.chosen_by} chooses {case.chosen}, {case.loss:.1%} from the fastest"
        )
        rows = [
            (name, significant(us), "fastest" if name == case.measured.kernel else "")
            for name, us in sorted(times.items(), key=lambda item: item[1])
        ]
        lines += [f"  {line}" for line in align(rows)]
    lines += [f"{failure.shape} has no figures: {failure.message}" for failure in result.failures]
    return "\n".join([*lines, "", *summary(result)])


def summary(result: TuneResult) -> list[str]:
    """How far choosing without this measurement is from the fastest kernels."""
    found = mean_and_least(1.0 + case.loss for case in result.cases)
    if found is None:
        return []
    worst = max(result.cases, key=lambda case: case.loss)
    p = worst.measured.problem
    over = sum(case.loss > 0.03 for case in result.cases)
    return [
        f"without tuning: {found[0] - 1.0:.1%} from the fastest kernel in the geometric mean over "
        f"{len(result.cases)} problems, at worst {worst.loss:.1%} ({p.m}x{p.n}x{p.k}), "
        f"{over} beyond 3 %"
    ]
