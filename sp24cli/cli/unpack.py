"""``sp24 unpack``."""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.cli import console
from sp24cli.cli.options import (
    json_option,
    output_options,
    quiet_option,
    require_output,
    source_argument,
    workers_option,
)
from sp24cli.ops import unpack_checkpoint


@click.command()
@source_argument("PACKED")
@output_options
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    help="Dtype of the dense weights (default: that of the original; f32 for one of f64, bf16 "
    "where a file of another tool does not say). A value beyond it becomes its largest, infinite "
    "where the weight was packed with --overflow nan or is FP8 of another tool; a warning says so.",
)
@click.option(
    "--codes",
    is_flag=True,
    help="Write the codes as they are (X.weight in F8_E4M3) with their X.weight_scale; sp24 "
    "convert makes a checkpoint that other tools load, with its config.json.",
)
@workers_option
@json_option
@quiet_option
def unpack(
    source: Path,
    output: Path | None,
    resume: bool,
    force: bool,
    dtype: str | None,
    codes: bool,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the weights of PACKED as dense tensors again, zeros where they were pruned.

    All other tensors are copied byte for byte. PACKED is a file or a whole checkpoint, as for
    sp24 prune.
    """
    if codes and dtype is not None:
        raise click.UsageError("--codes keeps the packed type; leave out --dtype")
    target = require_output(output)
    assert target is not None
    with console.progress("unpack", quiet=quiet) as progress:
        done = unpack_checkpoint(
            source,
            target,
            dtype=dtype,
            codes=codes,
            workers=workers,
            resume=resume,
            overwrite=force,
            progress=progress,
        )
    if as_json:
        console.out_json(done.to_json())
        return
    report = done.report
    console.table(
        ("tensor", "type", "scale", "shape", "dtype"),
        [(t.name, t.type, t.scale, console.shape(t.shape), t.dtype) for t in report.tensors],
    )
    console.folder(done.folder, quiet=quiet)
    console.out()
    console.out(f"unpacked {len(report.tensors)} tensors, copied {report.copied} as they are")
    console.wrote(report.output, report.output_bytes)
    if report.without_scale:
        count, first = len(report.without_scale), report.without_scale[0]
        console.log(
            f"sp24: note: {count} FP8 weights without a scale were left as they are, as {first}",
            quiet=quiet,
        )
    if report.not_finite:
        count, first = len(report.not_finite), report.not_finite[0]
        console.log(
            f"sp24: warning: {count} weights have infinite values or NaN now, as {first}: in what "
            "was packed, or beyond their dtype",
            quiet=quiet,
        )
    saturated = [tensor for tensor in report.tensors if tensor.saturated]
    if saturated:
        values = sum(tensor.saturated for tensor in saturated)
        console.log(
            f"sp24: warning: {len(saturated)} weights have values beyond their dtype, as "
            f"{saturated[0].name}: {values} are its largest now",
            quiet=quiet,
        )
