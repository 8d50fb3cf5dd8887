"""In what order the tiles of D are computed, so that L2 serves most reads of A and B."""

from __future__ import annotations

from dataclasses import dataclass

#: Cluster rows a group where neither operand stays in L2, and the most of them that are as good.
#: What runs together reads 20 KB of A a stage and cluster row, and 32 KB of B a column: least at 10
#: rows of an H200's 66 clusters. Measured there at 28672x4096x8192: groups of 4 are 7 % slower than
#: of 8, groups of 33 are 4 %, those of 16 half a percent; at 8192x4096x28672 8, 11 and 16 differ in
#: nothing.
RASTER, RASTER_MOST = 8, 16


@dataclass(frozen=True)
class TileOrder:
    """Tiles go in groups of ``raster`` cluster rows, M fastest.

    ``a_once`` and ``b_once``: what runs together reads all there is of a part of that operand, so
    no later tile finds it in L2, nor needs to.
    """

    raster: int
    a_once: bool
    b_once: bool

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
