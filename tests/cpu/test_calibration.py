"""The choice of a scale against plain loops, and what it promises of any values."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp24cli import calibration
from sp24cli.bits import NUMBER_TYPES
from sp24cli.calibration import (
    CANDIDATES,
    POWERS,
    REFINEMENTS,
    ScaleRule,
    kept_values,
    passes,
    tensor_scale,
    unit_scales,
)
from sp24cli.errors import BadInputError
from sp24cli.fp8 import convert
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.rowblocks import row_slices
from sp24cli.scaling import ScaleSpec, amax, find_bad, make_scales, scale_values
from sp24cli.sparsity import prune_24
from tests.cpu.modelfile import Array, naive_prune, normal
from tests.cpu.test_scaling import blocks_of

E4M3 = OPERAND_TYPES["e4m3"]
TENSOR, VECTOR, MX = ScaleSpec("tensor"), ScaleSpec("vector"), ScaleSpec.parse("mx")
SPECS = [TENSOR, VECTOR, *(ScaleSpec("block", b) for b in [(16, 16), (5, 128), (2, 12)]), MX]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
MSE = ScaleRule("mse")
TINY, MAX = (np.float32(getattr(np.finfo(np.float32), name)) for name in ("tiny", "max"))
#: Neither side a multiple of a block.
SHAPE = (39, 84)


def choose(
    dense: Array,
    spec: ScaleSpec,
    rule: ScaleRule,
    overflow: Any = "satfinite",
    band: int = 16,
    optype: OperandType = E4M3,
) -> Array:
    """The scales of a 2:4 matrix, a tensor's from bands of rows."""
    if spec.kind != "tensor":
        return unit_scales(kept_values(dense), spec, optype, overflow, rule)
    reads = []

    def over(work: Any) -> list[Any]:
        reads.append(work)
        return [work(kept_values(dense[r])) for r in row_slices(len(dense), band)]

    scale = tensor_scale(over, dense.dtype, optype, overflow, rule)
    assert len(reads) == passes(dense.dtype, rule) or not dense.any()
    return scale


def weights(kind: str, dtype: Any = np.float32) -> Array:
    random = np.random.default_rng(7)
    values = {
        "normal": lambda: random.standard_normal(SHAPE),
        "heavy": lambda: random.standard_t(2, SHAPE),
        # Of one size: the least error is that of clipping some.
        "flat": lambda: (1 + 0.02 * random.standard_normal(SHAPE)) * random.choice([-1, 1], SHAPE),
        "wild": lambda: random.lognormal(0, 4, SHAPE) * random.choice([-1, 1], SHAPE),
        # Of a trained layer: rows and columns of different size, and a few outliers.
        "layer": lambda: (
            random.standard_normal(SHAPE)
            * random.lognormal(-3, 0.4, (SHAPE[0], 1))
            * np.where(random.random(SHAPE[1]) < 0.05, 6, 1)
        ),
    }[kind]()
    values[3] = 0
    values[16:32, 32:48] = 0
    values[5, :4] = 0, 0, 0, -1e-3
    if np.dtype(dtype).itemsize == 1:
        values = np.clip(values * 8, -120, 120)
    return prune_24(np.clip(values, -6e4, 6e4).astype(dtype))


def of_units(dense: Array, spec: ScaleSpec) -> dict[tuple[int, ...], list[float]]:
    """The kept values under each scale, in the order of rows and columns."""
    wide = dense.astype(np.float64)
    return {
        place: wide[cut].reshape(-1).tolist()
        for place, cut in blocks_of(spec, *dense.shape).items()
    }


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (ScaleRule(), "amax"),
        (MSE, "mse"),
        (ScaleRule("percentile", 99.9), "percentile 99.9"),
        (ScaleRule("percentile", 100), "percentile 100.0"),
        (ScaleRule("percentile", np.float64(0.5)), "percentile 0.5"),
        (ScaleRule("history", pick="max"), "history max"),
        (ScaleRule("history", pick="most_recent"), "history most_recent"),
    ],
)
def test_rules_as_text(rule: ScaleRule, text: str) -> None:
    assert rule.text == text
    assert ScaleRule.parse(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "magic",
        "amax ",
        "mse 3",
        "percentile",
        "percentile x",
        "percentile 0",
        "percentile -1.0",
        "percentile 100.5",
        "percentile nan",
        "percentile inf",
        "percentile 099.9",
        "percentile 99",
        "history",
        "history mean",
        "history  max",
    ],
)
def test_rules_of_other_versions_are_refused_by_name(text: str) -> None:
    with pytest.raises(BadInputError, match=r"unknown|percentile|history"):
        ScaleRule.parse(text)


@pytest.mark.parametrize("fields", [("amax", 5.0), ("mse", None, "max"), ("percentile",)])
def test_rules_that_do_not_fit(fields: tuple[Any, ...]) -> None:
    with pytest.raises(BadInputError, match="does not fit"):
        ScaleRule(*fields)


def test_kept_values_are_all_that_are_not_zero() -> None:
    dense = naive_prune(normal(1, SHAPE, "BF16"))
    dense[2] = 0
    dense[4, :8] = 0, 0, 0, -1, 0, 2, 0, 0
    kept = kept_values(dense)
    assert (kept.shape, kept.dtype) == ((39, 42), dense.dtype)
    for row, values in zip(dense.astype(float), kept.astype(float), strict=True):
        assert values[values != 0].tolist() == row[row != 0].tolist()


@every_spec
@pytest.mark.parametrize("source", NUMBER_TYPES)
@pytest.mark.parametrize("percentile", [0.1, 37.5, 99.0, 99.9, 100.0])
def test_a_percentile_is_an_order_statistic(
    spec: ScaleSpec, source: str, percentile: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_CHUNK", 100)
    dense = weights("heavy", NUMBER_TYPES[source].dtype)
    scale = choose(dense, spec, ScaleRule("percentile", percentile))
    assert (scale.dtype, scale.shape) == (spec.dtype, spec.shape(*SHAPE))
    want = np.zeros(scale.shape, np.float64 if source == "F64" else np.float32)
    for place, values in of_units(dense, spec).items():
        magnitudes = sorted(abs(v) for v in values if v)
        if magnitudes:
            rank = math.ceil(len(magnitudes) * Fraction(str(percentile)) / 100)
            want[place] = magnitudes[max(rank, 1) - 1]
    assert scale_values(scale).tolist() == scale_values(make_scales(want, 448.0, spec)).tolist()
    if percentile == 100:
        want = amax(dense, spec)
        assert scale_values(scale).tolist() == scale_values(make_scales(want, 448.0, spec)).tolist()


def test_a_percentile_is_that_of_numpy() -> None:
    """Where rounding a share to binary does not decide the rank."""
    dense = weights("normal")
    dense = dense[[row for row in range(39) if row not in (3,)]]
    scale = choose(dense, VECTOR, ScaleRule("percentile", 87.5))
    for row, found in zip(dense, scale[:, 0], strict=True):
        magnitudes = np.abs(row[row != 0])
        want = np.percentile(magnitudes, 87.5, method="inverted_cdf")
        assert found == np.float32(want) / np.float32(448)


def test_the_rank_is_that_of_the_decimal_and_not_of_a_float() -> None:
    # 99.9 in binary is a little more.
    assert Fraction(99.9) * 10 > 999
    assert calibration._rank(1000, calibration._share(ScaleRule("percentile", 99.9))) == 999


def by_halves(terms: list[float]) -> float:
    while len(terms) > 1:
        lower, upper = terms[: -(-len(terms) // 2)], terms[-(-len(terms) // 2) :]
        sums = [a + b for a, b in zip(lower, upper, strict=False)]
        terms = sums + lower[len(upper) :]
    return terms[0] if terms else 0.0


def naive_least(
    values: list[float], spec: ScaleSpec, optype: OperandType, overflow: Any, row: int
) -> float:
    """The scale with the least error, by trying them all. ``row`` values are summed by halves,
    the sums of rows exactly."""
    largest = max((abs(v) for v in values), default=0.0)
    if largest == 0:
        return 1.0
    base = float(make_scales(np.array([largest], np.float32), optype.max_finite, spec)[0])
    w = np.array(values, np.float32)

    def products(scale: np.float32) -> tuple[float, float, float]:
        codes = convert(w / scale, optype, overflow).astype(np.float64)
        exact = w.astype(np.float64)
        terms = np.square(codes * np.float64(scale) - exact), exact * codes, np.square(codes)
        sums = [math.fsum(by_halves(t[r].tolist()) for r in row_slices(len(w), row)) for t in terms]
        return (math.inf if math.isnan(sums[0]) else sums[0]), sums[1], sums[2]

    def narrow(scale: float) -> np.float32:
        return np.float32(min(max(scale, float(TINY)), float(MAX)))

    tried = [narrow(base * f) for f in (POWERS if spec.kind == "mx" else CANDIDATES)]
    best = tried[0]
    held = products(best)
    for scale in tried[1:]:
        found = products(scale)
        if found[0] < held[0]:
            best, held = scale, found
    for _ in range(0 if spec.kind == "mx" else REFINEMENTS):
        step = narrow(held[1] / held[2]) if held[2] > 0 else best
        found = products(step)
        if found[0] < held[0]:
            best, held = step, found
    return float(best)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_sums_have_one_order(count: int) -> None:
    terms = np.random.default_rng(count).lognormal(0, 9, (5, count))
    want = [by_halves(row.tolist()) for row in terms]
    assert calibration._sum(terms.copy()).tolist() == want
    if count == 1000:
        # numpy's own order gives another sum.
        assert terms.sum(axis=1).tolist() != want


@every_spec
@pytest.mark.parametrize("kind", ["normal", "flat", "wild"])
@pytest.mark.parametrize(
    ("optype", "overflow"),
    [
        (t, overflow)
        for t in OPERAND_TYPES.values()
        for overflow in ("satfinite", "nan")
        if t.scaled and (t.name, overflow) != ("s8", "nan")
    ],
    ids=str,
)
def test_mse_is_the_best_of_all_candidates(
    spec: ScaleSpec,
    kind: str,
    optype: OperandType,
    overflow: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it does not try those that cannot win, and whatever it takes at once."""
    monkeypatch.setattr(calibration, "_CHUNK", 100)
    dense = weights(kind)
    kept = kept_values(dense).astype(np.float64)
    scale = choose(dense, spec, MSE, overflow, optype=optype)
    assert scale.dtype == spec.dtype
    (bm, bk), found = spec.block or (1, 84), {}
    if spec.kind == "tensor":
        found[(0,)] = naive_least(kept.reshape(-1).tolist(), spec, optype, overflow, 42)
    else:
        for place in np.ndindex(scale.shape):
            i, j = place
            part = kept[bm * i : bm * i + bm, bk * j // 2 : (bk * j + bk) // 2]
            # Blocks at the edge are filled up.
            full = np.zeros((min(bm, 39), min(bk // 2, 42)))
            full[: part.shape[0], : part.shape[1]] = part
            found[place] = naive_least(full.reshape(-1).tolist(), spec, optype, overflow, full.size)
    assert {place: float(scale[place]) for place in found} == found


@every_spec
@pytest.mark.parametrize("rule", [MSE, ScaleRule("percentile", 90.0)], ids=lambda r: r.text)
def test_bands_and_chunks_do_not_matter(
    spec: ScaleSpec, rule: ScaleRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = weights("layer")
    want = choose(dense, spec, rule).tobytes()
    for chunk, band in ((1, 16), (84, 64), (1 << 20, 48)):
        monkeypatch.setattr(calibration, "_CHUNK", chunk)
        assert choose(dense, spec, rule, band=band).tobytes() == want


def error_of(dense: Array, scale: Array, spec: ScaleSpec) -> float:
    factor = np.empty(dense.shape, np.float32)
    for place, cut in blocks_of(spec, *dense.shape).items():
        factor[cut] = scale_values(scale)[place]
    wide = dense.astype(np.float64 if dense.dtype == np.float64 else np.float32)
    codes = convert(wide / factor.astype(wide.dtype), E4M3).astype(np.float64)
    return float(np.square(codes * factor - dense.astype(np.float64)).sum())


@every_spec
@pytest.mark.parametrize("kind", ["normal", "heavy", "wild", "layer"])
def test_mse_is_never_worse_than_amax(spec: ScaleSpec, kind: str) -> None:
    dense = weights(kind)
    plain = error_of(dense, make_scales(amax(dense, spec), 448.0, spec), spec)
    least = error_of(dense, choose(dense, spec, MSE), spec)
    # Both sums are of 3276 terms, each rounded.
    assert least <= plain * (1 + 3276 * 2.0**-53)
    if spec.block in ((16, 16), (2, 12)) or spec.kind == "vector":
        assert least < 0.95 * plain


def test_ties_go_to_the_larger_scale() -> None:
    # Without an error at the scale of amax, and for powers of two at twice that as well.
    dense = np.array([[448, 0, 0, 224]], np.float32)
    assert choose(dense, VECTOR, MSE).tolist() == [[1.0]]
    assert choose(dense, MX, MSE).tolist() == [[2.0]]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
@every_spec
@pytest.mark.parametrize("rule", [MSE, ScaleRule("percentile", 50.0)], ids=lambda r: r.text)
def test_of_nothing_the_scale_is_one(
    spec: ScaleSpec, shape: tuple[int, int], rule: ScaleRule
) -> None:
    scale = choose(np.zeros(shape, np.float16), spec, rule)
    assert scale.shape == spec.shape(*shape)
    assert (scale_values(scale) == 1).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(SPECS),
    st.sampled_from([MSE, ScaleRule("percentile", 50.0), ScaleRule("percentile", 99.9)]),
    st.sampled_from(["F32", "F64", "BF16"]),
)
def test_no_values_make_a_scale_that_is_none(
    values: list[float], spec: ScaleSpec, rule: ScaleRule, source: str
) -> None:
    flat = np.zeros(80)
    flat[: 2 * len(values) : 2] = values
    with np.errstate(over="ignore"):
        dense = flat.reshape(4, 20).astype(NUMBER_TYPES[source].dtype)
    dense[~np.isfinite(dense.astype(np.float64))] = 0
    scale = choose(dense, spec, rule, band=2)
    assert find_bad(scale) is None
    if rule == MSE:
        plain = error_of(dense, make_scales(amax(dense, spec), 448.0, spec), spec)
        # Every term is at least 0, and the sums are rounded.
        assert error_of(dense, scale, spec) <= plain * (1 + 80 * 2.0**-53)


def test_scores_hold_no_temporaries() -> None:
    """A view of the terms would keep them all, for every scale and chunk of a tensor."""
    for part in calibration._score_units(
        np.ones((4, 64)), np.ones(1, np.float32), E4M3, "nan", True
    ):
        assert part.base is None
        assert part.shape == (4,)


def search(largest: list[float], weight: list[float]) -> tuple[list[float], list[float], int]:
    """(found, best of all, scales tried) of units where clipping costs what it does and all else
    ``weight`` times the square of the scale."""
    tried = []

    def error(scale: Array) -> Array:
        wide = scale.astype(np.float64)
        return np.square(np.maximum(largest - 448 * wide, 0)) + weight * np.square(wide)

    def score(scales: list[Array], products: bool) -> list[tuple[Array, Array, Array]]:
        tried.extend(scales)
        return [(error(s), s.astype(np.float64), np.ones(len(s))) for s in scales]

    found = calibration._least_error(np.array(largest), VECTOR, E4M3, score)
    base = make_scales(np.array(largest), 448.0, VECTOR).astype(np.float64)
    every = np.array([(base * f).astype(np.float32) for f in CANDIDATES])
    best = np.argmin([error(s) for s in every], axis=0)
    return found.tolist(), every[best, np.arange(len(base))].tolist(), len(tried)


def test_the_search_stops_when_it_may_and_no_earlier() -> None:
    units = {1.0: 1e2, 0.5: 1e5, 30.0: 1e6, 2.0: 1e7, 1e-3: 3e5}
    found, want, tried = search(list(units), list(units.values()))
    assert found == want
    # One of them is best by the last of all.
    assert tried == len(CANDIDATES) + 1 + REFINEMENTS
    clips = {s / largest * 448 for s, largest in zip(found, units, strict=True)}
    assert len(clips) == 5
    assert max(clips) == pytest.approx(1)
    assert min(clips) == pytest.approx(1 / 8)
    found, want, tried = search([1.0], [1e2])
    assert found == want
    assert tried < 12 + 1 + REFINEMENTS
