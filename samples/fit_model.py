"""Fits the constants of the time model (sp24cli/gpu/model.py) to measured times of kernels.

    sp24 bench --tune --suite fit --type e4m3 --json e4m3.json
    sp24 bench --tune --suite fit-few --json few.json
    sp24 bench --tune --suite fit --type f16 --json f16.json
    python samples/fit_model.py e4m3.json few.json f16.json --test select30.json

Prints the constants as they stand in `Constants`, and how far the kernels that would be chosen are
from the fastest: by the model, and by the model corrected by the other nine tenths of the problems
(cross-validation); of the problems of ``--test``, which are never fitted to, too. ``--merge GRID
TABLE`` writes what was measured, and that of another file, as one table such as the package's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.gpu.correction import Correction
from sp24cli.gpu.model import H200, Constants, Points, times_us
from sp24cli.kernels.choices import Measured, Table, from_text, to_text
from sp24cli.kernels.manifest import load

Array = npt.NDArray[Any]

#: A kernel that was slower than the fastest by this share counts half of it; residuals beyond
#: `_OUTLIER` count by their size, not its square; and how firmly constants stay where they began.
_SLOWER, _OUTLIER, _PRIOR = 0.25, 0.1, 0.03

#: See `merge`.
_KEPT = 3.0

#: Folds of the cross-validation, and the seeds that deal the problems out.
_FOLDS, _SEEDS = 10, range(4)


def read(paths: Sequence[Path]) -> list[Measured]:
    """The measured problems of some files that have more than one kernel that there still is."""
    known = {entry.name for entry in load().entries}
    found = []
    for path in paths:
        for table in from_text(path.read_text(encoding="utf-8"), str(path)):
            for row in table.measured:
                times = {name: us for name, us in row.times.items() if name in known}
                if len(times) > 1:
                    found.append(Measured(row.problem, times))
    return found


def points(rows: Sequence[Measured], sm_count: int) -> tuple[Points, Array, Array]:
    """All kernels of all problems: where, microseconds, and these by the fastest."""
    by_name = {entry.name: entry for entry in load().entries}
    pairs = [(by_name[name], row.problem) for row in rows for name in row.times]
    us = np.array([us for row in rows for us in row.times.values()])
    behind = np.array([us / min(row.times.values()) for row in rows for us in row.times.values()])
    return Points.of(pairs, sm_count), us, behind


def least_squares(residuals: Callable[[Array], Array], x: Array) -> Array:
    """Levenberg-Marquardt with a Jacobian by differences."""
    damping, step = 1e-2, 1e-4
    r = residuals(x)
    for _ in range(200):
        jacobian = np.stack(
            [(residuals(x + step * unit) - r) / step for unit in np.eye(len(x))], axis=1
        )
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ r
        for _ in range(12):
            scale = np.diag(normal.diagonal() + 1e-6)
            move = np.clip(-np.linalg.solve(normal + damping * scale, gradient), -0.5, 0.5)
            trial = residuals(x + move)
            gained = r @ r - trial @ trial
            if gained > 0:
                break
            damping *= 4
        else:
            return x
        done = gained < 1e-7 * (r @ r)
        x, r, damping = x + move, trial, max(damping / 5, 1e-7)
        if done:
            break
    return x


def fit(rows: Sequence[Measured], sm_count: int) -> Constants:
    """The constants that put the times of fast kernels right, relative, near those of an H200."""
    at, us, behind = points(rows, sm_count)
    weight = 1 / np.sqrt(1 + ((behind - 1) / _SLOWER) ** 2)
    began = np.log(astuple(H200))

    def residuals(x: Array) -> Array:
        off = np.log(times_us(at, Constants(*np.exp(x))) / us)
        bent = _OUTLIER * np.sqrt(2 * (np.sqrt(1 + (off / _OUTLIER) ** 2) - 1))
        return np.concatenate([weight * np.sign(off) * bent, _PRIOR * (x - began)])

    return Constants(*(float(value) for value in np.exp(least_squares(residuals, began))))


def losses(rows: Sequence[Measured], known: Sequence[Measured], sm_count: int) -> Array:
    """How much longer the kernel chosen by what is known takes than the fastest, by problem."""
    by_name = {entry.name: entry for entry in load().entries}
    correction = Correction(known, sm_count)
    found = []
    for row in rows:
        predicted = correction.times_us([by_name[name] for name in row.times], row.problem)
        chosen = list(row.times.values())[int(predicted.argmin())]
        found.append(chosen / min(row.times.values()) - 1)
    return np.array(found)


def cross_validated(rows: Sequence[Measured], sm_count: int, seed: int) -> Array:
    """The losses of every problem, chosen by the problems of the other folds."""
    fold = np.random.default_rng(seed).permutation(len(rows)) % _FOLDS
    found = np.empty(len(rows))
    for held in range(_FOLDS):
        inside = [row for row, of in zip(rows, fold, strict=True) if of == held]
        known = [row for row, of in zip(rows, fold, strict=True) if of != held]
        found[fold == held] = losses(inside, known, sm_count)
    return found


def show(name: str, found: Array) -> None:
    mean = np.expm1(np.log1p(found).mean())
    print(
        f"{name}: {mean:.2%} from the fastest in the geometric mean over {len(found)} problems, "
        f"at worst {found.max():.1%}, {(found > 0.03).sum()} beyond 3 %"
    )


def merge(paths: Sequence[Path], to: Path) -> None:
    """Writes the tables of all files as one, without times that nobody asks for: of kernels that
    took `_KEPT` times as long as the fastest, or more. They must be of one GPU."""
    found = [table for path in paths for table in from_text(path.read_text("utf-8"), str(path))]
    if len({table.gpu for table in found}) != 1:
        raise SystemExit("measured on several GPUs, or none: a table is of one")
    rows = Table(found[0].gpu, found[-1].fatbins, ())
    for table in found:
        for row in table.measured:
            most = _KEPT * row.times[row.kernel]
            times = {name: us for name, us in row.times.items() if us < most}
            rows = rows.merged([Measured(row.problem, times)])
    to.write_text(to_text([rows]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the time model to measured kernels.")
    parser.add_argument("measured", nargs="+", type=Path, help="files of sp24 bench --tune --json")
    parser.add_argument("--test", type=Path, help="measured problems that are not to be fitted to")
    parser.add_argument(
        "--merge",
        nargs=2,
        type=Path,
        metavar=("GRID", "TABLE"),
        help="write TABLE of what GRID and the measured files hold",
    )
    parser.add_argument("--sm-count", type=int, default=132, help="SMs of the GPU (132)")
    arguments = parser.parse_args()
    rows, sm_count = read(arguments.measured), arguments.sm_count
    constants = fit(rows, sm_count)
    at, us, behind = points(rows, sm_count)
    near = behind < 1.3
    for name, values in (("these", H200), ("fitted", constants)):
        off = np.log(times_us(at, values) / us)[near]
        print(f"{name} constants: {np.sqrt((off**2).mean()):.1%} off, kernels near the fastest")
    for field in fields(Constants):
        print(f"    {field.name}: float = {getattr(constants, field.name):.4g}")
    print("by the constants in the package:")
    show("model alone", losses(rows, [], sm_count))
    for seed in _SEEDS:
        show(f"corrected, cross-validated, seed {seed}", cross_validated(rows, sm_count, seed))
    if arguments.test:
        test = read([arguments.test])
        show("test, model alone", losses(test, [], sm_count))
        show("test, corrected", losses(test, rows, sm_count))
    if arguments.merge:
        grid, table = arguments.merge
        merge([grid, *arguments.measured], table)


if __name__ == "__main__":
    main()
