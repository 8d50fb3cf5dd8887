"""Turn a packed file into a dense one again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sp24cli.bits import Array
from sp24cli.checkpoint.header import DTYPES, TensorSpec
from sp24cli.checkpoint.packedfile import PackedFile
from sp24cli.errors import BadInputError, check_known
from sp24cli.ops.plan import Sink, copy_tensor, open_sink, tensor_label
from sp24cli.ops.report import document, scale_text
from sp24cli.ops.stream import Meter, Progress, bands, default_workers, map_bands
from sp24cli.packed import check_band, check_parts
from sp24cli.sparsity import find_nonfinite

#: What a dense weight can become, by the name a user gives: safetensors dtypes.
DENSE_TYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


@dataclass(frozen=True)
class UnpackedTensor:
    """One weight: how it was packed, and the dtype it has now. ``saturated`` counts the values that
    are beyond it and became its largest."""

    name: str
    shape: tuple[int, ...]
    type: str
    scale: str
    dtype: str
    saturated: int = 0


@dataclass(frozen=True)
class UnpackReport:
    """What `unpack_file` did; ``copied`` counts the tensors that were passed through,
    ``without_scale`` names those of them that are weights in FP8. ``not_finite`` names the weights
    that have infinite values or NaN now: from what was packed, or beyond their dtype."""

    source: str
    output: str
    tensors: tuple[UnpackedTensor, ...]
    copied: int
    without_scale: tuple[str, ...]
    not_finite: tuple[str, ...]
    output_bytes: int

    def to_json(self) -> dict[str, Any]:
        return document(self)


def unpack_file(
    source: Path,
    output: Path,
    *,
    dtype: str | None = None,
    codes: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> UnpackReport:
    """Write the packed ``source`` to ``output`` with dense weights, all else as it is.

    A value is code * scale rounded once to ``dtype`` ("bf16", "f16", "f32"; None: what the
    original was, f32 for f64); past its end it goes as the weight's ``overflow`` says. With
    ``codes`` the weight is the codes themselves, and ``X.weight_scale`` stays beside ``X.weight``.
    Permuted columns go back to their places; ``X.weight_perm`` stays beside the weight, which is
    2:4 in that order. The factors of smoothed columns are divided by (`PackedMatrix.restore`); of
    ``codes``, ``X.weight_smooth`` stays beside.

    Raises:
        BadInputError: not a packed file, or one that this version does not know, or a weight whose
            parts cannot be right (`packed.check_structure`), by name and place.
        UsageError: a ``dtype`` that there is not.
        Sp24Error: the output may not or cannot be written.
    """
    check_dense_type(dtype)
    workers = workers or default_workers()
    with PackedFile(source) as packed:
        file = packed.file
        entries: list[TensorSpec] = [entry.spec for entry in packed.others]
        tensors = []
        for name, info in packed.packed.items():
            target = _target_dtype(info.source_dtype, info.optype.safetensors, dtype, codes)
            entries.append((name, target, info.shape))
            tensors.append(
                UnpackedTensor(name, info.shape, info.type, scale_text(info.scale), target)
            )
            if codes and info.optype.scaled:
                entries.append(file.entry(f"{name}_scale").spec)
            if codes and info.smooth is not None:
                entries.append(file.entry(f"{name}_smooth").spec)
            if info.permuted:
                if codes and info.scale.block is not None:
                    raise BadInputError(
                        f"{tensor_label(file, name)}: is permuted: in the order of the original "
                        "no block scales go with its codes"
                    )
                entries.append(file.entry(f"{name}_perm").spec)
        meter = Meter(sum(entry.nbytes for entry in file.header.entries), progress)
        with open_sink(
            output,
            entries,
            packed.metadata,
            source=source,
            overwrite=overwrite,
            stacks=packed.stacks,
        ) as sink:
            done, not_finite = [], []
            for tensor in tensors:
                if codes and packed.packed[tensor.name].optype.scaled:
                    copy_tensor(file, f"{tensor.name}_scale", sink, meter)
                if codes and packed.packed[tensor.name].smooth is not None:
                    copy_tensor(file, f"{tensor.name}_smooth", sink, meter)
                if packed.packed[tensor.name].permuted:
                    copy_tensor(file, f"{tensor.name}_perm", sink, meter)
                all_finite, saturated = _unpack_tensor(packed, tensor, sink, codes, workers)
                done.append(replace(tensor, saturated=saturated))
                if not all_finite:
                    not_finite.append(tensor.name)
                meter.add(
                    sum(
                        file.entry(f"{tensor.name}_{part}").nbytes
                        for part in packed.packed[tensor.name].parts()
                        if not (codes and part in ("scale", "smooth")) and part != "perm"
                    )
                )
            for entry in packed.others:
                copy_tensor(file, entry.name, sink, meter)
        return UnpackReport(
            source=str(source),
            output=str(output),
            tensors=tuple(done),
            copied=len(packed.others),
            without_scale=(),
            not_finite=tuple(not_finite),
            output_bytes=sink.header.file_bytes,
        )


def check_dense_type(dtype: str | None) -> None:
    """`UsageError` unless ``dtype`` is None or one of `DENSE_TYPES`."""
    if dtype is not None:
        check_known("dtype", dtype, DENSE_TYPES)


def _target_dtype(source: str, operand: str, dtype: str | None, codes: bool) -> str:
    if codes:
        return operand
    if dtype is not None:
        return DENSE_TYPES[dtype]
    return source if source in DENSE_TYPES.values() else "F32"


def _unpack_tensor(
    packed: PackedFile, tensor: UnpackedTensor, sink: Sink, codes: bool, workers: int
) -> tuple[bool, int]:
    """Whether all that was written is finite, and how many values were beyond the dtype; codes are
    what they are."""
    matrix = packed.load(tensor.name)

    def refuse(fault: str | None) -> None:
        if fault is not None:
            raise BadInputError(f"{matrix.where}: {fault}")

    refuse(check_parts(matrix))
    rows, columns = matrix.shape
    dtype = DTYPES[tensor.dtype].numpy

    def unpack(start: int, stop: int) -> tuple[Array, bool, int]:
        refuse(check_band(matrix, slice(start, stop)))
        band = matrix.rows(slice(start, stop))
        if codes:
            return band.original_order(band.codes()), True, 0
        dense = band.restore(dtype)
        return dense, find_nonfinite(dense) is None, band.count_saturated(dense)

    ranges = bands(rows, columns, multiple=matrix.row_step)
    all_finite, saturated = True, 0
    for dense, finite, beyond in map_bands(unpack, ranges, columns, workers):
        sink.write(tensor.name, dense)
        all_finite &= finite
        saturated += beyond
        packed.drop_cache(tensor.name)
    return all_finite, saturated
