"""The rows of a report, the worst layers first, and what there is to doubt in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sp24cli.ops.histogram import LEAST
from sp24cli.ops.prune import PruneReport
from sp24cli.ops.quantize import QuantizedTensor, QuantizeReport
from sp24cli.ops.report import Skipped

#: Below the 80 % that 2:4 leaves of evenly spread magnitudes: there is no small half to drop.
LOW_KEPT = 0.80
#: Normally distributed weights come to 31 or 32 dB in E4M3; less means a scale that misfits.
LOW_SNR_DB = 28.0
#: E5M2 has a bit less, 6 dB.
LOW_SNR_DB_E5M2 = LOW_SNR_DB - 6
#: Share of the kept values that became zero.
HIGH_UNDERFLOW = 0.01
#: Share of the kept values below the least normal number of E4M3, 2^-6, where bits are missing.
HIGH_SUBNORMAL = 0.25
_LEAST_NORMAL = -6
#: A layer's error against the median of all.
HIGH_ERROR_RATIO = 1.5


@dataclass(frozen=True)
class Layer:
    """One weight.

    ``error`` is the size of the change against the original, ||new - old|| / ||old||, of what
    was done here: pruning, rounding, or both (not what sparsegpt adds to the kept values; of
    smoothed columns, rounding as it is before they are divided again). It is infinite where a
    code is. Shares are of 1; what was not measured or does not exist is None. ``output_error`` is
    the share of the outputs' energy that a calibrated method expects to be lost. ``doubts`` says in
    words what stands out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    kept_energy: float | None
    output_error: float | None
    snr_db: float | None
    kept: int | None
    clipped: int | None
    underflowed: int | None
    scale_min: float | None
    scale_max: float | None
    histogram: tuple[int, ...]
    doubts: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """What layers are ordered by: the change of the outputs where it is known."""
        loss = self.error if self.output_error is None else _root(self.output_error)
        return math.inf if math.isnan(loss) else loss

    @property
    def underflow(self) -> float | None:
        """The share of the kept values that became zero."""
        if self.underflowed is None or self.kept is None:
            return None
        return self.underflowed / self.kept if self.kept else 0.0

    @property
    def subnormal(self) -> float | None:
        """The share of the kept values that are subnormal in E4M3, or zero."""
        if not self.histogram or not self.kept or self.underflowed is None:
            return None
        return (sum(self.histogram[: _LEAST_NORMAL - LEAST]) + self.underflowed) / self.kept


@dataclass(frozen=True)
class Summary:
    """A whole run. ``facts`` are its options, by the words of a table."""

    operation: str
    source: str
    output: str | None
    facts: tuple[tuple[str, str], ...]
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]

    @property
    def doubtful(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.doubts)

    @property
    def verdict(self) -> str:
        """One sentence on what the numbers say, and they alone."""
        if not self.layers:
            return "No weight was changed."
        many = len(self.layers)
        errors = [layer.error for layer in self.layers]
        largest = f"{100 * max(errors):.1f} %" if all(map(math.isfinite, errors)) else "not finite"
        worst = f"the largest change of a weight is {largest}"
        if not self.doubtful:
            return f"Nothing stands out in {_count(many, 'layer')}; {worst}."
        return f"{len(self.doubtful)} of {_count(many, 'layer')} stand out; {worst}."

    def to_json(self) -> list[dict[str, Any]]:
        """The layers as they are listed, for machines; see `Layer`."""
        return [_finite(asdict(layer)) for layer in self.layers]


def summarize(report: PruneReport | QuantizeReport) -> Summary:
    """The summary of what `prune_file` or `quantize_file` says."""
    if isinstance(report, PruneReport):
        layers = [
            Layer(
                name=t.name,
                dtype=t.dtype,
                shape=t.shape,
                error=_root(1 - t.kept_energy),
                kept_energy=t.kept_energy,
                output_error=t.weighted_error,
                snr_db=None,
                kept=None,
                clipped=None,
                underflowed=None,
                scale_min=None,
                scale_max=None,
                histogram=(),
            )
            for t in report.tensors
        ]
        operation = "prune"
        facts = [("pattern", report.pattern), ("method", report.method)]
    else:
        layers = [_quantized(t) for t in report.tensors]
        operation = "quantize"
        facts = [
            ("type", report.type),
            ("scale", report.scale),
            *(() if report.scale == "none" else (("calibration", report.calibration),)),
            *(() if report.smooth is None else (("smoothed, alpha", str(report.smooth)),)),
            ("pruned", report.pruned),
            ("overflow", report.overflow),
            ("layout", report.layout),
        ]
    return Summary(
        operation=operation,
        source=report.source,
        output=report.output,
        facts=tuple(facts),
        layers=tuple(_judged(layers, ("type", "e5m2") in facts)),
        skipped=report.skipped,
    )


def _quantized(t: QuantizedTensor) -> Layer:
    lost = 0.0 if math.isinf(t.snr_db) and t.snr_db > 0 else 10 ** (-t.snr_db / 10)
    kept = 1.0 if t.kept_energy is None else t.kept_energy
    return Layer(
        name=t.name,
        dtype=t.source_dtype,
        shape=t.shape,
        error=_root(1 - kept + kept * lost),
        kept_energy=t.kept_energy,
        output_error=None,
        snr_db=t.snr_db,
        kept=t.kept,
        clipped=t.clipped,
        underflowed=t.underflowed,
        scale_min=t.scale_min,
        scale_max=t.scale_max,
        histogram=t.histogram,
    )


def _judged(layers: Sequence[Layer], e5m2: bool) -> list[Layer]:
    """``layers`` with their doubts, those in doubt first, then by what they lose."""
    low_snr = LOW_SNR_DB_E5M2 if e5m2 else LOW_SNR_DB
    finite = [layer.error for layer in layers if math.isfinite(layer.error)]
    usual = median(finite) if finite else 0.0
    judged = [
        Layer(**{**vars(layer), "doubts": _doubts(layer, usual, low_snr)}) for layer in layers
    ]
    return sorted(judged, key=lambda layer: (not layer.doubts, -layer.loss, layer.name))


def _doubts(layer: Layer, usual: float, low_snr: float) -> tuple[str, ...]:
    doubts = []
    if layer.kept_energy is not None and layer.kept_energy < LOW_KEPT:
        doubts.append(f"keeps less than {LOW_KEPT:.0%} of its energy")
    if layer.snr_db is not None and layer.snr_db < low_snr:
        doubts.append(f"SNR below {low_snr:.0f} dB")
    if layer.clipped:
        doubts.append(f"{_count(layer.clipped, 'value')} clipped")
    if layer.underflow is not None and layer.underflow > HIGH_UNDERFLOW:
        doubts.append(f"{100 * layer.underflow:.1f} % of the kept values became zero")
    if layer.subnormal is not None and layer.subnormal > HIGH_SUBNORMAL:
        doubts.append(f"{100 * layer.subnormal:.0f} % of the kept values have lost bits")
    if not math.isfinite(layer.error):
        doubts.append("its change is not finite")
    elif usual and layer.error > HIGH_ERROR_RATIO * usual:
        doubts.append(f"changed {layer.error / usual:.1f} times as much as the median layer")
    return tuple(doubts)


def _root(share: float) -> float:
    """The root of a share of energy, which rounding can take below zero; NaN stays."""
    return math.sqrt(max(share, 0.0))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value
