"""What moved between two results, case by case and figure by figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from sp24cli.bench.report import align, significant
from sp24cli.bench.result import BenchResult, CaseResult, Figure, Row, mean_and_least

#: A move below this is none, however quiet the two runs were: as much as a quiet run is off.
LEAST_MOVE = 0.005

_FIGURES = ("burst", "sustained")

#: (what is compared, family, the default algorithm or any). A peer's fastest algorithm may be
#: another one in either run.
_PRODUCTS = (
    ("sp24", "sp24", None),
    ("cuSPARSELt best", "cusparselt", None),
    ("cuSPARSELt default", "cusparselt", True),
    ("cuBLASLt dense", "cublaslt", None),
)


@dataclass(frozen=True)
class Move:
    """One figure of one product in both results.

    ``gain`` is the old time over the new one, less 1: positive is faster. ``noise`` is what the
    two runs leave open: of each the larger of its median deviation and its rounds' distance,
    added up, and `LEAST_MOVE` at least.
    """

    old_us: float
    new_us: float
    noise: float

    @property
    def gain(self) -> float:
        return self.old_us / self.new_us - 1.0

    @property
    def verdict(self) -> str:
        """ "faster" or "slower" where the move is more than the noise, else "same"."""
        if abs(self.gain) <= self.noise:
            return "same"
        return "faster" if self.gain > 0 else "slower"


@dataclass(frozen=True)
class MovedProduct:
    """One product of a case; ``changed`` says if another kernel or algorithm did the work."""

    label: str
    burst: Move
    sustained: Move
    changed: str


@dataclass(frozen=True)
class MovedCase:
    name: str
    products: tuple[MovedProduct, ...]


@dataclass(frozen=True)
class Comparison:
    """Two results of the bench. ``warnings`` say what else than the kernels may have moved the
    figures, ``cautions`` what the comparison cannot know; ``gone`` and ``added`` are cases that
    only the old or the new result has."""

    old_date: str
    warnings: tuple[str, ...]
    cases: tuple[MovedCase, ...]
    gone: tuple[str, ...]
    added: tuple[str, ...]
    cautions: tuple[str, ...] = ()

    def gain(self, label: str, figure: str) -> float | None:
        """The gains of one product over all cases as a geometric mean; None where it has none."""
        found = mean_and_least(
            1.0 + getattr(product, figure).gain
            for case in self.cases
            for product in case.products
            if product.label == label
        )
        return None if found is None else found[0] - 1.0


def compare(old: BenchResult, new: BenchResult) -> Comparison:
    """What moved from ``old`` to ``new``. Cases are matched by shape, types, order, scales and
    sums, and in their order where several share these."""
    waiting: dict[tuple[Any, ...], list[CaseResult]] = {}
    for case in old.cases:
        waiting.setdefault(_key(case), []).append(case)
    moved: list[MovedCase] = []
    added: list[str] = []
    warnings = list(_conditions(old, new))
    cautions = list(_cautions(old, new))
    for case in new.cases:
        before = waiting.get(_key(case), [])
        match = next((one for one in before if _summed_alike(one, case)), None)
        if match is None:
            added.append(case.name)
            continue
        before.remove(match)
        if (match.weight, match.activations) != (case.weight, case.activations):
            warnings.append(f"{case.name}: other data")
        moved.append(MovedCase(case.name, tuple(_products(match, case))))
    gone = tuple(case.name for cases in waiting.values() for case in cases)
    return Comparison(
        old.environment.date, tuple(warnings), tuple(moved), gone, tuple(added), tuple(cautions)
    )


def _key(case: CaseResult) -> tuple[Any, ...]:
    return case.shape, case.type, case.out, case.order


def _summed_alike(old: CaseResult, new: CaseResult) -> bool:
    """Whether scales and sums are the same, as far as both results say them."""
    pairs = (old.scale, new.scale), (old.accumulate, new.accumulate)
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def _cautions(old: BenchResult, new: BenchResult) -> Iterator[str]:
    """What of two runs keeps a verdict from being sure."""
    runs = (("old", old), ("new", new))
    single = [which for which, run in runs if run.settings.rounds == 1]
    if single:
        yield (
            f"one round in the {' and the '.join(single)} run: how far rounds lie apart is not "
            "known, and a small move may be that"
        )
    silent = [
        which
        for which, run in runs
        if any(case.scale is None or case.accumulate is None for case in run.cases)
    ]
    if silent:
        yield (
            f"scales and sums are not said by the {' and the '.join(silent)} run: cases may "
            "differ in them"
        )


def _products(old: CaseResult, new: CaseResult) -> Iterator[MovedProduct]:
    for label, family, default in _PRODUCTS:
        moves, rows = [], []
        for figure in _FIGURES:
            rows = [case.best(family, figure, default=default) for case in (old, new)]
            before, after = rows
            if before is None or after is None:
                break
            moves.append(_move(getattr(before, figure), getattr(after, figure)))
        else:
            yield MovedProduct(label, moves[0], moves[1], _changed(*rows))


def _move(old: Figure, new: Figure) -> Move:
    noise = max(old.noise, old.drift) + max(new.noise, new.drift)
    return Move(old.us, new.us, max(noise, LEAST_MOVE))


def _changed(old: Row | None, new: Row | None) -> str:
    assert old is not None and new is not None
    before, after = ((f"{r.role.detail} {r.role.order}") for r in (old, new))
    if before == after:
        return ""
    if old.role.order == new.role.order:
        return f"{old.role.detail} -> {new.role.detail}"
    return f"{before} -> {after}"


def _conditions(old: BenchResult, new: BenchResult) -> Iterator[str]:
    """What differs between two runs beside the figures."""
    a, b = old.environment, new.environment
    named = {
        "GPU": (a.gpu, b.gpu),
        "SMs": (a.sm_count, b.sm_count),
        "highest clock": (f"{a.clock_mhz_max:.0f} MHz", f"{b.clock_mhz_max:.0f} MHz"),
        "driver": (a.driver, b.driver),
        "kernels": (a.fatbin_sha256[:12], b.fatbin_sha256[:12]),
    }
    if a.uuid and b.uuid:
        named["card"] = (a.uuid[:8], b.uuid[:8])
    for library in sorted({*a.peers, *b.peers}):
        named[library] = (a.peers.get(library, "absent"), b.peers.get(library, "absent"))
    for field in fields(old.settings):
        pair = getattr(old.settings, field.name), getattr(new.settings, field.name)
        named[field.name.replace("_", " ")] = pair
    for name, (before, after) in named.items():
        if before != after:
            yield f"{name}: {before} -> {after}"
    limits = [
        {row.sustained.limit_w for case in result.cases for row in case.rows}
        for result in (old, new)
    ]
    if all(limits) and limits[0] != limits[1]:
        before, after = (", ".join(_watts(w) for w in sorted(x, key=str)) for x in limits)
        yield f"power limit: {before} -> {after}"


def _watts(limit: float | None) -> str:
    return "unknown" if limit is None else f"{limit:.0f} W"


HEAD = ("", "burst us", "speed", "noise", "", "sust. us", "speed", "noise", "", "")


def lines(comparison: Comparison) -> list[str]:
    """The comparison as text: warnings, a table of all cases, the summary."""
    text = [f"against the run of {comparison.old_date}; speed is the old time over the new one"]
    text += [f"warning: differs in {warning}" for warning in comparison.warnings]
    text += [f"warning: {caution}" for caution in comparison.cautions]
    for case in comparison.cases:
        text += ["", case.name]
        text += align([HEAD, *(cells(product) for product in case.products)])
    text.append("")
    text += [f"only in the old run: {name}" for name in comparison.gone]
    text += [f"only in this run: {name}" for name in comparison.added]
    return text + summary(comparison)


def cells(product: MovedProduct) -> tuple[str, ...]:
    """One product as a row under `HEAD`."""

    def figure(move: Move) -> tuple[str, str, str, str]:
        return (
            f"{significant(move.old_us)} -> {significant(move.new_us)}",
            f"{move.gain:+.1%}",
            f"{move.noise:.1%}",
            move.verdict,
        )

    return (product.label, *figure(product.burst), *figure(product.sustained), product.changed)


def summary(comparison: Comparison) -> list[str]:
    """How many figures of ours moved; how far each peer did, which no kernel of ours moves, and
    what is left of our gain beside it."""
    ours = [p for case in comparison.cases for p in case.products if p.label == "sp24"]
    if not ours:
        return ["nothing to compare: the two runs share no case"]
    text = []
    for figure in _FIGURES:
        verdicts = [getattr(product, figure).verdict for product in ours]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("faster", "slower", "same"))
        gain = comparison.gain("sp24", figure)
        text.append(f"sp24 {figure}: {gain:+.1%} in the geometric mean; {counts}")
    for label, _, _ in _PRODUCTS[1:]:
        gains = [(comparison.gain("sp24", f), comparison.gain(label, f)) for f in _FIGURES]
        pairs = [(mine, peers) for mine, peers in gains if mine is not None and peers is not None]
        if pairs:
            moved = " / ".join(f"{peers:+.1%}" for _, peers in pairs)
            left = " / ".join(f"{(1 + mine) / (1 + peers) - 1:+.1%}" for mine, peers in pairs)
            text.append(f"{label} moved {moved} (burst / sustained); beside it sp24 moved {left}")
    return text
