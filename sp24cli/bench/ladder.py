"""The ladder: every rung of an operand type verified and timed on one problem, beside the kernel
that sp24 chooses for it, which is the last rung."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from sp24cli.bench.candidates import Operands, Ours, Role
from sp24cli.bench.instrument import DeviceTimer, Instrument
from sp24cli.bench.judge import Judge, again, raise_if_wrong
from sp24cli.bench.plan import BenchPlan, Case, plan_shapes
from sp24cli.bench.rates import Shape
from sp24cli.bench.result import Environment, Failure, Figure, Progress, Row
from sp24cli.bench.run import environment, open_libraries, timed_row
from sp24cli.bench.rungs import NOTES, PRODUCTION, PRODUCTION_CHANGED
from sp24cli.bench.statistics import Settings, rotation
from sp24cli.errors import Sp24Error
from sp24cli.gpu import ladder as gpu
from sp24cli.gpu.select import sums_from_the_start
from sp24cli.kernels.manifest import RungEntry
from sp24cli.ops.report import document
from sp24cli.optypes import operand_type
from sp24cli.packed import PackedMatrix
from sp24cli.verify.result import Check

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

Array = npt.NDArray[Any]

#: Version of the JSON document.
SCHEMA = 1

#: The problem of the tuning log.
SHAPE = Shape(4096, 8192, 8192)

#: The unit of `cycles`: a tile of D of the largest kernels, and the bytes along K of one stage.
_TILE_M, _TILE_N = 128, 256


@dataclass(frozen=True)
class LadderPlan:
    """Which rungs to time, lowest first, on what. The chosen kernel, rung ``height`` of its ladder,
    comes after them always."""

    case: Case
    rungs: tuple[RungEntry, ...]
    height: int
    settings: Settings
    workers: int = 1


@dataclass(frozen=True)
class RungRow:
    """A rung's figures, and the log's beside them (see bench/rungs.py).

    ``number`` counts from the bottom; a ``side`` rung stands beside the main one before it.
    """

    number: int
    label: str
    side: bool
    changed: str
    log_tflops: float | None
    log_step: float | None
    row: Row


@dataclass(frozen=True)
class LadderResult:
    """What a run found. ``reference`` says what the products were compared with, ``alike`` whether
    the rungs had to have the bits of the chosen kernel too; a rung that gave no figures is in
    ``failures``."""

    environment: Environment
    settings: Settings
    shape: Shape
    type: str
    out: str
    order: str
    weight: str
    activations: str
    slots: int
    reference: str
    rows: tuple[RungRow, ...]
    failures: tuple[Failure, ...]
    alike: bool = True

    def to_json(self) -> dict[str, Any]:
        return {"sp24.ladder": SCHEMA, **document(self)}

    def before(self, rung: RungRow) -> RungRow | None:
        """The main rung below, as far as it was timed; None for the lowest."""
        below = [r for r in self.rows if not r.side and r.number < rung.number]
        return max(below, key=lambda r: r.number, default=None)

    def cycles(self, figure: Figure) -> float | None:
        """Cycles that an SM spends on a step: 128 x 256 of D by 128 bytes along K.

        By the clock meanwhile, None where it is not known; the tensor cores alone take 512. A last
        round of tiles that does not fill the chip counts as time of all SMs.
        """
        if not figure.sm_mhz:
            return None
        steps = self.shape.flops / (2 * _TILE_M * _TILE_N * operand_type(self.type).block_k)
        return figure.us * figure.sm_mhz * self.environment.sm_count / steps


def plan_ladder(
    ladder: str,
    rungs: Sequence[RungEntry],
    names: Sequence[str],
    *,
    shape: Shape = SHAPE,
    settings: Settings | None = None,
    workers: int = 1,
) -> LadderPlan:
    """The rungs of ``ladder`` called ``names`` (labels, numbers or kernels), or all.

    Raises:
        ValueError: a name that the ladder does not have, in words.
    """
    mine = sorted((r for r in rungs if r.a_type == ladder), key=lambda r: r.number)
    by_name = {name: r for r in mine for name in (r.label, str(r.number), r.name)}
    for name in names:
        if name not in by_name and name not in (PRODUCTION, str(len(mine))):
            known = ", ".join([*(r.label for r in mine), PRODUCTION])
            raise ValueError(f"the ladder of {ladder} has no rung {name!r} (it has {known})")
    wanted = {by_name[name].name for name in names if name in by_name}
    settings = settings or Settings()
    (case,) = plan_shapes((shape,), ladder, seed=settings.seed, workers=workers)
    chosen = tuple(r for r in mine if not names or r.name in wanted)
    return LadderPlan(case, chosen, len(mine), settings, workers)


class Rung:
    """A rung as the instrument times it: in every slot its own copy of the weight."""

    def __init__(
        self, operands: Operands, weights: Sequence[gpu.RungWeight], entry: RungEntry
    ) -> None:
        self.role = Role(entry.label, "rung", entry.name, entry.order, sparse=True)
        self.slots = operands.slots
        self._plans = [
            weight.plan(
                entry,
                operands.shape.n,
                operands.x[slot],
                operands.ldx,
                operands.outs[slot],
                scale_b=operands.scale_b,
                scale_b_rows=operands.scale_b is not None,
            )
            for slot, weight in enumerate(weights)
        ]

    def enqueue(self, slot: int) -> None:
        self._plans[slot].enqueue()


def run(
    plan: LadderPlan,
    device: Device,
    *,
    telemetry: Any = None,
    progress: Progress | None = None,
    finished: Callable[[str], None] | None = None,
) -> LadderResult:
    """Verify every rung, then time those that are right, interleaved, and look at each once more.

    The chosen kernel is verified as `sp24 bench` does. A rung must be within the same bounds in
    every element, and have the same bits as the others, since all sum in one order, and as the
    chosen kernel if that does, too. ``finished`` gets a line as each rung has been verified.

    Raises:
        Sp24Error: the chosen kernel itself fails.
    """
    say = progress or (lambda text: None)
    done = finished or (lambda text: None)
    case, settings = plan.case, plan.settings
    bench = BenchPlan((case,), "nm", settings=settings, workers=plan.workers)
    failures: list[Failure] = []
    with ExitStack() as stack:
        libraries = open_libraries(device, stack, wanted=False)
        say("making operands")
        packed, tokens = case.load()
        slots = _slots(device, case)
        operands = Operands(device, case.shape, packed, tokens, case.operands, case.out, slots)
        stack.callback(operands.free)
        chosen = Ours(operands, bench.order, None)
        stack.callback(chosen.free)
        say(f"verifying {chosen.kernel.name}")
        judge = Judge(device, libraries.cublaslt, case, bench, packed, tokens)
        _, check, verified = judge.ours(operands, chosen)
        weights = _weights(operands, packed, stack)

        alike = sums_from_the_start(chosen.kernel, case.shape.m, case.shape.n)
        bits = verified if alike else None
        rungs: list[tuple[RungEntry, Rung, Check, Array]] = []
        for entry in plan.rungs:
            say(f"verifying rung {entry.number}, {entry.label}")
            try:
                rung = Rung(operands, weights, entry)
                seen, bits = judge.sibling(operands, rung, entry.name, bits)
            except Sp24Error as error:
                failures.append(_failed(case, entry, error))
                continue
            rungs.append((entry, rung, seen, bits))
            done(f"rung {entry.number}, {entry.label}: right in every element")

        works: list[Rung | Ours] = [*(rung for _, rung, _, _ in rungs), chosen]
        timer = DeviceTimer(device, telemetry)
        measured = Instrument(timer, settings).measure(
            works, lambda count, total: say(f"timing, run {count} of {total}")
        )

        def check_again(work: Rung | Ours, output: Array) -> None:
            same = again(device, operands, work, output, bench.order)
            raise_if_wrong(case, work.role.detail, [same])

        rows: list[RungRow] = []
        for (entry, rung, seen, output), timing in zip(rungs, measured, strict=False):
            try:
                check_again(rung, output)
            except Sp24Error as error:
                failures.append(_failed(case, entry, error))
                continue
            row = timed_row(rung.role, seen, timing, case, bench, device)
            rows.append(_rung_row(entry, row))
        check_again(chosen, verified)
    last = timed_row(chosen.role, check, measured[-1], case, bench, device)
    rows.append(RungRow(plan.height, PRODUCTION, False, PRODUCTION_CHANGED, None, None, last))
    return LadderResult(
        environment(device, libraries.states, telemetry=telemetry),
        settings,
        case.shape,
        case.type,
        case.out,
        bench.order,
        case.weight,
        case.activations,
        slots,
        judge.how,
        tuple(rows),
        tuple(failures),
        alike,
    )


def _failed(case: Case, entry: RungEntry, error: Sp24Error) -> Failure:
    return Failure(case.shape, f"rung {entry.label}: {error}", error.exit_code)


def _rung_row(entry: RungEntry, row: Row) -> RungRow:
    note = NOTES[entry.a_type, entry.label]
    return RungRow(
        entry.number,
        entry.label,
        entry.side,
        entry.changed,
        note.log_tflops,
        note.log_step,
        row,
    )


def _slots(device: Device, case: Case) -> int:
    return rotation(
        case.input_bytes, case.output_bytes, device.l2_bytes, device.mem_bytes // 8
    ).slots


def _weights(operands: Operands, packed: PackedMatrix, stack: ExitStack) -> list[gpu.RungWeight]:
    row = packed.to_layout("row")
    weights = [gpu.RungWeight(weight, row) for weight in operands.weights]
    for weight in weights:
        stack.callback(weight.free)
    return weights
