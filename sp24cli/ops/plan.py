"""What every operation does around its own work: choose, copy the rest, write or only count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from sp24cli.bits import Array
from sp24cli.checkpoint import header
from sp24cli.checkpoint.header import TensorEntry, TensorSpec
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.packedfile import is_packed
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.stacks import expert_names, join
from sp24cli.checkpoint.writer import StreamingWriter
from sp24cli.errors import BadInputError
from sp24cli.ops.report import Skipped
from sp24cli.ops.stream import Meter, bands
from sp24cli.pruning import permute
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, find_crowded
from sp24cli.sparsity import GROUP

#: As an output: the operation is only to say what it would write, by `Announced`.
ANNOUNCE = Path("nothing is written")

#: Bytes of a tensor that are copied at a time.
_COPY_BYTES = 1 << 24


class Announced(Exception):
    """Ends an operation whose output is `ANNOUNCE`, before its work; ``header`` is that of the
    file it would write, ``scratch_bytes`` the room that it needs besides meanwhile."""

    def __init__(self, header: header.Header, scratch_bytes: int) -> None:
        super().__init__()
        self.header = header
        self.scratch_bytes = scratch_bytes


@dataclass(frozen=True)
class Plan:
    """The tensors to work on and those to copy, both in the order of the file."""

    chosen: tuple[TensorEntry, ...]
    skipped: tuple[Skipped, ...]


def make_plan(file: SafetensorsFile, selection: Selection, *, group: int = GROUP) -> Plan:
    """Decide on every tensor of a dense ``file``; `BadInputError` when it is a packed one.

    K must be a multiple of ``group``. Stacks that are taken are split into their experts, of
    which the file and the plan then speak.
    """
    if is_packed(file.metadata):
        raise BadInputError(f"{header.label(file.path)}: is packed already; see sp24 unpack")
    chosen: list[TensorEntry] = []
    skipped: list[Skipped] = []
    taken = [
        e.name
        for e in file.header.entries
        if len(e.shape) == 3 and selection.decide(e.name, e, group) is None
    ]
    file.split(taken)
    experts = {name for stack in taken for name in expert_names(stack, file.stacks[stack])}
    for entry in file.header.entries:
        if entry.name in experts:
            chosen.append(entry)
            continue
        reason = selection.decide(entry.name, entry, group)
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


class _StackSink:
    """Writes the experts of a stack one after the other into the stack's tensor."""

    def __init__(self, inner: AbstractContextManager[Sink], renamed: Mapping[str, str]) -> None:
        self._inner = inner
        self._renamed = renamed

    def __enter__(self) -> Sink:
        self._sink = self._inner.__enter__()
        self.header = self._sink.header
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def write(self, name: str, data: Array | memoryview) -> None:
        target = self._renamed.get(name)
        if target is not None and not isinstance(data, memoryview):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        self._sink.write(target or name, data)


def open_sink(
    output: Path | None,
    entries: Iterable[TensorSpec],
    metadata: Mapping[str, str],
    *,
    source: Path,
    beside: Iterable[Path] = (),
    overwrite: bool,
    stacks: Mapping[str, int] | None = None,
    scratch_bytes: int = 0,
) -> AbstractContextManager[Sink]:
    """A writer of ``output``, or what stands for it when that is None; see also `ANNOUNCE`.

    The output may be neither ``source`` nor one of the files ``beside`` it that are read.
    Of ``stacks``, the experts among the ``entries`` are written as one tensor again; they must
    come in order. ``scratch_bytes`` must be free beside the output.
    """
    if stacks:
        entries, renamed = join(entries, stacks)
        inner = open_sink(
            output,
            entries,
            metadata,
            source=source,
            beside=beside,
            overwrite=overwrite,
            scratch_bytes=scratch_bytes,
        )
        return _StackSink(inner, renamed)
    if output is ANNOUNCE:
        raise Announced(_DryRun(entries, metadata).header, scratch_bytes)
    if output is None:
        return nullcontext(_DryRun(entries, metadata))
    return StreamingWriter(
        output,
        entries,
        metadata,
        forbid=[source, *beside],
        overwrite=overwrite,
        scratch_bytes=scratch_bytes,
    )


def copy_tensor(file: SafetensorsFile, name: str, sink: Sink, meter: Meter) -> None:
    """Pass a tensor of any dtype through, byte for byte."""
    with file.raw(name) as raw:
        for start in range(0, raw.nbytes, _COPY_BYTES):
            part = raw[start : start + _COPY_BYTES]
            sink.write(name, part)
            meter.add(part.nbytes)
            file.drop_cache(name)


def is_sparse(
    file: SafetensorsFile,
    entry: TensorEntry,
    order: Array | None = None,
    pattern: Pattern = TWO_OF_FOUR,
) -> bool:
    """Whether a matrix of a file, K in whole groups, has ``pattern``; reads no further than it
    must.

    In the ``order`` of its columns, or that which the file itself has for it.
    """
    return has_pattern(file, entry, pattern, stored_order(file, entry) if order is None else order)


def has_pattern(
    file: SafetensorsFile, entry: TensorEntry, pattern: Pattern, order: Array | None
) -> bool:
    """Whether a matrix of a file has ``pattern`` with its columns in ``order``."""
    for start, stop in bands(*entry.shape):
        dense = file.array(entry.name, slice(start, stop))
        if order is not None:
            dense = permute.apply(dense, order)
        violation = find_crowded(dense, pattern)
        file.drop_cache(entry.name, slice(start, stop))
        if violation is not None:
            return False
    return True


def stored_order(file: SafetensorsFile, entry: TensorEntry) -> Array | None:
    """The order of the columns in which ``X.weight`` is 2:4, where the file has one for it:
    ``X.weight_perm``, int32 [K].

    Raises:
        BadInputError: it is no permutation of the columns.
    """
    found = file.header.by_name.get(f"{entry.name}_perm")
    if found is None or found.dtype != "I32":
        return None
    order = file.array(found.name)
    try:
        permute.check_order(order, entry.shape[1])
    except BadInputError as fault:
        raise BadInputError(f"{tensor_label(file, found.name)}: {fault}") from fault
    return order


def check_types(**options: tuple[object, type]) -> None:
    """`TypeError` unless each option, given as its value and its type, is of that type."""
    for name, (value, kind) in options.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}, not a {kind.__module__}.{kind.__qualname__}")


def tensor_label(file: SafetensorsFile, name: str) -> str:
    """File and tensor, as every message about one begins."""
    return f"{header.label(file.path)}: tensor {header.quote(name)}"


def not_finite(where: str, dense: Array, first_row: int, place: tuple[int, int]) -> BadInputError:
    """The error of a NaN or infinity at ``place`` of ``dense``, which begins at ``first_row``."""
    value: Any = dense[place]
    row, column = place
    return BadInputError(f"{where}: {value} at row {first_row + row}, column {column}")
