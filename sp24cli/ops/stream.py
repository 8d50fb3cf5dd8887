"""Row bands: how every operation walks a tensor in bounded memory, on several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sp24cli.sparsity import PATCH_ROWS

_Result = TypeVar("_Result")

#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]

#: Elements of one band: enough for the cost of handing it over not to show.
BAND_ELEMENTS = 1 << 20
#: Elements of all bands in flight, which bounds the temporaries whatever the number of workers.
FLIGHT_ELEMENTS = 1 << 23
MAX_WORKERS = 8


def default_workers() -> int:
    """One a CPU that this process may use, at most `MAX_WORKERS`."""
    allowed = getattr(os, "sched_getaffinity", None)
    count = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, count))


def bands(rows: int, columns: int, *, multiple: int = 1) -> list[tuple[int, int]]:
    """Half-open row ranges that cover a [rows, columns] matrix, each a multiple of ``multiple``
    rows but the last. They depend on the shape alone, so that sums over them do too."""
    step = max(1, BAND_ELEMENTS // max(1, columns * multiple)) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def prune_ranges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The row ranges that a matrix is pruned by: whole patches, for their sums."""
    return bands(*shape, multiple=PATCH_ROWS)


def map_bands(
    work: Callable[[int, int], _Result],
    ranges: list[tuple[int, int]],
    columns: int,
    workers: int,
    *,
    share: int = 1,
) -> Iterator[_Result]:
    """``work(start, stop)`` of every range, in order, ``workers`` at a time.

    Only as many bands exist at once as fit `FLIGHT_ELEMENTS` / ``share`` (at least one);
    ``share`` is for work whose temporaries are larger than those of packing.
    """
    largest = max((stop - start for start, stop in ranges), default=0) * columns
    workers = max(1, min(workers, FLIGHT_ELEMENTS // share // max(1, largest)))
    if workers == 1:
        for start, stop in ranges:
            yield work(start, stop)
        return
    waiting: deque[Future[_Result]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for start, stop in ranges:
            waiting.append(pool.submit(work, start, stop))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Meter:
    """Counts bytes towards a total that is known from the start."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
