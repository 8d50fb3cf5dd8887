"""Pack the 2:4 weights of one safetensors file: codes, indices, scales."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sp24cli.checkpoint.header import TensorEntry, TensorSpec, label
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.packedfile import merge_metadata, part_entries
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.formats.dequantized import input_files, open_dense
from sp24cli.fp8 import Overflow
from sp24cli.ops.calibrate import Calibration, Calibrator
from sp24cli.ops.choose import Choice, Chooser
from sp24cli.ops.engine import Engine
from sp24cli.ops.histogram import Spread
from sp24cli.ops.pack import (
    Arrangement,
    pack_bands,
    scale_passes,
    smooth_factors,
    tensor_scale,
)
from sp24cli.ops.plan import Sink, check_types, copy_tensor, make_plan, open_sink
from sp24cli.ops.report import Skipped, add_up, document, energy_share, scale_text
from sp24cli.ops.stream import Meter, Progress, default_workers
from sp24cli.optypes import OperandType
from sp24cli.packed import Layout, PackInfo, Pruned, QuantStats
from sp24cli.pruning.pattern import pattern_of
from sp24cli.scaling import ScaleSpec


@dataclass(frozen=True)
class QuantizedTensor:
    """One packed weight and what rounding did to its kept values.

    ``kept`` counts the nonzero ones, ``clipped`` those past the type's range, ``underflowed``
    those whose code is zero. ``snr_db`` is infinite without any error. ``error_energy`` is in units
    of 4 to the power ``energy_exponent`` (see `PrunedTensor`). ``kept_energy`` is the
    share of the sum of squares that pruning left, None where the weight was 2:4 already by the
    caller's word. ``scale_min`` and ``scale_max`` are None where there is no scale;
    ``histogram`` is that of `code_histogram`, empty unless asked for.
    """

    name: str
    source_dtype: str
    shape: tuple[int, ...]
    snr_db: float
    error_energy: float
    energy_exponent: int
    amax: float
    kept: int
    clipped: int
    underflowed: int
    kept_energy: float | None
    scale_min: float | None
    scale_max: float | None
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_file` did. ``output`` is None after a dry run.

    ``calibration`` says how the scales were chosen, ``smooth`` the alpha of the columns' factors,
    None where they have none. ``device`` ("cpu" or a GPU's name) did it, but for ``on_cpu``.
    """

    source: str
    output: str | None
    type: str
    scale: str
    calibration: str
    smooth: float | None
    layout: str
    overflow: str
    pruned: str
    tensors: tuple[QuantizedTensor, ...]
    skipped: tuple[Skipped, ...]
    source_bytes: int
    output_bytes: int
    device: str
    on_cpu: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return document(self)


def quantize_file(
    source: Path,
    output: Path | None,
    *,
    optype: OperandType,
    spec: ScaleSpec,
    overflow: Overflow = "satfinite",
    layout: Layout = "row",
    prune: bool = False,
    choice: Choice | None = None,
    calibration: Calibration | None = None,
    selection: Selection | None = None,
    dequantize_fp8: str | None = None,
    siblings: Sequence[Path] = (),
    histograms: bool = False,
    engine: Engine | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write ``source`` to ``output`` with its selected weights packed, all else as it is.

    ``prune`` makes them 2:4 first (1:2 for tf32), as ``choice`` says (by magnitude or wanda,
    whose kept values are those of the file); without it they must be, in the order of
    ``X.weight_perm`` where the file has that. ``calibration`` says how the scales are chosen,
    and what of the activations moves into the weights (smoothing, after pruning; scaled types
    alone). ``output`` None is a dry run: all is read and measured, nothing written. Memory holds
    a few row bands; a scale by tensor reads each tensor twice or more (`scale_passes`). The
    result does not depend on ``workers`` (None: one a CPU, at most 8).

    ``dequantize_fp8`` ("BF16", "F16", "F32") takes the FP8 weights too, as code * scale rounded
    once to that dtype; their scales go. ``siblings`` are the other files of a checkpoint, where
    those scales, or the weights of the scales that are here, may lie. ``histograms`` asks for
    those of the codes.

    ``engine`` does the work where it can: in the order of the file, with scales by amax, from and
    to the types that it has. The bytes are the same without it.

    Raises:
        BadInputError: a malformed or packed file; in a selected weight NaN or infinity (with
            row and column) or more than two nonzeros in a group (with row and group); what
            `Calibrator` refuses.
        UsageError: a ``dequantize_fp8`` that there is not.
        Sp24Error: the output may not or cannot be written.
        TypeError: a name, say, where an object is needed: of an ``optype`` or a ``spec``.
    """
    check_types(optype=(optype, OperandType), spec=(spec, ScaleSpec))
    workers = workers or default_workers()
    selection = selection or Selection()
    pattern = pattern_of(optype)
    choice = choice or Choice(pattern=pattern)
    calibration = calibration or Calibration()
    check_types(
        selection=(selection, Selection),
        choice=(choice, Choice),
        calibration=(calibration, Calibration),
    )
    if choice.pattern != pattern or choice.method == "sparsegpt":
        raise ValueError(f"only {pattern} with the values of the file can be packed at once")
    pruned: Pruned = choice.method if prune else "given"
    with ExitStack() as stack:
        file = stack.enter_context(open_dense(source, selection, dequantize_fp8, siblings))
        plan = make_plan(file, selection, group=pattern.group)
        chosen = choice if prune else Choice(pattern=pattern)
        chooser = stack.enter_context(Chooser(chosen, file, plan.chosen))
        calibrator = stack.enter_context(
            Calibrator(
                calibration.history, calibration.activations, plan.chosen, calibration.rule.pick
            )
        )
        permuted = {e.name for e in plan.chosen if chooser.permuted(e)}
        orders = {f"{name}_perm" for name in permuted}
        skipped = tuple(item for item in plan.skipped if item.name not in orders)
        infos = {
            e.name: PackInfo(
                shape=(e.shape[0], e.shape[1]),
                source_dtype=e.dtype,
                type=optype.name,
                scale=spec,
                pruned=pruned,
                layout=layout,
                overflow=overflow,
                permuted=e.name in permuted,
                calibration=calibration.rule,
                smooth=calibration.smooth,
            )
            for e in plan.chosen
        }
        entries = _output_entries(source, skipped, infos)
        meter = Meter(
            sum(e.nbytes for e in file.header.entries)
            + sum(scale_passes(infos[e.name]) * e.nbytes for e in plan.chosen),
            progress,
        )
        metadata = merge_metadata(file.metadata, infos, file.stacks)
        on_cpu: list[str] = []
        beside = input_files(choice.calibration, calibration.history, calibration.activations)
        with open_sink(
            output, entries, metadata, source=source, beside=beside, overwrite=overwrite
        ) as sink:
            tensors = tuple(
                _quantize_tensor(
                    file,
                    e,
                    infos[e.name],
                    chooser,
                    calibrator,
                    sink,
                    meter,
                    prune,
                    histograms,
                    engine,
                    on_cpu,
                    workers,
                )
                for e in plan.chosen
            )
            for item in skipped:
                copy_tensor(file, item.name, sink, meter)
        return QuantizeReport(
            source=str(source),
            output=None if output is None else str(output),
            type=optype.name,
            scale=scale_text(spec),
            calibration=calibration.rule.text,
            smooth=calibration.smooth,
            layout=layout,
            overflow=overflow,
            pruned=pruned,
            tensors=tensors,
            skipped=skipped,
            source_bytes=file.header.file_bytes,
            output_bytes=sink.header.file_bytes,
            device="cpu" if engine is None else engine.name,
            on_cpu=tuple(on_cpu),
        )


def _output_entries(
    source: Path, skipped: tuple[Skipped, ...], infos: dict[str, PackInfo]
) -> list[TensorSpec]:
    entries = [(item.name, item.dtype, item.shape) for item in skipped]
    taken = {item.name for item in skipped}
    for name, info in infos.items():
        for part in part_entries(name, info):
            if part[0] in taken:
                raise BadInputError(
                    f"{label(source)}: tensor {name!r} cannot be packed: the file has a tensor "
                    f"{part[0]!r} already"
                )
            entries.append(part)
    return entries


def _quantize_tensor(
    file: SafetensorsFile,
    entry: TensorEntry,
    info: PackInfo,
    chooser: Chooser,
    calibrator: Calibrator,
    sink: Sink,
    meter: Meter,
    prune: bool,
    histograms: bool,
    engine: Engine | None,
    on_cpu: list[str],
    workers: int,
) -> QuantizedTensor:
    """Write the parts of one tensor, band by band; add its name to ``on_cpu`` if there is an
    engine and it cannot."""
    name = entry.name
    how = chooser.tensor(entry, workers=workers)
    arrange = None
    if how.order is not None or how.method == "wanda":
        arrange = Arrangement(how.order, lambda start, dense: how.prune(dense), norms=how.norms)
    activations = calibrator.activations(entry)
    if activations is not None:
        smooth = smooth_factors(
            file, name, info, activations, prune=prune, workers=workers, arrange=arrange
        )
        sink.write(f"{name}_smooth", smooth)
        arrange = replace(arrange or Arrangement(), smooth=smooth)
    scale = calibrator.scale(name, info)
    if engine is not None and engine.packs(info, arrange):
        scale = engine.scale(file, name, info, workers=workers, arrange=arrange)
        packing = engine.pack(
            file, name, info, scale, prune=prune, workers=workers, arrange=arrange
        )
    else:
        if engine is not None:
            on_cpu.append(name)
        if scale is None:
            scale = tensor_scale(file, name, info, prune=prune, workers=workers, arrange=arrange)
        packing = pack_bands(file, name, info, scale, prune=prune, workers=workers, arrange=arrange)
    if how.order is not None:
        sink.write(f"{name}_perm", how.order)
    if scale is not None:
        sink.write(f"{name}_scale", scale)
    meter.add(scale_passes(info) * entry.nbytes)
    stats: list[QuantStats] = []
    spread = Spread(histogram=histograms)
    totals: list[tuple[float, int]] = []
    left: list[tuple[float, int]] = []
    for band in packing:
        parts = {part: getattr(band.packed, part) for part in band.packed.info.parts()}
        if scale is not None:
            del parts["scale"]
        for part, array in parts.items():
            sink.write(f"{name}_{part}", array)
        meter.add((band.stop - band.start) * (entry.nbytes // entry.shape[0]))
        stats += band.stats
        spread.add(band.packed)
        totals += [(energy, band.exponent) for energy in band.energies]
        left += [(energy, band.exponent) for energy in band.kept_energies]
    merged = QuantStats.merge(stats)
    kept = (merged.signal_energy, merged.exponent) if info.smooth is None else add_up(left)
    return QuantizedTensor(
        name=name,
        source_dtype=entry.dtype,
        shape=entry.shape,
        snr_db=merged.snr_db,
        error_energy=merged.error_energy,
        energy_exponent=merged.exponent,
        amax=merged.amax,
        kept=merged.kept,
        clipped=merged.clipped,
        underflowed=merged.underflowed,
        kept_energy=energy_share(kept, add_up(totals)) if prune else None,
        scale_min=spread.scale_min,
        scale_max=spread.scale_max,
        histogram=spread.histogram,
    )
