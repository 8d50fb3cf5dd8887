"""``sp24 prune``."""

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
from sp24cli.ops import PruneReport, prune_file


@click.command()
@source_argument()
@output_options
@selection_options
@dry_run_option
@workers_option
@json_option
@quiet_option
def prune(
    source: Path,
    output: Path | None,
    force: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    dry_run: bool,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prune the 2-D weights of IN to 2:4 along K by magnitude.

    Of every four neighbours in a row the two of largest magnitude stay (ties keep the lower
    index); dtypes stay, all other tensors are copied byte for byte. Prints the share of each
    tensor's energy (sum of squares) that is kept.
    """
    target = require_output(output, dry_run=dry_run)
    with console.progress("prune", quiet=quiet) as progress:
        report = prune_file(
            source,
            target,
            selection=Selection(include, exclude),
            workers=workers,
            overwrite=force,
            progress=progress,
        )
    if as_json:
        console.out_json(report.to_json())
        return
    _print(report, quiet=quiet)


def _print(report: PruneReport, *, quiet: bool) -> None:
    if report.tensors:
        console.table(
            ("tensor", "dtype", "shape", "kept energy"),
            [
                (t.name, t.dtype, console.shape(t.shape), console.percent(t.kept_energy))
                for t in report.tensors
            ],
        )
    console.skipped(report.skipped)
    console.out()
    count = f"{len(report.tensors)} of {len(report.tensors) + len(report.skipped)} tensors"
    console.out(f"pruned {count}, kept energy {console.percent(report.kept_energy)}")
    console.wrote(report.output, report.output_bytes)
    console.nothing_selected(not report.tensors, quiet=quiet)
