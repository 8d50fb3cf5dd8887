"""What every operation does around its own work: choose, copy the rest, write or only count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sp24cli.bits import Array
from sp24cli.checkpoint import header
from sp24cli.checkpoint.header import TensorEntry, TensorSpec
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.packedfile import is_packed
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.writer import StreamingWriter
from sp24cli.errors import BadInputError
from sp24cli.ops.report import Skipped
from sp24cli.ops.stream import Meter, bands
from sp24cli.sparsity import find_violation

#: Bytes of a tensor that are copied at a time.
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Plan:
    """The tensors to work on and those to copy, both in the order of the file."""

    chosen: tuple[TensorEntry, ...]
    skipped: tuple[Skipped, ...]


def make_plan(file: SafetensorsFile, selection: Selection) -> Plan:
    """Decide on every tensor of a dense ``file``; `BadInputError` when it is a packed one."""
    if is_packed(file.metadata):
        raise BadInputError(f"{header.label(file.path)}: is packed already; see sp24 unpack")
    chosen: list[TensorEntry] = []
    skipped: list[Skipped] = []
    for entry in file.header.entries:
        reason = selection.decide(entry.name, entry)
        if reason is None:
            chosen.append(entry)
        else:
            skipped.append(Skipped(entry.name, entry.dtype, entry.shape, reason))
    return Plan(tuple(chosen), tuple(skipped))


class Sink(Protocol):
    """Where tensors go: a `StreamingWriter`, or nowhere in a dry run."""

    header: header.Header

    def write(self, name: str, data: Array | memoryview) -> None: ...


class _DryRun:
    """Takes what a writer takes and knows the size that the file would have."""

    def __init__(self, entries: Iterable[TensorSpec], metadata: Mapping[str, str]) -> None:
        specs = header.file_order(entries)
        where = "the output"
        prefix = header.build(specs, metadata, where)
        data = sum(header.tensor_bytes(dtype, shape, where) for _, dtype, shape in specs)
        self.header = header.decode(prefix[header.LENGTH_BYTES :], len(prefix) + data, where)

    def write(self, name: str, data: Array | memoryview) -> None:
        pass


def open_sink(
    output: Path | None,
    entries: Iterable[TensorSpec],
    metadata: Mapping[str, str],
    *,
    source: Path,
    overwrite: bool,
) -> AbstractContextManager[Sink]:
    """A writer of ``output``, or what stands for it when that is None."""
    if output is None:
        return nullcontext(_DryRun(entries, metadata))
    return StreamingWriter(output, entries, metadata, forbid=[source], overwrite=overwrite)


def copy_tensor(file: SafetensorsFile, name: str, sink: Sink, meter: Meter) -> None:
    """Pass a tensor of any dtype through, byte for byte."""
    with file.raw(name) as raw:
        for start in range(0, raw.nbytes, _COPY_BYTES):
            part = raw[start : start + _COPY_BYTES]
            sink.write(name, part)
            meter.add(part.nbytes)
    file.drop_cache(name)


def is_24(file: SafetensorsFile, entry: TensorEntry) -> bool:
    """Whether a matrix of a file, K a multiple of 4, is 2:4; reads no further than it must."""
    for start, stop in bands(*entry.shape):
        violation = find_violation(file.array(entry.name, slice(start, stop)))
        file.drop_cache(entry.name, slice(start, stop))
        if violation is not None:
            return False
    return True


def tensor_label(file: SafetensorsFile, name: str) -> str:
    """File and tensor, as every message about one begins."""
    return f"{header.label(file.path)}: tensor {header.quote(name)}"


def not_finite(where: str, dense: Array, first_row: int, place: tuple[int, int]) -> BadInputError:
    """The error of a NaN or infinity at ``place`` of ``dense``, which begins at ``first_row``."""
    value: Any = dense[place]
    row, column = place
    return BadInputError(f"{where}: {value} at row {first_row + row}, column {column}")
