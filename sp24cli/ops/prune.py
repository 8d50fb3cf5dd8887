"""Prune the weights of one safetensors file, to 2:4 by magnitude unless a `Choice` says else."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp24cli.bits import Array
from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.formats.dequantized import input_files, open_dense
from sp24cli.ops.choose import Choice, Chooser, Losses, TensorChoice
from sp24cli.ops.engine import Engine
from sp24cli.ops.plan import (
    Sink,
    check_types,
    copy_tensor,
    make_plan,
    not_finite,
    open_sink,
    tensor_label,
)
from sp24cli.ops.report import Skipped, document, share
from sp24cli.ops.stream import Meter, Progress, default_workers, map_bands
from sp24cli.pruning.pattern import Pattern
from sp24cli.sparsity import find_nonfinite


@dataclass(frozen=True)
class PrunedTensor:
    """One pruned weight; ``kept_energy`` is the share of its sum of squares that is left. That is
    ``energy`` in units of 4 to the power ``energy_exponent``, which is 0 but for F64 values whose
    squares F64 does not hold. ``method`` is "given" where a calibrated method or a search found the
    pattern there; ``weighted_error`` is the share of the outputs' energy that is lost, by the norms
    or Hessian; ``permuted`` says that the pattern holds in the order of ``X.weight_perm``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kept_energy: float
    energy: float
    energy_exponent: int
    method: str
    weighted_error: float | None
    permuted: bool


@dataclass(frozen=True)
class PruneReport:
    """What `prune_file` did. ``output`` is None after a dry run; ``kept_energy`` is that of all
    pruned tensors together. ``device`` ("cpu" or a GPU's name) did it, but for ``on_cpu``."""

    source: str
    output: str | None
    method: str
    pattern: str
    tensors: tuple[PrunedTensor, ...]
    skipped: tuple[Skipped, ...]
    kept_energy: float
    output_bytes: int
    device: str
    on_cpu: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return document(self)


def prune_file(
    source: Path,
    output: Path | None,
    *,
    choice: Choice | None = None,
    selection: Selection | None = None,
    dequantize_fp8: str | None = None,
    siblings: Sequence[Path] = (),
    engine: Engine | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PruneReport:
    """Write ``source`` to ``output`` with its selected weights pruned, all else as it is.

    ``choice`` says how (None: 2:4 by magnitude). Weights stay in their order; where they are
    pruned in another, ``X.weight_perm`` is written beside them, or was there.
    ``output`` None is a dry run: all is read and measured, nothing written. Memory holds a few
    row bands; what sparsegpt needs beyond that is in a scratch file beside the output (in a dry
    run where temporary files go). The result does not depend on ``workers`` (None: one a CPU, at
    most 8).
    ``dequantize_fp8`` and ``engine`` as in `quantize_file`.

    Raises:
        BadInputError: a malformed file; NaN or infinity in a selected weight, with its place.
        UsageError: a ``dequantize_fp8`` that there is not.
        Sp24Error: the output or a scratch file may not or cannot be written.
    """
    workers = workers or default_workers()
    selection = selection or Selection()
    choice = choice or Choice()
    check_types(selection=(selection, Selection), choice=(choice, Choice))
    with open_dense(source, selection, dequantize_fp8, siblings) as file:
        plan = make_plan(file, selection, group=choice.pattern.group)
        entries = file.header.entries
        folder = None if output is None else Path(os.path.realpath(output)).parent
        with Chooser(choice, file, plan.chosen, scratch=folder) as chooser:
            specs = [*(e.spec for e in entries), *chooser.new_tensors(plan.chosen)]
            meter = Meter(sum(e.nbytes for e in entries), progress)
            metadata = {"format": "pt", **file.metadata}
            with open_sink(
                output,
                specs,
                metadata,
                source=source,
                beside=input_files(choice.calibration),
                overwrite=overwrite,
                stacks=file.stacks,
                scratch_bytes=chooser.scratch_bytes,
            ) as sink:
                tensors: list[PrunedTensor] = []
                losses: list[Losses] = []
                on_cpu: list[str] = []
                for entry in plan.chosen:
                    how = chooser.tensor(entry, workers=workers)
                    able = _engine_for(engine, entry, how, choice)
                    if engine is not None and able is None:
                        on_cpu.append(entry.name)
                    losses.append(
                        _prune_tensor(file, entry, how, choice.pattern, sink, meter, able, workers)
                    )
                    tensors.append(_pruned(entry, how, losses[-1]))
                for item in plan.skipped:
                    copy_tensor(file, item.name, sink, meter)
    whole = Losses.merge(losses)
    return PruneReport(
        source=str(source),
        output=None if output is None else str(output),
        method=choice.method,
        pattern=str(choice.pattern),
        tensors=tuple(tensors),
        skipped=plan.skipped,
        kept_energy=share(whole.kept, whole.total),
        output_bytes=sink.header.file_bytes,
        device="cpu" if engine is None else engine.name,
        on_cpu=tuple(on_cpu),
    )


def _engine_for(
    engine: Engine | None, entry: TensorEntry, how: TensorChoice, choice: Choice
) -> Engine | None:
    """The engine if it can do what is to be done here."""
    plain = how.method in ("magnitude", "wanda") and how.order is None
    able = plain and engine is not None and engine.prunes(entry, choice.pattern)
    return engine if able else None


def _pruned(entry: TensorEntry, how: TensorChoice, losses: Losses) -> PrunedTensor:
    return PrunedTensor(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        kept_energy=share(losses.kept, losses.total),
        energy=losses.total,
        energy_exponent=losses.exponent,
        method=how.method,
        weighted_error=losses.weighted_error,
        permuted=how.order is not None,
    )


def _prune_tensor(
    file: SafetensorsFile,
    entry: TensorEntry,
    how: TensorChoice,
    pattern: Pattern,
    sink: Sink,
    meter: Meter,
    engine: Engine | None,
    workers: int,
) -> Losses:
    """Write one pruned tensor, and its new order if it has one."""
    parts: list[Losses] = []
    if engine is not None:
        by_engine = engine.prune(
            file, entry.name, norms=how.norms, pattern=pattern, workers=workers
        )
        for pruned, found in by_engine:
            sink.write(entry.name, pruned)
            meter.add(pruned.nbytes)
            parts += found
        return Losses.merge(parts)

    def prune_band(start: int, stop: int) -> tuple[Array, Losses]:
        dense = file.array(entry.name, slice(start, stop))
        pruned, losses = how.band(dense)
        # The sum is finite when all values are, so the search costs nothing.
        if not math.isfinite(losses.total) and (place := find_nonfinite(dense)) is not None:
            raise not_finite(tensor_label(file, entry.name), dense, start, place)
        file.drop_cache(entry.name, slice(start, stop))
        return pruned, losses

    if how.searched:
        assert how.order is not None
        sink.write(f"{entry.name}_perm", how.order)
    at_once, share = (1, 1) if how.share is None else (workers, how.share)
    ranges = how.ranges(entry.shape)
    for pruned, losses in map_bands(prune_band, ranges, entry.shape[1], at_once, share=share):
        sink.write(entry.name, pruned)
        meter.add(pruned.nbytes)
        parts.append(losses)
    return Losses.merge(parts)
