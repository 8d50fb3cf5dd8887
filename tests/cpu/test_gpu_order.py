"""The order of tiles: which operand stays in L2 and which is streamed past it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp24cli.gpu.order import (
    RASTER,
    TileOrder,
    balanced_order,
    blocks_of_busiest,
    cluster_rows,
    heights,
    tile_order,
)
from sp24cli.kernels.manifest import Entry, load

MB = 2**20
L2 = 60 * MB


def test_a_small_a_stays_and_b_is_read_once() -> None:
    assert tile_order(16, 32, 66, 21 * MB, 64 * MB, L2) == TileOrder(16, False, True)


def test_a_small_b_stays_and_whole_rows_of_tiles_run_at_once() -> None:
    assert tile_order(32, 4, 66, 42 * MB, 8 * MB, L2) == TileOrder(16, True, False)


def test_where_neither_fits_the_default_stands() -> None:
    assert tile_order(32, 16, 66, 147 * MB, 117 * MB, L2) == TileOrder(RASTER, False, False)


def test_more_rows_than_run_at_once_read_b_again() -> None:
    """The second wave of a column wants B still in L2, so it must not be the first to leave."""
    order = tile_order(100, 8, 66, 20 * MB, 64 * MB, L2)
    assert not order.b_once
    assert not tile_order(100, 8, 66, 20 * MB, 64 * MB, L2, raster=100).b_once


def test_a_single_column_reads_a_once_whatever_its_rows() -> None:
    assert tile_order(112, 1, 66, 147 * MB, 1 * MB, L2).a_once


@pytest.mark.parametrize(("rows", "cols"), [(7, 9), (17, 9), (112, 16), (1, 1), (112, 1)])
def test_lopsided_groups_cost_more_than_they_save(rows: int, cols: int) -> None:
    """Few rows of A beside many columns of B, or the reverse, read more at a time."""
    assert tile_order(rows, cols, 66, 20 * MB, 20 * MB, L2).raster == RASTER


def test_a_given_raster_is_kept_and_judged() -> None:
    assert tile_order(16, 32, 66, 21 * MB, 64 * MB, L2, raster=8) == TileOrder(8, False, False)
    assert tile_order(16, 8, 66, 21 * MB, 64 * MB, L2, raster=8) == TileOrder(8, True, False)


def test_the_kernels_argument_has_a_bit_for_each() -> None:
    assert [TileOrder(1, a, b).read_once for b in (False, True) for a in (False, True)] == [
        0,
        1,
        2,
        3,
    ]


def kernel(balanced: bool = True, tile_n: int = 128) -> Entry:
    """Tiles of three blocks of rows, two CTAs of a cluster along M."""
    entry = next(e for e in load().entries if (e.tile_m, e.tile_n, e.cluster) == (192, tile_n, 2))
    assert entry.balanced
    return replace(entry, balanced=balanced)


@pytest.mark.parametrize(
    ("m", "cols", "want"),
    [
        (1, 1, 1),
        (384, 1, 3),  # six blocks of rows, one a CTA
        (385, 1, 4),  # a seventh, in the first CTA of another cluster
        (8192, 1, 30),  # all clusters, 2.1 blocks a CTA instead of 3 in 22
        (10368, 1, 27),  # nine tenths of the clusters are busy with full tiles
        (11520, 1, 30),
        (11521, 1, 60),  # two rounds
        (8192, 2, 30),  # of 44 tiles in two rounds 60
        (384, 31, 1),  # no cluster for a second row in two rounds
    ],
)
def test_balanced_tiles_keep_all_clusters_busy(m: int, cols: int, want: int) -> None:
    assert cluster_rows(kernel(True), m, cols, 30) == want


@pytest.mark.parametrize(("m", "want"), [(1, 1), (384, 1), (385, 2), (8192, 22)])
def test_other_tiles_are_as_few_as_can_be(m: int, want: int) -> None:
    assert cluster_rows(kernel(False), m, 1, 30) == want


def test_wide_balanced_tiles_leave_no_cluster_idle() -> None:
    """Where tiles of up to 128 columns would keep to full ones."""
    assert cluster_rows(kernel(tile_n=256), 10368, 1, 30) == 30
    assert cluster_rows(kernel(tile_n=256), 28672, 16, 66) == 78  # 1248 of 1254 places, for 1200


def blocks_of(row: int, low: int, high: int, cluster: int, m_blocks: int) -> list[range]:
    """The blocks of 64 rows of each CTA of a cluster in a row of tiles, as Schedule deals them."""
    each, before = low + (row < high), row * low + min(row, high)
    starts = [min(before * cluster + rank * each, m_blocks) for rank in range(cluster)]
    return [range(start, start + min(each, m_blocks - start)) for start in starts]


def test_balanced_tiles_share_out_every_block_of_rows_once() -> None:
    for tile_n in (128, 256):
        entry = kernel(tile_n=tile_n)
        for m in range(1, 64 * 700, 640):
            for cols in (1, 2, 7, 31):
                rows = cluster_rows(entry, m, cols, 30)
                low, high = heights(entry, m, rows)
                assert low + (high > 0) <= entry.tile_m // 64
                m_blocks = -(-m // 64)
                dealt = [blocks_of(r, low, high, entry.cluster, m_blocks) for r in range(rows)]
                assert [b for row in dealt for part in row for b in part] == [*range(m_blocks)]


def tiles_in_order(rows: int, cols: int, order: TileOrder) -> list[tuple[int, int]]:
    """Row and column of every tile, as Schedule walks them where tiles are balanced."""
    found = []
    for index in range(rows * cols):
        group, within = divmod(index, order.raster * cols)
        first = group * order.raster
        height = min(order.raster, rows - first)
        step = within // height
        row = first + (within - step * height + order.skew * step) % height
        found.append((row, cols - 1 - step if group % 2 else step))
    return found


@pytest.mark.parametrize(
    ("m", "n", "k", "raster", "most", "unmixed"),
    [
        (4096, 8192, 8192, 12, 16, 18),
        (8192, 4096, 28672, 8, 16, 16),
        (28672, 4096, 8192, 10, 55, 56),  # groups of two rows more
        (4096, 4096, 4096, 8, 8, 9),  # groups of the high rows and of the low ones
        (5000, 5000, 5000, 16, 13, 14),
        (11008, 4096, 4096, 10, 21, 22),
    ],
)
def test_no_cluster_meets_high_tiles_alone(
    m: int, n: int, k: int, raster: int, most: int, unmixed: int
) -> None:
    entry, clusters = kernel(tile_n=256), 66
    cols = -(-n // entry.tile_n)
    rows = cluster_rows(entry, m, cols, clusters)
    low, high = heights(entry, m, rows)
    plain = tile_order(rows, cols, clusters, m * k * 5 // 8, n * k, L2)
    order = balanced_order(plain, rows, cols, clusters, low, high)
    assert order.raster == raster
    assert not order.b_once  # high tiles and low ones do not read a column at once
    tiles = tiles_in_order(rows, cols, order)
    assert sorted(tiles) == [(r, c) for r in range(rows) for c in range(cols)]
    for way, want in ((plain, unmixed), (order, most)):
        blocks = [low + (row < high) for row, _ in tiles_in_order(rows, cols, way)]
        assert max(sum(blocks[c::clusters]) for c in range(clusters)) == want


def test_high_rows_are_no_group_of_their_own_if_that_reads_b_more_often() -> None:
    """Groups of fewer rows, or several for those that are left."""
    plain = TileOrder(16, False, True)
    for rows, high, raster in ((12, 8, 8), (9, 7, 16), (16, 8, 8), (16, 7, 16), (3, 2, 16)):
        orders = {balanced_order(plain, rows, cols, 66, 2, high) for cols in range(2, 130)}
        assert {order.raster for order in orders} == {16, raster}, rows
        assert not any(order.b_once for order in orders - {plain})


def test_groups_of_other_sizes_say_anew_whether_a_is_read_once() -> None:
    """Ten rows by six columns, or by sixteen, of 66 clusters."""
    six = balanced_order(TileOrder(8, True, False), 12, 6, 66, 2, 9)
    assert (six.raster, six.a_once) == (10, True)
    sixteen = balanced_order(TileOrder(8, True, False), 78, 16, 66, 2, 68)
    assert (sixteen.raster, sixteen.a_once) == (10, False)


def test_of_very_many_tiles_none_matters() -> None:
    plain = TileOrder(8, False, False)
    assert balanced_order(plain, 1000, 66, 66, 2, 10) is plain
    assert blocks_of_busiest(plain, 1000, 66, 66, 2, 10) == 2010


def test_tiles_of_one_height_keep_their_order() -> None:
    plain = TileOrder(12, True, True)
    assert balanced_order(plain, 12, 32, 66, 3, 0) is plain
    assert balanced_order(plain, 12, 1, 6, 2, 5) is plain  # one column
    assert balanced_order(plain, 12, 5, 66, 2, 5) is plain  # a tile a cluster
