"""A packed matrix: kept values, metadata and scales of a 2:4 matrix, in either layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from sp24cli import layout as sm90
from sp24cli import metadata, scaling, smoothing
from sp24cli.bits import (
    NUMBER_TYPES,
    Array,
    contiguous_bits,
    magnitude_values,
    magnitudes,
    number_type,
    widen,
)
from sp24cli.calibration import AMAX, ScaleRule
from sp24cli.errors import BadInputError
from sp24cli.fp8 import Overflow, check_overflow, find_unrounded, round_to
from sp24cli.optypes import BLOCK_ROWS, OperandType, operand_type
from sp24cli.packing import short_buffers, tools
from sp24cli.pruning import permute
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern, find_crowded, pattern_of, violation
from sp24cli.rowblocks import pieces, row_slices, run, tiles
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import (
    GROUP,
    PATCH_COLUMNS,
    PATCH_ROWS,
    TILE_COLUMNS,
    check_matrix,
    common_exponent,
    energy_exponent,
    find_nonfinite,
    find_violation,
    fold,
    in_unit,
    keep_indices,
    patches_of,
)

#: Values of one tile of `pack_rows`. An eighth as many would stay in a core's L2 cache, but two
#: workers then wait for each other's interpreter lock between short NumPy calls.
_TILE_ELEMENTS = 1 << 20

Layout = Literal["row", "sm90"]
Pruned = Literal["magnitude", "wanda", "given"]


@dataclass(frozen=True)
class PackInfo:
    """What a file says of one packed tensor.

    ``shape`` is the logical (M, K), ``source_dtype`` a safetensors name, ``type`` the operand
    type's name, ``pruned`` how sp24 chose the kept values, or that it found them given. With
    ``permuted`` the columns are those of the original in another order, which is a part.
    ``calibration`` says how the scales were chosen. ``smooth`` is the alpha of the factors that
    the columns were multiplied by, which are a part (`smoothing`), None where they were not.
    """

    shape: tuple[int, int]
    source_dtype: str
    type: str
    scale: ScaleSpec
    pruned: Pruned
    layout: Layout
    overflow: Overflow
    permuted: bool = False
    calibration: ScaleRule = AMAX
    smooth: float | None = None

    def __post_init__(self) -> None:
        optype = operand_type(self.type)
        _known("source dtype", self.source_dtype, NUMBER_TYPES)
        _known("pruning", self.pruned, get_args(Pruned))
        _known("layout", self.layout, get_args(Layout))
        _known("overflow mode", self.overflow, get_args(Overflow))
        if optype.scaled != (self.scale.kind != "none"):
            carries = "needs a" if optype.scaled else "takes no"
            raise BadInputError(f"operand type {self.type!r} {carries} scale")
        if not optype.scaled and (self.calibration != AMAX or self.smooth is not None):
            raise BadInputError(f"operand type {self.type!r} takes no calibration or smoothing")
        if self.calibration.method == "history" and self.scale.kind != "tensor":
            raise BadInputError("an amax history gives a scale by tensor alone")
        if self.smooth is not None:
            smoothing.check_alpha(self.smooth)
        check_overflow(optype, self.overflow)
        if min(self.shape) < 0 or self.shape[1] % optype.group:
            raise BadInputError(
                f"shape {list(self.shape)} is not [M, K] with K a multiple of {optype.group}"
            )

    @property
    def optype(self) -> OperandType:
        return operand_type(self.type)

    def parts(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Type and shape of the parts that a tensor so described has, by name, in file order."""
        m, k = self.shape
        parts: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
        if self.layout == "sm90":
            parts = {"blocks": (np.dtype(np.uint8), sm90.image_shape(m, k, self.optype))}
        else:
            parts = {
                "values": (self.optype.dtype, (m, k // 2)),
                "meta": (np.dtype(np.uint8), (m, metadata.meta_bytes(self.optype.meta_k(k)))),
            }
        if self.optype.scaled:
            parts["scale"] = (self.scale.dtype, self.scale.shape(m, k))
        if self.permuted:
            parts["perm"] = (np.dtype(np.int32), (k,))
        if self.smooth is not None:
            parts["smooth"] = (np.dtype(np.float32), (k,))
        return parts

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        block = self.scale.block
        return {
            "shape": list(self.shape),
            "source_dtype": self.source_dtype,
            "type": self.type,
            "scale": self.scale.kind,
            "block": None if block is None else list(block),
            "pruned": self.pruned,
            "layout": self.layout,
            "overflow": self.overflow,
            **({"permuted": True} if self.permuted else {}),
            **({} if self.calibration == AMAX else {"calibration": self.calibration.text}),
            **({} if self.smooth is None else {"smooth": self.smooth}),
        }

    @classmethod
    def from_json(cls, data: object) -> PackInfo:
        """The info in a JSON object; `BadInputError` names what is missing or not known."""
        fields = {*cls.__dataclass_fields__, "block"} - _OPTIONAL_FIELDS
        if not isinstance(data, dict):
            raise BadInputError(f"packed tensor is described by {data!r}, not an object")
        if missing := sorted(fields - data.keys()):
            raise BadInputError(f"description of a packed tensor lacks {missing[0]!r}")
        if unknown := sorted(data.keys() - fields - _OPTIONAL_FIELDS):
            raise BadInputError(f"unknown field {unknown[0]!r} in a packed tensor's description")
        for name in (fields - {"shape", "block"}) | (data.keys() & {"calibration"}):
            if not isinstance(data[name], str):
                raise BadInputError(f"field {name!r} is {data[name]!r}, not a string")
        if type(data.get("permuted", False)) is not bool:
            raise BadInputError(f"field 'permuted' is {data['permuted']!r}, not true or false")
        smooth = data.get("smooth")
        if "smooth" in data and type(smooth) not in (int, float):
            raise BadInputError(f"field 'smooth' is {smooth!r}, not a number")
        block = data["block"]
        return cls(
            shape=_pair("shape", data["shape"]),
            source_dtype=data["source_dtype"],
            type=data["type"],
            scale=ScaleSpec(data["scale"], None if block is None else _pair("block", block)),
            pruned=cast(Pruned, data["pruned"]),
            layout=cast(Layout, data["layout"]),
            overflow=cast(Overflow, data["overflow"]),
            permuted=data.get("permuted", False),
            calibration=ScaleRule.parse(data.get("calibration", AMAX.text)),
            smooth=None if smooth is None else float(smooth),
        )


#: Fields that a description has where they are not the default.
_OPTIONAL_FIELDS = {"permuted", "calibration", "smooth"}


def _known(what: str, value: str, names: Iterable[str]) -> None:
    if value not in names:
        raise BadInputError(f"unknown {what} {value!r} (known: {', '.join(names)})")


def _pair(name: str, value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value):
        return value[0], value[1]
    raise BadInputError(f"field {name!r} is {value!r}, not two integers")


@dataclass(frozen=True)
class QuantStats:
    """What packing did to the values.

    ``kept`` counts the nonzero source values, ``clipped`` those that round past the largest
    finite value of the type, ``underflowed`` those whose code is zero. ``amax`` is the largest
    magnitude of the source. Energies are sums of squares in float64, of the source and of its
    difference to code * scale (infinite where a code is), in units of 4 to the power ``exponent``.
    """

    kept: int
    clipped: int
    underflowed: int
    amax: float
    error_energy: float
    signal_energy: float
    exponent: int = 0

    @property
    def snr_db(self) -> float:
        """Signal to error in decibels; infinite without any error."""
        if self.error_energy == 0:
            return math.inf
        if self.signal_energy == 0 or math.isinf(self.error_energy):
            return -math.inf
        return 10 * (math.log10(self.signal_energy) - math.log10(self.error_energy))

    @staticmethod
    def merge(parts: Iterable[QuantStats]) -> QuantStats:
        """The stats of all ``parts`` together; the order of the parts does not matter."""
        parts = list(parts)
        unit = common_exponent((p.signal_energy, p.exponent) for p in parts)
        return QuantStats(
            kept=sum(p.kept for p in parts),
            clipped=sum(p.clipped for p in parts),
            underflowed=sum(p.underflowed for p in parts),
            amax=max((p.amax for p in parts), default=0.0),
            error_energy=math.fsum(in_unit(p.error_energy, p.exponent, unit) for p in parts),
            signal_energy=math.fsum(in_unit(p.signal_energy, p.exponent, unit) for p in parts),
            exponent=unit,
        )


def _spread(kept: Array, meta: Array, shape: tuple[int, int], group: int) -> Array:
    """The dense matrix with ``kept`` [M, K/2] where ``meta`` says and +0 elsewhere."""
    bits = contiguous_bits(kept)
    dense = np.zeros(shape, bits.dtype)
    dense.reshape(-1)[metadata.kept_places(meta, shape[1], group)] = bits
    return dense.view(kept.dtype)


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix [M, K] and what is known of it.

    Layout ``row``: ``values`` [M, K/2] of the operand type and ``meta`` uint8 [M, ceil(K/8)]
    (ceil(K/4) for tf32).
    Layout ``sm90``: ``blocks`` uint8 [Mb, Kb, block_bytes]. ``scale`` is ``info.scale.dtype`` of
    ``info.scale.shape(M, K)``, None for unscaled types. ``perm`` int32 [K] is the order of the
    columns, None where it is the original's: column j of what is stored, and of all results
    here, is column ``perm[j]`` of the original (see `original_order`). ``smooth`` float32 [K] are
    the factors of the columns of the original, None where there are none: what is stored, and all
    results but that of `restore`, is multiplied by them. ``where`` names the file and tensor that
    it is all of, for messages; empty where it is of none.
    """

    info: PackInfo
    values: Array | None
    meta: Array | None
    blocks: Array | None
    scale: Array | None
    perm: Array | None = None
    smooth: Array | None = None
    where: str = field(default="", kw_only=True)

    @classmethod
    def empty(cls, info: PackInfo, scale: Array | None = None) -> PackedMatrix:
        """Parts of the right types and shapes, to be filled; a scaled type brings its scale."""
        expected = info.parts().get("scale")
        if (None if scale is None else (scale.dtype, scale.shape)) != expected:
            raise ValueError(f"scale does not fit, expected {expected}")
        parts = {name: np.empty(shape, dtype) for name, (dtype, shape) in info.parts().items()}
        if scale is not None:
            parts["scale"] = scale
        return cls(info, *(parts.get(name) for name in ("values", "meta", "blocks", "scale")))

    @property
    def shape(self) -> tuple[int, int]:
        return self.info.shape

    @property
    def row_step(self) -> int:
        """Row blocks for `rows` and `pack_rows` are cut at multiples of this many rows."""
        return math.lcm(BLOCK_ROWS, self.info.scale.row_step)

    def rows(self, rows: slice) -> PackedMatrix:
        """The packed matrix of some rows, as views, cut at multiples of `row_step`."""
        start, stop, _ = rows.indices(self.shape[0])
        for row in (start, stop):
            if row % self.row_step and row != self.shape[0]:
                raise ValueError(f"row {row} is not a multiple of {self.row_step}")
        info = replace(self.info, shape=(max(0, stop - start), self.shape[1]))
        whole = slice(start, stop)
        blocks = slice(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS))
        scale = self.scale
        if scale is not None and self.info.scale.kind != "tensor":
            step = self.info.scale.row_step
            scale = scale[start // step : -(-stop // step)]
        return PackedMatrix(
            info,
            None if self.values is None else self.values[whole],
            None if self.meta is None else self.meta[whole],
            None if self.blocks is None else self.blocks[blocks],
            scale,
            self.perm,
            self.smooth,
        )

    def columns(self, columns: slice) -> PackedMatrix:
        """The packed matrix of some columns as they are stored, without their order or factors,
        cut at multiples of the type's ``block_k``. A block of scales that is cut becomes several.
        """
        optype, spec, scale = self.info.optype, self.info.scale, self.scale
        start, stop, _ = columns.indices(self.shape[1])
        for column in (start, stop):
            if column % optype.block_k and column != self.shape[1]:
                raise ValueError(f"column {column} is not a multiple of {optype.block_k}")
        if scale is not None and spec.block is not None:
            rows, width = spec.block
            step = math.gcd(width, start)
            if step == width:
                scale = scale[:, start // width : -(-stop // width)]
            else:
                scale = scale.take(np.arange(start, stop, step) // width, axis=1)
                spec = ScaleSpec(spec.kind, (rows, step))
        info = replace(
            self.info, shape=(self.shape[0], stop - start), scale=spec, permuted=False, smooth=None
        )
        packed = slice(*(metadata.meta_bytes(optype.meta_k(k)) for k in (start, stop)))
        blocks = slice(start // optype.block_k, -(-stop // optype.block_k))
        return PackedMatrix(
            info,
            None if self.values is None else self.values[:, start // 2 : stop // 2],
            None if self.meta is None else self.meta[:, packed],
            None if self.blocks is None else self.blocks[:, blocks],
            scale,
        )

    def row_order(self, rows: slice = slice(None)) -> tuple[Array, Array]:
        """(values, meta) in row order, whatever the layout; ``rows`` start at a block's first."""
        start, stop, _ = rows.indices(self.shape[0])
        if self.blocks is not None:
            blocks = self.blocks[start // BLOCK_ROWS : -(-stop // BLOCK_ROWS)]
            return sm90.from_sm90(blocks, stop - start, self.shape[1], self.info.optype)
        assert self.values is not None and self.meta is not None
        return self.values[start:stop], self.meta[start:stop]

    def to_layout(self, layout: Layout) -> PackedMatrix:
        """The same matrix in ``layout``; itself when it is there already."""
        if layout == self.info.layout:
            return self
        info = replace(self.info, layout=layout)
        values, meta = self.row_order()
        if layout == "row":
            return replace(self, info=info, values=values, meta=meta, blocks=None)
        blocks = sm90.to_sm90(values, meta, self.shape[1], info.optype)
        return replace(self, info=info, values=None, meta=None, blocks=blocks)

    def original_order(self, dense: Array) -> Array:
        """``dense`` [R, K], whose columns are as stored, with the columns of the original."""
        if self.perm is None:
            return dense
        return permute.apply(dense, permute.inverse(self.perm))

    def restore(self, dtype: Any = np.float32) -> Array:
        """The dense [M, K] of ``dtype`` in place of the original: `dequantize` in the original's
        order, the smoothing undone: code * scale / factor, divided in float64, then rounded."""
        if self.smooth is None:
            return self.original_order(self.dequantize(dtype))
        wide = self.original_order(self.dequantize(np.float64))
        with np.errstate(over="ignore", under="ignore"):
            wide /= self.smooth.astype(np.float64)
        return round_to(wide, np.dtype(dtype), self.info.overflow)

    def count_saturated(self, dense: Array) -> int:
        """How many values of ``dense``, which `restore` has made of this, are the largest of their
        dtype because what they should be is beyond it."""
        kind = number_type(dense.dtype)
        if self.info.overflow != "satfinite" or kind.nonfinite is None:
            return 0
        if not (magnitudes(contiguous_bits(dense), kind) == kind.nonfinite - 1).any():
            return 0
        # Some are the largest by right: only where they are not clamped are the others told apart.
        plain = round_to(self.restore(np.float64), dense.dtype, "nan")
        return int((magnitudes(contiguous_bits(plain), kind) == kind.nonfinite).sum())

    def codes(self) -> Array:
        """The dense [M, K] of ``info.optype.dtype``: codes where kept, +0 elsewhere."""
        values, meta = self.row_order()
        return _spread(values, meta, self.shape, self.info.optype.group)

    def dequantize(self, dtype: Any = np.float32, *, workers: int = 1) -> Array:
        """The dense [M, K] of code * scale, the exact product rounded once to ``dtype``.

        Past the end of ``dtype`` it goes as ``info.overflow`` says.
        """
        m, k = self.shape
        out = np.empty((m, k), np.dtype(dtype))

        def tile(r: slice) -> None:
            values, meta = self.row_order(r)
            wide = widen(values)
            if self.scale is not None:
                factor = scaling.expand(self.scale, self.info.scale, r, slice(0, k))
                # Exact: a scale's 24 significant bits and the few of a code fit in 53.
                wide = wide.astype(np.float64)
                wide *= factor.astype(np.float64)
            rounded = round_to(wide, out.dtype, self.info.overflow)
            out[r] = _spread(rounded, meta, (r.stop - r.start, k), self.info.optype.group)

        run(tile, [r for r, _ in tiles(m, k, row_step=BLOCK_ROWS, width=max(1, k))], workers)
        return out


def pack(
    dense: Array,
    optype: OperandType,
    spec: ScaleSpec,
    *,
    overflow: Overflow = "satfinite",
    layout: Layout = "row",
    pruned: Pruned = "given",
    source_dtype: str | None = None,
    workers: int = 1,
) -> tuple[PackedMatrix, QuantStats]:
    """Packs ``dense`` [M, K], which must be 2:4 (1:2 for tf32) and finite already.

    Indices come from the source values, so a value that rounds to zero keeps its place.
    ``source_dtype`` is what the file shall say the source was, by default what it is. The
    result does not depend on ``workers``. Errors: `BadInputError` naming row and column of a
    NaN or infinity, row and group of a violation.
    """
    rows, cols, kind = check_matrix(dense, optype.group)
    info = PackInfo(
        (rows, cols), source_dtype or kind.name, optype.name, spec, pruned, layout, overflow
    )
    scale = None
    blocks = pieces(rows, cols, math.lcm(BLOCK_ROWS, spec.row_step))
    if spec.kind == "vector":
        scale = np.empty(spec.shape(rows, cols), spec.dtype)
    elif spec.kind != "none":
        largest = run(lambda r: scaling.amax(dense[r], spec), blocks or [slice(0, 0)], workers)
        scale = scaling.make_scales(scaling.join_amax(largest, spec), optype.max_finite, spec)
    packed = PackedMatrix.empty(info, scale)

    def piece(r: slice) -> QuantStats:
        by_row = spec.kind == "vector"
        return pack_rows(dense[r], packed.rows(r), find_scales=by_row, first_row=r.start)

    stats = run(piece, blocks, workers)
    return packed, QuantStats.merge(stats)


def pack_rows(
    dense: Array, into: PackedMatrix, *, find_scales: bool = False, first_row: int = 0
) -> QuantStats:
    """Packs some rows, ``dense`` [R, K], into the parts of ``into``.

    ``into`` describes these rows alone (shape [R, K], its ``scale`` filled in): a
    `PackedMatrix.empty`, or `PackedMatrix.rows` of a larger one. ``find_scales`` fills in the
    scales, which must be of kind ``vector``, by amax on the way. ``first_row`` is where they
    stand in the whole, for messages. Temporaries stay small whatever R and K. Errors: as
    `pack`.
    """
    optype, overflow = into.info.optype, into.info.overflow
    rows, cols, kind = check_matrix(dense, optype.group)
    if into.shape != (rows, cols):
        raise ValueError(f"rows of shape {[rows, cols]} do not fit {list(into.shape)}")
    bits = dense.view(kind.unsigned)
    kept, clipped, underflowed, largest = 0, 0, 0, 0
    exponent = energy_exponent(dense)
    # Energies of error and signal by patch, which has half as many kept values.
    error, signal = energies = np.zeros((2, -(-rows // PATCH_ROWS), -(-cols // PATCH_COLUMNS)))
    # Few rows and many columns, for NumPy runs fastest along long rows.
    step = BLOCK_ROWS * max(1, _TILE_ELEMENTS // (BLOCK_ROWS * max(1, cols)))
    width = TILE_COLUMNS * max(1, _TILE_ELEMENTS // (TILE_COLUMNS * min(step, max(1, rows))))
    if find_scales and not 0 < cols <= width:
        _fill(into, scaling.amax(dense, into.info.scale))
    with short_buffers(cols // 2):
        for r in row_slices(rows, step):
            for c in row_slices(cols, width):
                tile = bits[r, c]
                values, rounder, sums = tools(tile.shape, kind, optype, overflow)
                fits = values.take(tile)
                largest = max(largest, values.largest)
                if not fits or (kind.nonfinite is not None and largest >= kind.nonfinite):
                    raise _refusal(dense, pattern_of(optype), first_row)
                if find_scales and width >= cols:
                    _fill(into.rows(r), values.row_amax())
                scale = None
                if into.scale is not None:
                    scale = scaling.expand(into.scale, into.info.scale, r, c)
                codes = _codes_of(into, r, c)
                rounder.round(values, scale, codes)
                here = slice(None), *patches_of(r, c)
                energies[here] = sums.of(rounder, scale, exponent)
                clipped += rounder.clipped
                kept += values.count
                underflowed += values.count - rounder.nonzero
                _store(codes, _meta(values.nonzero, optype), into, r, c)
    top = magnitude_values(np.array([largest], kind.unsigned), kind).item()
    return QuantStats(
        kept=kept,
        clipped=clipped,
        underflowed=underflowed,
        amax=float(top),
        error_energy=math.inf if clipped and overflow == "nan" else fold(error),
        signal_energy=fold(signal),
        exponent=exponent,
    )


def _fill(into: PackedMatrix, largest: Array) -> None:
    assert into.scale is not None
    into.scale[:] = scaling.make_scales(largest, into.info.optype.max_finite, into.info.scale)


def check_rows(dense: Array, *, first_row: int = 0) -> None:
    """`BadInputError`, as of `pack_rows`, unless the rows are finite and 2:4."""
    if find_nonfinite(dense) or find_violation(dense):
        raise _refusal(dense, TWO_OF_FOUR, first_row)


def _meta_of_occupancy() -> Array:
    """The bytes of four groups, as one integer, by which of the sixteen values differ from zero, a
    bit each. Those of a group with more than two mean nothing."""
    every = np.arange(1 << 8, dtype=np.uint8)[:, None]
    values = np.unpackbits(every, axis=1, bitorder="little").view(np.int8)
    meta = metadata.encode(*keep_indices(values))[:, 0]
    bytes_of = np.arange(1 << 16, dtype=np.uint16)[:, None].view(np.uint8)
    return meta.take(bytes_of).view(np.uint16)[:, 0]


_META_OF_OCCUPANCY = _meta_of_occupancy()


def _meta(nonzero: Array, optype: OperandType) -> Array:
    """The metadata, uint8 [R, ceil(C/8)] (C/4 for tf32), of rows of which ``nonzero`` [R, C] says
    where values differ from zero."""
    if optype.group != GROUP:
        # A value of a pair of tf32 fills two places of its group.
        nonzero = nonzero.repeat(GROUP // optype.group, axis=1)
    cols = nonzero.shape[1]
    occupied = np.packbits(nonzero, axis=1, bitorder="little")
    if occupied.shape[1] % 2:
        occupied = np.pad(occupied, ((0, 0), (0, 1)))
    meta: Array = _META_OF_OCCUPANCY.take(occupied.view(np.uint16)).view(np.uint8)
    meta = meta[:, : metadata.meta_bytes(cols)]
    if cols % 8:
        meta[:, -1] &= 0x0F
    return meta


def _refusal(dense: Array, pattern: Pattern, first_row: int) -> BadInputError:
    if place := find_nonfinite(dense):
        row, column = place
        value = widen(dense[row : row + 1, column]).item()
        return BadInputError(f"{value} at row {first_row + row}, column {column}")
    return violation(pattern, *(find_crowded(dense, pattern) or (0, 0)), first_row)


def _codes_of(into: PackedMatrix, r: slice, c: slice) -> Array:
    """Where the codes of a tile are to be written: their place, or where they go to an image."""
    if into.values is not None:
        return into.values[r, c.start // 2 : c.stop // 2]
    return np.empty((r.stop - r.start, (c.stop - c.start) // 2), into.info.optype.dtype)


def _store(codes: Array, meta: Array, into: PackedMatrix, r: slice, c: slice) -> None:
    """Put the ``meta`` of a tile in its place, and where there is an image the ``codes``, too."""
    optype = into.info.optype
    if into.blocks is not None:
        rows = slice(r.start // BLOCK_ROWS, -(-r.stop // BLOCK_ROWS))
        cols = slice(c.start // optype.block_k, -(-c.stop // optype.block_k))
        sm90.to_sm90(codes, meta, c.stop - c.start, optype, out=into.blocks[rows, cols])
        return
    assert into.meta is not None
    meta_k = optype.meta_k
    into.meta[r, meta_k(c.start) // 8 : metadata.meta_bytes(meta_k(c.stop))] = meta


def check_structure(packed: PackedMatrix, *, workers: int = 1) -> str | None:
    """The first fault of ``packed`` in words, or None: shapes, metadata, scales, padding, codes."""
    if fault := check_parts(packed):
        return fault
    blocks = pieces(*packed.shape, BLOCK_ROWS)
    return next(filter(None, run(lambda r: check_band(packed, r), blocks, workers)), None)


def check_parts(packed: PackedMatrix) -> str | None:
    """`check_structure` of all but the rows: of shapes, scales, order and factors."""
    expected = packed.info.parts()
    for name in ("values", "meta", "blocks", "scale", "perm", "smooth"):
        part: Array | None = getattr(packed, name)
        if (part is None) != (name not in expected):
            return f"{name} " + ("missing" if part is None else "does not belong to it")
        if part is not None and (part.dtype, part.shape) != expected[name]:
            dtype, shape = expected[name]
            found = f"{part.dtype.name} {list(part.shape)}"
            return f"{name} is {found}, not {dtype.name} {list(shape)}"
    if packed.scale is not None and (bad := scaling.find_bad(packed.scale)) is not None:
        return f"scale {float(packed.scale[bad])} at {list(bad)} is not positive, normal and finite"
    if packed.perm is not None:
        try:
            permute.check_order(packed.perm, packed.shape[1])
        except BadInputError as error:
            return str(error)
    if packed.smooth is not None:
        try:
            smoothing.check_factors(packed.smooth)
        except BadInputError as error:
            return str(error)
    return None


def check_band(packed: PackedMatrix, r: slice) -> str | None:
    """`check_structure` of some rows, from a multiple of 64 on."""
    k = packed.shape[1]
    if packed.blocks is not None:
        blocks = packed.blocks[r.start // BLOCK_ROWS : -(-r.stop // BLOCK_ROWS)]
        if place := sm90.find_bad_padding(blocks, r.stop - r.start, k, packed.info.optype):
            return f"padding at row {r.start + place[0]}, group {place[1]} is not empty"
    values, meta = packed.row_order(r)
    optype = packed.info.optype
    if place := metadata.find_illegal(meta, optype.meta_k(k), optype.group):
        what = "no ascending pair" if optype.group == GROUP else "not 0100 or 1110"
        return f"metadata at row {r.start + place[0]}, group {place[1]} is {what}"
    if optype.name == "tf32" and (place := find_unrounded(values)):
        return f"value at row {r.start + place[0]}, kept column {place[1]} is not rounded to tf32"
    if packed.info.overflow == "satfinite" and (place := find_nonfinite(values)):
        return f"value at row {r.start + place[0]}, kept column {place[1]} is not finite"
    return None
