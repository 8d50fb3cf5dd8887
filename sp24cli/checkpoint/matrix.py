"""A matrix of a file that is read piece by piece and never is in memory whole."""

from __future__ import annotations

import numpy as np

from sp24cli.bits import Array
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.rowblocks import row_slices

#: Rows read from all over a matrix before their pages are given back.
_LINES = 32


class StoredMatrix:
    """``matrix[rows, columns]`` is a copy of that piece of the tensor ``name``, whose pages are
    given back at once. With an ``order`` [K] of a square one, of its rows and columns alike."""

    def __init__(self, file: SafetensorsFile, name: str, order: Array | None = None) -> None:
        self._file = file
        self._name = name
        self._order = order

    @property
    def shape(self) -> tuple[int, ...]:
        return self._file.entry(self._name).shape

    def __getitem__(self, place: tuple[slice, slice]) -> Array:
        rows, columns = place
        if self._order is None:
            piece: Array = self._file.array(self._name, rows)[:, columns].copy()
            self._file.drop_cache(self._name, rows)
            return piece
        lines, chosen = self._order[rows], self._order[columns]
        dtype = self._file.array(self._name, slice(0, 0)).dtype
        piece = np.empty((len(lines), len(chosen)), dtype)
        for r in row_slices(len(lines), _LINES):
            for i, line in enumerate(lines[r].tolist(), r.start):
                piece[i] = self._file.array(self._name, slice(line, line + 1))[0, chosen]
            # All of it: with a page come those around, which are of lines that no one asked for.
            self._file.drop_cache(self._name)
        return piece
