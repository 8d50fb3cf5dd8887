"""The triangle by tiles: what is written comes back, from memory as from a file without a name."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from sp24cli.errors import Sp24Error
from sp24cli.pruning.triangle import Triangle, triangle_bytes
from tests.cpu.modelfile import Array, normal

K, TILE = 45, 8


def filled(matrix: Array, folder: Path | None) -> Triangle:
    triangle = Triangle(len(matrix), TILE, folder)
    count = len(triangle.parts)
    # From the last, so that a tile that runs into the next one would spoil it.
    for i in reversed(range(count)):
        for j in reversed(range(i, count)):
            triangle.write(i, j, matrix[triangle.parts[i], triangle.parts[j]])
    return triangle


@pytest.mark.parametrize("where", ["memory", "file"])
def test_tiles_and_rows_are_those_of_the_matrix(tmp_path: Path, where: str) -> None:
    matrix = normal(1, (K, K), "F64")
    with filled(matrix, tmp_path if where == "file" else None) as triangle:
        for i, r in enumerate(triangle.parts):
            for j, c in enumerate(triangle.parts[i:], i):
                assert np.array_equal(triangle.read(i, j), matrix[r, c])
        upper = np.triu(matrix)
        for start in range(K):
            for stop in range(start + 1, K + 1):
                rows = triangle.rows(slice(start, stop))
                assert rows.shape == (stop - start, K - start)
                assert np.array_equal(np.triu(rows), upper[start:stop, start:])
                assert np.isfinite(rows).all()


def test_it_takes_the_bytes_that_it_says(tmp_path: Path) -> None:
    size = triangle_bytes(K, TILE)
    assert size == 8 * sum(K - TILE * (i // TILE) for i in range(K))
    with filled(np.zeros((K, K)), tmp_path) as triangle:
        # The only trace of the file: a descriptor. It has no name, whatever ends the process.
        assert not list(tmp_path.iterdir())
        assert size in sizes_without_a_name()
        triangle.close()
        assert size not in sizes_without_a_name()


def sizes_without_a_name() -> set[int]:
    """Of the files that this process has open."""
    sizes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(descriptor))
            if status.st_nlink == 0:
                sizes.add(status.st_size)
    return sizes


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    size = triangle_bytes(K, TILE)
    with pytest.raises(Sp24Error, match=rf"^scratch file of {size} bytes cannot be made: No such"):
        Triangle(K, TILE, tmp_path / "none")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Triangle(K, TILE, tmp_path) as triangle:
        with pytest.raises(Sp24Error, match=r"cannot be read: it ends too soon$"):
            triangle.read(0, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 8, hard))
        try:
            with pytest.raises(Sp24Error, match=r"cannot be written: File too large$"):
                triangle.write(5, 5, np.zeros((5, 5)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
