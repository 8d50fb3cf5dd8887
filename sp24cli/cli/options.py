"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sp24cli.checkpoint.folder import is_checkpoint

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Path(click.Path):
    """A path as given; whether it can be read is for the reader to say, with the right exit code.
    An empty one, as a shell makes of a variable that is not set, is none: it would be the folder
    that one stands in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False, path_type=Path)


class _Output(_Path):
    """Where to write; not a folder's name (``NAME/``) where the input is a file: `Path` would make
    a file's of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        source = None if ctx is None else ctx.params.get("source")
        of_file = source is not None and os.path.isfile(source) and not is_checkpoint(source)
        if of_file and os.path.basename(value) in ("", ".") and not os.path.isdir(path):
            self.fail(f"{value!r} names a folder, but the input is a file", param, ctx)
        return path


def source_argument(metavar: str = "IN") -> Callable[[_Command], _Command]:
    # Before all options: -o depends on it.
    return click.argument("source", metavar=metavar, type=PATH, is_eager=True)


def seed_option(default: int, text: str) -> Callable[[_Command], _Command]:
    # NumPy takes no negative seed.
    return click.option(
        "--seed", type=click.IntRange(min=0), default=default, show_default=True, help=text
    )


def selection_options(command: _Command) -> _Command:
    for option in (
        click.option(
            "--experts",
            is_flag=True,
            help="Take stacked experts [E, out, in] too, each as a matrix: 3-D tensors whose name "
            "has 'expert', or that --include matches.",
        ),
        click.option(
            "--exclude",
            metavar="GLOB",
            multiple=True,
            help="Leave out the tensors whose name matches. Repeatable; wins over --include.",
        ),
        click.option(
            "--include",
            metavar="GLOB",
            multiple=True,
            help="Take only the tensors whose name matches, those that are skipped by name too. "
            "Repeatable.",
        ),
    ):
        command = option(command)
    return command


def output_options(command: _Command) -> _Command:
    for option in (
        click.option(
            "--resume",
            is_flag=True,
            help="Go on with the folder OUT where a run that was cut off has stopped.",
        ),
        click.option("--force", is_flag=True, help="Replace OUT when it exists."),
        click.option(
            "-o",
            "--output",
            metavar="OUT",
            type=_Output(readable=False, path_type=Path),
            help="The file to write, or the folder when the input is one. A file appears when it "
            "is complete, and never replaces an input.",
        ),
    ):
        command = option(command)
    return command


dequantize_option = click.option(
    "--dequantize-fp8",
    type=click.Choice(["bf16", "f16", "f32"]),
    help="Take weights in FP8 too, whose scales (weight_scale, weight_scale_inv, .scale) are in "
    "the file or checkpoint: code * scale as this dtype. Otherwise they are copied as they are.",
)
report_option = click.option(
    "--report",
    metavar="FILE",
    type=PATH,
    help="Write a report to FILE, a page for people (.html, .md) or a document (.json): the "
    "worst layers first, what the numbers mean, what stands out.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Read and report everything, write nothing."
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads to use (default: one a CPU, at most 8). The result is the same for any number.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress and no remarks.")


def require_output(output: Path | None, *, dry_run: bool = False) -> Path | None:
    """Where to write, None in a dry run; a usage error when it is missing."""
    if dry_run:
        return None
    if output is None:
        raise click.UsageError("-o OUT is missing")
    return output
