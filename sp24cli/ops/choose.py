"""Which values of a weight are kept: the method, what it was calibrated by, the order of columns.

A weight may be 2:4 in another order of its columns than that of the file. Then the tensor
``X.weight_perm`` (I32 [K]) lies beside it: column j of the 2:4 matrix is column perm[j] of
``X.weight``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from sp24cli.bits import Array, contiguous_bits, magnitudes, number_type, widen
from sp24cli.checkpoint.header import TensorEntry, TensorSpec, label
from sp24cli.checkpoint.matrix import StoredMatrix
from sp24cli.checkpoint.names import DENSE_DTYPES
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.sharded import open_tensors
from sp24cli.closing import Closing
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.ops.plan import has_pattern, stored_order, tensor_label
from sp24cli.ops.stream import bands, prune_ranges
from sp24cli.pruning import permute
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, prune_magnitude
from sp24cli.pruning.sparsegpt import (
    BLOCK_SIZE,
    DAMPING,
    check_hessian,
    hessian_diagonal,
    inverse_factor,
    output_energy,
    piece_rows,
    prune_sparsegpt,
    scratch_bytes,
)
from sp24cli.pruning.triangle import Triangle
from sp24cli.pruning.wanda import check_norms, prune_wanda, weighted_energy
from sp24cli.rowblocks import row_slices
from sp24cli.sparsity import (
    common_exponent,
    energy_exponent,
    in_unit,
    kept_energy,
    prune_24,
    scale_down,
)

#: Workers' pieces in a band for sparsegpt, which reads the factor once and the Hessian twice a
#: band: with so many rows that takes little of the time.
SPARSEGPT_PIECES = 4

Method = Literal["magnitude", "wanda", "sparsegpt"]


@dataclass(frozen=True)
class Choice:
    """How the values to keep are chosen.

    ``calibration`` is a safetensors file (or a checkpoint) with a tensor under the name of each
    weight: for wanda the norms of its input channels [K], for sparsegpt their Hessian [K, K].
    ``permute`` searches for an order of the columns in which more is kept; 2:4 alone.
    """

    method: Method = "magnitude"
    pattern: Pattern = TWO_OF_FOUR
    calibration: Path | None = None
    damping: float = DAMPING
    block_size: int = BLOCK_SIZE
    permute: bool = False

    def __post_init__(self) -> None:
        if (self.calibration is None) != (self.method == "magnitude"):
            takes = "takes no" if self.method == "magnitude" else "needs a"
            raise ValueError(f"method {self.method} {takes} calibration")
        if self.permute and self.pattern != TWO_OF_FOUR:
            raise ValueError("only 2:4 is permuted")


@dataclass(frozen=True)
class Losses:
    """Sums over the rows of a band: squares kept and in all, and, by what the weights are
    multiplied with, of what the outputs lose and have; None where that is not known. All are in
    units of 4 to the power ``exponent``."""

    kept: float
    total: float
    lost: float | None = None
    output: float | None = None
    exponent: int = 0

    @staticmethod
    def merge(parts: Sequence[Losses]) -> Losses:
        unit = common_exponent((p.total, p.exponent) for p in parts)

        def add(values: list[float | None]) -> float | None:
            known = [
                in_unit(value, part.exponent, unit)
                for value, part in zip(values, parts, strict=True)
                if value is not None
            ]
            return math.fsum(known) if known else None

        return Losses(
            add([p.kept for p in parts]) or 0.0,
            add([p.total for p in parts]) or 0.0,
            add([p.lost for p in parts]),
            add([p.output for p in parts]),
            unit,
        )

    @property
    def weighted_error(self) -> float | None:
        """The share of the outputs' energy that is lost."""
        if self.lost is None or self.output is None:
            return None
        return self.lost / self.output if self.output else 0.0


@dataclass(frozen=True)
class TensorChoice:
    """How one tensor is pruned: ``order`` [K] of its columns if not that of the file, ``prune``
    and the ``energy`` of outputs for a band whose columns are in that order. ``method`` is
    "given" where the tensor had the pattern already, ``searched`` says that the order is new."""

    method: str
    order: Array | None
    searched: bool
    prune: Callable[[Array], Array]
    energy: Callable[[Array], float] | None
    #: How many times the memory of a plain band one takes; None where it is larger and comes
    #: alone, for `prune` and `energy` have workers of their own.
    share: int | None
    #: What wanda weighs the columns by, float64 [K] in that order.
    norms: Array | None = None

    def ranges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """The row ranges of the bands."""
        if self.share is not None:
            return prune_ranges(shape)
        rows, columns = shape
        parts = row_slices(rows, SPARSEGPT_PIECES * piece_rows(columns))
        return [(r.start, r.stop) for r in parts]

    def band(self, dense: Array) -> tuple[Array, Losses]:
        """Rows of the tensor pruned, in the file's order, and what that lost."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            arranged = dense if self.order is None else permute.apply(dense, self.order)
            pruned = self.prune(arranged)
            losses = self._losses(arranged, pruned)
            if self.order is not None:
                pruned = permute.apply(pruned, permute.inverse(self.order))
        return pruned, losses

    def _losses(self, dense: Array, pruned: Array) -> Losses:
        unit = energy_exponent(dense)
        if self.method != "sparsegpt":
            kept, total = kept_energy(dense, pruned, exponent=unit)
        else:
            # Its values are new: what counts is where they stand.
            kind = number_type(dense.dtype)
            places = magnitudes(contiguous_bits(pruned), kind) != 0
            held = np.multiply(contiguous_bits(dense), places).view(dense.dtype)
            kept, total = kept_energy(dense, held, exponent=unit)
        if self.energy is None:
            return Losses(kept, total, exponent=unit)
        difference = scale_down(widen(dense).astype(np.float64), unit)
        output = self.energy(difference)
        difference -= scale_down(widen(pruned), unit)
        return Losses(kept, total, self.energy(difference), output, unit)


class Chooser(Closing):
    """Chooses for the ``entries`` of ``file`` as ``choice`` says.

    ``searched`` are the tensors that get a new order: all that do not have the pattern yet.
    What does not fit in memory is in a file in the folder ``scratch`` (None: where temporary files
    go), ``scratch_bytes`` of them at most.

    Raises:
        BadInputError: the calibration lacks a tensor or has one that cannot be, with file,
            tensor and place; a permutation in the file is none.
    """

    def __init__(
        self,
        choice: Choice,
        file: SafetensorsFile,
        entries: Sequence[TensorEntry],
        *,
        scratch: Path | None = None,
    ) -> None:
        self.choice = choice
        self._file = file
        self._scratch = Path(tempfile.gettempdir()) if scratch is None else scratch
        #: That of the last tensor by sparsegpt.
        self._factor: Triangle | None = None
        self._calibration: SafetensorsFile | None = None
        #: Whose norms are in memory.
        self._last: str | None = None
        self._orders = {e.name: stored_order(file, e) for e in entries}
        if choice.calibration is not None:
            self._calibration = open_tensors(choice.calibration)
            try:
                for entry in entries:
                    self._check(self._calibration, entry)
            except BaseException:
                self.close()
                raise
        # Others keep a mask that is there by themselves, group by group.
        looks = choice.permute or choice.method == "sparsegpt"
        self._given = {
            e.name
            for e in entries
            if looks and has_pattern(file, e, choice.pattern, self._orders[e.name])
        }
        self.searched = frozenset(
            e.name
            for e in entries
            if choice.permute and e.name not in self._given and self._orders[e.name] is None
        )
        factors = (e for e in entries if e.name not in self._given)
        self.scratch_bytes = (
            max((scratch_bytes(e.shape[1]) for e in factors), default=0)
            if choice.method == "sparsegpt"
            else 0
        )

    def close(self) -> None:
        self._drop_factor()
        if self._calibration is not None:
            self._calibration.close()

    def new_tensors(self, entries: Sequence[TensorEntry]) -> list[TensorSpec]:
        """The tensors that come beside the weights."""
        return [(f"{e.name}_perm", "I32", (e.shape[1],)) for e in entries if self.permuted_new(e)]

    def permuted_new(self, entry: TensorEntry) -> bool:
        return entry.name in self.searched

    def permuted(self, entry: TensorEntry) -> bool:
        """Whether a tensor is pruned in another order than that of the file."""
        return self.permuted_new(entry) or self._orders[entry.name] is not None

    def tensor(self, entry: TensorEntry, *, workers: int) -> TensorChoice:
        """How the tensor is pruned; what an earlier call gave is of no use any more.

        Raises:
            BadInputError: a Hessian that its damping does not make positive definite.
            Sp24Error: there is no room for a scratch file, or it fails.
        """
        self._drop_factor()
        name, pattern = entry.name, self.choice.pattern
        order = self._orders[name]
        method: str = "given" if name in self._given else self.choice.method
        if method in ("given", "magnitude"):
            if name in self.searched:
                order = self._search(entry, None, workers)
            return TensorChoice(
                method,
                order,
                name in self.searched,
                lambda dense: prune_magnitude(dense, pattern),
                None,
                1,
            )
        file = self._calibration
        assert file is not None
        try:
            make = self._wanda if method == "wanda" else self._sparsegpt
            return make(file, entry, order, workers)
        except BadInputError as fault:
            raise BadInputError(f"{tensor_label(file, name)}: {fault}") from fault

    def _drop_factor(self) -> None:
        """Before the next is made: there is room for one."""
        if self._factor is not None:
            self._factor.close()
        self._factor = None

    def _wanda(
        self, file: SafetensorsFile, entry: TensorEntry, order: Array | None, workers: int
    ) -> TensorChoice:
        values = file.array(entry.name)
        if self._last is not None:
            file.drop_cache(self._last)
        self._last = entry.name
        norms = check_norms(values, entry.shape[1])
        if entry.name in self.searched:
            order = self._search(entry, norms, workers)
        if order is not None:
            norms = norms[order]
        return TensorChoice(
            "wanda",
            order,
            entry.name in self.searched,
            lambda dense: prune_wanda(dense, norms, self.choice.pattern),
            lambda dense: weighted_energy(dense, norms),
            2,
            norms,
        )

    def _sparsegpt(
        self, file: SafetensorsFile, entry: TensorEntry, order: Array | None, workers: int
    ) -> TensorChoice:
        choice = self.choice
        if entry.name in self.searched:
            diagonal = hessian_diagonal(StoredMatrix(file, entry.name)).astype(np.float64)
            order = self._search(entry, np.sqrt(diagonal), workers)
        hessian = StoredMatrix(file, entry.name, order)
        try:
            factor, dead = inverse_factor(
                hessian, choice.damping, folder=self._scratch, workers=workers
            )
        except BadInputError:
            raise
        except Sp24Error as fault:
            raise Sp24Error(f"{label(self._scratch)}: {fault}") from fault
        self._factor = factor
        return TensorChoice(
            "sparsegpt",
            order,
            entry.name in self.searched,
            lambda dense: prune_sparsegpt(
                dense,
                factor,
                dead,
                choice.pattern,
                block_size=choice.block_size,
                workers=workers,
            ),
            lambda dense: output_energy(dense, hessian, workers=workers),
            None,
        )

    def _check(self, file: SafetensorsFile, entry: TensorEntry) -> None:
        found = file.entry(entry.name)
        k = entry.shape[1]
        what, shape = ("norms", (k,)) if self.choice.method == "wanda" else ("a Hessian", (k, k))
        where = tensor_label(file, entry.name)
        if found.dtype not in DENSE_DTYPES:
            raise BadInputError(f"{where}: is {found.dtype}, not {what} (F64, F32, F16 or BF16)")
        if found.shape != shape:
            raise BadInputError(
                f"{where}: {what} of a weight {list(entry.shape)} must be {list(shape)}, "
                f"not {list(found.shape)}"
            )
        try:
            if self.choice.method == "wanda":
                check_norms(file.array(entry.name), k)
                file.drop_cache(entry.name)
            else:
                check_hessian(StoredMatrix(file, entry.name), k)
        except BadInputError as fault:
            raise BadInputError(f"{where}: {fault}") from fault

    def _search(self, entry: TensorEntry, norms: Array | None, workers: int) -> Array:
        """The order in which most is kept; that of the file when the search found none better."""
        rows, columns = entry.shape
        step = max(1, rows * columns // permute.SAMPLE_ELEMENTS)
        weigh = np.ones(columns) if norms is None else norms
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            sample = np.empty((-(-rows // step), columns))
            for start, stop in bands(rows, columns, multiple=step):
                dense = self._file.array(entry.name, slice(start, stop))[::step]
                into = sample[start // step :][: len(dense)]
                np.multiply(widen(dense), weigh, out=into)
                self._file.drop_cache(entry.name, slice(start, stop))
            unit = energy_exponent(sample)
            sample = scale_down(sample, unit)
            np.square(sample, out=sample)
            order = permute.search(sample, workers=workers)
            del sample
            kept = partial(self._kept, entry, weigh, unit)
            if step > 1 and kept(order) <= kept(None):
                return np.arange(columns, dtype=np.int32)
        return order

    def _kept(self, entry: TensorEntry, weigh: Array, unit: int, order: Array | None) -> float:
        """What all rows keep, in an order of their columns, in units of 4 to the power ``unit``."""
        kept = []
        for start, stop in bands(*entry.shape):
            scores = widen(self._file.array(entry.name, slice(start, stop))) * weigh
            scores = scale_down(scores, unit)
            if order is not None:
                scores = scores[:, order]
            kept.append(float(np.square(prune_24(scores)).sum()))
            self._file.drop_cache(entry.name, slice(start, stop))
        return math.fsum(kept)
