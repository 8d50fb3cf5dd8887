"""How the scale of a unit (a tensor, a row or a block) is chosen from its kept values.

``amax`` takes the largest magnitude to the largest finite value of the type (`scaling`).
``percentile`` does so with an order statistic of the magnitudes that are not zero: the one of
rank ceil(n p / 100), as ``numpy.percentile`` with ``method="inverted_cdf"``, the rank in exact
arithmetic; what is beyond saturates. ``mse`` seeks the least sum of squares of
value - code * scale: of `CANDIDATES` times the scale of amax the best, ties to the larger, then
`REFINEMENTS` steps of least squares, s = <w, c> / <c, c> with the codes c at hand, each taken
where it makes the error smaller. For powers of two (``mx``) the candidates are `POWERS` times
the scale of amax, and there is no step.

Sums are in float64, of the terms in the order of the columns (in a block: row by row), the
upper half added to the lower until one is left; the sum of a tensor is the exact sum of those of
its rows, rounded once. So they do not depend on the machine, the bands or the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np

from sp24cli.bits import (
    Array,
    contiguous_bits,
    magnitude_values,
    magnitudes,
    number_type,
    widen,
)
from sp24cli.errors import BadInputError
from sp24cli.fp8 import Overflow, convert
from sp24cli.metadata import encode, kept_places
from sp24cli.optypes import OperandType
from sp24cli.rowblocks import row_slices
from sp24cli.scaling import ScaleSpec, join_amax, make_scales, powers, quotient, scale_values
from sp24cli.sparsity import keep_indices

Method = Literal["amax", "percentile", "mse", "history"]
#: Which of an amax history counts, by the names that Transformer Engine gives them.
HistoryPick = Literal["max", "most_recent"]

#: For ``percentile``, as a default.
PERCENTILE = 99.9
REFINEMENTS = 2

_F32 = np.finfo(np.float32)
#: ``over(work)``: ``work`` of the kept values [R, K/2] of all row bands of a tensor, in order.
Bands = Callable[[Callable[[Array], Any]], list[Any]]
#: Of units by some scales, one after the other: (error, <w, c>, <c, c>), of which the last two
#: count only if asked for.
_Score = Callable[[list[Array], bool], list[tuple[Array, Array, Array]]]

#: Values scored at a time, so that the temporaries stay in cache.
_CHUNK = 1 << 15
#: Bits of a digit of `_select`.
_DIGIT = 16


def _candidates() -> tuple[float, ...]:
    # By square roots, which IEEE 754 rounds rightly everywhere, as powers of a library may not be.
    eighth = math.sqrt(math.sqrt(math.sqrt(2.0)))
    octave = [1.0]
    for _ in range(7):
        octave.append(octave[-1] * eighth)
    return tuple(math.ldexp(octave[i % 8], i // 8) for i in range(7, -25, -1))


#: 2^(i/8) for i from 7 down to -24. Above 1 nothing is clipped, but the codes fall otherwise on
#: the values; down to 1/8, which a weight with outliers needs in s8 and none in FP8.
CANDIDATES = _candidates()
POWERS = (2.0, 1.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class ScaleRule:
    """A method and what it needs: ``percentile`` in (0, 100], ``pick`` from a history."""

    method: Method = "amax"
    percentile: float | None = None
    pick: HistoryPick | None = None

    def __post_init__(self) -> None:
        _known("scale calibration", self.method, get_args(Method))
        if (self.percentile is not None) != (self.method == "percentile"):
            raise BadInputError(f"scale calibration {self.method!r}: percentile does not fit")
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise BadInputError(f"percentile {self.percentile} is not above 0 and up to 100")
        if (self.pick is not None) != (self.method == "history"):
            raise BadInputError(f"scale calibration {self.method!r}: pick does not fit")
        if self.pick is not None:
            _known("amax of a history", self.pick, get_args(HistoryPick))

    @property
    def text(self) -> str:
        """As files and reports have it; `parse` reads it."""
        if self.method == "percentile":
            return f"percentile {float(cast(float, self.percentile))!r}"
        return f"history {self.pick}" if self.method == "history" else self.method

    @classmethod
    def parse(cls, text: str) -> ScaleRule:
        """The rule that ``text`` says; `BadInputError` for one this version does not know."""
        word, _, rest = text.partition(" ")
        method = cast(Method, word)
        try:
            percentile = float(rest) if method == "percentile" else None
        except ValueError:
            percentile = math.nan
        pick = cast(HistoryPick, rest) if method == "history" else None
        rule = cls(method, percentile, pick)
        # One way to write each, so that files of the same content have the same bytes.
        if rule.text != text:
            raise BadInputError(f"unknown scale calibration {text!r}")
        return rule


def _known(what: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise BadInputError(f"unknown {what} {value!r} (known: {', '.join(names)})")


AMAX = ScaleRule()


def kept_values(dense: Array) -> Array:
    """The two kept values of every group of a 2:4 matrix [R, K], zeros among them: [R, K/2]."""
    columns = dense.shape[1]
    bits = contiguous_bits(dense)
    places = kept_places(encode(*keep_indices(dense)), columns)
    kept: Array = bits.reshape(-1).take(places)
    return kept.view(dense.dtype)


def unit_scales(
    kept: Array, spec: ScaleSpec, optype: OperandType, overflow: Overflow, rule: ScaleRule
) -> Array:
    """The scales of rows or blocks: ``spec.shape(R, K)`` of ``spec.dtype``.

    ``kept`` [R, K/2] are the finite kept values of some rows that begin with a block, of any
    weight type; ``rule`` is ``percentile`` or ``mse``, ``spec`` any kind but ``tensor``.
    """
    rows, half = kept.shape
    shape = spec.shape(rows, 2 * half)
    if not kept.size:
        return make_scales(np.zeros(shape), optype.max_finite, spec)
    units = _units(kept, spec)
    found = np.empty(len(units), spec.dtype)
    for part in row_slices(len(units), max(1, _CHUNK // units.shape[1])):
        members = units[part]
        if rule.method == "percentile":
            largest = _percentiles(members, _share(rule))
            found[part] = make_scales(largest, optype.max_finite, spec)
            continue

        score = partial(_score_by_unit, members, optype, overflow)
        found[part] = _least_error(_largest(members), spec, optype, score)
    return found.reshape(shape)


def tensor_scale(
    over: Bands,
    source: np.dtype[Any],
    optype: OperandType,
    overflow: Overflow,
    rule: ScaleRule,
) -> Array:
    """The scale [1] of a whole tensor of the type ``source``, by ``percentile`` or ``mse``.

    ``over`` is called as often as `passes` says.
    """
    spec = ScaleSpec("tensor")
    if rule.method == "percentile":
        return make_scales(_select(over, source, _share(rule)), optype.max_finite, spec)

    def score(scales: list[Array], products: bool) -> list[tuple[Array, Array, Array]]:
        def work(kept: Array) -> Array:
            chunks = row_slices(len(kept), max(1, _CHUNK // max(1, kept.shape[1])))
            scores = [
                [_score_units(kept[part], s, optype, overflow, products) for s in scales]
                for part in chunks
            ]
            return np.concatenate(scores, axis=2)

        by_row = np.concatenate([np.zeros((len(scales), 3, 0)), *over(work)], axis=2)
        sums = np.array([[_exact_sum(of_rows) for of_rows in scores] for scores in by_row])
        return [(s[:1], s[1:2], s[2:]) for s in sums]

    largest = join_amax([np.zeros(1), *over(lambda kept: _largest(kept.reshape(1, -1)))], spec)
    return _least_error(largest, spec, optype, score, at_once=len(CANDIDATES))


def passes(source: np.dtype[Any], rule: ScaleRule) -> int:
    """How often `tensor_scale` reads a tensor."""
    if rule.method == "percentile":
        return -(-8 * source.itemsize // _DIGIT)
    return 3 + REFINEMENTS  # for the amax, the candidates, the best of them, and each step


def _score_by_unit(
    members: Array, optype: OperandType, overflow: Overflow, scales: list[Array], products: bool
) -> list[tuple[Array, Array, Array]]:
    return [_score_units(members, s[:, None], optype, overflow, products) for s in scales]


def _share(rule: ScaleRule) -> Fraction:
    # The decimal that the user wrote, not the float nearest to it.
    return Fraction(repr(float(cast(float, rule.percentile)))) / 100


def _units(kept: Array, spec: ScaleSpec) -> Array:
    """The values under each scale, filled up with zeros: [units, most values of one]."""
    if spec.block is None:
        return kept
    rows, half = kept.shape
    height, width = min(spec.block[0], rows), min(spec.block[1] // 2, half)
    down, across = -(-rows // height), -(-half // width)
    bits = contiguous_bits(kept)
    if (rows, half) != (down * height, across * width):
        bits = np.pad(bits, ((0, down * height - rows), (0, across * width - half)))
    blocks = bits.reshape(down, height, across, width).swapaxes(1, 2)
    return blocks.reshape(down * across, height * width).view(kept.dtype)


def _largest(units: Array) -> Array:
    kind = number_type(units.dtype)
    return magnitude_values(magnitudes(contiguous_bits(units), kind).max(axis=1, initial=0), kind)


def _percentiles(units: Array, share: Fraction) -> Array:
    """The order statistic of each unit's nonzero magnitudes; 0 where there are none."""
    kind = number_type(units.dtype)
    ordered = np.sort(magnitudes(contiguous_bits(units), kind), axis=1)
    counts = np.count_nonzero(ordered, axis=1)
    known, which = np.unique(counts, return_inverse=True)
    ranks = np.array([_rank(int(n), share) for n in known])[which.reshape(-1)]
    # Zeros come first in the order.
    place = units.shape[1] - counts + ranks - 1
    place[counts == 0] = 0
    return magnitude_values(np.take_along_axis(ordered, place[:, None], axis=1)[:, 0], kind)


def _rank(count: int, share: Fraction) -> int:
    return max(1, math.ceil(count * share))


def _select(over: Bands, source: np.dtype[Any], share: Fraction) -> Array:
    """The order statistic [1] of a tensor's nonzero magnitudes: digit by digit, by counting."""
    kind = number_type(source)
    width = 8 * source.itemsize
    digit = min(_DIGIT, width)
    found, rank = 0, None
    for shift in range(width - digit, -1, -digit):

        def count(kept: Array, shift: int = shift, found: int = found) -> Array:
            values = magnitudes(contiguous_bits(kept), kind).reshape(-1)
            values = values[values != 0]
            if shift + digit < width:
                values = values[values >> (shift + digit) == found]
            places = (values >> shift) & ((1 << digit) - 1)
            return np.bincount(places.astype(np.intp), minlength=1 << digit)

        counts = sum(over(count), np.zeros(1 << digit, np.int64))
        if rank is None:
            total = int(counts.sum())
            if total == 0:
                return magnitude_values(np.zeros(1, kind.unsigned), kind)
            rank = _rank(total, share)
        upto = np.cumsum(counts)
        place = int(np.searchsorted(upto, rank))
        rank -= int(upto[place] - counts[place])
        found = found << digit | place
    return magnitude_values(np.array([found], kind.unsigned), kind)


def _least_error(
    largest: Array, spec: ScaleSpec, optype: OperandType, score: _Score, *, at_once: int = 1
) -> Array:
    """The scales [U] of ``spec.dtype`` of units with these largest values.

    ``at_once`` candidates are scored before it is seen whether others could be better.
    """
    base = scale_values(make_scales(largest, optype.max_finite, spec)).astype(np.float64)
    factors = POWERS if spec.kind == "mx" else CANDIDATES
    best = _to_f32(base * factors[0])
    error = np.full(len(base), np.inf)
    # In descending order, and only a smaller error replaces: ties go to the larger.
    for part in row_slices(len(factors), at_once):
        scales = [_to_f32(base * factor) for factor in factors[part]]
        for scale, (found, _, _) in zip(scales, score(scales, False), strict=True):
            _take_better((best, error), (scale, found))
        # What clipping costs the largest value alone bounds the errors of all smaller scales.
        clipped = np.maximum(largest - optype.max_finite * scales[-1].astype(np.float64), 0)
        with np.errstate(over="ignore"):
            if (np.square(clipped) >= error).all():
                break
    if spec.kind != "mx":
        ((_, wc, cc),) = score([best], True)
        for _ in range(REFINEMENTS):
            usable = np.isfinite(wc) & np.isfinite(cc) & (cc > 0)
            scale = _to_f32(np.divide(wc, cc, out=best.astype(np.float64), where=usable))
            (step,) = score([scale], True)
            _take_better((best, error, wc, cc), (scale, *step))
    best[largest == 0] = 1
    return powers(np.frexp(best)[1] - 1) if spec.kind == "mx" else best


def _take_better(held: tuple[Array, ...], found: tuple[Array, ...]) -> None:
    """Replace what is ``held`` (scales, errors, ...) where the error that was found is smaller."""
    better = found[1] < held[1]
    for into, new in zip(held, found, strict=True):
        into[better] = new[better]


def _to_f32(scale: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(scale, _F32.tiny, _F32.max).astype(np.float32)


def _score_units(
    units: Array, scale: Array, optype: OperandType, overflow: Overflow, products: bool
) -> tuple[Array, Array, Array]:
    """(sum of (w - c s)^2, sum of w c, sum of c c), float64 [U], of ``units`` [U, n].

    ``scale`` float32 broadcasts to it. The error is infinite or NaN where a code is; the other two
    are 0 unless ``products`` are asked for.
    """
    codes = convert(quotient(units, scale), optype, overflow)
    exact = widen(units).astype(np.float64)
    wide = widen(codes).astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        difference = wide * scale.astype(np.float64)
        difference -= exact
        np.square(difference, out=difference)
        error = _sum(difference)
        if not products:
            return error, np.zeros_like(error), np.zeros_like(error)
        exact *= wide
        np.square(wide, out=wide)
        return error, _sum(exact), _sum(wide)


def _exact_sum(values: Array) -> float:
    try:
        return math.fsum(values.tolist())
    except OverflowError:
        return math.inf


def _sum(terms: Array) -> Array:
    """Sums over the last axis, by halves; overwrites ``terms``."""
    n = terms.shape[-1]
    if n == 0:
        return np.zeros(terms.shape[:-1])
    while n > 1:
        half = -(-n // 2)
        terms[..., : n - half] += terms[..., half:n]
        n = half
    return terms[..., 0].copy()  # a view would keep all the terms
