"""How results, progress and errors reach the user: stdout for results, stderr for the rest."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from sp24cli.errors import Sp24Error

if TYPE_CHECKING:
    # The group imports this module for every command: nothing heavy may hang on it.
    from sp24cli.ops.report import Skipped
    from sp24cli.ops.shards import FolderReport
    from sp24cli.ops.stream import Progress


def printable(text: str) -> str:
    """``text`` on one line: names come from files, and may hold line ends or escape codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log(message: str, *, quiet: bool = False) -> None:
    """A line about the run, on stderr."""
    if not quiet:
        click.echo(printable(message), err=True)


def error(message: str) -> None:
    """The one line of a known error."""
    click.echo(f"sp24: error: {printable(message)}", err=True)


def out(message: str = "") -> None:
    """A line of the result; `Sp24Error` where it cannot be written.

    But that a pipe's reader has left: that is click's to end without a word.
    """
    try:
        click.echo(message)
    except OSError as fault:
        if fault.errno == errno.EPIPE:
            raise
        raise Sp24Error(f"standard output: {fault.strerror}") from fault


def out_json(document: Any) -> None:
    """One JSON document, ASCII only, so that every terminal and pipe can carry it."""
    out(json.dumps(document, indent=2, allow_nan=False, default=str))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print aligned columns: the first ``left`` to the left, the others to the right."""
    cells = [tuple(printable(c) for c in row) for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    for row in cells:
        parts = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        out("  ".join(parts).rstrip())


def size(count: int) -> str:
    """Bytes in decimal units, as file managers count."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def shape(dims: Sequence[int]) -> str:
    return "x".join(str(d) for d in dims) if dims else "scalar"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def decibel(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f}"


def skipped(tensors: Sequence[Skipped]) -> None:
    """The tensors that were copied as they are: a line for each reason (--json names all)."""
    by_reason: dict[str, list[str]] = {}
    for tensor in tensors:
        by_reason.setdefault(tensor.reason, []).append(tensor.name)
    if by_reason:
        out()
        table(
            ("copied as it is", "because"),
            [
                (names[0] + (f" and {len(names) - 1} more" if names[1:] else ""), reason)
                for reason, names in by_reason.items()
            ],
            left=2,
        )


def folder(report: FolderReport | None, *, dry_run: bool = False, quiet: bool = False) -> None:
    """The shards of a checkpoint and its other files; nothing for a single file."""
    if report is None:
        return
    out()
    table(
        ("shard", "from", "to"),
        [(s.name, size(s.source_bytes), size(s.output_bytes)) for s in report.shards],
    )
    if report.carried:
        out(f"carried over: {printable(', '.join(report.carried))}")
    for item in report.left_out:
        out(f"left out: {printable(item.name)} ({item.reason})")
    if dry_run:
        out(f"room needed on the disk: {size(report.disk_bytes)}")
    if report.resumed:
        done = f"{report.resumed} of {len(report.shards)} shards"
        log(f"sp24: {done} were finished by an earlier run", quiet=quiet)


def wrote(path: str | None, count: int, *, before: int | None = None) -> None:
    """The last line of a command that writes; no path says that it was a dry run."""
    ratio = f", from {size(before)}" if before is not None else ""
    if path is None:
        out(f"dry run: nothing written ({size(count)} needed{ratio})")
    else:
        out(f"wrote {printable(path)} ({size(count)}{ratio})")


def ran_on(device: str, on_cpu: Sequence[str]) -> None:
    """Where the work was done, when it was not the CPU."""
    if device != "cpu":
        but = f", but {len(on_cpu)} tensors on the CPU" if on_cpu else ""
        out(f"ran on {device}{but}")


def nothing_selected(nothing: bool, *, quiet: bool) -> None:
    if nothing:
        log("sp24: warning: no tensor was selected; all were copied as they are", quiet=quiet)


def left_quantized(tensors: Sequence[Skipped], *, quiet: bool) -> None:
    """A remark where weights were left alone that --dequantize-fp8 would take."""
    # Not scales in E8M0, nor the FNUZ types, which nothing here reads.
    taken = [f"already quantized ({dtype})" for dtype in ("F8_E4M3", "F8_E5M2")]
    count = sum(t.reason in taken for t in tensors)
    if count:
        log(
            f"sp24: note: {count} FP8 tensors were left as they are; --dequantize-fp8 bf16 takes "
            "them, if each has its scale",
            quiet=quiet,
        )


@contextmanager
def progress(label: str, *, quiet: bool) -> Iterator[Progress | None]:
    """A bar over bytes on stderr, or None when that is not a terminal, or closed."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    with tqdm(desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
