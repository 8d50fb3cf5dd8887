"""What verification found, as frozen values. Nothing here prints or measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sp24cli.ops.report import document

#: How the names of checks begin that round activations on the way (`smoothed`), which most of their
#: error comes from.
ORIGINAL = "original product"


@dataclass(frozen=True)
class Check:
    """One comparison of a whole M x N matrix, element by element.

    ``max_error`` and ``bound`` belong to the same element: the one whose error is largest in
    terms of its own bound, so ``max_error <= bound`` for every check that passes.
    ``rel_frobenius`` is the norm of the whole error over that of the whole reference.
    ``first_bad`` is the first (row, column) out of bound in row order. ``summation`` is how the
    product was summed (`kernels.manifest.SUMMATIONS`), where its output shows that: in float32;
    empty elsewhere.
    """

    name: str
    passed: bool
    max_error: float
    bound: float
    rel_frobenius: float
    first_bad: tuple[int, int] | None = None
    summation: str = ""


@dataclass(frozen=True)
class NumericsResult:
    """The products of one packed matrix, run on ``device`` ("cpu" or the GPU's name)."""

    device: str
    checks: tuple[Check, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def error(self) -> float:
        """The largest relative error of a whole product."""
        products = (c for c in self.checks if not c.name.startswith(ORIGINAL))
        return max((c.rel_frobenius for c in products), default=0.0)

    @property
    def errors(self) -> dict[str, float]:
        """The largest relative error of each summation, of float32 outputs."""
        found: dict[str, float] = {}
        for check in self.checks:
            if check.summation:
                found[check.summation] = max(check.rel_frobenius, found.get(check.summation, 0.0))
        return found


@dataclass(frozen=True)
class Agreement:
    """Whether mask, codes and scales recomputed from the dense original are the stored bits.

    ``fault`` says in words what differs first, and where; ``note`` how it was compared.
    """

    fault: str | None
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.fault is None


@dataclass(frozen=True)
class TensorVerdict:
    """All that was found out about one packed tensor; None marks a part that was not run."""

    name: str
    shape: tuple[int, int]
    type: str
    scale: str
    layout: str
    structure: str | None
    agreement: Agreement | None
    numerics: NumericsResult | None

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The first fault in words, without the tensor's name."""
        if self.structure is not None:
            return f"structure: {self.structure}"
        if self.agreement is not None and self.agreement.fault is not None:
            return f"agreement: {self.agreement.fault}"
        if self.numerics is not None:
            for check in self.numerics.checks:
                if not check.passed:
                    where = "" if check.first_bad is None else _place(check.first_bad)
                    return (
                        f"numerics on {self.numerics.device}: {check.name}{where}: "
                        f"error {check.max_error:.3g} where {check.bound:.3g} is allowed"
                    )
        return None


@dataclass(frozen=True)
class VerifyReport:
    """The verdict on a packed file.

    ``passed_through`` counts the tensors that were compared byte for byte with the original
    (None when there was none to compare with); ``faults`` are faults of the file as a whole.
    """

    path: str
    against: str | None
    device: str
    device_note: str
    tensors: tuple[TensorVerdict, ...]
    passed_through: int | None
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The first fault in words, with the tensor's name; None when all is right."""
        for verdict in self.tensors:
            if verdict.failure is not None:
                return f"{verdict.name}: {verdict.failure}"
        return self.faults[0] if self.faults else None

    def to_json(self) -> dict[str, Any]:
        result = document(self)
        result["passed"] = self.passed
        result["failure"] = self.failure
        for item, verdict in zip(result["tensors"], self.tensors, strict=True):
            item["passed"] = verdict.passed
        return result


def _place(where: tuple[int, int]) -> str:
    return f" at row {where[0]}, column {where[1]}"
