"""The order of tiles: which operand stays in L2 and which is streamed past it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp24cli.gpu.order import RASTER, TileOrder, cluster_rows, tile_order
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


def kernel(balanced: bool) -> Entry:
    """Tiles of three blocks of rows, two CTAs of a cluster along M."""
    entry = next(e for e in load().entries if (e.tile_m, e.cluster) == (192, 2))
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


def test_no_balanced_tile_is_higher_than_the_kernels() -> None:
    entry = kernel(True)
    for m in range(1, 64 * 700, 640):
        for cols in (1, 2, 7, 31):
            tiles = cluster_rows(entry, m, cols, 30) * entry.cluster
            assert tiles * entry.tile_m >= m
