"""Pack one tensor of a file by row bands: what quantizing writes and verifying compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sp24cli import scaling
from sp24cli.bits import Array, widen
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.ops.plan import not_finite, tensor_label
from sp24cli.ops.stream import bands, map_bands
from sp24cli.optypes import BLOCK_ROWS
from sp24cli.packed import PackedMatrix, PackInfo, QuantStats, pack_rows
from sp24cli.pruning import permute
from sp24cli.sparsity import find_nonfinite, prune_24


@dataclass(frozen=True)
class Arrangement:
    """In which ``order`` (int32 [K]) the columns are packed, None for the file's, and what
    prunes them then: ``pruner`` of a first row and the rows from it, None for magnitude."""

    order: Array | None = None
    pruner: Callable[[int, Array], Array] | None = None

    def columns(self, dense: Array) -> Array:
        return dense if self.order is None else permute.apply(dense, self.order)

    def prune(self, start: int, dense: Array) -> Array:
        return prune_24(dense) if self.pruner is None else self.pruner(start, dense)


@dataclass(frozen=True)
class Band:
    """Rows [start, stop) of a packed tensor.

    ``energy`` is the sum of squares of the dense rows before they were pruned here, None when
    they were not.
    """

    start: int
    stop: int
    packed: PackedMatrix
    stats: QuantStats
    energy: float | None


def tensor_scale(
    file: SafetensorsFile,
    name: str,
    info: PackInfo,
    *,
    workers: int,
    arrange: Arrangement | None = None,
) -> Array | None:
    """The scale of a whole tensor, from a pass over it; None for kinds that a band decides.

    Pruning by magnitude does not change it: the largest of a group is always kept. NaN and
    infinity are found, and named, when the rows are packed.
    """
    if info.scale.kind != "tensor":
        return None

    def largest(start: int, stop: int) -> Array:
        dense = file.array(name, slice(start, stop))
        if arrange is not None and arrange.pruner is not None:
            dense = arrange.prune(start, arrange.columns(dense))
        found = scaling.amax(dense, info.scale)
        file.drop_cache(name, slice(start, stop))
        return found

    rows, columns = info.shape
    found = list(map_bands(largest, bands(rows, columns), columns, workers))
    return scaling.scales_from_amax(scaling.join_amax(found, info.scale), info.optype.max_finite)


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
    ``arrange`` says. The bands themselves have no `PackedMatrix.perm`.

    Raises:
        BadInputError: with file and tensor, and the row and column of a NaN or infinity, or the
            row and group of one that is not 2:4.
    """
    rows, columns = info.shape
    arrange = arrange or _PLAIN

    def pack(start: int, stop: int) -> Band:
        dense = file.array(name, slice(start, stop))
        band_info = replace(info, shape=dense.shape, permuted=False)
        band_scale = scale
        energy = _energy(dense) if prune else None
        # Named here, by its own column, what permuting would move and other methods could prune.
        if arrange is not _PLAIN and (place := find_nonfinite(dense)) is not None:
            raise not_finite(tensor_label(file, name), dense, start, place)
        dense = arrange.columns(dense)
        if prune:
            dense = arrange.prune(start, dense)
        if scale is None and info.scale.kind != "none":
            largest = scaling.amax(dense, info.scale)
            band_scale = scaling.scales_from_amax(largest, info.optype.max_finite)
        into = PackedMatrix.empty(band_info, band_scale)
        try:
            stats = pack_rows(dense, into, first_row=start)
        except BadInputError as fault:
            raise BadInputError(f"{tensor_label(file, name)}: {fault}") from fault
        file.drop_cache(name, slice(start, stop))
        return Band(start, stop, into, stats, energy)

    step = math.lcm(BLOCK_ROWS, info.scale.row_step)
    return map_bands(pack, bands(rows, columns, multiple=step), columns, workers)


_PLAIN = Arrangement()


def _energy(dense: Array) -> float:
    # Infinite squares, and what is wrong with the values, are for the caller and `pack_rows`.
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(widen(dense), dtype=np.float64).sum())
