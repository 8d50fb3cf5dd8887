"""What is in a safetensors file, packed or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp24cli.bits import NUMBER_TYPES
from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.packedfile import PackedFile, is_packed, user_metadata
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.sharded import open_tensors
from sp24cli.ops.plan import is_sparse
from sp24cli.ops.report import document, scale_text
from sp24cli.ops.stream import Meter, Progress
from sp24cli.sparsity import GROUP


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as safetensors has it.

    ``sparsity`` is "yes" for a matrix that is 2:4 along K, "no" for one that is not, and ""
    where the question makes no sense (not a matrix of numbers, or K no multiple of 4).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    sparsity: str


@dataclass(frozen=True)
class PackedTensor:
    """A packed weight; ``bytes`` are those of all its parts, ``dense_bytes`` what it had been.
    ``permuted`` says that its columns are in another order than the original's, ``smooth`` is the
    alpha of their factors, None where they have none."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    type: str
    scale: str
    scale_shape: tuple[int, ...]
    pruned: str
    layout: str
    overflow: str
    calibration: str
    permuted: bool
    smooth: float | None
    bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class InspectReport:
    path: str
    bytes: int
    metadata: dict[str, str]
    packed: tuple[PackedTensor, ...]
    tensors: tuple[PlainTensor, ...]

    def to_json(self) -> dict[str, Any]:
        return document(self)


def inspect_file(path: Path, *, progress: Progress | None = None) -> InspectReport:
    """Read the headers of ``path``, and of its matrices as much as shows whether they are 2:4.

    Raises:
        BadInputError: a malformed file, or a packed one that this version does not know.
    """
    with open_tensors(path) as file:
        packed: tuple[PackedTensor, ...] = ()
        entries = file.header.entries
        if any(is_packed(part.metadata) for part in file.parts()):
            with PackedFile(path) as packed_file:
                packed = tuple(_packed_tensor(packed_file, name) for name in packed_file.packed)
                entries = packed_file.others
        meter = Meter(sum(entry.nbytes for entry in entries), progress)
        tensors = []
        for entry in entries:
            sparsity = _sparsity(file, entry)
            tensors.append(
                PlainTensor(entry.name, entry.dtype, entry.shape, entry.nbytes, sparsity)
            )
            meter.add(entry.nbytes)
        return InspectReport(
            path=str(path),
            bytes=file.header.file_bytes,
            metadata=user_metadata(file.metadata),
            packed=packed,
            tensors=tuple(tensors),
        )


def _packed_tensor(packed: PackedFile, name: str) -> PackedTensor:
    info = packed.packed[name]
    rows, columns = info.shape
    return PackedTensor(
        name=name,
        shape=info.shape,
        source_dtype=info.source_dtype,
        type=info.type,
        scale=scale_text(info.scale),
        scale_shape=info.scale.shape(rows, columns),
        pruned=info.pruned,
        layout=info.layout,
        overflow=info.overflow,
        calibration=info.calibration.text,
        permuted=info.permuted,
        smooth=info.smooth,
        bytes=sum(packed.file.entry(f"{name}_{part}").nbytes for part in info.parts()),
        dense_bytes=rows * columns * NUMBER_TYPES[info.source_dtype].dtype.itemsize,
    )


def _sparsity(file: SafetensorsFile, entry: TensorEntry) -> str:
    if len(entry.shape) != 2 or 0 in entry.shape or entry.dtype not in NUMBER_TYPES:
        return ""
    if entry.shape[1] % GROUP:
        return ""
    return "yes" if is_sparse(file, entry) else "no"
