"""The products that are timed against each other on one problem: ours and the peers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sp24cli import optypes
from sp24cli.activations import Tokens
from sp24cli.bench.rates import Shape
from sp24cli.errors import Sp24Error
from sp24cli.packed import PackedMatrix
from sp24cli.peers.cublaslt import CublasLt
from sp24cli.peers.cusparselt import CusparseLt, SparsePlan
from sp24cli.peers.loading import NUMPY_TYPES, PeerError, PeerProblem
from sp24cli.scaling import ScaleSpec

if TYPE_CHECKING:
    from sp24cli.gpu.device import Buffer, Device

Array = npt.NDArray[Any]


class Enqueue(Protocol):
    """A peer's plan: enqueue and free."""

    def enqueue(self, a: int, b: int, d: int) -> None: ...

    def free(self) -> None: ...


@dataclass(frozen=True)
class Role:
    """Who a candidate is. ``label`` is unique within a case.

    ``family`` is "sp24", "cublaslt", "cusparselt", or "sp24 fast" for our own kernel with fast sums
    beside one that sums otherwise; ``default`` marks what its library picks
    when not asked to search; ``detail`` is the kernel or algorithm; ``alpha`` the factor that a
    peer was given (1 for ours, which applies the scales themselves).
    """

    label: str
    family: str
    detail: str
    order: str
    sparse: bool
    default: bool = True
    alpha: float = 1.0


class Operands:
    """One problem's operands on the device, in as many copies as the rotation wants.

    ``x`` are the activations' codes [N, K], their columns as the weight's are stored, rows ``ldx``
    elements apart (a multiple of 16 bytes, which the kernels' bulk copies need); ``given`` the
    same in the order of the original, where that differs; ``out`` the outputs, shared by all
    candidates. Sums of integers as they are (s32) take no scale: then ``scaled`` is false.
    """

    def __init__(
        self,
        device: Device,
        shape: Shape,
        packed: PackedMatrix,
        tokens: Tokens,
        types: optypes.Operands,
        out: str,
        slots: int,
    ) -> None:
        from sp24cli.gpu.matmul import SparseWeight

        self.device = device
        self.shape = shape
        self.types = types
        self.out_type = out
        self.slots = slots
        self._held: list[Buffer] = []
        align = 16 // types.b.itemsize
        self.ldx = -(-shape.k // align) * align
        x = self._padded(tokens.codes)
        wide = types.b.name if types.widened else None
        self.weights = [SparseWeight.upload(device, packed, activations=wide) for _ in range(slots)]
        self.x = self.given = self.copies(x)
        if packed.perm is not None:
            self.given = self.copies(self._padded(packed.original_order(tokens.codes)))
        self.scaled = out != "s32"
        self.scale_b, self.scale_b_strides = None, None
        self.scale_k = tokens.scale_k if self.scaled else 0
        if self.scaled and tokens.scale is not None:
            scale = tokens.scale
            if self.scale_k:
                # Column-major, as block-scaled kernels of other libraries want it too.
                scale, self.scale_b_strides = scale.T.copy(), (1, shape.n)
            self.scale_b = self.hold(device.upload(scale))
        out_bytes = shape.m * shape.n * NUMPY_TYPES[out].itemsize
        self.outs = [self.hold(device.alloc(out_bytes)) for _ in range(slots)]
        device.synchronize()

    def _padded(self, codes: Array) -> Array:
        """``codes`` with rows of ``ldx`` elements."""
        if self.ldx == codes.shape[1]:
            return codes
        x = np.zeros((codes.shape[0], self.ldx), codes.dtype)
        x[:, : codes.shape[1]] = codes
        return x

    def hold(self, buffer: Buffer) -> Buffer:
        """``buffer``, freed with these operands."""
        self._held.append(buffer)
        return buffer

    def copies(self, array: Array) -> list[Buffer]:
        """``slots`` device copies of an array."""
        first = self.hold(self.device.upload(array))
        self.device.synchronize()
        others = [self.hold(self.device.alloc(first.nbytes)) for _ in range(self.slots - 1)]
        for other in others:
            self.device.copy_d2d(other.ptr, first.ptr, first.nbytes)
        return [first, *others]

    def poison(self) -> None:
        """What no product is into every output, so that an element nobody writes cannot pass."""
        from sp24cli.gpu.matmul import poison

        for out in self.outs:
            self.device.memset(out, poison(self.out_type))

    def output(self, slot: int, order: str) -> Array:
        """What was written in that slot, as M×N whatever the order."""
        m, n = self.shape.m, self.shape.n
        stored = (n, m) if order == "nm" else (m, n)
        got = self.device.download(self.outs[slot], NUMPY_TYPES[self.out_type], stored)
        return got.T if order == "nm" else got

    def free(self) -> None:
        while self._held:
            self._held.pop().free()
        self.weights.clear()


class Ours:
    """The sp24 kernel: scales of A and of B applied, in every slot its own weight.

    ``family`` is another than "sp24" for a kernel of ours that the first is compared with,
    ``types`` what it multiplies and sums in, if not those of the operands.
    """

    def __init__(
        self,
        operands: Operands,
        order: str,
        kernel: str | None,
        accumulate: str = "fast",
        family: str = "sp24",
        types: optypes.Operands | None = None,
    ) -> None:
        self._operands = operands
        self.types = types or operands.types
        self._plans = [
            weight.plan(
                operands.shape.n,
                operands.out_type,
                order,
                kernel,
                accumulate=accumulate,
                scale_b_k=operands.scale_k,
                types=self.types,
            )
            for weight in operands.weights
        ]
        self.kernel = self._plans[0].kernel
        self.chosen_by = self._plans[0].chosen_by
        self.role = Role(family, family, self.kernel.name, order, sparse=True)
        self.slots = operands.slots

    def enqueue(self, slot: int) -> None:
        operands = self._operands
        self._plans[slot].enqueue(
            operands.given[slot],
            operands.ldx,
            operands.outs[slot],
            scale_b=operands.scale_b,
            scale_b_rows=operands.scale_b is not None,
            scale_b_strides=operands.scale_b_strides,
        )

    def free(self) -> None:
        self._plans.clear()


@dataclass
class Peer:
    """A peer's plan on the same data; ``a`` are its forms of the weight, one a slot."""

    role: Role
    plan: Enqueue
    a: Sequence[Buffer]
    operands: Operands
    owned: list[Buffer] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return self.operands.slots

    def enqueue(self, slot: int) -> None:
        operands = self.operands
        self.plan.enqueue(self.a[slot].ptr, operands.x[slot].ptr, operands.outs[slot].ptr)

    def free(self) -> None:
        self.plan.free()
        while self.owned:
            self.owned.pop().free()


Candidate = Ours | Peer


def without_scales(packed: PackedMatrix) -> PackedMatrix:
    """The same codes under one scale of 1."""
    info = replace(packed.info, scale=ScaleSpec("tensor"))
    return replace(packed, info=info, scale=np.ones(1, np.float32))


def tensor_alpha(packed: PackedMatrix) -> float:
    """The factor a peer applies: the tensor scale; 1 where there is another kind or none."""
    if packed.info.scale.kind == "tensor" and packed.scale is not None:
        return float(packed.scale.ravel()[0])
    return 1.0


class Peers:
    """The peers' side of one problem: the dense weight on the device and plans on it.

    ``order`` is the output order that was asked for, in which the defaults are timed. Refusals are
    collected in ``skipped`` as (label, reason).
    """

    def __init__(self, operands: Operands, dense: Array, alpha: float, order: str) -> None:
        if operands.ldx != operands.shape.k:
            raise PeerError("the peers need K to fill whole 16 bytes")
        self._operands = operands
        self._dense = dense
        self._alpha = alpha
        self.order = order
        self._on_device: list[Buffer] | None = None
        self.skipped: list[tuple[str, str]] = []

    def _problem(self, order: str) -> PeerProblem:
        shape, operands = self._operands.shape, self._operands
        types = operands.types
        return PeerProblem(
            shape.m,
            shape.n,
            shape.k,
            types.multiplied.name,
            operands.out_type,
            order,
            self._alpha,
            types.b.name,
            types.accumulate,
        )

    def _weights(self) -> list[Buffer]:
        if self._on_device is None:
            self._on_device = self._operands.copies(self._dense)
        return self._on_device

    def dense(self, library: CublasLt) -> Peer | None:
        """cuBLASLt's first choice, None where it refuses."""
        label = "cuBLASLt dense"
        try:
            plan = library.plan(self._problem(self.order))
        except PeerError as error:
            self.skipped.append((label, str(error)))
            return None
        role = Role(
            label, "cublaslt", "heuristic's first", self.order, sparse=False, alpha=self._alpha
        )
        return Peer(role, plan, self._weights(), self._operands)

    def sparse(self, library: CusparseLt, order: str, algorithm: int | None) -> Peer | None:
        """cuSPARSELt by algorithm id, or its default; None where it refuses."""
        name = "default" if algorithm is None else f"id {algorithm}"
        label = f"cuSPARSELt {name}" + ("" if algorithm is None else f" {order}")
        try:
            plan = library.plan(self._problem(order), algorithm)
        except PeerError as error:
            self.skipped.append((f"{label} ({order})", str(error)))
            return None
        role = Role(
            label,
            "cusparselt",
            f"id {plan.algorithm} of {plan.algorithm_count}",
            order,
            sparse=True,
            default=algorithm is None,
            alpha=self._alpha,
        )
        peer = Peer(role, plan, [], self._operands)
        try:
            peer.owned = self._compressed(plan)
        except Sp24Error as error:
            self.skipped.append((f"{label} ({order})", str(error)))
            peer.free()
            return None
        peer.a = list(peer.owned)
        return peer

    def algorithms(self, library: CusparseLt) -> Iterator[tuple[str, int]]:
        """(order, id) of every algorithm that this problem has."""
        for order in ("nm", "mn"):
            try:
                plan = library.plan(self._problem(order))
            except PeerError:
                continue
            count = plan.algorithm_count
            plan.free()
            for algorithm in range(count):
                yield order, algorithm

    def _compressed(self, plan: SparsePlan) -> list[Buffer]:
        """The weight as this plan reads it, once a slot. Compressed anew for every plan: the
        API ties the compressed form to the plan."""
        device = self._operands.device
        made: list[Buffer] = []
        try:
            for _ in range(self._operands.slots):
                made.append(device.alloc(plan.compressed_bytes))
            plan.compress(self._weights()[0].ptr, made[0].ptr)
            for other in made[1:]:
                device.copy_d2d(other.ptr, made[0].ptr, plan.compressed_bytes)
            device.synchronize()
        except Sp24Error:
            for buffer in made:
                buffer.free()
            raise
        return made
