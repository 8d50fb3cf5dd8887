"""``sp24 quantize``."""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.checkpoint.names import Selection
from sp24cli.cli import console
from sp24cli.cli.options import (
    dry_run_option,
    json_option,
    output_options,
    quiet_option,
    require_output,
    selection_options,
    source_argument,
    workers_option,
)
from sp24cli.errors import BadInputError
from sp24cli.fp8 import Overflow
from sp24cli.ops import QuantizeReport, quantize_file
from sp24cli.optypes import OPERAND_TYPES, OperandType
from sp24cli.packed import Layout
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
    type=click.Choice(["tensor", "vector", "block"]),
    help="One scale a tensor, a row, or a block. Needed for e4m3; f16 and bf16 have none.",
)
@click.option(
    "--block",
    metavar="RxC",
    help="The size of a block, rows x columns (default: 128x128). Only with --scale block.",
)
@click.option(
    "--overflow",
    type=click.Choice(["satfinite", "nan"]),
    default="satfinite",
    show_default=True,
    help="What a value beyond the type's range becomes: the largest finite value, or NaN "
    "(infinity in f16 and bf16).",
)
@click.option(
    "--layout",
    type=click.Choice(["row", "sm90"]),
    default="row",
    show_default=True,
    help="Rows of values and metadata, or the block images that the kernels read.",
)
@click.option("--prune", is_flag=True, help="Prune by magnitude what is not 2:4 yet.")
@selection_options
@dry_run_option
@workers_option
@json_option
@quiet_option
def quantize(
    source: Path,
    output: Path | None,
    force: bool,
    type_name: str,
    scale: str | None,
    block: str | None,
    overflow: Overflow,
    layout: Layout,
    prune: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    dry_run: bool,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Pack the 2:4 weights of IN: kept values in --type, their indices, and scales.

    A weight that is not 2:4 is an error unless --prune is given. All other tensors are copied
    byte for byte. Prints, by tensor, the signal-to-noise ratio of the kept values and how many
    of them were clipped or became zero.
    """
    optype = OPERAND_TYPES[type_name]
    spec = _scale_spec(optype, scale, block)
    target = require_output(output, dry_run=dry_run)
    with console.progress("quantize", quiet=quiet) as progress:
        report = quantize_file(
            source,
            target,
            optype=optype,
            spec=spec,
            overflow=overflow,
            layout=layout,
            prune=prune,
            selection=Selection(include, exclude),
            workers=workers,
            overwrite=force,
            progress=progress,
        )
    if as_json:
        console.out_json(report.to_json())
        return
    _print(report, quiet=quiet)


def _scale_spec(optype: OperandType, kind: str | None, block: str | None) -> ScaleSpec:
    if not optype.scaled:
        if kind is not None or block is not None:
            raise click.UsageError(f"--type {optype.name} has no scale; leave out --scale")
        return ScaleSpec.parse("none", None)
    if kind is None:
        raise click.UsageError(f"--type {optype.name} needs --scale tensor, vector or block")
    if kind != "block" and block is not None:
        raise click.UsageError("--block goes with --scale block only")
    try:
        return ScaleSpec.parse(kind, (block or "128x128") if kind == "block" else None)
    except BadInputError as fault:
        raise click.UsageError(f"--block {block}: {fault}") from fault


def _print(report: QuantizeReport, *, quiet: bool) -> None:
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
    console.out()
    count = f"{len(report.tensors)} of {len(report.tensors) + len(report.skipped)} tensors"
    scale = "" if report.scale == "none" else f", scale by {report.scale}"
    console.out(f"packed {count} as {report.type}{scale}, layout {report.layout}")
    console.wrote(report.output, report.output_bytes, before=report.source_bytes)
    console.nothing_selected(not report.tensors, quiet=quiet)
