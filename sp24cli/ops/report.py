"""What all reports share: how they become JSON, and the tensors that were left alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import common_exponent, in_unit

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Skipped:
    """A tensor that is copied as it is, and why."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    reason: str


def scale_text(spec: ScaleSpec) -> str:
    """A kind of scale as tables and reports name it."""
    if spec.block is None or spec.kind == "mx":
        return spec.kind
    return f"{spec.kind} {spec.block[0]}x{spec.block[1]}"


def parse_scale(text: str) -> ScaleSpec:
    """The kind of scale that `scale_text` has named so."""
    kind, _, block = text.partition(" ")
    return ScaleSpec.parse(kind, block or None)


def share(part: float, whole: float) -> float:
    """``part / whole``; of nothing, all of it."""
    return part / whole if whole else 1.0


def add_up(sums: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Sums of squares, each in units of 4 to a power of its own, together."""
    unit = common_exponent(sums)
    return math.fsum(in_unit(value, exponent, unit) for value, exponent in sums), unit


def energy_share(part: tuple[float, int], whole: tuple[float, int]) -> float:
    """`share` of such sums."""
    unit = common_exponent([part, whole])
    return share(in_unit(*part, unit), in_unit(*whole, unit))


def document(report: DataclassInstance) -> dict[str, Any]:
    """``report`` as plain JSON values; numbers that JSON lacks (infinite, NaN) become null."""
    result = _plain(asdict(report))
    assert isinstance(result, dict)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
