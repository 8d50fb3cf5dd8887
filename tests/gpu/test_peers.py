"""Every plan of the peers against float64 on a small problem, and the bench beside them."""

from __future__ import annotations

import pytest

from sp24cli.bench.plan import BenchPlan, plan_shapes
from sp24cli.bench.rates import Shape
from sp24cli.bench.run import run
from sp24cli.bench.statistics import Settings
from sp24cli.peers import selfcheck
from sp24cli.peers.cublaslt import CublasLt
from sp24cli.peers.cusparselt import CusparseLt
from sp24cli.peers.loading import PeerAbsent


@pytest.mark.parametrize("kind", [CublasLt, CusparseLt])
def test_every_product_is_right(device, kind):
    try:
        library = kind.load()
    except PeerAbsent as absent:
        pytest.skip(str(absent))
    results = list(selfcheck.check(device, library))
    ran = [result for result in results if result.error is not None]
    assert {(r.problem.operand, r.problem.order) for r in ran} >= {
        (operand, order) for operand in ("e4m3", "f16", "bf16", "s8") for order in ("nm", "mn")
    }
    wrong = [(r.peer, r.problem, r.error) for r in ran if not r.passed]
    assert not wrong


@pytest.mark.parametrize(
    ("type_name", "order", "options"),
    [
        ("e4m3", "nm", {}),
        ("e4m3", "mn", {}),
        ("f16", "nm", {}),
        ("s8", "mn", {}),
        ("s8", "nm", {"out": "bf16"}),
        ("e5m2", "nm", {}),
        ("e4m3", "nm", {"b_type": "e5m2"}),
        ("tf32", "nm", {}),
        ("f16", "nm", {"accumulate": "f16"}),
    ],
)
def test_the_bench_times_what_is_here(device, type_name, order, options):
    settings = Settings(idle_ms=1.0, sustained_from_ms=20.0, sustained_to_ms=40.0, rounds=1)
    # The second shape is ragged: the peers refuse it, the kernels must not.
    shapes = (Shape(512, 128, 1024), Shape(1000, 77, 4092))
    cases = plan_shapes(shapes, type_name, workers=4, **options)
    result = run(BenchPlan(cases, order, settings=settings, workers=4), device)
    assert not result.failures
    for case in result.cases:
        ours = case.best("sp24", "sustained")
        assert ours is not None
        assert 1.0 < ours.sustained.us < 1000.0
        assert ours.sustained.p5 <= ours.sustained.us <= ours.sustained.p95
        assert ours.sustained.peak_share < 1.0
    timed = {row.role.family for row in result.cases[0].rows}
    if (type_name, options) not in (("e4m3", {}), ("f16", {})):
        # Which other types a peer has is its own affair; what it times is verified.
        assert "sp24" in timed
        return
    present = {
        family
        for family, name in (("cublaslt", "cuBLASLt"), ("cusparselt", "cuSPARSELt"))
        if not result.environment.peers[name].startswith("not used")
    }
    assert timed == {"sp24", *present}
