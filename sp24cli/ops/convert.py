"""Turn packed weights into another format, exactly: no value is rounded again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sp24cli.bits import Array
from sp24cli.checkpoint.header import PathLike, TensorSpec, label, quote
from sp24cli.checkpoint.names import WEIGHT_SUFFIX
from sp24cli.checkpoint.packedfile import merge_metadata, part_entries
from sp24cli.errors import BadInputError
from sp24cli.formats import bitmask
from sp24cli.formats.config import layers, quantization_config
from sp24cli.formats.foreign import (
    BITMASK,
    FP8,
    SP24,
    PackedWeights,
    open_packed,
)
from sp24cli.formats.origin import origin_metadata
from sp24cli.formats.scales import Siblings, find_scale, is_fp8_weight
from sp24cli.ops.plan import Sink, copy_tensor, open_sink
from sp24cli.ops.report import document, parse_scale, scale_text
from sp24cli.ops.stream import Meter, Progress, bands, default_workers, map_bands
from sp24cli.optypes import BLOCK_ROWS
from sp24cli.packed import Layout, PackedMatrix, PackInfo
from sp24cli.scaling import ScaleSpec

#: Parts that are not cut by rows.
_WHOLE = ("scale", "perm", "smooth")

#: The operand types that a format can say.
_HELD = {BITMASK: ("e4m3", "f16", "bf16"), FP8: ("e4m3",)}


@dataclass(frozen=True)
class ConvertedTensor:
    """One weight, whatever tensors it is now."""

    name: str
    shape: tuple[int, ...]
    type: str
    scale: str


@dataclass(frozen=True)
class ConvertReport:
    """What `convert_file` did. ``output`` is None after a dry run; ``ignored`` are the layers
    whose weight is a matrix that is not packed, but for the ``dense`` ones: FP8 with a scale that
    stays as it is, of which other tools must be told."""

    source: str
    output: str | None
    source_format: str
    format: str
    layout: str
    tensors: tuple[ConvertedTensor, ...]
    ignored: tuple[str, ...]
    dense: tuple[ConvertedTensor, ...]
    copied: int
    source_bytes: int
    output_bytes: int

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """What the model's config.json must say of another tool's format; None for our own.

        Raises:
            BadInputError: the weights have several kinds of scale, which it cannot say.
        """
        if self.format == SP24:
            return None
        return _config(
            self.source, self.format, _specs(self.tensors), self.ignored, _specs(self.dense)
        )

    def to_json(self) -> dict[str, Any]:
        return {**document(self), "quantization_config": self.quantization_config}


def convert_file(
    source: Path,
    output: Path | None,
    *,
    format: str,
    layout: Layout = "row",
    siblings: Sequence[Path] = (),
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the packed weights of ``source`` to ``output`` in ``format``, all else as it is.

    ``source`` is a packed file, one with sparse-24-bitmask weights, or one whose FP8 weights are
    2:4. ``format`` is one of `FORMATS`; ``layout`` is that of our own. ``siblings`` are the
    files of a checkpoint, where the scales of FP8 weights may lie. ``output`` None is a dry run.
    A bitmask holds all of a packed tensor, so there and back gives the same bytes; dense FP8
    holds the codes, but not which of two zeros was the kept one.

    Raises:
        BadInputError: a malformed file, one without packed weights, or one that ``format``
            cannot express.
        Sp24Error: the output may not or cannot be written.
    """
    workers = workers or default_workers()
    with open_packed(source, siblings) as weights:
        infos = {
            name: replace(info, layout=layout if format == SP24 else "row")
            for name, info in weights.packed.items()
        }
        dense = () if format == SP24 else _dense_fp8(weights, siblings)
        stays = {tensor.name for tensor in dense}
        if format != SP24 and weights.stacks:
            stack = next(iter(weights.stacks))
            raise BadInputError(
                f"{label(source)}: tensor {quote(stack)}: {format} holds no stacked experts"
            )
        parts = {name: _parts(weights, name, info, format) for name, info in infos.items()}
        _check_names(weights, parts)
        entries = [entry.spec for entry in weights.others]
        entries += [spec for specs in parts.values() for spec in specs]
        if format == SP24:
            metadata = merge_metadata(weights.metadata, infos, weights.stacks)
        else:
            metadata = {"format": "pt", **weights.metadata, **origin_metadata(infos)}
        report = ConvertReport(
            source=str(source),
            output=None if output is None else str(output),
            source_format=weights.format,
            format=format,
            layout=layout if format == SP24 else "",
            tensors=tuple(
                ConvertedTensor(name, info.shape, info.type, scale_text(info.scale))
                for name, info in infos.items()
            ),
            ignored=tuple(layers(entry for entry in weights.others if entry.name not in stays)),
            dense=dense,
            copied=len(weights.others),
            source_bytes=weights.file.header.file_bytes,
            output_bytes=0,
        )
        # What cannot be said in a config is no output either.
        assert report.to_json()
        total = sum(entry.nbytes for entry in weights.file.header.entries)
        rest = total - sum(entry.nbytes for entry in weights.others)
        meter = Meter(total, progress)
        with open_sink(output, entries, metadata, source=source, overwrite=overwrite) as sink:
            for index, (name, info) in enumerate(infos.items()):
                _convert(weights, name, info, format, sink, workers)
                meter.add(rest * (index + 1) // len(infos) - rest * index // len(infos))
            for entry in weights.others:
                copy_tensor(weights.file, entry.name, sink, meter)
        return replace(report, output_bytes=sink.header.file_bytes)


def check_shards(source: Path, shards: Sequence[Path], format: str) -> None:
    """`BadInputError` for what no shard of the checkpoint ``source`` shows by itself: that nothing
    in it is packed, or that ``format`` cannot say in one config how all of it is."""
    specs: dict[str, ScaleSpec] = {}
    dense: dict[str, ScaleSpec] = {}
    is_ours = False
    for shard in shards:
        with open_packed(shard, shards) as weights:
            specs |= {name: info.scale for name, info in weights.packed.items()}
            is_ours |= weights.format == SP24
            if format != SP24:
                dense |= _specs(_dense_fp8(weights, shards))
    if not specs and not is_ours:
        raise BadInputError(f"{label(source)}: has no weight that is packed in any format")
    # MX has an error of its own, which names the weight.
    if format != SP24 and not any(spec.kind == "mx" for spec in specs.values()):
        _config(source, format, specs, (), dense)


def _dense_fp8(weights: PackedWeights, siblings: Sequence[Path]) -> tuple[ConvertedTensor, ...]:
    """The layers with FP8 weights and a scale among the tensors that stay as they are.

    Raises:
        BadInputError: one that compressed-tensors would not read: of another type than E4M3, or
            with a scale by another name.
    """
    found = []
    with Siblings(Path(weights.file.path), siblings) as others:
        for entry in weights.others:
            if not (is_fp8_weight(entry) and entry.name.endswith(WEIGHT_SUFFIX)):
                continue
            scale = find_scale(weights.file, entry, others)
            # Without one it may be anything.
            if scale is None:
                continue
            where = f"{label(weights.file.path)}: tensor {quote(entry.name)}"
            if entry.dtype != "F8_E4M3":
                raise BadInputError(f"{where}: is scaled {entry.dtype}, which no config can say")
            if scale.entry.name != f"{entry.name}_scale":
                raise BadInputError(
                    f"{where}: is not packed, and its scale is called {quote(scale.entry.name)}, "
                    f"not {quote(entry.name + '_scale')}"
                )
            found.append(ConvertedTensor(entry.name, scale.shape, "e4m3", scale_text(scale.spec())))
    return tuple(found)


def _specs(tensors: Sequence[ConvertedTensor]) -> dict[str, ScaleSpec]:
    return {tensor.name: parse_scale(tensor.scale) for tensor in tensors}


def _config(
    source: PathLike,
    format: str,
    packed: Mapping[str, ScaleSpec],
    ignored: Sequence[str],
    dense: Mapping[str, ScaleSpec],
) -> dict[str, Any]:
    """The `quantization_config` of packed and of dense weights by their scales, for another
    tool's format; `BadInputError` for several kinds of scale, which one group cannot say."""
    specs = {**packed, **dense}
    first = next(iter(specs), None)
    spec = ScaleSpec("none") if first is None else specs[first]
    for name, other in specs.items():
        if other != spec:
            assert first is not None
            raise BadInputError(
                f"{label(source)}: weights with several kinds of scale ({scale_text(spec)} of "
                f"{quote(first)}, {scale_text(other)} of {quote(name)}) need several groups"
            )
    return quantization_config(spec, packed, ignored, dense, bitmask=format == BITMASK)


def _parts(weights: PackedWeights, name: str, info: PackInfo, format: str) -> list[TensorSpec]:
    """The tensors that the weight ``name`` becomes."""
    if format == SP24:
        return part_entries(name, info)
    rows, columns = info.shape
    dtype = info.optype.safetensors
    where = f"{label(weights.file.path)}: tensor {quote(name)}"
    if info.scale.kind == "mx":
        raise BadInputError(f"{where}: has MX scales (E8M0), which {format} cannot say")
    if info.smooth is not None:
        raise BadInputError(f"{where}: has its columns smoothed, which {format} cannot say")
    if info.permuted and (format == BITMASK or info.scale.block is not None):
        raise BadInputError(f"{where}: has its columns permuted, which {format} cannot say")
    scale = [
        (part, kind, shape)
        for part, kind, shape in part_entries(name, info)
        if part == f"{name}_scale"
    ]
    if info.type not in _HELD[format]:
        raise BadInputError(
            f"{where}: is packed as {info.type}, which {format} cannot hold; see sp24 unpack"
        )
    if format == BITMASK:
        return [
            (bitmask.part_name(name, "shape"), "I64", (2, 1)),
            (bitmask.part_name(name, "compressed"), dtype, (rows, columns // 2)),
            (bitmask.part_name(name, "bitmask"), "U8", (rows, -(-columns // 8))),
            *scale,
        ]
    assert format == FP8
    return [(name, dtype, info.shape), *scale]


def _check_names(weights: PackedWeights, parts: dict[str, list[TensorSpec]]) -> None:
    taken = {entry.name: entry.name for entry in weights.others}
    for name, specs in parts.items():
        for part, _, _ in specs:
            if part in taken:
                raise BadInputError(
                    f"{label(weights.file.path)}: tensor {quote(name)} cannot be written: "
                    f"{quote(part)} is there already"
                )
            taken[part] = name


def _convert(
    weights: PackedWeights, name: str, info: PackInfo, format: str, sink: Sink, workers: int
) -> None:
    rows, columns = info.shape
    if format == BITMASK:
        sink.write(bitmask.part_name(name, "shape"), np.array([[rows], [columns]], np.int64))
    scale = weights.scale(name)
    if scale is not None:
        sink.write(f"{name}_scale", scale)
    if info.permuted and format == SP24:
        sink.write(f"{name}_perm", weights.file.array(f"{name}_perm"))
    if info.smooth is not None and format == SP24:
        sink.write(f"{name}_smooth", weights.file.array(f"{name}_smooth"))

    def convert(start: int, stop: int) -> dict[str, Array]:
        return _encode(weights.rows(name, slice(start, stop)), name, info.layout, format)

    ranges = bands(rows, columns, multiple=math.lcm(BLOCK_ROWS, info.scale.row_step))
    for band in map_bands(convert, ranges, columns, workers):
        for part, array in band.items():
            sink.write(part, array)
        weights.drop_cache(name)


def _encode(band: PackedMatrix, name: str, layout: Layout, format: str) -> dict[str, Array]:
    """What some rows become in ``format``, but for the parts of the whole."""
    if format == FP8:
        return {name: band.original_order(band.codes())}
    if format == SP24:
        packed = band.to_layout(layout)
        parts = {part: getattr(packed, part) for part in packed.info.parts() if part not in _WHOLE}
        return {f"{name}_{part}": array for part, array in parts.items()}
    values, meta = band.row_order()
    return {
        bitmask.part_name(name, "compressed"): values,
        bitmask.part_name(name, "bitmask"): bitmask.to_bitmask(meta, band.shape[1]),
    }
