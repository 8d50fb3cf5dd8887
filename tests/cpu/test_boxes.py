"""What a product's kernel is told: the boxes of its activations, and how its tiles are ordered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sp24cli.gpu import matmul
from sp24cli.gpu.order import balanced_order, cluster_rows, heights, tile_order
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

    def launch(loaded: Any, grid: int, parameters: list[Any], stream: int, overlap: bool) -> Any:
        launched.append(parameters[0])
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(matmul, "Launch", launch)
    monkeypatch.setattr(matmul, "tensor_map", tensor_map)
    device = SimpleNamespace(l2_bytes=50 << 20, stream=0)
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
        launches={},
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


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        # 12 rows of tiles, 8 of them high; columns begin each four rows later.
        ((4096, 8192, 8192), (2, 8, 4, 12)),
        # The 8 high ones come first, as a group of their own.
        ((4096, 4096, 4096), (2, 8, 0, 8)),
    ],
)
def test_balanced_tiles_are_launched_in_the_order_that_was_found(
    shape: tuple[int, int, int], want: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result would tell of another one: every order covers D."""
    m, n, k = shape
    (entry,) = (e for e in ENTRIES if e.name == "gemm_e4m3_bf16_nm_n256_w3_c2_s4")
    launched: list[Any] = []

    def launch(loaded: Any, grid: int, parameters: list[Any], stream: int, overlap: bool) -> Any:
        launched.append(parameters[1])
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(matmul, "Launch", launch)
    monkeypatch.setattr(matmul, "tensor_map", lambda *_: np.zeros(16, np.uint64))
    device = SimpleNamespace(l2_bytes=60 << 20, stream=0)
    weight = SimpleNamespace(
        device=device,
        shape=(m, k),
        multiplied=OPERANDS[entry.type].b,
        image=SimpleNamespace(ptr=0, nbytes=m * k * 5 // 8),
        scale=None,
        scale_rows=False,
        block=None,
        blocks=(m // 64, k // 128),
        column_order=None,
        limit=0,
        launches={},
    )
    plan = matmul.Plan(weight, entry, SimpleNamespace(max_clusters=66), n)  # type: ignore[arg-type]
    plan.enqueue(16, k, 32)
    (raw,) = launched
    fields = {name: at for name, _, at in manifest.load().args[entry.args].fields}
    got = {name: int(np.frombuffer(raw, np.int32, 1, at)[0]) for name, at in fields.items()}
    names = ("tile_blocks", "high_rows", "skew", "raster")
    assert tuple(got[name] for name in names) == want
    rows, cols = cluster_rows(entry, m, n // 256, 66), n // 256
    assert got["cluster_rows"] == rows
    low, high = heights(entry, m, rows)
    order = tile_order(rows, cols, 66, weight.image.nbytes, n * k, device.l2_bytes)
    order = balanced_order(order, rows, cols, 66, low, high)
    assert (low, high, order.skew, order.raster) == want
    assert got["read_once"] == order.read_once
