"""Cutting rows that are dense in float64 along K: what is checked of them adds up."""

from __future__ import annotations

from sp24cli.packed import PackedMatrix
from sp24cli.rowblocks import row_slices

#: Elements that are dense at a time: all columns of 64 rows up to K = 32768.
PIECE_ELEMENTS = 1 << 21


def column_pieces(band: PackedMatrix) -> list[slice]:
    """The columns of some rows, by as many as `PIECE_ELEMENTS` allow."""
    rows, columns = band.shape
    step = band.info.optype.block_k
    return row_slices(columns, step * max(1, PIECE_ELEMENTS // (step * max(1, rows))))
