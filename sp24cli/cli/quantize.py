"""``sp24 quantize``."""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.calibration import AMAX, HistoryPick
from sp24cli.calibration import Method as ScaleMethod
from sp24cli.checkpoint.names import Selection
from sp24cli.cli import console
from sp24cli.cli.calibrating import make_calibration, scale_choice_options
from sp24cli.cli.choosing import make_choice, method_option, norms_option, permute_option
from sp24cli.cli.engine import device_option, open_engine
from sp24cli.cli.options import (
    dequantize_option,
    dry_run_option,
    json_option,
    output_options,
    quiet_option,
    report_option,
    require_output,
    selection_options,
    source_argument,
    workers_option,
)
from sp24cli.cli.sidefile import check_report, write_report
from sp24cli.errors import BadInputError
from sp24cli.fp8 import Overflow, check_overflow
from sp24cli.ops import Done, QuantizeReport, quantize_checkpoint
from sp24cli.ops.choose import Method
from sp24cli.ops.engine import DeviceChoice
from sp24cli.ops.unpack import DENSE_TYPES
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import Layout
from sp24cli.pruning.pattern import TWO_OF_FOUR, pattern_of
from sp24cli.scaling import ScaleSpec


@click.command()
@source_argument()
@output_options
@click.option(
    "--type",
    "type_name",
    type=click.Choice(list(OPERAND_TYPES)),
    default="e4m3",
    show_default=True,
    help="What the kept values become.",
)
@click.option(
    "--scale",
    type=click.Choice(["tensor", "vector", "block", "mx"]),
    help="One scale a tensor, a row, a block, or 32 columns of a row (mx: a power of two, rounded "
    "up, stored as E8M0). Needed for e4m3, e5m2 and s8; f16, bf16 and tf32 have none.",
)
@click.option(
    "--block",
    metavar="RxC",
    help="The size of a block, rows x columns (default: 128x128). Only with --scale block.",
)
@scale_choice_options
@click.option(
    "--overflow",
    type=click.Choice(["satfinite", "nan"]),
    default="satfinite",
    show_default=True,
    help="What a value beyond the type's range becomes: the largest finite value, or NaN "
    "(infinity where the type has one; s8 has neither).",
)
@click.option(
    "--layout",
    type=click.Choice(["row", "sm90"]),
    default="row",
    show_default=True,
    help="Rows of values and metadata, or the block images that the kernels read.",
)
@click.option("--prune", is_flag=True, help="Prune what is not 2:4 (tf32: 1:2) yet.")
@method_option("magnitude", "wanda")
@norms_option
@permute_option
@selection_options
@dequantize_option
@report_option
@dry_run_option
@device_option
@workers_option
@json_option
@quiet_option
def quantize(
    source: Path,
    output: Path | None,
    resume: bool,
    force: bool,
    type_name: str,
    scale: str | None,
    block: str | None,
    calibrate: ScaleMethod | None,
    percentile: float | None,
    amax_history: Path | None,
    amax_compute: HistoryPick | None,
    smooth: Path | None,
    alpha: float | None,
    overflow: Overflow,
    layout: Layout,
    prune: bool,
    method: Method,
    activation_norms: Path | None,
    permute: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    experts: bool,
    dequantize_fp8: str | None,
    report: Path | None,
    dry_run: bool,
    device: DeviceChoice,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Pack the 2:4 weights of IN: kept values in --type, their indices, and scales.

    A weight that is not 2:4 is an error unless --prune is given; for tf32 it must be 1:2. All
    other tensors are copied byte for byte. Prints, by tensor, the signal-to-noise ratio of the
    kept values and how many of them were clipped or became zero.

    IN is a safetensors file or a whole checkpoint, as for sp24 prune.
    """
    optype = OPERAND_TYPES[type_name]
    spec = _scale_spec(optype, scale, block)
    try:
        check_overflow(optype, overflow)
    except BadInputError as fault:
        raise click.UsageError(f"--overflow {overflow}: {fault}") from fault
    calibration = make_calibration(
        spec,
        overflow,
        calibrate=calibrate,
        percentile=percentile,
        history=amax_history,
        pick=amax_compute,
        smooth=smooth,
        alpha=alpha,
    )
    if not prune and (method != "magnitude" or permute):
        raise click.UsageError("--method and --permute go with --prune only")
    pattern = pattern_of(optype)
    if permute and pattern != TWO_OF_FOUR:
        raise click.UsageError(f"--permute does not go with --type {type_name}, which is {pattern}")
    choice = make_choice(method, norms=activation_norms, permute=permute, pattern=str(pattern))
    target = require_output(output, dry_run=dry_run)
    inputs = [source, activation_norms, amax_history, smooth]
    check_report(report, inputs, target, overwrite=force)
    engine = open_engine(device, choice, calibration)
    with console.progress("quantize", quiet=quiet) as progress:
        done = quantize_checkpoint(
            source,
            target,
            optype=optype,
            spec=spec,
            overflow=overflow,
            layout=layout,
            prune=prune,
            choice=choice,
            calibration=calibration,
            selection=Selection(include, exclude, experts),
            dequantize_fp8=DENSE_TYPES[dequantize_fp8] if dequantize_fp8 else None,
            histograms=report is not None,
            engine=engine,
            workers=workers,
            resume=resume,
            overwrite=force,
            progress=progress,
        )
    write_report(report, done)
    if as_json:
        console.out_json(done.to_json())
        return
    _print(done, quiet=quiet)


def _scale_spec(optype: OperandType, kind: str | None, block: str | None) -> ScaleSpec:
    if not optype.scaled:
        if kind is not None or block is not None:
            raise click.UsageError(f"--type {optype.name} has no scale; leave out --scale")
        return ScaleSpec.parse("none", None)
    if kind is None:
        raise click.UsageError(f"--type {optype.name} needs --scale tensor, vector, block or mx")
    if kind != "block" and block is not None:
        raise click.UsageError("--block goes with --scale block only")
    try:
        return ScaleSpec.parse(kind, (block or "128x128") if kind == "block" else None)
    except BadInputError as fault:
        raise click.UsageError(f"--block {block}: {fault}") from fault


def _print(done: Done[QuantizeReport], *, quiet: bool) -> None:
    report = done.report
    if report.tensors:
        console.table(
            ("tensor", "dtype", "shape", "SNR dB", "clipped", "underflow", "kept energy"),
            [
                (
                    t.name,
                    t.source_dtype,
                    console.shape(t.shape),
                    console.decibel(t.snr_db),
                    str(t.clipped),
                    str(t.underflowed),
                    "given" if t.kept_energy is None else console.percent(t.kept_energy),
                )
                for t in report.tensors
            ],
        )
    console.skipped(report.skipped)
    console.folder(done.folder, dry_run=report.output is None, quiet=quiet)
    console.out()
    count = f"{len(report.tensors)} of {len(report.tensors) + len(report.skipped)} tensors"
    scale = "" if report.scale == "none" else f", scale by {report.scale}"
    if report.calibration != AMAX.text:
        scale += f" ({report.calibration})"
    if report.smooth is not None:
        scale += f", smoothed with alpha {report.smooth:g}"
    console.out(f"packed {count} as {report.type}{scale}, layout {report.layout}")
    console.ran_on(report.device, report.on_cpu)
    console.wrote(report.output, report.output_bytes, before=report.source_bytes)
    console.nothing_selected(not report.tensors, quiet=quiet)
    console.left_quantized(report.skipped, quiet=quiet)
