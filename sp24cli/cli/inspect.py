"""``sp24 inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.cli import console
from sp24cli.cli.options import json_option, quiet_option, source_argument
from sp24cli.ops import InspectReport, inspect_file


@click.command()
@source_argument("FILE")
@json_option
@quiet_option
def inspect(source: Path, as_json: bool, quiet: bool) -> None:
    """Show what is in FILE: dtypes, shapes, sizes, which weights are 2:4, what is packed how.

    FILE is a safetensors file or a whole checkpoint, a folder of shards with their index.
    """
    with console.progress("inspect", quiet=quiet) as progress:
        report = inspect_file(source, progress=progress)
    if as_json:
        console.out_json(report.to_json())
        return
    _print(report)


def _print(report: InspectReport) -> None:
    if report.packed:
        console.table(
            ("packed tensor", "shape", "source", "type", "scale", "pruned", "layout", "size"),
            [
                (
                    p.name,
                    console.shape(p.shape),
                    p.source_dtype,
                    p.type,
                    p.scale,
                    p.pruned,
                    p.layout,
                    console.size(p.bytes),
                )
                for p in report.packed
            ],
        )
        console.out()
    if report.tensors:
        console.table(
            ("tensor", "dtype", "shape", "size", "2:4"),
            [
                (t.name, t.dtype, console.shape(t.shape), console.size(t.bytes), t.sparsity)
                for t in report.tensors
            ],
        )
        console.out()
    for key, value in report.metadata.items():
        console.out(f"{console.printable(key)}: {console.printable(value)}")
    packed = f"{len(report.packed)} packed, " if report.packed else ""
    sparse = sum(t.sparsity == "yes" for t in report.tensors)
    console.out(
        f"{packed}{len(report.tensors)} plain tensors, {sparse} of them 2:4; "
        f"{console.size(report.bytes)}"
    )
