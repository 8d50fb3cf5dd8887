"""``sp24 prune``."""

from __future__ import annotations

from pathlib import Path

import click

from sp24cli.checkpoint.names import Selection
from sp24cli.cli import console
from sp24cli.cli.choosing import (
    calibration_options,
    make_choice,
    method_option,
    norms_option,
    permute_option,
)
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
from sp24cli.ops import Done, PruneReport, prune_checkpoint
from sp24cli.ops.choose import Method
from sp24cli.ops.engine import DeviceChoice
from sp24cli.ops.unpack import DENSE_TYPES
from sp24cli.pruning.pattern import TWO_OF_FOUR


@click.command()
@source_argument()
@output_options
@method_option("magnitude", "wanda", "sparsegpt")
@norms_option
@calibration_options
@permute_option
@selection_options
@dequantize_option
@report_option
@dry_run_option
@device_option
@workers_option
@json_option
@quiet_option
def prune(
    source: Path,
    output: Path | None,
    resume: bool,
    force: bool,
    method: Method,
    activation_norms: Path | None,
    hessians: Path | None,
    damping: float | None,
    block_size: int | None,
    pattern: str,
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
    """Prune the 2-D weights of IN to 2:4 along K, by magnitude unless --method says else.

    Of every four neighbours in a row the two of largest magnitude stay (ties keep the lower
    index); dtypes stay, all other tensors are copied byte for byte. Prints the share of each
    tensor's energy (sum of squares) that is kept; for wanda and sparsegpt also the share of the
    output's energy that is lost, by norms or Hessian. A weight that is 2:4 already stays as it is.

    IN is a safetensors file or a whole checkpoint, a folder of shards with their index. OUT is
    then a new folder: a shard appears when it is complete, the index at the end.
    """
    choice = make_choice(
        method,
        norms=activation_norms,
        hessians=hessians,
        damping=damping,
        block_size=block_size,
        permute=permute,
        pattern=pattern,
    )
    target = require_output(output, dry_run=dry_run)
    check_report(report, [source, choice.calibration], target, overwrite=force)
    engine = open_engine(device, choice)
    with console.progress("prune", quiet=quiet) as progress:
        done = prune_checkpoint(
            source,
            target,
            choice=choice,
            selection=Selection(include, exclude, experts),
            dequantize_fp8=DENSE_TYPES[dequantize_fp8] if dequantize_fp8 else None,
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


def _print(done: Done[PruneReport], *, quiet: bool) -> None:
    report = done.report
    if report.tensors:
        columns = {
            "tensor": [t.name for t in report.tensors],
            "dtype": [t.dtype for t in report.tensors],
            "shape": [console.shape(t.shape) for t in report.tensors],
            "kept energy": [console.percent(t.kept_energy) for t in report.tensors],
        }
        if report.method != "magnitude":
            columns["output lost"] = [
                "given" if t.weighted_error is None else console.percent(t.weighted_error)
                for t in report.tensors
            ]
        if any(t.permuted for t in report.tensors):
            columns["order"] = ["permuted" if t.permuted else "" for t in report.tensors]
        console.table(tuple(columns), list(zip(*columns.values(), strict=True)))
    console.skipped(report.skipped)
    console.folder(done.folder, dry_run=report.output is None, quiet=quiet)
    console.out()
    count = f"{len(report.tensors)} of {len(report.tensors) + len(report.skipped)} tensors"
    how = "" if report.pattern == str(TWO_OF_FOUR) else f" to {report.pattern}"
    how += "" if report.method == "magnitude" else f" by {report.method}"
    console.out(f"pruned {count}{how}, kept energy {console.percent(report.kept_energy)}")
    console.ran_on(report.device, report.on_cpu)
    console.wrote(report.output, report.output_bytes)
    console.nothing_selected(not report.tensors, quiet=quiet)
    console.left_quantized(report.skipped, quiet=quiet)
