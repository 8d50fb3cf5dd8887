"""Prune the weights of one safetensors file to 2:4 by magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sp24cli.bits import Array
from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.ops.plan import Sink, copy_tensor, make_plan, not_finite, open_sink, tensor_label
from sp24cli.ops.report import Skipped, document, share
from sp24cli.ops.stream import Meter, Progress, bands, default_workers, map_bands
from sp24cli.sparsity import find_nonfinite, kept_energy, prune_24


@dataclass(frozen=True)
class PrunedTensor:
    """One pruned weight; ``kept_energy`` is the share of its sum of squares that is left."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kept_energy: float


@dataclass(frozen=True)
class PruneReport:
    """What `prune_file` did. ``output`` is None after a dry run; ``kept_energy`` is that of all
    pruned tensors together."""

    source: str
    output: str | None
    tensors: tuple[PrunedTensor, ...]
    skipped: tuple[Skipped, ...]
    kept_energy: float
    output_bytes: int

    def to_json(self) -> dict[str, Any]:
        return document(self)


def prune_file(
    source: Path,
    output: Path | None,
    *,
    selection: Selection | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PruneReport:
    """Write ``source`` to ``output`` with its selected weights pruned, all else as it is.

    ``output`` None is a dry run: all is read and measured, nothing written. Memory holds a few
    row bands. The result does not depend on ``workers`` (None: one a CPU, at most 8).

    Raises:
        BadInputError: a malformed file; NaN or infinity in a selected weight, with its place.
        Sp24Error: the output may not or cannot be written.
    """
    workers = workers or default_workers()
    with SafetensorsFile(source) as file:
        plan = make_plan(file, selection or Selection())
        entries = file.header.entries
        meter = Meter(sum(e.nbytes for e in entries), progress)
        metadata = {"format": "pt", **file.metadata}
        with open_sink(
            output, (e.spec for e in entries), metadata, source=source, overwrite=overwrite
        ) as sink:
            energies = [_prune_tensor(file, e, sink, meter, workers) for e in plan.chosen]
            for item in plan.skipped:
                copy_tensor(file, item.name, sink, meter)
    return PruneReport(
        source=str(source),
        output=None if output is None else str(output),
        tensors=tuple(
            PrunedTensor(e.name, e.dtype, e.shape, share(*energy))
            for e, energy in zip(plan.chosen, energies, strict=True)
        ),
        skipped=plan.skipped,
        kept_energy=share(math.fsum(k for k, _ in energies), math.fsum(t for _, t in energies)),
        output_bytes=sink.header.file_bytes,
    )


def _prune_tensor(
    file: SafetensorsFile, entry: TensorEntry, sink: Sink, meter: Meter, workers: int
) -> tuple[float, float]:
    """Write one pruned tensor; its energy (kept, in all)."""
    rows, columns = entry.shape

    def prune_band(start: int, stop: int) -> tuple[Array, float, float]:
        dense = file.array(entry.name, slice(start, stop))
        pruned = prune_24(dense)
        with np.errstate(over="ignore", invalid="ignore"):
            kept, total = kept_energy(dense, pruned)
        # The sum is finite when all values are (but for squares beyond f64), so the search
        # costs nothing as a rule.
        if not math.isfinite(total) and (place := find_nonfinite(dense)) is not None:
            raise not_finite(tensor_label(file, entry.name), dense, start, place)
        file.drop_cache(entry.name, slice(start, stop))
        return pruned, kept, total

    sums: list[tuple[float, float]] = []
    for pruned, kept, total in map_bands(prune_band, bands(rows, columns), columns, workers):
        sink.write(entry.name, pruned)
        meter.add(pruned.nbytes)
        sums.append((kept, total))
    return math.fsum(k for k, _ in sums), math.fsum(t for _, t in sums)
