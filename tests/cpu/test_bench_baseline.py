"""Comparing a result with an earlier one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp24cli.bench.baseline import LEAST_MOVE, compare, lines
from sp24cli.bench.statistics import Settings
from tests.cpu.benchresult import BEST, DECODE, LARGE, OURS, case, faster, result, row, two_cases

OLD = two_cases()


def changed(**figures):
    """The old result with its first case's own time divided by ``factor``."""
    factor = figures.pop("factor", 1.0)
    return replace(OLD, cases=(faster(OLD.cases[0], factor, **figures), OLD.cases[1]))


def first_move(old, new, figure="burst"):
    return getattr(compare(old, new).cases[0].products[0], figure)


def test_the_same_result_moved_nowhere():
    found = compare(OLD, OLD)
    assert found.warnings == found.gone == found.added == found.cautions == ()
    labels = [[product.label for product in case.products] for case in found.cases]
    assert labels == [
        ["sp24", "cuSPARSELt best", "cuSPARSELt default", "cuBLASLt dense"],
        ["sp24", "cuSPARSELt best", "cuSPARSELt default", "cuBLASLt dense"],
    ]
    assert {
        getattr(p, f).verdict
        for c in found.cases
        for p in c.products
        for f in ("burst", "sustained")
    } == {"same"}


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.05, "faster"), (0.95, "slower"), (1.004, "same"), (0.9965, "same"), (1.006, "faster")],
)
def test_a_move_beyond_the_noise_is_one(factor, verdict):
    move = first_move(OLD, changed(factor=factor))
    assert move.verdict == verdict
    assert move.gain == pytest.approx(factor - 1)
    assert move.noise == LEAST_MOVE


@pytest.mark.parametrize("doubt", ["noise", "drift"])
def test_the_noise_of_both_runs_counts(doubt):
    new = changed(factor=1.05, **{doubt: 0.03})
    assert first_move(OLD, new).noise == pytest.approx(0.002 + 0.03)
    assert first_move(OLD, new).verdict == "faster"
    noisy = changed(**{doubt: 0.03})
    assert first_move(noisy, new).noise == pytest.approx(0.06)
    assert first_move(noisy, new).verdict == "same"


def test_burst_and_sustained_are_apart():
    slower = replace(OLD.cases[0].rows[0], sustained=OLD.cases[0].rows[1].sustained)
    new = replace(OLD, cases=(replace(OLD.cases[0], rows=(slower, *OLD.cases[0].rows[1:])),))
    assert first_move(OLD, new).verdict == "same"
    assert first_move(OLD, new, "sustained").verdict == "slower"


def test_what_else_differs_is_a_warning():
    environment = replace(
        OLD.environment, gpu="NVIDIA H100", fatbin_sha256="cd" * 32,
        peers={"cuBLASLt": "13.2.0", "cuSPARSELt": "0.8.0"},
    )  # fmt: skip
    new = replace(OLD, environment=environment, settings=Settings(rounds=5, graph_ms=2.0))
    assert compare(OLD, new).warnings == (
        "GPU: NVIDIA H200 -> NVIDIA H100",
        "kernels: abababababab -> cdcdcdcdcdcd",
        "cuBLASLt: 13.1.0 -> 13.2.0",
        "graph ms: 1.0 -> 2.0",
        "rounds: 3 -> 5",
    )
    limited = changed(limit_w=500.0)
    assert compare(OLD, limited).warnings == ("power limit: 700 W -> 500 W, 700 W",)
    other = replace(OLD, cases=(replace(OLD.cases[0], weight="a.safetensors: x"),))
    assert compare(OLD, other).warnings == ("4096x8192x8192 e4m3 -> bf16 nm: other data",)
    text = "\n".join(lines(compare(OLD, new)))
    assert "warning: differs in GPU: NVIDIA H200 -> NVIDIA H100" in text


def test_another_card_of_the_kind_is_a_warning():
    def on(uuid):
        return replace(OLD, environment=replace(OLD.environment, uuid=uuid))

    assert compare(on("0123456789ab"), on("ba9876543210")).warnings == (
        "card: 01234567 -> ba987654",
    )
    for other in ("0123456789ab", None):
        assert compare(on("0123456789ab"), on(other)).warnings == ()


@pytest.mark.parametrize(("rounds", "which"), [((1, 3), "old"), ((3, 1), "new"), ((1, 1), "both")])
def test_one_round_has_no_drift_to_judge_by(rounds, which):
    old, new = (replace(OLD, settings=Settings(rounds=count)) for count in rounds)
    (caution,) = compare(old, new).cautions
    runs = "old and the new" if which == "both" else which
    assert caution.startswith(f"one round in the {runs} run: how far rounds lie apart is not known")
    assert f"warning: {caution}" in lines(compare(old, new))


def scaled(scale, accumulate="fast"):
    return replace(OLD, cases=(replace(OLD.cases[0], scale=scale, accumulate=accumulate),))


@pytest.mark.parametrize(
    ("new", "name"),
    [
        (scaled("block 128x128"), "4096x8192x8192 e4m3 -> bf16 nm, scale block 128x128"),
        (scaled("tensor", "precise"), "4096x8192x8192 e4m3 -> bf16 nm, precise sums"),
    ],
)
def test_other_scales_or_sums_are_another_case(new, name):
    found = compare(scaled("tensor"), new)
    assert (found.cases, found.gone, found.added) == (
        (),
        ("4096x8192x8192 e4m3 -> bf16 nm",),
        (name,),
    )
    assert compare(new, new).cases[0].name == name


def test_where_a_run_does_not_say_its_scales_the_reader_is_told():
    unsaid = scaled(None, None)
    for old, new, which in ((unsaid, scaled("mx"), "old"), (scaled("mx"), unsaid, "new")):
        found = compare(old, new)
        assert len(found.cases) == 1
        assert found.cautions == (
            f"scales and sums are not said by the {which} run: cases may differ in them",
        )


def test_cases_that_one_run_lacks():
    only_first, only_second = replace(OLD, cases=OLD.cases[:1]), replace(OLD, cases=OLD.cases[1:])
    found = compare(only_first, only_second)
    assert found.cases == ()
    assert found.gone == ("4096x8192x8192 e4m3 -> bf16 nm",)
    assert found.added == ("28672x16x8192 e4m3 -> bf16 nm",)
    assert lines(found)[-1] == "nothing to compare: the two runs share no case"


def test_cases_of_one_shape_are_matched_in_turn():
    twice = result(OLD.cases[0], faster(OLD.cases[0], 2.0))
    found = compare(twice, twice)
    assert [case.products[0].burst.gain for case in found.cases] == [0.0, 0.0]


def test_another_kernel_or_algorithm_is_named():
    old = result(case(LARGE, row(OURS, LARGE, 260.0, 300.0), row(BEST, LARGE, 265.0, 305.0)))
    new = result(
        case(
            LARGE,
            row(replace(OURS, detail="gemm_b"), LARGE, 250.0, 290.0),
            row(replace(BEST, detail="id 8 of 25", order="nm"), LARGE, 265.0, 305.0),
        )
    )
    products = compare(old, new).cases[0].products
    assert [product.changed for product in products] == [
        "gemm_a -> gemm_b", "id 7 of 25 mn -> id 8 of 25 nm",
    ]  # fmt: skip


def test_the_summary_sets_us_beside_the_peers():
    """The new card is 4 % faster, and our first case another 10 %."""
    cases = tuple(
        faster(faster(faster(c, 1.04), 1.04, "cusparselt"), 1.04, "cublaslt") for c in OLD.cases
    )
    new = replace(OLD, cases=(faster(cases[0], 1.10), cases[1]))
    text = lines(compare(OLD, new))
    mean = (1.04 * 1.04 * 1.10) ** 0.5
    assert f"sp24 burst: {mean - 1:+.1%} in the geometric mean; 2 faster, 0 slower, 0 same" in text
    assert (
        "cuBLASLt dense moved +4.0% / +4.0% (burst / sustained); beside it sp24 moved "
        f"{mean / 1.04 - 1:+.1%} / {mean / 1.04 - 1:+.1%}"
    ) in text


def test_the_table_gives_both_times_and_the_noise():
    text = "\n".join(lines(compare(OLD, changed(factor=1.3))))
    assert "260.0 -> 200.0  +30.0%   0.5%  faster  300.0 -> 230.8  +30.0%   0.5%  faster" in text
    assert "36.70 -> 36.70  +0.0%   0.5%  same" in text
    assert str(DECODE) in text
