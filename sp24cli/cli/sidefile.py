"""A file that a command writes beside its output: a report, a piece of configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from sp24cli.checkpoint.folder import is_checkpoint
from sp24cli.checkpoint.header import label
from sp24cli.checkpoint.writer import check_output
from sp24cli.errors import Sp24Error
from sp24cli.ops import Done, PruneReport, QuantizeReport
from sp24cli.ops.journal import replace_file
from sp24cli.reporting import as_html, as_markdown, summarize

REPORT_FORMATS = (".html", ".md", ".json")


def check_side_file(
    path: Path, inputs: Sequence[Path | None], target: Path | None, *, overwrite: bool
) -> None:
    """`Sp24Error`, before any work, unless ``path`` may be written beside ``target``: it is none
    of the ``inputs``, nor replaces a file in the folder of one that is a checkpoint; a usage error
    for one in the folder ``target``."""
    given = [each for each in inputs if each is not None]
    place = Path(os.path.realpath(path.parent))
    if target is not None and _lies_in(path, place, Path(os.path.realpath(target))):
        raise click.UsageError(f"{label(path)}: lies in the output folder; choose another file")
    check_output(path, forbid=given, overwrite=overwrite)
    if not os.access(place, os.W_OK):
        # At the end of the run, where it is written, all work on it would be lost.
        raise Sp24Error(f"{label(path)}: the folder {label(place)} may not be written")
    for source in given:
        if not (is_checkpoint(source) and os.path.lexists(path)):
            continue
        folder = Path(os.path.realpath(source if source.is_dir() else source.parent))
        if folder in (place, *place.parents):
            raise Sp24Error(f"{label(path)}: is a file of the input; choose another file")
    if target is not None and os.path.realpath(path) == os.path.realpath(target):
        raise Sp24Error(f"{label(path)}: is the output; choose another file")


def _lies_in(path: Path, place: Path, folder: Path) -> bool:
    """Whether ``path``, in the folder ``place``, or what it links to is a file below ``folder``."""
    # Written last, it would replace a file that the run itself has put there.
    return folder in (place, *place.parents, *Path(os.path.realpath(path)).parents)


def write_side_file(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all."""
    try:
        replace_file(path, [text.encode("utf-8", "backslashreplace")])
    except OSError as error:
        raise Sp24Error(f"{path}: cannot be written: {error.strerror}") from error


def check_report(
    path: Path | None, inputs: Sequence[Path | None], target: Path | None, *, overwrite: bool
) -> None:
    """As `check_side_file`; a usage error for a file whose name says no known format."""
    if path is None:
        return
    if path.suffix.lower() not in REPORT_FORMATS:
        raise click.UsageError(f"--report {path}: its name must end in {', '.join(REPORT_FORMATS)}")
    check_side_file(path, inputs, target, overwrite=overwrite)


def write_report(path: Path | None, done: Done[PruneReport] | Done[QuantizeReport]) -> None:
    """Write the report of a run in the format that the name of ``path`` says."""
    if path is None:
        return
    summary = summarize(done.report)
    kind = path.suffix.lower()
    if kind == ".html":
        text = as_html(summary)
    elif kind == ".md":
        text = as_markdown(summary)
    else:
        document = {**done.to_json(), "verdict": summary.verdict, "worst": summary.to_json()}
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_side_file(path, text)
