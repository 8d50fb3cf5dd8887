"""What the chip can do at most, measured now: the rate at which it copies its memory, that of its
sparse tensor cores alone, and how near to them a product came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING

from sp24cli.bench.instrument import Instrument, Timer
from sp24cli.bench.rates import Shape, a_bytes, moved_bytes, peak_tflops
from sp24cli.bench.result import CaseResult, Environment, Row, WgmmaCeiling
from sp24cli.kernels import manifest
from sp24cli.kernels.manifest import CeilingEntry
from sp24cli.optypes import OPERANDS, operand_type

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

#: Bytes that one copy reads, and as many that it writes: far past any L2.
COPY_BYTES = 2_000_000_000
_WARM_UP, _COPIES = 3, 15

#: Tiles that a CTA of a ceiling kernel multiplies in one launch: two to three milliseconds', beside
#: which the launch and the making of the operands (some 10 us) count little.
WGMMA_TILES = 108


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


class WgmmaLoop:
    """A launch of a ceiling kernel on every SM, as the instrument times it.

    The threads' sums, float32 [sm_count, threads], are left in ``sums``. They do not depend on
    ``tiles``, since every tile is the same sum.
    """

    slots = 1

    def __init__(self, device: Device, entry: CeilingEntry, tiles: int = WGMMA_TILES) -> None:
        from sp24cli.gpu.arguments import pack_struct

        self._device, self.entry, self.tiles = device, entry, tiles
        self._kernel = device.kernel(entry)
        self.sums = device.alloc(4 * device.sm_count * entry.threads)
        self._args = pack_struct(
            manifest.load().args[entry.args], {"sums": self.sums.ptr, "tiles": tiles}
        )

    @property
    def flops(self) -> int:
        """Of one launch, dense-equivalent."""
        entry = self.entry
        tile = 2 * entry.tile_m * entry.tile_n * entry.tile_k * entry.tile_stages
        return self._device.sm_count * self.tiles * tile

    def enqueue(self, slot: int) -> None:
        device = self._device
        device.launch(self._kernel, device.sm_count, [self._args], device.stream)

    def free(self) -> None:
        self.sums.free()


def wgmma_ceilings(
    device: Device,
    instrument: Instrument,
    entries: Sequence[CeilingEntry],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[WgmmaCeiling, ...]:
    """The rate of each ceiling kernel, timed as products are: burst and sustained, interleaved."""
    with ExitStack() as stack:
        loops = []
        for entry in entries:
            loops.append(WgmmaLoop(device, entry))
            stack.callback(loops[-1].free)
        measured = instrument.measure(loops, progress) if loops else []
        return tuple(
            WgmmaCeiling(
                loop.entry.a_type,
                loop.entry.source,
                loop.flops / times.burst.us.median / 1e6,
                loop.flops / times.sustained.us.median / 1e6,
                times.sustained.state.sm_mhz,
                times.sustained.state.power_w,
            )
            for loop, times in zip(loops, measured, strict=True)
        )


def shares(environment: Environment, case: CaseResult, row: Row) -> tuple[str, float, float] | None:
    """How near a sparse product came to what bounds it: ("copy" or "wgmma", burst, sustained).

    Where memory bounds the case: the time of its packed weight at the rate of a copy over the
    product's. Else the product's rate over the faster one of the ceiling kernels of its operand
    width. None for a dense product, and where the ceiling was not measured.
    """
    if not row.role.sparse:
        return None
    if memory_bounds(environment, case):
        assert environment.copy_tbps is not None
        floor = memory_floor_us(case.shape, case.type, environment.copy_tbps)
        return "copy", floor / row.burst.us, floor / row.sustained.us
    width = OPERANDS[case.type].multiplied.itemsize
    fitting = [c for c in environment.wgmma if operand_type(c.type).itemsize == width]
    if not fitting:
        return None
    return (
        "wgmma",
        row.burst.tflops / max(c.burst_tflops for c in fitting),
        row.sustained.tflops / max(c.sustained_tflops for c in fitting),
    )


def memory_bounds(environment: Environment, case: CaseResult) -> bool:
    """`bound_by_memory` of a case, as measured; False where the copy was not."""
    return environment.copy_tbps is not None and bound_by_memory(
        case.shape,
        case.type,
        case.out,
        copy_tbps=environment.copy_tbps,
        sm_count=environment.sm_count,
        clock_khz=round(environment.clock_mhz_max * 1000),
    )


def memory_floor_us(shape: Shape, type_name: str, copy_tbps: float) -> float:
    """Microseconds that the packed weight alone takes at the rate of a copy."""
    return a_bytes(shape, OPERANDS[type_name].a, sparse=True) / copy_tbps / 1e6


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
    types = OPERANDS[type_name]
    moved = moved_bytes(shape, types, out, sparse=True)
    peak = peak_tflops(types.multiplied, sparse=True, sm_count=sm_count, clock_khz=clock_khz)
    return moved / copy_tbps > shape.flops / peak
