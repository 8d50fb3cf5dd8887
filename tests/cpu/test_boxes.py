"""The boxes in which a product's kernel is told to fetch its activations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli.gpu import matmul
from sp24cli.kernels import manifest
from sp24cli.optypes import OPERANDS

ENTRIES = manifest.load().entries


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_no_box_reaches_beyond_the_last_token(
    entry: manifest.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps: list[tuple[int, tuple[int, int]]] = []
    launched: list[Any] = []

    def tensor_map(ptr: int, row_bytes: int, rows: int, pitch: int, box: tuple[int, int]) -> Any:
        maps.append((rows, box))
        return np.full(16, len(maps), np.uint64)

    def launch(loaded: Any, grid: int, parameters: list[Any], stream: int, overlap: bool) -> None:
        launched.append(parameters[0])

    monkeypatch.setattr(matmul, "tensor_map", tensor_map)
    device = SimpleNamespace(launch=launch, l2_bytes=50 << 20, stream=0)
    weight = SimpleNamespace(
        device=device,
        shape=(4096, 1024),
        multiplied=OPERANDS[entry.type].b,
        image=SimpleNamespace(ptr=0, nbytes=1 << 20),
        scale=None,
        scale_rows=False,
        block=None,
        blocks=(64, 8),
        column_order=None,
        limit=0,
    )
    tile, share = entry.tile_n, entry.tile_n // entry.cluster
    for n, last in ((1, 1), (tile - 1, tile - 1), (tile, tile), (tile + 1, 1), (5 * tile + 3, 3)):
        plan = matmul.Plan(weight, entry, SimpleNamespace(max_clusters=33), n)  # type: ignore[arg-type]
        plan.enqueue(16, 1024, 32)
        assert maps == [(n, (entry.box_bytes_b, share)), (n, (entry.box_bytes_b, last))]
        (both,) = launched
        assert both.nbytes == manifest.load().args[entry.args].tensor_map_bytes
        assert list(dict.fromkeys(both.tolist())) == [1, 2]
        maps.clear()
        launched.clear()
