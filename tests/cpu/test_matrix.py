"""A matrix of a file read piece by piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sp24cli.checkpoint.matrix import StoredMatrix
from sp24cli.checkpoint.reader import SafetensorsFile
from tests.cpu.modelfile import normal, save


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_are_those_of_the_whole(tmp_path: Path, dtype: str, shift: int) -> None:
    matrix = normal(1, (24, 24), dtype)
    path = save(tmp_path / "f", {"before": np.zeros(shift, np.uint8), "m": matrix})
    order = np.random.default_rng(2).permutation(24).astype(np.int32)
    arranged = matrix[np.ix_(order, order)]
    with SafetensorsFile(path) as file:
        plain, ordered = StoredMatrix(file, "m"), StoredMatrix(file, "m", order)
        assert plain.shape == ordered.shape == (24, 24)
        for place in (
            (slice(0, 24), slice(0, 24)),
            (slice(5, 9), slice(None)),
            (slice(7, 20), slice(7, None)),
            (slice(23, 24), slice(3, 4)),
        ):
            for read, want in ((plain, matrix), (ordered, arranged)):
                piece = read[place]
                assert piece.dtype == matrix.dtype and piece.flags.c_contiguous
                assert piece.tobytes() == want[place].tobytes()
