"""Row bands and the threads that work on them."""

from __future__ import annotations

import threading
import time

import pytest

from sp24cli.ops import stream
from sp24cli.ops.stream import bands, map_bands


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("columns", [0, 4, 4096, 10**7])
@pytest.mark.parametrize("multiple", [1, 64, 192])
def test_bands_cover_all_rows_and_begin_at_multiples(
    rows: int, columns: int, multiple: int
) -> None:
    ranges = bands(rows, columns, multiple=multiple)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    assert all(start % multiple == 0 for start, _ in ranges)
    limit = max(stream.BAND_ELEMENTS, multiple * columns)
    assert all((stop - start) * columns <= limit for start, stop in ranges)


def test_results_come_in_order_however_long_each_takes() -> None:
    def work(start: int, stop: int) -> int:
        time.sleep(0.02 if start % 2 == 0 else 0)
        return start

    ranges = [(i, i + 1) for i in range(20)]
    assert list(map_bands(work, ranges, 1, 4)) == list(range(20))


def test_only_a_few_bands_are_ahead_of_the_consumer() -> None:
    started = []
    lock = threading.Lock()

    def work(start: int, stop: int) -> int:
        with lock:
            started.append(start)
        return start

    for taken, _ in enumerate(map_bands(work, [(i, i + 1) for i in range(50)], 1, 3), start=1):
        time.sleep(0.001)
        assert len(started) <= taken + 4
    assert len(started) == 50


def test_wide_bands_get_fewer_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FLIGHT_ELEMENTS", 100)
    names = set()

    def work(start: int, stop: int) -> None:
        names.add(threading.current_thread().name)
        time.sleep(0.002)

    list(map_bands(work, [(i, i + 1) for i in range(20)], 60, 8))
    assert names == {threading.main_thread().name}


def test_the_first_error_ends_the_work() -> None:
    seen = []

    def work(start: int, stop: int) -> int:
        seen.append(start)
        if start == 3:
            raise ValueError("three")
        return start

    with pytest.raises(ValueError, match="three"):
        list(map_bands(work, [(i, i + 1) for i in range(1000)], 1, 2))
    assert max(seen) < 20
