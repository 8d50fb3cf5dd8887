"""Comparing a matrix with its reference element by element, in row bands."""

from __future__ import annotations

import math

import numpy as np

from sp24cli.bits import Array
from sp24cli.verify.result import Check


class Comparison:
    """Collects the bands of one comparison; `check` gives the verdict on all of them.

    An element is right when its error is within its bound, or when result and reference are
    the same infinity or both NaN.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._worst = (0.0, 0.0, 0.0)  # error in terms of the bound, error, bound
        self._first_bad: tuple[int, int] | None = None
        self._error_energy: list[float] = []
        self._energy: list[float] = []

    def add(
        self,
        got: Array,
        want: Array,
        bound: Array | float,
        *,
        first_row: int = 0,
        first_column: int = 0,
    ) -> None:
        """Compare the next rows, or some columns of these, [m, N] each; ``first_row`` and
        ``first_column`` are where they stand in the whole."""
        if not want.size:
            return
        if np.array_equal(got, want):
            self._energy.append(_energy(want))
            return
        want = want.astype(np.float64, copy=False)
        bound = np.broadcast_to(np.asarray(bound, np.float64), want.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(got.astype(np.float64) - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        error[same] = 0
        # What is left of NaN here has only one side that is NaN or infinite.
        error[np.isnan(error)] = np.inf
        allowed = same | (error <= bound)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(allowed, error / bound, np.inf)
        # 0/0 and inf/inf: no error, and a bound that allows any.
        ratio[np.isnan(ratio)] = 0

        bad = ~allowed
        place = int(bad.argmax() if bad.any() else ratio.argmax())
        row, column = divmod(place, want.shape[1])
        worst = (float(ratio.flat[place]), float(error.flat[place]), float(bound.flat[place]))
        where = (first_row + row, first_column + column) if bad.any() else None
        self._see(worst, where)
        usable = np.isfinite(error) & np.isfinite(want)
        self._error_energy.append(_energy(error[usable]))
        self._energy.append(_energy(want[usable]))

    def merge(self, later: Comparison) -> None:
        """Take over what was compared elsewhere."""
        self._see(later._worst, later._first_bad)
        self._error_energy += later._error_energy
        self._energy += later._energy

    def _see(self, worst: tuple[float, float, float], bad: tuple[int, int] | None) -> None:
        if bad is not None and (self._first_bad is None or bad < self._first_bad):
            self._first_bad = bad
            self._worst = worst
        elif self._first_bad is None and worst[0] > self._worst[0]:
            self._worst = worst

    def check(self) -> Check:
        energy, error_energy = math.fsum(self._energy), math.fsum(self._error_energy)
        if error_energy == 0:
            relative = 0.0
        else:
            relative = math.sqrt(error_energy / energy) if energy else math.inf
        _, error, bound = self._worst
        return Check(self._name, self._first_bad is None, error, bound, relative, self._first_bad)


def _energy(values: Array) -> float:
    flat = values.reshape(-1)
    with np.errstate(over="ignore", under="ignore"):
        return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
