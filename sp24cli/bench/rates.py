"""What a time means: rates, and shares of what the chip could do."""

from __future__ import annotations

from dataclasses import dataclass

from sp24cli.optypes import OPERANDS, Operands, OperandType

#: Dense multiply-adds of one SM in one cycle by operand bytes. Source: wgmma m64n256 takes 128
#: cycles for K 32 of an 8-bit type and K 16 of a 16-bit one (64·256·32/128 = 4096), and a
#: Hopper's published rates over its SMs and boost clock come to the same, for tf32 too.
DENSE_FMA_PER_CYCLE = {1: 4096, 2: 2048, 4: 1024}

_OUT_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "s32": 4}


@dataclass(frozen=True)
class Shape:
    """M×N×K of D = A·Bᵀ: A is M×K (the weight), B is N×K (the tokens)."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        """Dense-equivalent: 2MNK, zeros counted as work."""
        return 2 * self.m * self.n * self.k


def a_bytes(shape: Shape, optype: OperandType, *, sparse: bool) -> int:
    """Bytes of A as a kernel must read it: values and metadata, or the dense matrix."""
    if not sparse:
        return shape.m * shape.k * optype.itemsize
    metadata = -(-optype.meta_k(shape.k) // 8)
    return shape.m * (shape.k // 2) * optype.itemsize + shape.m * metadata


def b_bytes(shape: Shape, optype: OperandType) -> int:
    return shape.n * shape.k * optype.itemsize


def d_bytes(shape: Shape, out: str) -> int:
    return shape.m * shape.n * _OUT_BYTES[out]


def moved_bytes(shape: Shape, types: Operands, out: str, *, sparse: bool) -> int:
    """Bytes of A, B and D once. A dense peer of a weight that is widened reads it as it is
    multiplied."""
    a = a_bytes(shape, types.a if sparse else types.multiplied, sparse=sparse)
    return a + b_bytes(shape, types.b) + d_bytes(shape, out)


def peak_tflops(optype: OperandType, *, sparse: bool, sm_count: int, clock_khz: int) -> float:
    """Rate of the tensor cores at the highest clock, dense-equivalent for sparse operands.

    Two flops a multiply-add; 2:4 operands let each one stand for two.
    """
    per_cycle = 2 * DENSE_FMA_PER_CYCLE[optype.itemsize] * (2 if sparse else 1)
    return sm_count * clock_khz * 1e3 * per_cycle / 1e12


@dataclass(frozen=True)
class Rates:
    """One time as rates. ``tflops`` is dense-equivalent; ``gbps`` counts A, B and D once."""

    us: float
    tflops: float
    gbps: float
    peak_share: float


def rates(
    shape: Shape,
    type_name: str,
    out: str,
    us: float,
    *,
    sparse: bool,
    sm_count: int,
    clock_khz: int,
) -> Rates:
    """Rates of one product of the operands ``type_name`` that took ``us`` microseconds."""
    types = OPERANDS[type_name]
    moved = moved_bytes(shape, types, out, sparse=sparse)
    tflops = shape.flops / us / 1e6
    peak = peak_tflops(types.multiplied, sparse=sparse, sm_count=sm_count, clock_khz=clock_khz)
    return Rates(us, tflops, moved / us / 1e3, tflops / peak)
