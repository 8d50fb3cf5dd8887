"""Whether a packed tensor is, bit for bit, what packing the dense original gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sp24cli import metadata
from sp24cli.bits import Array, contiguous_bits
from sp24cli.checkpoint.header import label, quote
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.formats.foreign import PackedWeights
from sp24cli.ops.calibrate import Calibrator
from sp24cli.ops.pack import Arrangement, pack_bands, pack_ranges, smooth_factors, tensor_scale
from sp24cli.ops.plan import is_sparse
from sp24cli.ops.stream import map_bands
from sp24cli.packed import PackedMatrix, check_parts
from sp24cli.pruning.pattern import pattern_of
from sp24cli.verify.result import Agreement


def compare_packing(
    stored: PackedMatrix,
    original: SafetensorsFile,
    name: str,
    *,
    calibrator: Calibrator | None = None,
    workers: int,
) -> Agreement:
    """Pack the original's tensor ``name`` as ``stored.info`` says, compare all of its parts.

    The original may be pruned or not: pruning by magnitude leaves a 2:4 matrix as it is, and
    indices come from the source values either way. Columns are taken in the stored order.
    What wanda chose is not known here: of a dense original, the kept places are taken as stored.
    So they are where it had been pruned before it was packed and magnitude would keep others.
    Scales are chosen again, but those of an amax history and the factors of smoothed columns are
    taken as stored unless ``calibrator`` has what they come from.

    Raises:
        BadInputError: the original's tensor holds NaN or infinity, or what `Calibrator` refuses.
    """
    info = stored.info
    entry = original.header.by_name.get(name)
    if entry is None:
        return Agreement(f"{label(original.path)} has no tensor {quote(name)}")
    if (entry.dtype, entry.shape) != (info.source_dtype, info.shape):
        return Agreement(
            f"the original is {entry.dtype} {list(entry.shape)}, "
            f"packed from {info.source_dtype} {list(info.shape)}"
        )
    if check_parts(stored) is not None:
        return Agreement("its parts cannot be right")
    pattern = pattern_of(info.optype)
    given = info.pruned == "magnitude" or is_sparse(original, entry, stored.perm, pattern)
    if info.pruned == "wanda" and not given:
        note = f"pruned by {info.pruned}; compared with the mask as it is"
        return _compare(stored, original, name, calibrator, workers, True, [note])
    if info.pruned != "given" or given:
        return _compare(stored, original, name, calibrator, workers, False, [])
    note = f"the original is not {pattern}; pruned by magnitude to compare"
    found = _compare(stored, original, name, calibrator, workers, False, [note])
    if not found.passed:
        masked = f"the original is not {pattern}; compared with the mask as it is"
        otherwise = _compare(stored, original, name, calibrator, workers, True, [masked])
        if otherwise.passed:
            return otherwise
        # Sparsegpt changes what it keeps, and what is packed does not tell.
        hint = "if sparsegpt pruned it, compare with the pruned file"
        return Agreement(f"{found.fault} ({note}; {hint})")
    return found


@dataclass(frozen=True)
class Conversion:
    """What `compare_codes` found: the first ``fault`` against the codes and scales as they are in
    the original, and whether ``scales`` are those."""

    fault: str | None
    scales: bool


def compare_codes(
    stored: PackedMatrix, original: PackedWeights, name: str, *, workers: int
) -> Conversion | None:
    """Compare with what `ops.convert` makes of the original's weight ``name``, which is packed in
    the format of another tool.

    None where it makes none, or one that is described otherwise.
    """
    info = replace(original.packed[name], layout=stored.info.layout)
    if info != stored.info or check_parts(stored) is not None:
        return None
    step = info.scale.row_step

    def compare(start: int, stop: int) -> str | None:
        made = original.rows(name, slice(start, stop)).to_layout(stored.info.layout)
        part = stored.rows(slice(start, stop))
        fault = _first_difference(part, made, start, step, "in the original")
        original.drop_cache(name)
        return fault

    try:
        scale = original.scale(name)
        if stored.scale is not None and scale is not None:
            fault = _scale_difference(stored.scale, scale, "in the original")
            if fault is not None:
                return Conversion(fault, False)
        for fault in map_bands(compare, pack_ranges(info), info.shape[1], workers):
            if fault is not None:
                return Conversion(fault, True)
    except BadInputError:
        return None
    return Conversion(None, True)


def _compare(
    stored: PackedMatrix,
    original: SafetensorsFile,
    name: str,
    calibrator: Calibrator | None,
    workers: int,
    chosen: bool,
    notes: list[str],
) -> Agreement:
    """`compare_packing`, with the kept places as stored if ``chosen``, else by magnitude."""
    info = stored.info
    entry = original.header.by_name[name]
    arrange = None
    if stored.perm is not None or stored.smooth is not None or chosen:
        arrange = Arrangement(stored.perm, _keep_as(stored) if chosen else None, stored.smooth)
    if stored.smooth is not None:
        activations = None if calibrator is None else calibrator.activations(entry)
        if activations is None:
            notes.append("smooth factors taken as stored")
        else:
            plain = None if arrange is None else replace(arrange, smooth=None)
            made = smooth_factors(
                original, name, info, activations, prune=True, workers=workers, arrange=plain
            )
            place = _first(stored.smooth.view(np.uint32) != made.view(np.uint32))
            if place is not None:
                found, want = float(stored.smooth[place]), float(made[place])
                return Agreement(f"smooth at {list(place)} is {found!r}, recomputed {want!r}")
    if info.calibration.method == "history":
        scale = None if calibrator is None else calibrator.scale(name, info)
        if scale is None:
            notes.append("scales of an amax history taken as stored")
            scale = stored.scale
    else:
        scale = tensor_scale(original, name, info, prune=True, workers=workers, arrange=arrange)
    for band in pack_bands(
        original, name, info, scale, prune=True, workers=workers, arrange=arrange
    ):
        part = stored.rows(slice(band.start, band.stop))
        fault = _first_difference(part, band.packed, band.start, info.scale.row_step, "recomputed")
        if fault is not None:
            return Agreement(fault)
    return Agreement(None, "; ".join(notes))


def _keep_as(stored: PackedMatrix) -> Callable[[int, Array], Array]:
    """What keeps, of the rows from a first one on, what ``stored`` keeps of them."""

    def prune(start: int, dense: Array) -> Array:
        rows, columns = dense.shape
        step = stored.row_step
        first = start // step * step
        stop = min(-(-(start + rows) // step) * step, stored.shape[0])
        _, meta = stored.rows(slice(first, stop)).row_order()
        meta = meta[start - first :][:rows]
        bits = contiguous_bits(dense)
        kept = np.zeros_like(bits)
        places = metadata.kept_places(meta, columns, stored.info.optype.group)
        kept.reshape(-1)[places] = bits.reshape(-1)[places]
        return kept.view(dense.dtype)

    return prune


def _first_difference(
    stored: PackedMatrix, made: PackedMatrix, first_row: int, rows_a_scale: int, by: str
) -> str | None:
    """In words what differs first between two bands that begin at ``first_row``; ``by`` says what
    the second is."""
    if stored.scale is not None and made.scale is not None:
        first = 0 if stored.info.scale.kind == "tensor" else first_row // rows_a_scale
        fault = _scale_difference(stored.scale, made.scale, by, first)
        if fault is not None:
            return fault
    if (
        stored.blocks is not None
        and made.blocks is not None
        and np.array_equal(stored.blocks, made.blocks)
    ):
        return None
    optype, columns = stored.info.optype, stored.shape[1]
    values, meta = stored.row_order()
    want_values, want_meta = made.row_order()
    pairs = metadata.decode(meta, optype.meta_k(columns))
    want_pairs = metadata.decode(want_meta, optype.meta_k(columns))
    place = _first((pairs[0] != want_pairs[0]) | (pairs[1] != want_pairs[1]))
    if place is not None:
        found_pair, want_pair = (tuple(int(p[place]) for p in ps) for ps in (pairs, want_pairs))
        row, group = place
        return (
            f"mask differs at row {first_row + row}, group {group}: "
            f"keeps {found_pair}, {by} {want_pair}"
        )
    bits, want_bits = contiguous_bits(values), contiguous_bits(want_values)
    place = _first(bits != want_bits)
    if place is not None:
        row, kept = place
        column = int(metadata.kept_places(meta[row : row + 1], columns, optype.group)[0, kept])
        found_code, want_code = (f"0x{int(b[place]):0{2 * b.itemsize}x}" for b in (bits, want_bits))
        return f"code at row {first_row + row}, column {column} is {found_code}, {by} {want_code}"
    if not np.array_equal(meta, want_meta):
        return f"unused metadata bits differ from row {first_row} on"
    if stored.blocks is not None:
        return f"padding differs from row {first_row} on"
    return None


def _scale_difference(stored: Array, made: Array, by: str, first: int = 0) -> str | None:
    """The same of two scales, the first of which stand at ``first``."""
    raw = np.dtype(f"u{stored.itemsize}")
    place = _first(stored.view(raw) != made.view(raw))
    if place is None:
        return None
    index = [place[0] + first, *place[1:]]
    return f"scale at {index} is {float(stored[place])!r}, {by} {float(made[place])!r}"


def _first(differs: Array) -> tuple[int, ...] | None:
    if not differs.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(differs.argmax()), differs.shape))
