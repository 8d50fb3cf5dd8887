"""The columns of a report: which there are, what stands in them, and what it means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sp24cli.reporting.layers import (
    HIGH_ERROR_RATIO,
    HIGH_UNDERFLOW,
    LOW_KEPT,
    LOW_SNR_DB,
    LOW_SNR_DB_E5M2,
    Layer,
    Summary,
)


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Layer], str]
    meaning: str


def columns(summary: Summary) -> list[Column]:
    """Those that say something of at least one layer, but for the name and the histogram."""
    layers = summary.layers
    return [column for has, column in _ALL if any(has(layer) for layer in layers)]


def percent(share: float | None, digits: int = 2) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def decibel(value: float | None) -> str:
    if value is None:
        return ""
    return "exact" if math.isinf(value) and value > 0 else f"{value:.1f}"


def visible(text: str) -> str:
    """``text`` with what cannot be seen as escapes: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _scales(layer: Layer) -> str:
    if layer.scale_min is None or layer.scale_max is None:
        return ""
    if layer.scale_min == layer.scale_max:
        return f"{layer.scale_min:.3g}"
    return f"{layer.scale_min:.3g} to {layer.scale_max:.3g}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}".replace(",", " ")


_ALL: list[tuple[Callable[[Layer], bool], Column]] = [
    (
        lambda layer: True,
        Column(
            "change",
            lambda layer: percent(layer.error, 1),
            "How far the weight is from the original, ‖new − old‖ / ‖old‖, by all that was done "
            "here. The layers are listed by it (by what the outputs lose where that is known), "
            "those in doubt first. 2:4 pruning of normally distributed weights alone gives 37 %, "
            "E4M3 alone 2.6 %. A layer is in doubt that changed more than "
            f"{HIGH_ERROR_RATIO:g} times as much as the median layer.",
        ),
    ),
    (
        lambda layer: layer.kept_energy is not None,
        Column(
            "kept energy",
            lambda layer: percent(layer.kept_energy),
            "The share of the sum of squares that pruning left. Normally distributed weights keep "
            f"86.5 %, evenly spread ones {LOW_KEPT:.0%}, equal ones 50 %. A layer in which a few "
            f"values carry all keeps more. Below {LOW_KEPT:.0%} is doubtful. Empty where the "
            "weight was sparse already: what that cost is not known here.",
        ),
    ),
    (
        lambda layer: layer.output_error is not None,
        Column(
            "output lost",
            lambda layer: percent(layer.output_error),
            "The share of the energy of the layer's outputs that is lost on the calibration data: "
            "nearer to the model's behaviour than the weights alone. Sparsegpt moves the kept "
            "values to lessen it, which the change does not show.",
        ),
    ),
    (
        lambda layer: layer.snr_db is not None,
        Column(
            "SNR dB",
            lambda layer: decibel(layer.snr_db),
            "Signal to noise of the kept values after rounding, without the loss by pruning. E4M3 "
            f"reaches 31 to 32 dB when the scale fits. Below {LOW_SNR_DB:.0f} dB is doubtful "
            f"({LOW_SNR_DB_E5M2:.0f} dB in E5M2, which has a bit less): "
            "finer scales (vector, block) may help. Every 6 dB halve the error. One large "
            "outlier makes it look better than the rest is: see underflow and the histogram.",
        ),
    ),
    (
        lambda layer: layer.clipped is not None,
        Column(
            "clipped",
            lambda layer: _count(layer.clipped),
            "Values beyond the largest that the type can hold. With scales taken from the weights "
            "there are none; any is doubtful.",
        ),
    ),
    (
        lambda layer: layer.underflow is not None,
        Column(
            "underflow",
            lambda layer: percent(layer.underflow, 3),
            "The share of the kept values that became zero, being too small for their scale. "
            f"More than {HIGH_UNDERFLOW:.0%} is doubtful: an outlier takes the range, and "
            "finer scales help.",
        ),
    ),
    (
        lambda layer: layer.scale_min is not None,
        Column(
            "scales",
            _scales,
            "The least and the largest scale of the layer (value = code × scale). A wide range is "
            "what scales by row or block are for; with one scale a tensor there is one number.",
        ),
    ),
]
