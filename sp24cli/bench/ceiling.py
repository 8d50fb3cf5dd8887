"""What the chip can do at most, measured now: so far the rate at which it copies its memory."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from sp24cli.bench.instrument import Timer
from sp24cli.bench.rates import Shape, a_bytes, b_bytes, d_bytes, peak_tflops
from sp24cli.optypes import operand_type

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

#: Bytes that one copy reads, and as many that it writes: far past any L2.
COPY_BYTES = 2_000_000_000
_WARM_UP, _COPIES = 3, 15


def copy_bandwidth(device: Device, timer: Timer) -> float:
    """Terabytes a second that a copy within device memory reads and writes, both counted: the
    median of `_COPIES`."""
    nbytes = min(COPY_BYTES, device.mem_bytes // 8)
    with device.alloc(nbytes) as source, device.alloc(nbytes) as target:
        device.memset(source, 0x5A)  # memory never written may not be read from DRAM
        times = []
        for _ in range(_WARM_UP + _COPIES):
            start, end = timer.event(), timer.event()
            start.record()
            device.copy_d2d(target.ptr, source.ptr, nbytes)
            end.record()
            end.synchronize()
            times.append(timer.elapsed_ms(start, end))
    return 2 * nbytes / median(times[_WARM_UP:]) / 1e9


def memory_floor_us(shape: Shape, type_name: str, copy_tbps: float) -> float:
    """Microseconds that the packed weight alone takes at the rate of a copy."""
    return a_bytes(shape, operand_type(type_name), sparse=True) / copy_tbps / 1e6


def bound_by_memory(
    shape: Shape,
    type_name: str,
    out: str,
    *,
    copy_tbps: float,
    sm_count: int,
    clock_khz: int,
) -> bool:
    """Whether moving A, B and D once takes longer than the tensor cores at their highest clock."""
    optype = operand_type(type_name)
    moved = a_bytes(shape, optype, sparse=True) + b_bytes(shape, optype) + d_bytes(shape, out)
    peak = peak_tflops(optype, sparse=True, sm_count=sm_count, clock_khz=clock_khz)
    return moved / copy_tbps > shape.flops / peak
