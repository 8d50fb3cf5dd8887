"""A file with FP8 weights, read as if they were dense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint.folder import is_checkpoint, open_checkpoint
from sp24cli.checkpoint.header import DTYPES, TensorEntry, label, quote
from sp24cli.checkpoint.names import DENSE_DTYPES, Selection
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError, check_known
from sp24cli.formats.scales import (
    CheckpointFiles,
    Siblings,
    WeightScale,
    candidates,
    dequantize,
    find_scale,
    is_fp8_weight,
    scales_of_siblings,
)
from sp24cli.sparsity import find_nonfinite

#: What to do where a value is beyond a dtype.
_WIDER = {"F16": "; take bf16 or f32", "BF16": "; take f32"}
#: The safetensors dtype that an FP8 weight is to be read as, None to leave it as it is.
Wanted = Callable[[TensorEntry], str | None]


class DequantizedFile(SafetensorsFile):
    """An open file whose wanted FP8 weights look dense.

    Their entries have the wanted dtype, their arrays are code * scale rounded once, and their
    scales are not there. All else is as in ``file``, which is closed with this. ``siblings`` are
    the other files of a checkpoint, where scales may lie whose weights are here, and weights
    whose scales are here. Unless ``strict``, a weight without a scale is left as it is, and what
    is beyond the wanted dtype is infinite.

    Raises:
        BadInputError: a wanted weight without a scale, with two, or with one that does not fit;
            by `array`, a product beyond the wanted dtype.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        wanted: Wanted,
        *,
        siblings: Siblings | None = None,
        strict: bool = True,
    ) -> None:
        self.path = file.path
        self._where = label(file.path)
        self._strict = strict
        self._plain = file
        self._scales: dict[str, tuple[WeightScale, npt.NDArray[Any]]] = {}
        self._hidden: set[str] = set()
        self._dense: dict[str, TensorEntry] = {}
        for entry in file.header.entries:
            dtype = wanted(entry) if is_fp8_weight(entry) else None
            if dtype is None:
                continue
            scale = find_scale(file, entry, siblings)
            if scale is not None:
                self._scales[entry.name] = scale, scale.values()
                self._dense[entry.name] = as_dense(entry, dtype)
                if scale.file is file:
                    self._hidden.add(scale.entry.name)
            elif strict:
                names = ", ".join(quote(name) for name in candidates(entry.name))
                raise BadInputError(
                    f"{label(file.path)}: tensor {quote(entry.name)}: is {entry.dtype} "
                    f"without a scale (looked for {names})"
                )

        def holds(home: SafetensorsFile, name: str) -> bool:
            entry = home.header.by_name.get(name)
            return entry is not None and is_fp8_weight(entry) and wanted(entry) is not None

        if siblings is not None:
            self._hidden.update(scales_of_siblings(file, siblings, holds))
        self._show()

    def _show(self) -> None:
        """Make the header from that of the file beneath."""
        self.stacks = self._plain.stacks
        shown = self._plain.header
        self.header = replace(
            shown,
            entries=tuple(
                self._dense.get(entry.name, entry)
                for entry in shown.entries
                if entry.name not in self._hidden
            ),
        )

    def parts(self) -> tuple[SafetensorsFile, ...]:
        return self._plain.parts()

    def split(self, names: Iterable[str]) -> None:
        self._plain.split(names)
        self._show()

    @property
    def dequantized(self) -> dict[str, tuple[str, WeightScale]]:
        """The stored dtype and the scale of the weights that look dense, in file order."""
        return {
            name: (self._plain.entry(name).dtype, scale)
            for name, (scale, _) in self._scales.items()
        }

    def array(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        if name not in self._scales:
            return self._plain.array(name, rows)
        scale, values = self._scales[name]
        codes = self._plain.array(name)
        start, stop, _ = (slice(None) if rows is None else rows).indices(codes.shape[0])
        dtype = DTYPES[self.entry(name).dtype].numpy
        dense = dequantize(codes[start:stop], values, scale.block, start, dtype)
        if self._strict:
            self._refuse_overflow(name, dense, start)
        return dense

    def _refuse_overflow(self, name: str, dense: npt.NDArray[Any], first_row: int) -> None:
        """`BadInputError` if the first value of ``dense`` that is not finite is the product of a
        code and a scale that are: it would be called infinite, as if the file had it so."""
        place = find_nonfinite(dense)
        if place is None:
            return
        row, column = first_row + place[0], place[1]
        code = float(self._plain.array(name)[row, column])
        if not math.isfinite(code):
            return
        scale, values = self._scales[name]
        factor = float(values[row // scale.block[0], column // scale.block[1]])
        dtype = self.entry(name).dtype
        raise BadInputError(
            f"{self._where}: tensor {quote(name)}: code {code} times scale {factor} at row {row}, "
            f"column {column} is beyond {dtype}{_WIDER.get(dtype, '')}"
        )

    def raw(self, name: str) -> memoryview:
        if name not in self._scales:
            return self._plain.raw(name)
        return self.array(name).view(np.uint8).reshape(-1).data

    def drop_cache(self, name: str, rows: slice | None = None) -> None:
        self._plain.drop_cache(name, rows)

    def close(self) -> None:
        self._plain.close()


def as_dense(entry: TensorEntry, dtype: str) -> TensorEntry:
    """The entry of a weight as it would be in ``dtype``: its size is right, its place is not."""
    width = DTYPES[dtype].bits // DTYPES[entry.dtype].bits
    return replace(entry, dtype=dtype, end=entry.begin + width * entry.nbytes)


@contextmanager
def open_dense(
    path: Path, selection: Selection, dtype: str | None, siblings: Sequence[Path] = ()
) -> Iterator[SafetensorsFile]:
    """The file ``path`` with the FP8 weights that ``selection`` takes read as ``dtype`` (a
    safetensors name); as it is when that is None.

    ``siblings`` are the files of its checkpoint, itself or not among them. Errors: see
    `DequantizedFile`, and `UsageError` for a ``dtype`` that there is not.
    """
    if dtype is None:
        with SafetensorsFile(path) as file:
            yield file
        return
    check_known("dequantize_fp8", dtype, DENSE_DTYPES)
    wanted_dtype = dtype

    def wanted(entry: TensorEntry) -> str | None:
        taken = selection.decide(entry.name, as_dense(entry, wanted_dtype)) is None
        return wanted_dtype if taken else None

    with open_wanted(path, wanted, siblings) as dense:
        yield dense


@contextmanager
def open_wanted(
    path: Path, wanted: Wanted, siblings: Sequence[Path] = (), *, strict: bool = True
) -> Iterator[DequantizedFile]:
    """The `DequantizedFile` of ``path``, ``siblings`` as for `open_dense`."""
    with SafetensorsFile(path) as file, Siblings(path, siblings) as others:
        yield DequantizedFile(file, wanted, siblings=others, strict=strict)


def input_files(*paths: Path | None) -> tuple[Path, ...]:
    """The files that these are, or that the checkpoints among them consist of."""
    return tuple(
        file for path in paths if path is not None for file in shard_paths(path) or (path,)
    )


def shard_paths(source: Path) -> CheckpointFiles:
    """The files of a checkpoint, to be the ``siblings`` of each; none for a single file."""
    if not is_checkpoint(source):
        return CheckpointFiles()
    return CheckpointFiles(shard.path for shard in open_checkpoint(source).shards)
