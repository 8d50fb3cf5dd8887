"""Tuning and the ceiling on a real card: that they run, agree and give times that can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp24cli.bench.ceiling import copy_bandwidth
from sp24cli.bench.instrument import DeviceTimer
from sp24cli.bench.plan import BenchPlan, plan_shapes
from sp24cli.bench.rates import Shape
from sp24cli.bench.tune import tune
from sp24cli.gpu import select
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import SparseWeight
from sp24cli.gpu.select import candidates
from sp24cli.kernels import choices, manifest


def test_a_copy_is_as_fast_as_hbm(device: Device) -> None:
    assert 1.5 < copy_bandwidth(device, DeviceTimer(device)) < 8.0


@pytest.mark.parametrize("order", ["nm", "mn"])
def test_what_was_tuned_is_used(
    device: Device, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cases = plan_shapes((Shape(1000, 40, 2048),), "e4m3", workers=2)
    result = tune(BenchPlan(cases, order), device)
    (case,) = result.cases
    assert set(case.measured.times) == {e.name for e in candidates("e4m3", "bf16", order)}
    assert all(0.5 < us < 1000.0 for us in case.measured.times.values())
    path = choices.cache_path(device.uuid, manifest.load().sha256)
    assert path is not None
    choices.write_cache(path, result.table)
    select.forget()
    try:
        packed, _ = cases[0].load()
        plan = SparseWeight.upload(device, packed).plan(40, "bf16", order)
        assert (plan.kernel.name, plan.chosen_by) == (case.measured.kernel, "cache")
    finally:
        select.forget()
