"""In what order the tiles of D are computed, so that L2 serves most reads of A and B."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sp24cli.kernels.manifest import Entry, RungEntry
from sp24cli.optypes import BLOCK_ROWS

#: Cluster rows a group where neither operand stays in L2, and the most of them that are as good.
#: What runs together reads 20 KB of A a stage and cluster row, and 32 KB of B a column: least at 10
#: rows of an H200's 66 clusters. Measured there at 28672x4096x8192: groups of 4 are 7 % slower than
#: of 8, groups of 33 are 4 %, those of 16 half a percent; at 8192x4096x28672 8, 11 and 16 differ in
#: nothing. Of tiles of 192 rows, a third more of A: there 8 take 804 us, 16 808, 4 817.
RASTER, RASTER_MOST = 8, 16
#: Groups that balanced tiles may have instead, if the busiest cluster has fewer blocks of rows
#: then. At 28672x4096x8192 10 or 6 leave it 55 of them, 8 leave 56: 1.230 M cycles for 1.247, 820
#: us burst for 828.
NEAR_RASTER = (10, 6, 9, 7)
#: Measured on an H200 (e4m3): where 28 of 30 clusters were busy, balanced tiles in all 30 made
#: 28672x64x8192 2 % slower, and 14336x128x4096 by tiles of 64 columns 10 %; where 19 were,
#: 18944x64x3584 8 % faster. There memory sets the pace; where tiles have more than `FEW_COLUMNS`
#: and the tensor cores do, no cluster is left idle that could have a tile.
BUSY = 0.9
FEW_COLUMNS = 128

#: Tiles a cluster from which on a block more or less of one is no matter.
_MANY_ROUNDS = 64


def cluster_rows(entry: Entry | RungEntry, m: int, cols: int, clusters: int) -> int:
    """Rows of tiles of clusters that ``m`` rows of D are cut into; ``cols`` are those along N.

    As few as can be; or, of a kernel whose tiles are balanced, as many as ``clusters`` at a time
    take no longer for, each with fewer rows then, unless those few keep `BUSY` of them busy.
    """
    least = -(-m // (entry.tile_m * entry.cluster))
    if not entry.balanced:
        return least
    rounds = -(-least * cols // clusters)
    if entry.tile_n <= FEW_COLUMNS and least * cols >= BUSY * rounds * clusters:
        return least
    return max(least, min(rounds * clusters // cols, _blocks(entry, m)))


def heights(entry: Entry | RungEntry, m: int, rows: int) -> tuple[int, int]:
    """How balanced tiles share ``m`` rows of D out: blocks of 64 rows of each CTA of the lower rows
    of tiles, and how many rows of tiles, the first ones, have one more."""
    return divmod(_blocks(entry, m), rows)


def _blocks(entry: Entry | RungEntry, m: int) -> int:
    """What the heights of all rows of tiles add up to, in blocks of 64 rows of a CTA."""
    return -(-m // (BLOCK_ROWS * entry.cluster))


@dataclass(frozen=True)
class TileOrder:
    """Tiles go in groups of ``raster`` cluster rows, M fastest, each column beginning ``skew`` rows
    after the one before.

    ``a_once`` and ``b_once``: what runs together reads all there is of a part of that operand, so
    no later tile finds it in L2, nor needs to.
    """

    raster: int
    a_once: bool
    b_once: bool
    skew: int = 0

    @property
    def read_once(self) -> int:
        """The kernels' argument of that name."""
        return int(self.a_once) | int(self.b_once) << 1


def tile_order(
    rows: int,
    cols: int,
    clusters: int,
    a_bytes: int,
    b_bytes: int,
    l2_bytes: int,
    raster: int | None = None,
) -> TileOrder:
    """The order for ``rows`` x ``cols`` tiles of clusters, ``clusters`` at a time.

    An operand that fills less than half of L2 stays there while the other is streamed past it: A
    when a column of tiles runs at once, B when whole rows of them do. ``raster`` is chosen if not
    given.
    """
    if raster is None:
        raster = RASTER
        if a_bytes <= l2_bytes / 2 and RASTER <= rows <= RASTER_MOST:
            raster = rows
        elif b_bytes <= l2_bytes / 2 and RASTER <= clusters // max(1, cols) <= RASTER_MOST:
            raster = clusters // cols
    return TileOrder(
        raster,
        a_once=cols == 1 or raster * cols <= clusters,
        b_once=rows <= min(raster, clusters),
    )


@lru_cache(maxsize=4096)
def blocks_of_busiest(
    order: TileOrder, rows: int, cols: int, clusters: int, low: int, high: int
) -> int:
    """Blocks of rows, of a CTA, that the cluster with most has, of balanced tiles (`heights`) in
    this order; of very many tiles about the mean, which is nearly that."""
    if rows * cols > _MANY_ROUNDS * clusters:
        return -(-(rows * low + high) * cols // clusters)
    index = np.arange(rows * cols)
    group, within = np.divmod(index, order.raster * cols)
    first = group * order.raster
    height = np.minimum(order.raster, rows - first)
    step = within // height
    row = first + (within - step * height + step * order.skew) % height
    return int(np.bincount(index % clusters, low + (row < high)).max())


@lru_cache(maxsize=4096)
def balanced_order(
    order: TileOrder, rows: int, cols: int, clusters: int, low: int, high: int
) -> TileOrder:
    """``order`` for balanced tiles, such that the cluster with most blocks of rows has as few as
    can be.

    A cluster takes every ``clusters``-th tile, and in some orders high ones alone. Columns that
    begin each some rows later mix them; where all rows are one group, so do high rows in a group of
    their own, first, if it is large enough and leaves one of the others; where they are not, groups
    of a few rows more or less. High tiles are slower along K than low ones, so those of a column do
    not read B at once.
    """
    if not 0 < high < rows or cols == 1 or not clusters < rows * cols <= _MANY_ROUNDS * clusters:
        return order

    def grouped(raster: int) -> TileOrder:
        return replace(order, raster=raster, a_once=raster * cols <= clusters, b_once=False)

    orders = [replace(order, b_once=False)]
    if order.raster == RASTER < rows:
        orders += [grouped(raster) for raster in NEAR_RASTER]
    ways = [replace(way, skew=skew) for way in orders for skew in range(min(way.raster, rows))]
    if order.raster >= rows and high >= max(RASTER, rows - high):
        ways.append(grouped(high))
    return min(ways, key=lambda way: blocks_of_busiest(way, rows, cols, clusters, low, high))
