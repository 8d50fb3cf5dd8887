"""Pack one tensor of a file by row bands: what quantizing writes and verifying compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sp24cli import calibration, scaling, smoothing
from sp24cli.bits import NUMBER_TYPES, Array
from sp24cli.calibration import AMAX
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.ops.plan import not_finite, tensor_label
from sp24cli.ops.stream import bands, map_bands
from sp24cli.optypes import BLOCK_ROWS
from sp24cli.packed import PackedMatrix, PackInfo, QuantStats, check_rows, pack_rows
from sp24cli.pruning import permute
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, pattern_of, prune_magnitude
from sp24cli.sparsity import energy_exponent, find_nonfinite, fold, patch_energies


@dataclass(frozen=True)
class Arrangement:
    """In which ``order`` (int32 [K]) the columns are packed, None for the file's, and what
    prunes them then: ``pruner`` of a first row and the rows from it, None for magnitude. What
    is left is multiplied by ``smooth``, float32 [K] in the file's order, None for 1. ``norms`` are
    those of wanda, float64 [K] in that order, where that is what the pruner does."""

    order: Array | None = None
    pruner: Callable[[int, Array], Array] | None = None
    smooth: Array | None = None
    norms: Array | None = None

    def columns(self, dense: Array) -> Array:
        return dense if self.order is None else permute.apply(dense, self.order)

    def prune(self, start: int, dense: Array, pattern: Pattern) -> Array:
        if self.pruner is None:
            return prune_magnitude(dense, pattern)
        return self.pruner(start, dense)

    def rows(
        self,
        file: SafetensorsFile,
        name: str,
        start: int,
        dense: Array,
        *,
        prune: bool,
    ) -> Array:
        """``dense``, the rows of the file's tensor from ``start`` on, as they are packed in a type
        that has a scale."""
        dense = self.columns(dense)
        if prune:
            dense = self.prune(start, dense, TWO_OF_FOUR)
        return self.smoothed(file, name, start, dense)

    def smoothed(self, file: SafetensorsFile, name: str, start: int, dense: Array) -> Array:
        """`rows` that are pruned already."""
        if self.smooth is None:
            return dense
        smooth = self.smooth if self.order is None else self.smooth[self.order]
        dense = smoothing.apply(dense, smooth)
        if (place := find_nonfinite(dense)) is not None:
            column = place[1] if self.order is None else int(self.order[place[1]])
            raise BadInputError(
                f"{tensor_label(file, name)}: smoothing takes row {start + place[0]}, column "
                f"{column} beyond {dense.dtype}"
            )
        return dense


@dataclass(frozen=True)
class Band:
    """Rows [start, stop) of a packed tensor.

    ``stats`` are those of the bands of `ops.stream` that they consist of, ``energies`` the sums of
    squares of these before they were pruned here, none when they were not. ``kept_energies`` are
    those of what pruning left, where smoothing has changed it before the ``stats`` were taken.
    Both are in units of 4 to the power ``exponent``.
    """

    start: int
    stop: int
    packed: PackedMatrix
    stats: tuple[QuantStats, ...]
    energies: tuple[float, ...]
    kept_energies: tuple[float, ...] = ()
    exponent: int = 0


def tensor_scale(
    file: SafetensorsFile,
    name: str,
    info: PackInfo,
    *,
    prune: bool,
    workers: int,
    arrange: Arrangement | None = None,
) -> Array | None:
    """The scale of a whole tensor, from passes over it; None for kinds that a band decides.

    ``info.calibration`` is not ``history``. ``prune`` and ``arrange`` are as for `pack_bands`,
    whose errors it raises. As long as nothing is smoothed, pruning by magnitude does not change
    the amax: the largest of a group is always kept. NaN and infinity are then found, and named,
    when the rows are packed.
    """
    if info.scale.kind != "tensor":
        return None
    rows, columns = info.shape
    how = arrange or _PLAIN
    if info.calibration != AMAX:

        def over(work: Callable[[Array], Any]) -> list[Any]:
            def of_kept(start: int, stop: int) -> Any:
                dense = _read(file, name, start, stop, how, prune=prune)
                found = work(_kept(file, name, start, dense))
                file.drop_cache(name, slice(start, stop))
                return found

            # Kept values and where they stand come on top of a band.
            return list(map_bands(of_kept, bands(rows, columns), columns, workers, share=2))

        return calibration.tensor_scale(
            over, _packed_dtype(info), info.optype, info.overflow, info.calibration
        )

    def largest(start: int, stop: int) -> Array:
        if how.pruner is None and how.smooth is None:
            dense = file.array(name, slice(start, stop))
        else:
            dense = _read(file, name, start, stop, how, prune=prune)
        found = scaling.amax(dense, info.scale)
        file.drop_cache(name, slice(start, stop))
        return found

    found = list(map_bands(largest, bands(rows, columns), columns, workers))
    return scaling.scales_from_amax(scaling.join_amax(found, info.scale), info.optype.max_finite)


def smooth_factors(
    file: SafetensorsFile,
    name: str,
    info: PackInfo,
    activations: Array,
    *,
    prune: bool,
    workers: int,
    arrange: Arrangement | None = None,
) -> Array:
    """The factors of the columns, float32 [K] in the file's order, from a pass over the tensor.

    ``activations`` [K] are the largest magnitudes of its input channels; of the weights those
    that are kept count. Errors: as `pack_bands`.
    """
    assert info.smooth is not None
    rows, columns = info.shape
    how = arrange or _PLAIN

    def largest(start: int, stop: int) -> Array:
        of_band = smoothing.column_amax(_read(file, name, start, stop, how, prune=prune))
        file.drop_cache(name, slice(start, stop))
        return of_band

    found = np.zeros(columns)
    for of_band in map_bands(largest, bands(rows, columns), columns, workers):
        np.maximum(found, of_band, out=found)
    if how.order is not None:
        found = found[permute.inverse(how.order)]
    return smoothing.factors(activations, found, info.smooth)


def scale_passes(info: PackInfo) -> int:
    """How often a tensor is read before its rows are packed."""
    passes = int(info.smooth is not None)
    if info.scale.kind == "tensor" and info.calibration.method != "history":
        if info.calibration == AMAX:
            return passes + 1
        return passes + calibration.passes(_packed_dtype(info), info.calibration)
    return passes


def _packed_dtype(info: PackInfo) -> np.dtype[Any]:
    """The type of the rows that are packed: the source's, or that of its products."""
    narrow = info.smooth is not None and info.source_dtype != "F64"
    return NUMBER_TYPES["F32" if narrow else info.source_dtype].dtype


def _read(
    file: SafetensorsFile, name: str, start: int, stop: int, arrange: Arrangement, *, prune: bool
) -> Array:
    """Rows as they are packed, from the file, finite."""
    dense = file.array(name, slice(start, stop))
    if (place := find_nonfinite(dense)) is not None:
        raise not_finite(tensor_label(file, name), dense, start, place)
    return arrange.rows(file, name, start, dense, prune=prune)


def _kept(file: SafetensorsFile, name: str, start: int, dense: Array) -> Array:
    """The kept values of rows from ``start`` on; `BadInputError` as of `pack_bands`."""
    try:
        check_rows(dense, first_row=start)
    except BadInputError as fault:
        raise BadInputError(f"{tensor_label(file, name)}: {fault}") from fault
    return calibration.kept_values(dense)


def pack_bands(
    file: SafetensorsFile,
    name: str,
    info: PackInfo,
    scale: Array | None,
    *,
    prune: bool,
    workers: int,
    arrange: Arrangement | None = None,
) -> Iterator[Band]:
    """The packed tensor ``name`` of a dense file, in order.

    ``info`` says how, ``scale`` is what `tensor_scale` gave; ``prune`` makes it 2:4 first, as
    ``arrange`` says. The bands themselves have no `PackedMatrix.perm` or ``smooth``.

    Raises:
        BadInputError: with file and tensor, and the row and column of a NaN or infinity, or the
            row and group of one that is not 2:4.
    """

    def pack(start: int, stop: int) -> Band:
        rows = slice(start, stop)
        return pack_band(file, name, info, scale, rows, prune=prune, arrange=arrange)

    return map_bands(pack, pack_ranges(info), info.shape[1], workers)


def pack_ranges(info: PackInfo) -> list[tuple[int, int]]:
    """The row ranges that a tensor is packed by."""
    return bands(*info.shape, multiple=math.lcm(BLOCK_ROWS, info.scale.row_step))


def pack_band(
    file: SafetensorsFile,
    name: str,
    info: PackInfo,
    scale: Array | None,
    rows: slice,
    *,
    prune: bool,
    arrange: Arrangement | None = None,
) -> Band:
    """One band of `pack_bands`."""
    start, stop = rows.start, rows.stop
    dense = file.array(name, rows)
    band_info = replace(info, shape=dense.shape, permuted=False, smooth=None)
    exponent = energy_exponent(dense) if prune else 0
    energies = (fold(patch_energies(dense, exponent=exponent)),) if prune else ()
    # Named here, by its own column, what permuting would move and other methods could prune.
    if arrange is not None and (place := find_nonfinite(dense)) is not None:
        raise not_finite(tensor_label(file, name), dense, start, place)
    how = arrange or _PLAIN
    dense = how.columns(dense)
    if prune:
        dense = how.prune(start, dense, pattern_of(info.optype))
    kept_energies: tuple[float, ...] = ()
    if prune and how.smooth is not None:
        kept_energies = (fold(patch_energies(dense, exponent=exponent)),)
    dense = how.smoothed(file, name, start, dense)
    find_scales = scale is None and info.calibration == AMAX and info.scale.kind == "vector"
    if scale is None and info.calibration != AMAX:
        kept = _kept(file, name, start, dense)
        scale = calibration.unit_scales(
            kept, info.scale, info.optype, info.overflow, info.calibration
        )
    elif find_scales:
        scale = np.empty(info.scale.shape(*dense.shape), info.scale.dtype)
    elif scale is None and info.scale.kind != "none":
        largest = scaling.amax(dense, info.scale)
        scale = scaling.make_scales(largest, info.optype.max_finite, info.scale)
    into = PackedMatrix.empty(band_info, scale)
    try:
        stats = pack_rows(dense, into, find_scales=find_scales, first_row=start)
    except BadInputError as fault:
        raise BadInputError(f"{tensor_label(file, name)}: {fault}") from fault
    file.drop_cache(name, rows)
    return Band(start, stop, into, (stats,), energies, kept_energies, exponent)


_PLAIN = Arrangement()
