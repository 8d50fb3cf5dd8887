"""How long a kernel takes by a model of a persistent, warp-specialised kernel, in a few constants.

    time = launch + max(rounds of tiles x (steps x step + end), latency + rounds of memory)

with a smooth maximum, for what is nearly as slow as the slowest part costs a little, too. A step is
one block along K: what its wgmmas read from shared memory, or what the warps between them take.
Memory is the bytes that leave L2 and those that come from DRAM; a last round that is only partly
filled asks for less.

The constants are those of an H200; another GPU differs by its SMs alone. `samples/fit_model.py`
finds them anew from measured times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.gpu.order import (
    FEW_COLUMNS,
    balanced_order,
    blocks_of_busiest,
    cluster_rows,
    heights,
    tile_order,
)
from sp24cli.kernels.choices import Problem
from sp24cli.kernels.manifest import Entry

Array = npt.NDArray[Any]

#: The share of the SMs that clusters of so many CTAs find in whole processor clusters. Source: the
#: occupancy query on an H200, 30 clusters of 4 on 132 SMs; and times there, by which 15 of 8 fit.
_CLUSTER_SHARE = {4: 120 / 132, 8: 120 / 132}

#: What an SM of sm_90 has for CTAs, in bytes of shared memory (1 KB of a CTA's is the system's) and
#: registers. Source: CUDA C++ Programming Guide, "Compute Capability 9.0".
_SM_SHARED, _CTA_SHARED, _SM_REGISTERS = 228 << 10, 1 << 10, 1 << 16

#: Bytes of an H200's L2, as its driver says (``l2_bytes`` in samples/results).
_L2 = 60 << 20

_OUT_BYTES = {"f32": 4, "s32": 4, "f16": 2, "bf16": 2}

#: Tiles of up to so many columns ask for A before the launch before has ended (kFillsEarly).
_EARLY_COLUMNS = 128


@dataclass(frozen=True)
class Constants:
    """Nanoseconds, and bytes a nanosecond.

    ``port`` is a row of 128 bytes of B for a warpgroup, ``a_rows`` how many of these its A is
    like; a full chip runs slower by ``throttle``, relative. ``warpgroup`` is a step of one
    warpgroup whatever its tile, ``widen`` the conversion of its weights, ``flight`` how long a
    stage is on its way, ``issue`` what the thread that asks for A takes for a stage at least,
    ``together`` by how much each further CTA that shares B slows a step, relative.
    ``piece`` is a column of a piece of K whose sum is promoted, ``scale`` one of a piece whose
    scales differ, ``spread`` one whose scales a wgmma spreads. ``l2`` and ``dram`` are rates.
    ``launch`` is a launch, ``late`` what it takes longer if its CTAs find no SM before the launch
    before has ended, ``several`` if they have several narrow tiles each (these launches do not
    overlap), ``wide`` if they have wide tiles, which do not ask for A early. ``latency`` is the
    first stage's. ``column`` is a column of a warpgroup's rows at a tile's end; of a tile split
    over K ``exchange`` and, for each column that is sent, ``sent``. ``sum_time`` and
    ``sum_memory`` are the exponents of the smooth maxima: of steps and memory, of L2 and DRAM.
    """

    port: float = 0.5697
    a_rows: float = 4.72
    throttle: float = 0.03096
    warpgroup: float = 28.7
    widen: float = 14.0
    flight: float = 1061.0
    issue: float = 95.19
    together: float = 0.04267
    piece: float = 0.96
    scale: float = 0.38
    spread: float = 0.7
    l2: float = 10120.0
    dram: float = 5398.0
    launch: float = 809.2
    late: float = 235.2
    several: float = 2304.0
    wide: float = 2.779
    latency: float = 504.0
    column: float = 5.268
    exchange: float = 261.1
    sent: float = 12.42
    sum_time: float = 2.394
    sum_memory: float = 2.103


#: Source: `samples/fit_model.py` over 366 problems timed on an H200 (132 SMs, 700 W): kernels near
#: the fastest are 6.2 % off, root of the mean square. ``widen``, ``piece``, ``scale`` and
#: ``spread`` are of no kernel among them: of single timings of widened, precise and block-scaled
#: ones (cuda/README.md).
H200 = Constants()


@dataclass(frozen=True)
class Points:
    """Kernels at problems, as arrays of one length: the sizes that the model asks for.

    ``tile_rows`` are whole clusters along M, ``tiles`` these by ``cols``, of which ``places`` run
    at once, on SMs that hold ``slots`` CTAs in all; ``steps`` are blocks along K of a tile and part
    of K, of which a stage has ``stage_blocks`` and all stages ``flying``.
    ``a``, ``b`` and ``d`` are the bytes of the whole operands, ``step_a`` what a cluster reads of A
    in a step. ``consumers`` are the warpgroups that have rows, in the mean of high and low tiles,
    ``blocks`` those of 64 rows of one, ``pieces`` of a sum a step, ``scaled`` these if their scales
    differ, ``spread`` others, whose scales a wgmma spreads.
    """

    tile_n: Array
    consumers: Array
    split: Array
    cluster_ctas: Array
    widened: Array
    stage_blocks: Array
    flying: Array
    blocks: Array
    pieces: Array
    scaled: Array
    spread: Array
    tile_rows: Array
    cols: Array
    tiles: Array
    places: Array
    steps: Array
    n: Array
    a: Array
    b: Array
    d: Array
    step_a: Array
    slots: Array

    @classmethod
    def of(cls, pairs: Iterable[tuple[Entry, Problem]], sm_count: int) -> Points:
        rows = [_point(entry, problem, sm_count) for entry, problem in pairs]
        columns = np.array(rows, np.float64).reshape(len(rows), len(fields(cls))).T
        return cls(*columns)

    @property
    def rounds(self) -> Array:
        """Tiles of the busiest CTA."""
        return np.ceil(self.tiles / self.places)

    @property
    def busy(self) -> Array:
        """CTAs at once."""
        return np.minimum(self.tiles, self.places) * self.cluster_ctas


def residents(entry: Entry) -> int:
    """CTAs of a kernel that an SM holds at once."""
    by_shared = _SM_SHARED // (entry.smem_bytes + _CTA_SHARED)
    return max(1, min(by_shared, _SM_REGISTERS // (entry.registers * entry.threads)))


def _point(entry: Entry, p: Problem, sm_count: int) -> tuple[float, ...]:
    """The fields of `Points`. An empty problem counts as the smallest."""
    m, n, k = max(p.m, 1), max(p.n, 1), max(p.k, 1)
    cols = -(-n // entry.tile_n)
    slots = sm_count * residents(entry)
    usable = int(slots * _CLUSTER_SHARE.get(entry.cluster_ctas, 1))
    places = max(1, usable // entry.cluster_ctas)
    rows = cluster_rows(entry, m, cols, places)
    tile_blocks = m / 64 / (rows * entry.cluster) if entry.balanced else entry.tile_m / 64
    blocks = -(-k // entry.tile_k)
    a = m / 64 * blocks * entry.block_bytes
    b = n * blocks * entry.box_bytes_b
    consumers: float = min(entry.consumers, math.ceil(tile_blocks))
    if entry.balanced and entry.tile_n > FEW_COLUMNS and rows * cols > places:
        # Of the tiles of the busiest cluster, some of which are lower than others.
        sizes = (rows, cols, places)
        low, high = heights(entry, m, rows)
        order = balanced_order(tile_order(*sizes, int(a), int(b), _L2), *sizes, low, high)
        consumers = blocks_of_busiest(order, *sizes, low, high) / -(-rows * cols // places)
    pieces = entry.tile_k / entry.promote_k if entry.promote_k else 0.0
    spread, pieces = (pieces, 0.0) if entry.loop_scales == "tile" else (0.0, pieces)
    return (
        entry.tile_n,
        consumers,
        entry.split,
        entry.cluster_ctas,
        entry.layout == "widened",
        entry.stage_blocks,
        entry.stages * entry.stage_blocks,
        2 if pieces else 1,
        pieces,
        pieces if entry.loop_scales != "none" else 0.0,
        spread,
        rows,
        cols,
        rows * cols,
        places,
        -(-blocks // entry.split),
        n,
        a,
        b,
        m * n * _OUT_BYTES[entry.out_type],
        tile_blocks * entry.block_bytes * entry.cluster,
        slots,
    )


def _most(terms: Sequence[Array], exponent: float) -> Array:
    """A smooth maximum: the norm of that exponent."""
    most = np.maximum.reduce(terms)
    return most * sum((term / most) ** exponent for term in terms) ** (1 / exponent)


def times_us(at: Points, c: Constants = H200) -> Array:
    """Microseconds of each kernel at its problem, launches back to back."""
    rounds, busy = at.rounds, at.busy

    # Warpgroups of two blocks of rows lie side by side: all of them read B twice, but a part of it.
    rows_b = at.tile_n + c.a_rows * at.blocks
    port = c.port * at.consumers * rows_b * (1 + c.throttle * busy / at.slots)
    wgmma = at.consumers * (c.warpgroup + c.widen * at.widened)
    step = _most([wgmma, port, c.issue / at.stage_blocks, c.flight / at.flying], 4)
    step *= 1 + c.together * (at.cluster_ctas / at.split - 1)
    # Additions do not overlap with wgmmas.
    step += at.tile_n * (c.piece * at.pieces + c.scale * at.scaled + c.spread * at.spread)
    end = c.column * at.consumers * at.tile_n / at.split
    sent = at.consumers * at.tile_n * (1 - 1 / at.split)
    compute = at.steps * step + end + (at.split > 1) * c.exchange + c.sent * sent

    mean_rows = at.n / at.cols
    l2 = at.steps * at.split * (at.step_a + 128 * mean_rows) / c.l2
    dram = (at.a + at.b + at.d) / at.tiles / c.dram
    read = _most([l2, dram], c.sum_memory)
    # Every round but the last fills all places; the last has what is left.
    full = (rounds - 1) * _most([compute, at.places * read], c.sum_time)
    last = _most([compute, c.latency + (at.tiles - (rounds - 1) * at.places) * read], c.sum_time)

    early = np.where(rounds > 1, 0.0, np.clip((at.slots - busy) / busy, 0.0, 1.0))
    start = c.launch + c.late * (1 - early)
    start += np.where(at.tile_n > _EARLY_COLUMNS, c.wide, 0.0)
    start += np.where((rounds > 1) & (at.tile_n < _EARLY_COLUMNS), c.several, 0.0)
    return (start + full + last) / 1000
