"""Turn a file with weights in another tool's format into a dense one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from sp24cli.bits import Array
from sp24cli.checkpoint.header import DTYPES, TensorEntry, label
from sp24cli.checkpoint.packedfile import is_packed, user_metadata
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.formats.dequantized import DequantizedFile, open_wanted, shard_paths
from sp24cli.formats.foreign import ForeignFile, has_bitmasks, holds_packed
from sp24cli.formats.origin import origins
from sp24cli.formats.scales import Siblings, is_fp8_weight, scales_of_siblings
from sp24cli.ops.plan import copy_tensor, open_sink
from sp24cli.ops.report import scale_text
from sp24cli.ops.stream import Meter, Progress, bands, default_workers, map_bands
from sp24cli.ops.unpack import DENSE_TYPES, UnpackedTensor, UnpackReport, check_dense_type
from sp24cli.optypes import BLOCK_ROWS
from sp24cli.sparsity import find_nonfinite


def is_foreign(source: Path) -> bool:
    """Whether `dequantize_file` has something to do in a file or checkpoint, `unpack_file` not.

    Raises:
        BadInputError: a malformed file.
    """
    paths = shard_paths(source)
    found = False
    for path in paths or (source,):
        with SafetensorsFile(path) as file:
            if is_packed(file.metadata):
                return False
            found |= has_bitmasks(file) or any(is_fp8_weight(e) for e in file.header.entries)
    return found


def dequantize_file(
    source: Path,
    output: Path,
    *,
    dtype: str | None = None,
    siblings: Sequence[Path] = (),
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> UnpackReport:
    """Write ``source`` to ``output`` with its bitmask or scaled FP8 weights dense.

    A value is code * scale rounded once to ``dtype`` ("bf16", "f16", "f32"; None: that of the
    original where the file says it, else bf16, or the dtype of unscaled values). FP8 need not be
    2:4; without a scale it is left alone. The scales go, all else stays as it is. ``siblings`` are
    the files of a checkpoint, where scales may lie.

    Raises:
        BadInputError: a malformed file, or a weight whose parts do not fit each other.
        UsageError: a ``dtype`` that there is not.
        Sp24Error: the output may not or cannot be written.
    """
    check_dense_type(dtype)
    workers = workers or default_workers()
    with ExitStack() as stack:
        file = stack.enter_context(SafetensorsFile(source))
        beside = stack.enter_context(Siblings(source, siblings))
        found: list[_Weight] = []
        if has_bitmasks(file):
            found += _bitmasks(ForeignFile(file, beside), dtype)
        taken = {part for weight in found for part in weight.parts}
        taken.update(scales_of_siblings(file, beside, holds_packed))
        known = origins(file)

        def wanted(entry: TensorEntry) -> str | None:
            if entry.name in taken:
                return None
            return _target(dtype, known[entry.name].source_dtype if entry.name in known else "BF16")

        shown = stack.enter_context(open_wanted(source, wanted, siblings, strict=False))
        found += _fp8_weights(shown)
        if not found and not siblings:
            raise BadInputError(f"{label(source)}: has no weight to be dequantized")
        taken.update(weight.report.name for weight in found)
        others = [entry for entry in shown.header.entries if entry.name not in taken]
        entries = [entry.spec for entry in others]
        entries += [(w.report.name, w.report.dtype, w.report.shape) for w in found]
        meter = Meter(sum(entry.nbytes for entry in file.header.entries), progress)
        metadata = {"format": "pt", **user_metadata(file.metadata)}
        with open_sink(output, entries, metadata, source=source, overwrite=overwrite) as sink:
            tensors, not_finite = [], []
            for weight in found:
                rows, columns = weight.report.shape
                ranges = bands(rows, columns, multiple=weight.row_step)
                all_finite, saturated = True, 0
                for made in map_bands(weight.checked_rows, ranges, columns, workers):
                    dense, finite, beyond = made
                    sink.write(weight.report.name, dense)
                    all_finite &= finite
                    saturated += beyond
                    for part in weight.parts:
                        file.drop_cache(part)
                tensors.append(replace(weight.report, saturated=saturated))
                if not all_finite:
                    not_finite.append(weight.report.name)
                meter.add(sum(file.entry(part).nbytes for part in weight.parts))
            for entry in others:
                copy_tensor(file, entry.name, sink, meter)
        return UnpackReport(
            source=str(source),
            output=str(output),
            tensors=tuple(tensors),
            copied=len(others),
            without_scale=tuple(entry.name for entry in others if is_fp8_weight(entry)),
            not_finite=tuple(not_finite),
            output_bytes=sink.header.file_bytes,
        )


@dataclass(frozen=True)
class _Weight:
    """A weight to be made dense: what is said of it, the tensors that it is, and what gives its
    rows from multiples of ``row_step`` on, with how many values in them are saturated."""

    report: UnpackedTensor
    parts: tuple[str, ...]
    row_step: int
    rows: Callable[[int, int], tuple[Array, int]]

    def checked_rows(self, start: int, stop: int) -> tuple[Array, bool, int]:
        """Rows, whether all of them are finite, and how many values are saturated."""
        dense, saturated = self.rows(start, stop)
        return dense, find_nonfinite(dense) is None, saturated


def _bitmasks(foreign: ForeignFile, dtype: str | None) -> Iterator[_Weight]:
    for name, info in foreign.packed.items():
        target = _target(dtype, info.source_dtype)

        def rows(
            start: int, stop: int, *, name: str = name, target: str = target
        ) -> tuple[Array, int]:
            part = foreign.rows(name, slice(start, stop))
            values = part.dequantize(DTYPES[target].numpy)
            return values, part.count_saturated(values)

        yield _Weight(
            UnpackedTensor(name, info.shape, info.type, scale_text(info.scale), target),
            foreign.parts(name),
            math.lcm(BLOCK_ROWS, info.scale.row_step),
            rows,
        )


def _fp8_weights(dense: DequantizedFile) -> Iterator[_Weight]:
    for name, (dtype, scale) in dense.dequantized.items():

        def rows(start: int, stop: int, *, name: str = name) -> tuple[Array, int]:
            return dense.array(name, slice(start, stop)), 0

        operand = dtype.removeprefix("F8_").lower()
        target = dense.entry(name).dtype
        yield _Weight(
            UnpackedTensor(name, scale.shape, operand, scale.text, target), (name,), 1, rows
        )


def _target(dtype: str | None, source: str) -> str:
    if dtype is not None:
        return DENSE_TYPES[dtype]
    return source if source in DENSE_TYPES.values() else "F32"
