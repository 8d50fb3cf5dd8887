"""Packed weights wherever they lie: in our own files, as bitmasks, as dense FP8 that is 2:4.

`open_packed` gives any of them as `PackedWeights`, so that whoever converts need not know what
it reads. What our files know and others do not (the source's dtype, how it was pruned) travels
in ``__metadata__`` under `ORIGIN_KEY`, which other tools pass over; without it the plain
assumption is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from sp24cli import metadata, scaling
from sp24cli.bits import Array
from sp24cli.checkpoint.header import TensorEntry, label, quote
from sp24cli.checkpoint.names import WEIGHT_SUFFIX
from sp24cli.checkpoint.packedfile import PackedFile, is_packed, user_metadata
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.closing import Closing
from sp24cli.errors import BadInputError
from sp24cli.formats import bitmask
from sp24cli.formats.origin import origins
from sp24cli.formats.scales import (
    Siblings,
    WeightScale,
    find_scale,
    is_fp8_weight,
    scales_of_siblings,
)
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import PackedMatrix, PackInfo, check_band, check_parts
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import GROUP, find_nonfinite, find_violation, keep_indices

#: The formats by the names that users give them.
SP24 = "sp24"
BITMASK = "sparse-24-bitmask"
FP8 = "compressed-tensors-fp8"
FORMATS = (SP24, FP8, BITMASK)

#: The operand types that these formats have, by dtype.
_OPERANDS = {OPERAND_TYPES[name].safetensors: name for name in ("e4m3", "f16", "bf16")}
_E4M3 = "F8_E4M3"
_MASK_SUFFIX = f".{bitmask.PARTS[-1]}"


class PackedWeights(Closing):
    """The packed weights of an open file and all else in it.

    Attributes:
        format: the one of `FORMATS` that it is in.
        file: the safetensors file beneath.
        packed: the description of each packed weight, by its name.
        others: the tensors that are no part of one, in the order of their bytes.
        metadata: the user's ``__metadata__``.
        stacks: the number of experts of each stack that was packed by expert.
    """

    format: str
    file: SafetensorsFile
    packed: dict[str, PackInfo]
    others: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    stacks: dict[str, int]

    def close(self) -> None:
        self.file.close()

    def rows(self, name: str, rows: slice) -> PackedMatrix:
        """Some rows of a weight with their scales, cut at multiples of its row step.

        Raises:
            BadInputError: indices or values that cannot be: others would read them all the same.
        """
        raise NotImplementedError

    def scale(self, name: str) -> Array | None:
        """The whole scale of a weight, None for an unscaled type.

        Raises:
            BadInputError: a scale that is none, or an order or factors of columns.
        """
        raise NotImplementedError

    def drop_cache(self, name: str) -> None:
        """Give back the memory of the pages of a weight read so far."""
        raise NotImplementedError


@contextmanager
def open_packed(path: Path, siblings: Sequence[Path] = ()) -> Iterator[PackedWeights]:
    """The packed weights of ``path``, of whichever format it is.

    ``siblings`` are the files of its checkpoint, itself or not among them.

    Raises:
        BadInputError: a malformed file, or a single one without any packed weight.
    """
    with ExitStack() as stack:
        file = stack.enter_context(SafetensorsFile(path))
        if is_packed(file.metadata):
            yield stack.enter_context(_OwnFile(path))
            return
        others = stack.enter_context(Siblings(path, siblings))
        weights = ForeignFile(file, others)
        if not weights.packed and not others:
            raise BadInputError(f"{label(path)}: has no weight that is packed in any format")
        yield weights


def has_bitmasks(file: SafetensorsFile) -> bool:
    """Whether a file has weights as sparse-24-bitmask."""
    return any(_is_mask(file, entry) for entry in file.header.entries)


def _may_be_mask(entry: TensorEntry) -> bool:
    return entry.name.endswith(_MASK_SUFFIX) and entry.dtype == "U8"


def _is_mask(file: SafetensorsFile, entry: TensorEntry) -> bool:
    """Whether ``entry`` is the mask of a weight in ``file``; others may have its name, too."""
    if not _may_be_mask(entry):
        return False
    stem = entry.name.removesuffix(_MASK_SUFFIX)
    rest = (part for part in bitmask.PARTS if f".{part}" != _MASK_SUFFIX)
    return any(f"{stem}.{part}" in file.header.by_name for part in rest)


class _OwnFile(PackedWeights):
    """A file that sp24 packed."""

    format = SP24

    def __init__(self, path: Path) -> None:
        self._packed = PackedFile(path)
        self.file = self._packed.file
        self.packed = self._packed.packed
        self.others = self._packed.others
        self.metadata = self._packed.metadata
        self.stacks = self._packed.stacks

    def rows(self, name: str, rows: slice) -> PackedMatrix:
        matrix = self._packed.load(name)
        self._refuse(name, check_band(matrix, rows))
        return matrix.rows(rows)

    def scale(self, name: str) -> Array | None:
        matrix = self._packed.load(name)
        self._refuse(name, check_parts(matrix))
        return matrix.scale

    def drop_cache(self, name: str) -> None:
        self._packed.drop_cache(name)

    def _refuse(self, name: str, fault: str | None) -> None:
        if fault is not None:
            raise BadInputError(f"{label(self.file.path)}: tensor {quote(name)}: {fault}")


class ForeignFile(PackedWeights):
    """A file of compressed-tensors or its like: bitmasks, or dense FP8 that is 2:4 already.

    ``siblings`` are the other files of a checkpoint; ``only`` are the weights to look for, None for
    all.

    Raises:
        BadInputError: a weight whose parts are missing or do not fit each other.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        siblings: Siblings | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> None:
        self.file = file
        self._siblings = siblings
        self._only = only
        self._scales: dict[str, WeightScale] = {}
        self._values: dict[str, Array] = {}
        self.packed = {}
        self.stacks = {}
        self.metadata = user_metadata(file.metadata)
        self._origins = origins(file)
        self._refuse_scattered()
        if has_bitmasks(file):
            self.format = BITMASK
            self._read_bitmasks()
        else:
            self.format = FP8
            self._read_fp8()
        taken = {part for name in self.packed for part in self.parts(name)}
        if siblings is not None:
            taken.update(scales_of_siblings(file, siblings, holds_packed))
        self.others = tuple(e for e in file.header.entries if e.name not in taken)

    def scale(self, name: str) -> Array | None:
        """float32, of the shape that the description gives.

        Raises:
            BadInputError: a scale that is not finite and positive.
        """
        if name not in self._scales:
            return None
        if name not in self._values:
            info, found = self.packed[name], self._scales[name]
            exact = found.values()
            with np.errstate(over="ignore", under="ignore"):
                values = exact.astype(np.float32)
            bad = scaling.find_bad(values)
            if bad is None and (values != exact).any():
                bad = tuple(int(i) for i in np.argwhere(values != exact)[0])
            if bad is not None:
                raise BadInputError(
                    f"{label(self.file.path)}: tensor {quote(found.entry.name)}: scale "
                    f"{float(exact[bad])!r} at {list(bad)} is no positive, normal float32"
                )
            self._values[name] = values.reshape(info.scale.shape(*info.shape))
        return self._values[name]

    def rows(self, name: str, rows: slice) -> PackedMatrix:
        """Some rows, in layout ``row``.

        Raises:
            BadInputError: a group without exactly two bits, or with more than two nonzero codes;
                a value that is not finite in a weight that is not known to hold such.
        """
        info = self.packed[name]
        start, stop, _ = rows.indices(info.shape[0])
        read = self._bitmask_rows if self.format == BITMASK else self._fp8_rows
        values, meta = read(name, slice(start, stop))
        if info.overflow == "satfinite" and (place := find_nonfinite(values)) is not None:
            raise BadInputError(
                f"{self._where(name)}: value {values[place]} at row {start + place[0]}, "
                f"kept column {place[1]} is not finite"
            )
        part = replace(info, shape=(stop - start, info.shape[1]))
        scale = self.scale(name)
        if scale is not None and info.scale.kind != "tensor":
            step = info.scale.row_step
            scale = scale[start // step : -(-stop // step)]
        return PackedMatrix(part, values, meta, None, scale)

    def drop_cache(self, name: str) -> None:
        for part in self.parts(name):
            self.file.drop_cache(part)

    def parts(self, name: str) -> tuple[str, ...]:
        """The tensors of the file that a weight consists of."""
        found = self._scales.get(name)
        scale = () if found is None or found.file is not self.file else (found.entry.name,)
        if self.format == FP8:
            return name, *scale
        return *(bitmask.part_name(name, part) for part in bitmask.PARTS), *scale

    def _where(self, name: str) -> str:
        return f"{label(self.file.path)}: tensor {quote(name)}"

    def _bitmask_rows(self, name: str, rows: slice) -> tuple[Array, Array]:
        columns = self.packed[name].shape[1]
        mask = self.file.array(bitmask.part_name(name, "bitmask"), rows)
        if place := bitmask.find_bad_group(mask, columns):
            raise BadInputError(
                f"{self._where(name)}: bitmask at row {rows.start + place[0]}, group {place[1]} "
                "does not have two bits"
            )
        values = self.file.array(bitmask.part_name(name, "compressed"), rows)
        return values, bitmask.from_bitmask(mask, columns)

    def _fp8_rows(self, name: str, rows: slice) -> tuple[Array, Array]:
        codes = self.file.array(name, rows)
        bits = codes.view(np.int8)
        # -0 is a code that packing makes, of a small negative value, and keeps its place where
        # there is room for it.
        if find_violation(bits):
            bits = np.where(bits == -128, np.int8(0), bits)
        if place := find_violation(bits):
            row, group = rows.start + place[0], place[1]
            raise BadInputError(
                f"{self._where(name)}: more than two nonzeros at row {row}, group {group} "
                f"(columns {GROUP * group} to {GROUP * group + GROUP - 1}): not 2:4; "
                "see sp24 quantize --dequantize-fp8 --prune"
            )
        columns = codes.shape[1]
        meta = metadata.encode(*keep_indices(bits))
        kept = np.ascontiguousarray(bits).reshape(-1).take(metadata.kept_places(meta, columns))
        return kept.view(codes.dtype), meta

    def _refuse_scattered(self) -> None:
        """`BadInputError` for a mask whose other parts lie in a sibling."""
        for entry in self.file.header.entries if self._siblings else ():
            if not _may_be_mask(entry) or _is_mask(self.file, entry):
                continue
            stem = entry.name.removesuffix(_MASK_SUFFIX)
            parts = {f"{stem}.{part}" for part in bitmask.PARTS} - {entry.name}
            assert self._siblings is not None
            for sibling in self._siblings.files:
                if found := sorted(parts & sibling.header.by_name.keys()):
                    raise BadInputError(
                        f"{self._where(entry.name)}: {quote(found[0])} lies in another file, "
                        f"{label(sibling.path)}"
                    )

    def _read_bitmasks(self) -> None:
        entries = self.file.header.by_name
        for entry in self.file.header.entries:
            if not _is_mask(self.file, entry):
                continue
            stem = entry.name.removesuffix(_MASK_SUFFIX)
            name = self._origin_name(stem)
            if not self._is_wanted(name):
                continue
            parts = [entries.get(f"{stem}.{part}") for part in bitmask.PARTS]
            for part, found in zip(bitmask.PARTS, parts, strict=True):
                if found is None:
                    raise BadInputError(
                        f"{self._where(name)}: its {stem + '.' + part!r} is missing"
                    )
            shape, values, mask = (part for part in parts if part is not None)
            rows, columns = self._stored_shape(name, shape)
            for held, want in ((values, (rows, columns // 2)), (mask, (rows, -(-columns // 8)))):
                if held.shape != want:
                    raise BadInputError(
                        f"{self._where(name)}: its part {quote(held.name)} is "
                        f"{list(held.shape)}, not {list(want)}"
                    )
            self._add(name, values.dtype, (rows, columns))

    def _stored_shape(self, name: str, entry: TensorEntry) -> tuple[int, int]:
        where = f"{label(self.file.path)}: tensor {quote(entry.name)}"
        if entry.dtype not in ("I64", "I32") or entry.shape not in ((2,), (2, 1)):
            raise BadInputError(f"{where}: is {entry.dtype} {list(entry.shape)}, not I64 [2, 1]")
        rows, columns = (int(n) for n in self.file.array(entry.name).reshape(-1))
        if min(rows, columns) < 1 or columns % GROUP:
            raise BadInputError(
                f"{where}: {[rows, columns]} is not [M, K] with K a multiple of {GROUP}"
            )
        return rows, columns

    def _read_fp8(self) -> None:
        for entry in self.file.header.entries:
            # Without a scale it may be anything: it passes through.
            if not (_is_fp8(entry) and self._is_wanted(entry.name)):
                continue
            if find_scale(self.file, entry, self._siblings) is not None:
                self._add(entry.name, entry.dtype, (entry.shape[0], entry.shape[1]))

    def _add(self, name: str, dtype: str, shape: tuple[int, int]) -> None:
        if dtype not in _OPERANDS:
            raise BadInputError(
                f"{self._where(name)}: is {dtype}; packed are {', '.join(_OPERANDS)}"
            )
        origin = self._origins.get(name)
        scale = None
        spec = ScaleSpec("none")
        if dtype == _E4M3:
            entry = TensorEntry(name, dtype, shape, 0, shape[0] * shape[1])
            scale = find_scale(self.file, entry, self._siblings)
            if scale is None:
                raise BadInputError(f"{self._where(name)}: is {dtype} without a scale")
            spec = scale.spec()
            self._scales[name] = scale
        # compressed-tensors gives a scale the dtype that the weight had; f32 is everyone's.
        source = dtype if scale is None else scale.entry.dtype
        info = PackInfo(
            shape=shape,
            source_dtype=source if source in ("F16", "BF16") else "BF16",
            type=_OPERANDS[dtype],
            scale=spec,
            pruned="given",
            layout="row",
            overflow="satfinite",
        )
        # The origin is believed where it can be true of what is here.
        if origin is not None and (origin.shape, origin.type) == (info.shape, info.type):
            stored = () if scale is None else scale.entry.shape
            if origin.scale.shape(*shape) == stored and origin.scale.kind != "mx":
                info = replace(origin, layout="row", permuted=False, smooth=None)
        self.packed[name] = info

    def _is_wanted(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _origin_name(self, stem: str) -> str:
        """The weight that ``stem`` was; ours need not end in .weight."""
        return stem if stem in self._origins else stem + WEIGHT_SUFFIX


def holds_packed(file: SafetensorsFile, name: str) -> bool:
    """Whether a file has the packed weight ``name``, in whichever format."""
    known = file.header.by_name
    mask = known.get(bitmask.part_name(name, bitmask.PARTS[-1]))
    entry = known.get(name)
    return (mask is not None and _is_mask(file, mask)) or (entry is not None and _is_fp8(entry))


def _is_fp8(entry: TensorEntry) -> bool:
    return is_fp8_weight(entry) and entry.dtype == _E4M3 and entry.shape[1] % GROUP == 0
