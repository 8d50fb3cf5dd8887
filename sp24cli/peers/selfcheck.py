"""One small product by every plan of every peer, compared with float64 in every element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sp24cli.peers.cublaslt import CublasLt
from sp24cli.peers.cusparselt import CusparseLt
from sp24cli.peers.loading import NUMPY_TYPES, PeerAbsent, PeerError, PeerProblem
from sp24cli.pruning.pattern import ONE_OF_TWO, TWO_OF_FOUR, prune_magnitude

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

#: Limit of ‖D - ref‖ / ‖ref‖: rounding of the output (2^-9 for bf16) and of FP8 sums, with room.
LIMIT = 4e-3

CASES = (
    ("e4m3", "bf16"),
    ("e4m3", "f16"),
    ("f16", "f16"),
    ("f16", "f32"),
    ("bf16", "bf16"),
    ("e5m2", "bf16"),
    ("s8", "s32"),
    ("s8", "bf16"),
    ("tf32", "f32"),
    ("f64", "f64"),
)


@dataclass(frozen=True)
class PeerCheck:
    """What came of one product: its relative error, or the reason there was none."""

    peer: str
    problem: PeerProblem
    error: float | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= LIMIT


def libraries() -> list[CublasLt | CusparseLt | str]:
    """Each peer library loaded, or ``name: reason`` for one that is absent. Needs no GPU."""
    found: list[CublasLt | CusparseLt | str] = []
    for name, kind in (("cuBLASLt", CublasLt), ("cuSPARSELt", CusparseLt)):
        try:
            found.append(kind.load())
        except PeerAbsent as absent:
            found.append(f"{name}: {absent}")
    return found


def check(
    device: Device,
    library: CublasLt | CusparseLt,
    *,
    shape: tuple[int, int, int] = (256, 128, 512),
    seed: int = 24,
) -> Iterator[PeerCheck]:
    """Run every case, both output orders and, for cuSPARSELt, every algorithm id.

    The library is opened and closed here.
    """
    m, n, k = shape
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((m, k), dtype=np.float32)
    tokens = rng.standard_normal((n, k), dtype=np.float32)
    library.open(device)
    try:
        for operand, out in CASES:
            weight = prune_magnitude(dense, ONE_OF_TWO if operand == "tf32" else TWO_OF_FOUR)
            # Integers of some size.
            size = 8 if operand == "s8" else 1
            a, b = ((size * x).astype(NUMPY_TYPES[operand]) for x in (weight, tokens))
            accumulate = "s32" if operand == "s8" else "f32"
            # A factor that no output type holds exactly would hide a lost alpha.
            alpha = 1.0 if out == "s32" else 0.5
            reference = a.astype(np.float64) @ b.astype(np.float64).T
            for order in ("nm", "mn"):
                problem = PeerProblem(
                    m, n, k, operand, out, order, alpha=alpha, accumulate=accumulate
                )
                if isinstance(library, CublasLt):
                    yield _dense(device, library, problem, a, b, alpha * reference)
                elif operand != "f64":
                    yield from _sparse(device, library, problem, a, b, alpha * reference)
    finally:
        library.close()


def _dense(
    device: Device,
    library: CublasLt,
    problem: PeerProblem,
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    reference: npt.NDArray[np.float64],
) -> PeerCheck:
    try:
        plan = library.plan(problem)
    except PeerError as error:
        return PeerCheck("cuBLASLt dense", problem, None, str(error))
    with device.upload(a) as a_dev, device.upload(b) as b_dev:
        try:
            return _run(device, plan.label, plan, a_dev.ptr, b_dev.ptr, reference)
        finally:
            plan.free()


def _sparse(
    device: Device,
    library: CusparseLt,
    problem: PeerProblem,
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    reference: npt.NDArray[np.float64],
) -> Iterator[PeerCheck]:
    algorithm: int | None = None
    count = 1
    with device.upload(a) as a_dev, device.upload(b) as b_dev:
        tried = 0
        while tried <= count:
            name = "default" if algorithm is None else f"id {algorithm}"
            label = f"cuSPARSELt {name}"
            try:
                plan = library.plan(problem, algorithm)
            except PeerError as error:
                yield PeerCheck(label, problem, None, str(error))
                if algorithm is None:
                    return
            else:
                count = plan.algorithm_count
                try:
                    with device.alloc(plan.compressed_bytes) as compressed:
                        plan.compress(a_dev.ptr, compressed.ptr)
                        yield _run(device, label, plan, compressed.ptr, b_dev.ptr, reference)
                except PeerError as error:
                    yield PeerCheck(label, problem, None, str(error))
                finally:
                    plan.free()
            algorithm = tried
            tried += 1


def _run(
    device: Device, label: str, plan: Any, a: int, b: int, reference: npt.NDArray[np.float64]
) -> PeerCheck:
    from sp24cli.gpu.matmul import poison

    problem: PeerProblem = plan.problem
    with device.alloc(problem.out_bytes) as out:
        device.memset(out, poison(problem.out))  # an unwritten element cannot pass
        device.synchronize()  # an upload's last piece may still be on its way to the GPU
        plan.enqueue(a, b, out.ptr)
        device.synchronize()
        rows, columns = problem.m, problem.n
        if problem.order == "nm":
            rows, columns = columns, rows
        got = device.download(out, NUMPY_TYPES[problem.out], (rows, columns)).astype(np.float64)
    got = got.T if problem.order == "nm" else got
    error = float(np.linalg.norm(got - reference) / np.linalg.norm(reference))
    return PeerCheck(label, problem, error)
