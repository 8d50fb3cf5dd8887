"""The upper triangle of a large square matrix of float64, by tiles, in memory or in a file.

The file is read and written piece by piece, never mapped: pages of a map count as memory of the
process that touches them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from sp24cli.bits import Array
from sp24cli.closing import Closing
from sp24cli.errors import Sp24Error
from sp24cli.rowblocks import row_slices

_ITEM = np.dtype(np.float64).itemsize


def triangle_bytes(k: int, tile: int) -> int:
    """What a `Triangle` of K = ``k`` takes: about 4 K² bytes."""
    return _ITEM * sum((r.stop - r.start) * (k - r.start) for r in row_slices(k, tile))


class Triangle(Closing):
    """Tile (i, j), i <= j, holds the rows ``parts[i]`` and the columns ``parts[j]``, ``tile`` of
    each or what is left of ``k``. Not defined until written.

    With a ``folder`` all is in a scratch file there, which has no name: it goes with the process,
    however that ends. Threads may read and write different tiles at once. Closed, it is empty.

    Raises:
        Sp24Error: the file cannot be made, written (a full disk) or read.
    """

    def __init__(self, k: int, tile: int, folder: Path | None = None) -> None:
        self.parts = row_slices(k, tile)
        self._k = k
        #: Of each row of tiles the place of its first value: a row after the other, by tiles.
        self._begin = [0]
        for r in self.parts:
            self._begin.append(self._begin[-1] + (r.stop - r.start) * (k - r.start))
        size = self._begin[-1]
        self._store: _Store = _Memory(size) if folder is None else _File(size, folder)

    def close(self) -> None:
        self._store.close()

    def read(self, i: int, j: int) -> Array:
        """A tile [rows, columns]. It may be the matrix's own: not to be written to, and good until
        the tile is written again."""
        rows, columns = self.parts[i], self.parts[j]
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return self._store.read(self._place(i, j), shape)

    def write(self, i: int, j: int, values: Array) -> None:
        """Make ``values`` [rows, columns] the tile."""
        self._store.write(self._place(i, j), np.ascontiguousarray(values))

    def rows(self, r: slice) -> Array:
        """The rows ``r`` from column r.start on, a copy [rows, K - r.start]; what lies below the
        diagonal is not defined, but finite."""
        out = np.zeros((r.stop - r.start, self._k - r.start))
        for i, part in enumerate(self.parts):
            start, stop = max(r.start, part.start), min(r.stop, part.stop)
            if start >= stop:
                continue
            into = out[start - r.start : stop - r.start]
            for j in range(i, len(self.parts)):
                columns = self.parts[j]
                width = columns.stop - columns.start
                place = self._place(i, j) + (start - part.start) * width
                values = self._store.read(place, (stop - start, width))
                # Of the first tile the columns before r.start are not asked for.
                before = max(0, r.start - columns.start)
                first = columns.start + before - r.start
                into[:, first : columns.stop - r.start] = values[:, before:]
        return out

    def _place(self, i: int, j: int) -> int:
        rows = self.parts[i]
        return self._begin[i] + (rows.stop - rows.start) * (self.parts[j].start - rows.start)


class _Store(Protocol):
    """Numbers in a row."""

    def read(self, place: int, shape: tuple[int, int]) -> Array: ...
    def write(self, place: int, values: Array) -> None: ...
    def close(self) -> None: ...


class _Memory:
    def __init__(self, size: int) -> None:
        self._values = np.empty(size)

    def read(self, place: int, shape: tuple[int, int]) -> Array:
        return self._values[place : place + shape[0] * shape[1]].reshape(shape)

    def write(self, place: int, values: Array) -> None:
        self._values[place : place + values.size] = values.reshape(-1)

    def close(self) -> None:
        self._values = np.empty(0)


class _File:
    def __init__(self, size: int, folder: Path) -> None:
        self._what = f"scratch file of {_ITEM * size} bytes"
        try:
            self._file = _nameless(folder)
        except OSError as error:
            raise Sp24Error(f"{self._what} cannot be made: {error.strerror}") from error

    def read(self, place: int, shape: tuple[int, int]) -> Array:
        values = np.empty(shape)
        view, offset = values.reshape(-1).view(np.uint8).data, _ITEM * place
        try:
            while view.nbytes:
                count = os.preadv(self._file.fileno(), [view], offset)
                if not count:
                    raise Sp24Error(f"{self._what} cannot be read: it ends too soon")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise Sp24Error(f"{self._what} cannot be read: {error.strerror}") from error
        return values

    def write(self, place: int, values: Array) -> None:
        view, offset = values.reshape(-1).view(np.uint8).data, _ITEM * place
        try:
            while view.nbytes:
                count = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise Sp24Error(f"{self._what} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def _nameless(folder: Path) -> IO[bytes]:
    # Never in the folder's list, or no longer before anything is written.
    return tempfile.TemporaryFile(dir=folder, buffering=0)
