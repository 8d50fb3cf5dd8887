"""Which kernel multiplies a given problem.

`choose` asks, in this order:

1. a measurement of this very problem, the user's own (``cache``) before the package's (``table``):
   its fastest kernel;
2. the nearest measured problem of the same types and order that lies within `NEAR`: the time of
   each kernel there, carried over by the cycle model's ratio of the two problems, so that a last
   round of tiles that only one of the two fills is accounted for; the least wins;
3. the cycle model alone (``model``).

Where nothing was measured for an output type and order, measurements of another one stand in,
kernel by kernel: the tile decides, not what the epilogue writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.fragments import WIDENED, weight_scales
from sp24cli.kernels import choices
from sp24cli.kernels.choices import Measured, Problem, Table
from sp24cli.kernels.manifest import SUMMATIONS, Entry, RungEntry, load
from sp24cli.scaling import ScaleSpec

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

_LOG = logging.getLogger(__name__)

#: SM cycles per cycle that the wgmmas of a stage fill the read port of shared memory, and bytes a
#: cycle that an SM gets from L2 beside others. Source: single timings on an H200, which rank
#: the tiles so.
_PORT_CYCLES, _L2_BYTES = 1.13, 43

#: SM cycles that a tile takes beyond its stages, a column that its CTA stores, and to put the parts
#: of a tile together that is split over K. Source: times on an H200 (cuda/README.md).
_COLUMN_CYCLES, _EXCHANGE_CYCLES = 14, 2000

#: The share of the SMs that clusters of so many CTAs find in whole processor clusters. Source: the
#: occupancy query on an H200, 30 clusters of 4 on 132 SMs.
_CLUSTER_SHARE = {4: 120 / 132}

#: The narrowest wgmma.
_LEAST_N = 8

#: How far a measured problem may lie and still decide, in octaves; see `distance`.
NEAR = 1.0


@dataclass(frozen=True)
class Choice:
    """A kernel and, in words, what it was chosen by."""

    kernel: Entry
    by: str


def candidates(
    type_name: str, out_type: str, order: str, summation: str = "fast", *, able: bool = False
) -> list[Entry]:
    """Every kernel for these operands (`optypes.OPERANDS`) that sums so, in manifest order;
    `Sp24Error` if there is none.

    ``able``: also those that can, but do more than is needed.
    """
    widens = summation not in SUMMATIONS
    more = able and not widens
    ways = SUMMATIONS[SUMMATIONS.index(summation) :] if more else (summation,)
    found = [
        e
        for e in load().entries
        if (e.type, e.out_type, e.order) == (type_name, out_type, order) and e.summation in ways
    ]
    if not found:
        how = "" if summation == "fast" or widens else f", summing {summation}"
        known = ", ".join(outputs(type_name, ways))
        only = f" (only into {known})" if known else ""
        raise Sp24Error(f"no kernel multiplies {type_name} into {out_type} {order}{how}{only}")
    return found


def outputs(type_name: str, ways: Sequence[str] | None = None) -> tuple[str, ...]:
    """The output types that kernels for these operands write, by any of these ways to sum, or
    any at all."""
    return tuple(
        dict.fromkeys(
            e.out_type
            for e in load().entries
            if e.type == type_name and (ways is None or e.summation in ways)
        )
    )


def block_summation(rows: int, block_k: int) -> str:
    """The summation for scales of ``rows`` rows of A that change along K at multiples of
    ``block_k`` alone (0: nowhere); `Sp24Error` where no kernel has one."""
    if block_k % 128 == 0:
        return "row128" if rows % 64 else "block128"
    if block_k % 64 == 0:
        return "row64"
    raise Sp24Error(
        f"scales that change every {block_k} of K need a kernel that is not in this version: "
        "the kernels take multiples of 64"
    )


def check_block_scales(type_name: str, block: tuple[int, int]) -> None:
    """`Sp24Error` where no kernel applies such scales of a weight of this type."""
    summation = block_summation(*block)
    if not outputs(type_name, (summation,)):
        raise Sp24Error(
            f"block scales of {type_name} need a kernel that is not in this version: "
            "the kernels take those of e4m3"
        )


def needs_widening(type_name: str, spec: ScaleSpec) -> tuple[str, ...]:
    """The types of activations, of 16 bits, that a weight with such scales must be widened to;
    none where kernels of its own type apply them. `Sp24Error` where no kernel does."""
    if spec.block is None:
        return ()
    if type_name == "e4m3" and spec.is_small:
        weight_scales(spec)
        return WIDENED
    check_block_scales(type_name, spec.block)
    return ()


def cta_tiles(entry: Entry | RungEntry, m: int, n: int) -> int:
    """CTAs that the tiles of D keep busy once each: whole clusters along M, every part of K."""
    return -(-m // (entry.tile_m * entry.cluster)) * entry.cluster_ctas * -(-n // entry.tile_n)


def step_cycles(entry: Entry) -> float:
    """SM cycles of a stage: those of its wgmmas or of its bytes, whichever are more, and a little
    above where both are alike."""
    # The port reads 128 bytes a cycle: of B a row, of A 32 times 128 bytes, for each warpgroup.
    port = _PORT_CYCLES * entry.consumers * (entry.tile_n + 32)
    copied = entry.consumers * entry.block_bytes + entry.box_rows_b * entry.box_bytes_b
    load = copied / _L2_BYTES
    most, least = max(port, load), min(port, load)
    return float(most * (1 + (least / most) ** 8) ** (1 / 8))


def model_cycles(entry: Entry, m: int, n: int, k: int, sm_count: int) -> int:
    """SM cycles of a product: the rounds of tiles over the SMs times a tile's cycles.

    A tile wider than N multiplies padding, a narrower one reads A once more a column of tiles, and
    tiles that do not fill the last round leave SMs idle. Of a tile split over K a CTA takes its
    part of the stages, and then puts the parts together.
    """
    usable = int(sm_count * _CLUSTER_SHARE.get(entry.cluster_ctas, 1))
    rounds = -(-cta_tiles(entry, m, n) // usable)
    stages = -(-max(k, 1) // (entry.tile_k * entry.split))
    end = _COLUMN_CYCLES * entry.tile_n // entry.split + (entry.split > 1) * _EXCHANGE_CYCLES
    return rounds * (round(stages * step_cycles(entry)) + end)


def select(
    type_name: str,
    out_type: str,
    order: str,
    m: int,
    n: int,
    k: int,
    sm_count: int,
    summation: str = "fast",
) -> Entry:
    """The kernel that the cycle model finds fastest; of equals the one that reads A least often."""
    return min(
        candidates(type_name, out_type, order, summation),
        key=lambda entry: (
            model_cycles(entry, m, n, k, sm_count),
            cta_tiles(entry, m, n),
            entry.tile_n,
        ),
    )


def distance(one: Problem, other: Problem) -> float:
    """Octaves between two sizes: M and N in full, K by a quarter, for it changes the time of all
    kernels alike. Fewer tokens than `_LEAST_N` cost as much. Nothing is near an empty problem."""
    if not (one.m and one.n and one.k):
        return math.inf
    return (
        abs(math.log2(one.m / other.m))
        + abs(math.log2(max(one.n, _LEAST_N) / max(other.n, _LEAST_N)))
        + abs(math.log2(one.k / other.k)) / 4
    )


def choose(
    problem: Problem,
    sm_count: int,
    known: Sequence[tuple[str, Table]],
) -> Choice:
    """The kernel for a problem, by what was measured and by the model; see the module's head.

    ``known`` are tables of this kind of GPU with their names, the first to be trusted most.
    """
    p = problem
    by_name = {e.name: e for e in candidates(p.type, p.out, p.order, p.summation)}
    near: list[tuple[float, int, str, Problem, dict[str, float]]] = []
    for rank, (name, table) in enumerate(known):
        for row, times in _applying(problem, table, by_name):
            if row.problem == problem and times:
                return Choice(by_name[min(times, key=lambda kernel: times[kernel])], name)
            apart = distance(problem, row.problem)
            if times and apart <= NEAR:
                near.append((apart, rank, name, row.problem, times))
    if near:
        _, _, name, there, times = min(near, key=lambda found: found[:2])

        def carried(kernel: str) -> float:
            entry = by_name[kernel]
            here = model_cycles(entry, problem.m, problem.n, problem.k, sm_count)
            return times[kernel] * here / model_cycles(entry, there.m, there.n, there.k, sm_count)

        best = min(times, key=carried)
        return Choice(by_name[best], f"{name}, from {there.m}x{there.n}x{there.k}")
    entry = select(p.type, p.out, p.order, p.m, p.n, p.k, sm_count, p.summation)
    return Choice(entry, "model")


def _applying(
    problem: Problem, table: Table, by_name: dict[str, Entry]
) -> Iterator[tuple[Measured, dict[str, float]]]:
    """What ``table`` says of the candidates: its rows of the same types and order, with the times
    of the kernels that exist; failing these, rows of another output or order."""

    def rows(fits: Callable[[Problem], bool]) -> list[Measured]:
        return [row for row in table.measured if fits(row.problem)]

    kind = (problem.type, problem.summation, problem.out, problem.order)
    same = rows(lambda p: (p.type, p.summation, p.out, p.order) == kind)
    for row in same or rows(lambda p: (p.type, p.summation) == kind[:2]):
        times = {_sibling(name, row.problem, problem): us for name, us in row.times.items()}
        yield row, {name: us for name, us in times.items() if name in by_name}


def _sibling(name: str, measured: Problem, wanted: Problem) -> str:
    """The kernel that differs from ``name`` in output type and order alone."""
    return name.replace(f"_{measured.out}_{measured.order}_", f"_{wanted.out}_{wanted.order}_", 1)


@lru_cache(maxsize=4096)
def chosen(device: Device, problem: Problem) -> Choice:
    """`choose` by what is known of this device: the user's cache, then the package's table."""
    return choose(problem, device.sm_count, known(device))


@cache
def known(device: Device) -> tuple[tuple[str, Table], ...]:
    """The tables for this device, by name. A cache that cannot be read is warned of and left."""
    found = [("table", table) for table in choices.shipped() if table.gpu == device.name]
    try:
        cached = choices.read_cache(choices.cache_path(device.uuid, load().sha256))
    except BadInputError as error:
        _LOG.warning("sp24: warning: choices of kernels ignored: %s", error)
        cached = None
    return (("cache", cached), *found) if cached is not None else tuple(found)


def forget() -> None:
    """Read the tables anew at the next choice."""
    known.cache_clear()
    chosen.cache_clear()
