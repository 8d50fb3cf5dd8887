"""The judgement on products before and after they are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sp24cli import rowblocks
from sp24cli.activations import Tokens, over_columns
from sp24cli.bench.candidates import Operands, Ours, Peer
from sp24cli.bench.check import (
    Reference,
    check_exact,
    compare,
    dense_codes,
    dense_values,
    dense_widened,
    exact_problem,
    reference_on_cpu,
    result_values,
    row_norms,
    tolerance,
)
from sp24cli.bench.instrument import Work
from sp24cli.bench.plan import BenchPlan, Case
from sp24cli.bits import widen
from sp24cli.errors import VerificationError
from sp24cli.packed import PackedMatrix
from sp24cli.peers.cublaslt import CublasLt
from sp24cli.peers.loading import PeerError, PeerProblem
from sp24cli.verify.result import Check

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

Array = npt.NDArray[Any]

#: Largest 2MNK for which the float64 product is made on the CPU where cuBLASLt is absent.
CPU_FLOPS = 1e12

#: Bytes of one piece of A in float64 while the reference is made on the GPU.
_PIECE_BYTES = 1 << 30


class WeightChecks:
    """What ``sp24 verify`` does with a weight on the GPU, once for cases that share it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._last: tuple[PackedMatrix, tuple[Check, ...]] | None = None

    def check(self, case: Case, packed: PackedMatrix) -> tuple[Check, ...]:
        if self._last is None or self._last[0] is not packed:
            from sp24cli.verify.gpu import verify_matrix

            types = case.operands
            wide = (types.b.name,) if types.widened else ()
            self._last = packed, verify_matrix(packed, self._seed, wide).checks
        raise_if_wrong(case, "weight", self._last[1])
        return self._last[1]


class Judge:
    """Verifies outputs of one case: makes the reference once, compares many with it."""

    def __init__(
        self,
        device: Device,
        cublaslt: CublasLt | None,
        case: Case,
        plan: BenchPlan,
        packed: PackedMatrix,
        tokens: Tokens,
    ) -> None:
        self._device = device
        self._case = case
        self._plan = plan
        self._packed = packed
        self._tokens = tokens
        self._workers = plan.workers
        types = case.operands
        blocks = packed.info.scale.block is not None
        # Scales of a widened weight's blocks are in what is multiplied.
        self._in_operand = types.widened and blocks
        self.dense = (
            dense_widened(packed, types.b, plan.workers)
            if types.widened
            else dense_codes(packed, plan.workers)
        )
        self._limits = tolerance(case.operands, case.out, case.shape.k, normal=case.normal)
        # Scales that change along K are part of the sum: ours is compared with the values' product,
        # a peer, which knows no such scales, with that of the codes.
        self._in_sum = (blocks and not types.widened) or tokens.scale_k > 0
        self._codes = self.dense, tokens.codes
        self._values = self._codes
        if self._in_sum:
            b = widen(tokens.codes).astype(np.float64)
            if tokens.scale is not None:
                b *= over_columns(tokens.scale, b.shape[1], tokens.scale_k)
            self._values = dense_values(packed, plan.workers), b
        make: Callable[[Array, Array], Array] | None = None
        if cublaslt is not None:
            self.how = "float64 product by cuBLASLt"
            make = partial(reference_on_gpu, device, cublaslt)
        elif case.shape.flops <= CPU_FLOPS:
            self.how = "float64 product by numpy"
            make = reference_on_cpu
        else:
            self.how = "exact integers by Freivalds' test"
        self._reference: Reference | None = None
        self._peers_reference: Reference | None = None
        if make is not None:
            self._reference = self._with_norms(make(*self._values), self._values, 0.0)
            self._peers_reference = self._reference
            if self._in_sum and plan.peers:
                self._peers_reference = self._with_norms(make(*self._codes), self._codes, 0.0)

    @property
    def _row_scale(self) -> Array | float:
        """The weight's scales that come after the sum."""
        scale = self._packed.scale
        return 1.0 if scale is None or self._in_operand else scale

    def _with_norms(
        self, product: Array, operands: tuple[Array, Array], rounding: float
    ) -> Reference:
        a, b = (row_norms(operand, self._workers) for operand in operands)
        return Reference(product, a, b, rounding)

    def ours(self, operands: Operands, ours: Ours) -> tuple[tuple[Check, ...], Check, Array]:
        """All checks of our kernel, the one that stands in the table, and the verified output.

        `VerificationError` if any fails.
        """
        operands.poison()
        self._device.synchronize()
        for slot in range(operands.slots):
            ours.enqueue(slot)
        output = operands.output(0, self._plan.order)
        row_scale: Array | float = 1.0
        column_scale: Array | float = 1.0
        if operands.scaled and not self._in_sum:
            row_scale = self._row_scale
            column_scale = 1.0 if self._tokens.scale is None else self._tokens.scale
        checks: list[Check] = []
        if self._reference is not None:
            checks.append(
                compare(
                    "all elements",
                    output,
                    self._reference,
                    row_scale,
                    column_scale,
                    self._limits,
                    self._workers,
                )
            )
        if self._reference is None or not self._case.normal:
            checks.append(self.exact(ours))
        if self._reference is None and checks[0].passed and not self._in_sum:
            # The peers are compared with our own output, now that its kernel is proven.
            scales = np.outer(np.ravel(row_scale), np.ravel(column_scale))
            product = result_values(output).astype(np.float64) / scales
            self._peers_reference = self._with_norms(product, self._codes, self._limits.rounding)
        first = _bits(output)
        same = all(
            np.array_equal(first, _bits(operands.output(slot, self._plan.order)))
            for slot in range(1, operands.slots)
        )
        checks.append(_equality("every copy gives the same bits", same))
        raise_if_wrong(self._case, ours.kernel.name, checks)
        return tuple(checks), checks[0], output

    def sibling(
        self, operands: Operands, work: Work, name: str, same: Array | None
    ) -> tuple[Check, Array]:
        """Another kernel of ours on the same operands, after `ours`: every element in bounds, and
        in every copy the bits of ``same``, or of its own first. The first check, and the output.

        `VerificationError` if it is wrong. Not for scales that change along K.
        """
        # Without a product of its own, the verified output of `ours` stands in.
        reference = self._peers_reference if self._reference is None else self._reference
        assert reference is not None and not self._in_sum
        operands.poison()
        self._device.synchronize()
        for slot in range(operands.slots):
            work.enqueue(slot)
        output = operands.output(0, self._plan.order)
        row_scale = self._row_scale
        column_scale = 1.0 if self._tokens.scale is None else self._tokens.scale
        checks = [
            compare(
                "all elements",
                output,
                reference,
                row_scale,
                column_scale,
                self._limits,
                self._workers,
            )
        ]
        want = _bits(output if same is None else same)
        equal = all(
            np.array_equal(want, _bits(operands.output(slot, self._plan.order)))
            for slot in range(operands.slots)
        )
        checks.append(_equality("the same bits in every copy, and as the others", equal))
        raise_if_wrong(self._case, name, checks)
        return checks[0], output

    def peer(self, operands: Operands, peer: Peer) -> Check:
        """One product of a peer, compared in every element."""
        if self._peers_reference is None:
            raise PeerError("no reference without scales to compare with")
        operands.poison()
        self._device.synchronize()
        peer.enqueue(0)
        output = operands.output(0, peer.role.order)
        alpha = peer.role.alpha
        return compare(
            peer.role.label, output, self._peers_reference, alpha, 1.0, self._limits, self._workers
        )

    def exact(self, ours: Ours) -> Check:
        """A kernel of ours on integers, in the shape and on the mask of this case."""
        seed = self._plan.settings.seed
        exact = exact_problem(self._packed, self._case.shape.n, ours.types.b, seed)
        operands = Operands(
            self._device,
            self._case.shape,
            exact.packed,
            Tokens(exact.tokens, None),
            ours.types,
            self._case.out,
            slots=1,
        )
        try:
            operands.poison()
            self._device.synchronize()
            Ours(operands, self._plan.order, ours.kernel.name).enqueue(0)
            output = operands.output(0, self._plan.order)
        finally:
            operands.free()
        return check_exact("exact integers", output, exact, seed, self._workers)


def again(device: Device, operands: Operands, ours: Work, verified: Array, order: str) -> Check:
    """Our kernel once more after the timing: a race would have moved a bit by then."""
    operands.poison()
    device.synchronize()
    ours.enqueue(0)
    output = operands.output(0, order)
    return _equality("same bits after timing", np.array_equal(_bits(output), _bits(verified)))


def _bits(array: Array) -> Array:
    """The stored bits; NaN must not hide a difference nor make one."""
    stored = array if array.flags.c_contiguous else array.T
    return stored.view(np.dtype(f"u{array.dtype.itemsize}"))


def _equality(name: str, same: bool) -> Check:
    return Check(name, same, 0.0 if same else float("inf"), 0.0, 0.0)


def raise_if_wrong(case: Case, what: str, checks: Sequence[Check]) -> None:
    """`VerificationError` for the first of ``checks`` that failed, with its first wrong place."""
    for check in checks:
        if check.passed:
            continue
        where = ""
        if check.first_bad is not None:
            where = f", first at row {check.first_bad[0]}, column {check.first_bad[1]}"
        raise VerificationError(
            f"{what} at {case.shape} {case.type} ({case.weight}): {check.name}: "
            f"error {check.max_error:.3g} where {check.bound:.3g} is allowed{where}"
        )


def reference_on_gpu(device: Device, library: CublasLt, dense: Array, tokens: Array) -> Array:
    """A·Bᵀ of codes or values [M, K] and [N, K] in float64, [M, N], by cuBLASLt.

    For e4m3 codes it is exact: their products and sums fit float64.
    """
    m, k = dense.shape
    n = tokens.shape[0]
    out = np.empty((m, n))
    rows = max(1, min(m, _PIECE_BYTES // (8 * max(k, n))))
    with (
        device.upload(widen(tokens).astype(np.float64)) as b,
        device.alloc(8 * rows * n) as d,
    ):
        for part in rowblocks.row_slices(m, rows):
            with device.upload(widen(dense[part]).astype(np.float64)) as a:
                plan = library.plan(PeerProblem(part.stop - part.start, n, k, "f64", "f64", "mn"))
                try:
                    device.synchronize()
                    plan.enqueue(a.ptr, b.ptr, d.ptr)
                    out[part] = device.download(d, np.float64, out[part].shape)
                finally:
                    plan.free()
    return out
