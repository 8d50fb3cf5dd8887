"""``sp24 convert``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sp24cli.cli import console
from sp24cli.cli.options import (
    PATH,
    dry_run_option,
    json_option,
    output_options,
    quiet_option,
    require_output,
    source_argument,
    workers_option,
)
from sp24cli.cli.sidefile import check_side_file, write_side_file
from sp24cli.formats.foreign import FORMATS, SP24
from sp24cli.ops.checkpoint import convert_checkpoint
from sp24cli.ops.convert import ConvertReport
from sp24cli.ops.shards import CONFIG_NAME, Done
from sp24cli.packed import Layout


@click.command()
@source_argument()
@output_options
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    required=True,
    help="What the packed weights become: sp24's own format, dense FP8 with scales that vLLM "
    "loads, or the bitmask of compressed-tensors up to 0.14.",
)
@click.option(
    "--layout",
    type=click.Choice(["row", "sm90"]),
    help="Layout of the sp24 format: rows of values and metadata, or the block images that the "
    "kernels read (default: row).",
)
@click.option(
    "--config",
    metavar="FILE",
    type=PATH,
    help="Write the quantization_config that the model's config.json needs to FILE, as a JSON "
    "object to merge into it.",
)
@dry_run_option
@workers_option
@json_option
@quiet_option
def convert(
    source: Path,
    output: Path | None,
    resume: bool,
    force: bool,
    format_name: str,
    layout: Layout | None,
    config: Path | None,
    dry_run: bool,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn the packed weights of IN into another format, exactly.

    IN is a packed file, a file with sparse-24-bitmask weights, or one with FP8 weights that are
    2:4 (weight_scale, weight_scale_inv or .scale beside them); which, is found out. No value is
    rounded again, all other tensors are copied byte for byte. Prints the quantization_config
    that other tools look for in config.json; in a checkpoint folder it is written there.
    """
    if format_name == SP24 and config is not None:
        raise click.UsageError("--config goes with the formats of other tools only")
    if format_name != SP24 and layout is not None:
        raise click.UsageError("--layout goes with --format sp24 only")
    target = require_output(output, dry_run=dry_run)
    if config is not None and not dry_run:
        check_side_file(config, [source], target, overwrite=force)
    with console.progress("convert", quiet=quiet) as progress:
        done = convert_checkpoint(
            source,
            target,
            format=format_name,
            layout=layout or "row",
            workers=workers,
            resume=resume,
            overwrite=force,
            progress=progress,
        )
    report = done.report
    fragment = json.dumps({"quantization_config": report.quantization_config}, indent=2)
    if config is not None and not dry_run:
        write_side_file(config, fragment + "\n")
    if as_json:
        console.out_json(done.to_json())
        return
    _print(done, config, fragment, quiet=quiet)


def _is_written(done: Done[ConvertReport], config: Path | None) -> bool:
    """Whether the quantization_config lies in a file now."""
    is_carried = done.folder is not None and CONFIG_NAME in done.folder.carried
    return done.report.output is not None and (config is not None or is_carried)


def _print(done: Done[ConvertReport], config: Path | None, fragment: str, *, quiet: bool) -> None:
    report = done.report
    console.table(
        ("tensor", "type", "scale", "shape"),
        [(t.name, t.type, t.scale, console.shape(t.shape)) for t in report.tensors],
    )
    console.folder(done.folder, quiet=quiet)
    console.out()
    if report.quantization_config is not None and not _is_written(done, config):
        console.out("config.json needs this:")
        console.out(fragment)
    elif config is not None and report.output is not None:
        console.out(f"wrote {console.printable(str(config))} (merge it into config.json)")
    console.out(
        f"converted {len(report.tensors)} tensors from {report.source_format} to "
        f"{report.format}, copied {report.copied} as they are"
    )
    console.wrote(report.output, report.output_bytes, before=report.source_bytes)
