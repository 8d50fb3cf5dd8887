"""From a plan to a `BenchResult`: load, verify, time."""

from __future__ import annotations

import importlib.util
import math
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

import sp24cli
from sp24cli import optypes
from sp24cli.activations import Tokens
from sp24cli.bench.candidates import (
    Candidate,
    Operands,
    Ours,
    Peer,
    Peers,
    Role,
    tensor_alpha,
    without_scales,
)
from sp24cli.bench.ceiling import copy_bandwidth, wgmma_ceilings
from sp24cli.bench.instrument import DeviceTimer, Instrument, Measurement, Timing
from sp24cli.bench.judge import Judge, WeightChecks, again, raise_if_wrong
from sp24cli.bench.plan import BenchPlan, Case
from sp24cli.bench.rates import rates
from sp24cli.bench.result import (
    BenchResult,
    CaseResult,
    Environment,
    Failure,
    Figure,
    Progress,
    Row,
    WgmmaCeiling,
    failed,
    interrupted,
)
from sp24cli.bench.statistics import rotation
from sp24cli.errors import Sp24Error
from sp24cli.kernels import manifest
from sp24cli.ops.report import scale_text
from sp24cli.peers.cublaslt import CublasLt
from sp24cli.peers.cusparselt import CusparseLt
from sp24cli.peers.loading import PeerAbsent, PeerError
from sp24cli.verify.result import Check

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

Array = npt.NDArray[Any]

#: cuSPARSELt's fastest algorithms that are timed in full after all ids were ranked.
FINALISTS = 3


@dataclass
class Libraries:
    """The peers that are here, and what became of each."""

    cublaslt: CublasLt | None = None
    cusparselt: CusparseLt | None = None
    states: dict[str, str] = field(default_factory=dict)


def run(
    plan: BenchPlan,
    device: Device,
    *,
    telemetry: Any = None,
    progress: Progress | None = None,
    finished: Callable[[CaseResult], None] | None = None,
) -> BenchResult:
    """Verify and time every case of ``plan``; ``finished`` gets each result as it comes.

    A case whose product is wrong is not timed; it and any other that fails are in the result's
    ``failures``, and the rest go on. So is the one that was interrupted, after which none goes on.
    """
    say = progress or (lambda text: None)
    timer = DeviceTimer(device, telemetry)
    instrument = Instrument(timer, plan.settings)
    copy_tbps: float | None = None
    wgmma: tuple[WgmmaCeiling, ...] = ()
    if plan.ceiling:
        say("copying memory")
        copy_tbps = copy_bandwidth(device, timer)
        wgmma = wgmma_ceilings(
            device,
            instrument,
            manifest.load().ceiling_entries,
            lambda done, total: say(f"tensor cores alone, run {done} of {total}"),
        )
    cases: list[CaseResult] = []
    failures: list[Failure] = []
    with ExitStack() as stack:
        libraries = open_libraries(device, stack, wanted=plan.peers)
        bench = _Bench(device, instrument, libraries, WeightChecks(plan.settings.seed), plan)
        for i, case in enumerate(plan.cases, 1):
            head = f"[{i}/{len(plan.cases)}] {case.shape} {case.type}"
            try:
                result = _run_case(bench, case, _prefixed(say, head))
            except (Sp24Error, MemoryError) as error:
                failures.append(failed(case.shape, error))
            except KeyboardInterrupt:
                if not cases:
                    raise
                failures.append(interrupted(case.shape))
                break
            else:
                cases.append(result)
                if finished is not None:
                    finished(result)
    return BenchResult(
        environment(device, libraries.states, copy_tbps, wgmma, telemetry),
        plan.settings,
        tuple(cases),
        tuple(failures),
        plan.notes,
    )


def _prefixed(say: Progress, head: str) -> Progress:
    return lambda text: say(f"{head}: {text}")


@dataclass(frozen=True)
class _Bench:
    """What all cases of a run share."""

    device: Device
    instrument: Instrument
    libraries: Libraries
    weights: WeightChecks
    plan: BenchPlan


def open_libraries(device: Device, stack: ExitStack, *, wanted: bool) -> Libraries:
    """The peers that are here, closed with ``stack``; ``wanted``: to be compared with."""
    found = Libraries()
    # cuBLASLt also gives the float64 reference, so it is opened even when not compared with.
    for name, kind in (("cuBLASLt", CublasLt), ("cuSPARSELt", CusparseLt)):
        try:
            library = kind.load()
            library.open(device)
        except (PeerAbsent, PeerError) as reason:
            found.states[name] = f"not used: {reason}"
            continue
        stack.callback(_close, library)
        found.states[name] = library.version
        if isinstance(library, CublasLt):
            found.cublaslt = library
        else:
            found.cusparselt = library
    if not wanted:
        found.cusparselt = None
        found.states = dict.fromkeys(found.states, "not asked for")
        if found.cublaslt is not None:
            found.states["cuBLASLt"] = f"{found.cublaslt.version} (reference alone)"
    return found


def _close(library: CublasLt | CusparseLt) -> None:
    """What was measured is not lost to a library that does not end: after a fault on the GPU every
    call fails, and that fault has been told."""
    with suppress(PeerError):
        library.close()


def _run_case(bench: _Bench, case: Case, tell: Progress) -> CaseResult:
    device, plan = bench.device, bench.plan
    tell("making operands")
    packed, tokens = case.load()
    types = case.operands
    turn = rotation(case.input_bytes, case.output_bytes, device.l2_bytes, device.mem_bytes // 8)
    with ExitStack() as stack:
        operands = Operands(device, case.shape, packed, tokens, types, case.out, turn.slots)
        stack.callback(operands.free)
        ours = Ours(operands, plan.order, plan.kernel, plan.accumulate)
        stack.callback(ours.free)

        tell(f"verifying {ours.kernel.name}")
        judge = Judge(device, bench.libraries.cublaslt, case, plan, packed, tokens)
        checks, row_check, verified = judge.ours(operands, ours)
        if not case.normal:
            checks += bench.weights.check(case, packed)

        candidates: list[Candidate] = [ours]
        row_checks = [row_check]
        in_sum = packed.info.scale.block is not None and not types.widened
        if in_sum or plan.accumulate != "fast":
            # What it costs: the same codes by the fast kernel, without scales where it knows none.
            plain = operands
            if in_sum:
                codes = Tokens(tokens.codes, None)
                bare = without_scales(packed)
                plain = Operands(device, case.shape, bare, codes, types, case.out, turn.slots)
                stack.callback(plain.free)
            widest = optypes.operands(types.a.name, types.b.name)
            fast = Ours(plain, plan.order, None, family="sp24 fast", types=widest)
            stack.callback(fast.free)
            tell(f"verifying {fast.kernel.name}")
            candidates.append(fast)
            row_checks.append(judge.exact(fast))
            raise_if_wrong(case, fast.kernel.name, row_checks[-1:])
        searched = 0
        skipped: list[tuple[str, str]] = []
        if plan.peers:
            try:
                alpha = tensor_alpha(packed) if operands.scaled else 1.0
                peers = Peers(operands, judge.dense, alpha, plan.order)
            except PeerError as error:
                skipped.append(("peers", str(error)))
            else:
                found, searched = _peers(bench, peers, judge, operands, stack, tell)
                for peer, check in found:
                    candidates.append(peer)
                    row_checks.append(check)
                skipped += peers.skipped

        measured = bench.instrument.measure(
            candidates, lambda done, total: tell(f"timing, run {done} of {total}")
        )
        checks += (again(device, operands, ours, verified, plan.order),)
        raise_if_wrong(case, ours.kernel.name, checks)
    rows = tuple(
        timed_row(candidate.role, check, measurement, case, plan, device)
        for candidate, check, measurement in zip(candidates, row_checks, measured, strict=True)
    )
    return CaseResult(
        case.shape,
        case.type,
        case.out,
        plan.order,
        case.weight,
        case.activations,
        turn.slots,
        case.input_bytes,
        turn.past_l2,
        judge.how,
        checks,
        rows,
        searched,
        tuple(skipped),
        ours.chosen_by,
        scale_text(packed.info.scale),
        plan.accumulate,
    )


def _peers(
    bench: _Bench,
    peers: Peers,
    judge: Judge,
    operands: Operands,
    stack: ExitStack,
    tell: Progress,
) -> tuple[list[tuple[Peer, Check]], int]:
    """The peers to time, each verified, and how many cuSPARSELt algorithms were ranked.

    What is kept is freed with ``stack``.
    """
    libraries = bench.libraries
    kept: list[tuple[Peer, Check]] = []

    def keep(peer: Peer | None) -> bool:
        if peer is None:
            return False
        try:
            check = judge.peer(operands, peer)
            fault = "" if check.passed else "its product is wrong; not timed"
        except PeerError as error:
            fault = str(error)
        if fault:
            peers.skipped.append((peer.role.label, fault))
            peer.free()
            return False
        stack.callback(peer.free)
        kept.append((peer, check))
        return True

    if libraries.cublaslt is not None:
        keep(peers.dense(libraries.cublaslt))
    library = libraries.cusparselt
    # A weight that is widened has no peer: the dense product in the wide type stands beside it.
    if library is None or operands.types.widened:
        return kept, 0
    default = peers.sparse(library, peers.order, None)
    known = None
    if default is not None and keep(default):
        known = default.role.order, default.role.detail
    ranked: list[tuple[float, str, int]] = []
    for order, algorithm in peers.algorithms(library):
        tell(f"ranking cuSPARSELt id {algorithm} {order}")
        peer = peers.sparse(library, order, algorithm)
        if peer is None:
            continue
        # Some algorithms take ten times as long as others: no need to know how long.
        best = sorted(us for us, _, _ in ranked)[:FINALISTS]
        hopeless = 2.0 * best[-1] if len(best) == FINALISTS else math.inf
        try:
            us = bench.instrument.quick_us(peer, hopeless_us=hopeless)
            ranked.append((us, order, algorithm))
        except Sp24Error as error:
            peers.skipped.append((peer.role.label, str(error)))
        finally:
            peer.free()
    finalists = 0
    for _, order, algorithm in sorted(ranked):
        if finalists == FINALISTS:
            break
        peer = peers.sparse(library, order, algorithm)
        if peer is not None and (peer.role.order, peer.role.detail) == known:
            peer.free()  # the default is among the fastest and is timed already
            finalists += 1
            continue
        finalists += keep(peer)
    return kept, len(ranked)


def timed_row(
    role: Role,
    check: Check,
    measured: Measurement,
    case: Case,
    plan: BenchPlan,
    device: Device,
) -> Row:
    """A candidate's measurement as rates, with the state of the chip."""

    def figure(timing: Timing) -> Figure:
        us = timing.us.median
        rate = rates(
            case.shape,
            case.type,
            case.out,
            us,
            sparse=role.sparse,
            sm_count=device.sm_count,
            clock_khz=device.clock_khz_max,
        )
        state = timing.state
        power = state.power_w
        return Figure(
            us,
            timing.us.p5,
            timing.us.p95,
            timing.us.mad,
            timing.drift,
            timing.us.samples,
            rate.tflops,
            rate.gbps,
            rate.peak_share,
            state.sm_mhz,
            state.mem_mhz,
            power,
            state.limit_w,
            state.temp_c,
            state.throttle,
            None if power is None else power * us * 1e-6,
            None if not power else rate.tflops / power,
            timing.doubts(plan.settings.noise_limit),
        )

    return Row(role, check, figure(measured.burst), figure(measured.sustained), measured.launches)


def environment(
    device: Device,
    peers: dict[str, str],
    copy_tbps: float | None = None,
    wgmma: tuple[WgmmaCeiling, ...] = (),
    telemetry: Any = None,
) -> Environment:
    """Where and with what it is measured, now."""
    version = device.driver_version
    return Environment(
        datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        device.name,
        device.sm_count,
        device.l2_bytes,
        device.clock_khz_max / 1000,
        f"CUDA {version // 1000}.{version % 1000 // 10}",
        manifest.load().sha256,
        sp24cli.__version__,
        source_commit(Path(sp24cli.__file__).resolve().parent.parent),
        peers,
        copy_tbps,
        wgmma,
        _unread(telemetry),
        device.uuid,
        "counted",
    )


def _unread(telemetry: Any) -> str | None:
    """What ``telemetry`` does not tell of the card, and why; None where it does or is not asked."""
    if telemetry is None or any(vars(telemetry.sample()).values()):
        return None
    there = importlib.util.find_spec("pynvml") is not None
    why = "NVML does not answer" if there else "nvidia-ml-py is not installed"
    return f"power, temperature and throttling not read: {why}"


def source_commit(root: Path) -> str | None:
    """The git commit of a source checkout, with ``+`` if files differ; None for an install."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit + ("+" if git("status", "--porcelain", "--", "sp24cli", "cuda") else "")
