"""Cutting a matrix into tiles that stay in cache, and running a function over pieces of it.

The cut depends on the shape alone, never on the number of workers, and results come back in
order: so what is added up over pieces is the same whoever computed them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

T = TypeVar("T")
R = TypeVar("R")

#: Elements of one tile. A smaller one would stay in a core's L2 cache, but two workers would
#: then mostly wait for each other's interpreter lock between short NumPy calls.
TILE_ELEMENTS = 1 << 19
#: Most elements one worker takes at a time.
PIECE_ELEMENTS = 1 << 22
#: Pieces of a matrix too small for as many of the largest, so that workers can share it.
_LEAST_PIECES = 8

#: What `scratch` gave each thread, by name.
_HELD = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """This thread's memory of that name, with whatever is in it, until it asks for it again.

    Memory that is handed back after every tile the system clears for the next, page by page.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    held: dict[str, Array] = _HELD.__dict__
    if name not in held or held[name].size < size:
        held[name] = np.empty(size, np.uint8)
    return held[name][:size].view(dtype).reshape(shape)


def row_slices(rows: int, step: int) -> list[slice]:
    """``rows`` in order as slices of ``step`` rows, the last one shorter."""
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def pieces(rows: int, cols: int, row_step: int = 1) -> list[slice]:
    """Row slices for one worker at a time, cut at multiples of ``row_step``."""
    elements = min(PIECE_ELEMENTS, max(TILE_ELEMENTS, rows * cols // _LEAST_PIECES))
    steps = elements // max(1, row_step * cols)
    return row_slices(rows, row_step * max(1, steps))


def tiles(
    rows: int, cols: int, *, row_step: int = 1, width: int = 1 << 14
) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of tiles of about `TILE_ELEMENTS`, all columns of some rows, then the next.

    Tiles start at multiples of ``row_step`` rows and ``width`` columns.
    """
    if cols == 0:
        return
    steps = TILE_ELEMENTS // (row_step * min(cols, width))
    for r in row_slices(rows, row_step * max(1, steps)):
        for c in row_slices(cols, width):
            yield r, c


def run(task: Callable[[T], R], pieces: Sequence[T], workers: int) -> list[R]:
    """``task`` of every piece, in order; the error raised is that of the earliest piece."""
    if workers <= 1 or len(pieces) <= 1:
        return [task(p) for p in pieces]
    with ThreadPoolExecutor(min(workers, len(pieces))) as pool:
        return list(pool.map(task, pieces))
