"""Dense FP8 weights and the scales beside them, however they are named and shaped.

A scale is a multiplier under every name: ``X.weight_scale`` (compressed-tensors, ModelOpt),
``X.weight_scale_inv`` (DeepSeek, whose "inverse" is that of quantizing) and ``X.scale``. It
covers the tensor, a row, a group of columns or a block; at ragged edges the last block is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sp24cli.bits import Array, widen
from sp24cli.checkpoint.header import TensorEntry, label, quote
from sp24cli.checkpoint.names import WEIGHT_SUFFIX
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.closing import Closing
from sp24cli.errors import BadInputError
from sp24cli.formats.origin import origins
from sp24cli.fp8 import round_to
from sp24cli.rowblocks import tiles
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import GROUP

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0")
#: The block where only the number of scales is known: that of DeepSeek and its followers.
_USUAL_SIDE = 128
#: Scales of this name are by blocks of the size that the config gives, if it gives one.
_BLOCK_SUFFIX = "_scale_inv"
#: Columns of a tile of `dequantize`.
_TILE_COLUMNS = 1 << 14


@dataclass(frozen=True)
class WeightScale:
    """The scale of one FP8 weight [N, K]: the file and tensor it is, the block that one covers.

    ``block`` is (rows, columns); a side as long as the weight's means that it is not divided.
    ``said`` is the block of the checkpoint's weights, where this one's scales can be by it.
    """

    file: SafetensorsFile
    entry: TensorEntry
    shape: tuple[int, int]
    block: tuple[int, int]
    said: tuple[int, int] | None = None

    def values(self) -> Array:
        """float32 (float64 for F64) [scales along N, along K], a copy; finite.

        Raises:
            BadInputError: a scale that is NaN, infinite or negative, with its place.
        """
        stored = self.file.array(self.entry.name)
        wide = stored.astype(np.float32) if self.entry.dtype == "F8_E8M0" else widen(stored)
        bad = ~((wide >= 0) & np.isfinite(wide))
        if bad.any():
            place = [int(i) for i in np.argwhere(bad)[0]]
            value = float(wide[tuple(place)])
            raise BadInputError(
                f"{_where(self.file, self.entry)}: scale {value} at {place} "
                "is negative or not finite"
            )
        if wide is stored:
            wide = stored.copy()
        # A file of a checkpoint stays open while the weights of all others are read.
        self.file.drop_cache(self.entry.name)
        return wide.reshape(
            *(-(-n // side) for n, side in zip(self.shape, self.block, strict=True))
        )

    @property
    def text(self) -> str:
        """What one scale covers, as reports name it."""
        rows, columns = self.block
        if self.block == self.shape:
            return "tensor"
        return "vector" if self.block == (1, self.shape[1]) else f"block {rows}x{columns}"

    def spec(self) -> ScaleSpec:
        """What a packed tensor calls a scale that covers this.

        Raises:
            BadInputError: a group of columns that is not a multiple of 4 cuts 2:4 groups apart.
        """
        # A weight may be no larger than a block, and is of the others' kind all the same.
        block = self.said or self.block
        rows, columns = block
        if self.said is None:
            if block == self.shape:
                return ScaleSpec("tensor")
            if block == (1, self.shape[1]):
                return ScaleSpec("vector")
        if columns % GROUP:
            raise BadInputError(
                f"{_where(self.file, self.entry)}: one scale covers {rows}x{columns} values, "
                f"and {columns} columns are no multiple of {GROUP}"
            )
        return ScaleSpec("block", block)


def dequantize(
    codes: Array, scale: Array, block: tuple[int, int], first_row: int, dtype: Any
) -> Array:
    """Rows of code * scale, the exact product rounded once to ``dtype``.

    ``codes`` [R, K] begin at ``first_row`` of the weight that ``scale`` (2-D, see
    `WeightScale.values`) and ``block`` belong to. What is past the end of ``dtype`` becomes
    infinite, so that it is found.
    """
    out = np.empty(codes.shape, dtype)
    for r, c in tiles(*codes.shape, width=_TILE_COLUMNS):
        product = widen(codes[r, c]).astype(np.float64)
        across = scale.take(np.arange(first_row + r.start, first_row + r.stop) // block[0], axis=0)
        if across.shape[1] > 1:
            across = across.take(np.arange(c.start, c.stop) // block[1], axis=1)
        product *= across
        out[r, c] = round_to(product, out.dtype, "nan")
    return out


def candidates(name: str) -> tuple[str, ...]:
    """What the scale of a weight ``name`` may be called."""
    stem = name.removesuffix(WEIGHT_SUFFIX)
    return f"{name}_scale", f"{name}_scale_inv", f"{stem}.scale"


def is_fp8_weight(entry: TensorEntry) -> bool:
    return entry.dtype in FP8_DTYPES and len(entry.shape) == 2 and 0 not in entry.shape


class CheckpointFiles(tuple[Path, ...]):
    """The paths of a checkpoint's files, each of which is opened once, when it is first needed."""

    @cached_property
    def _opened(self) -> dict[Path, SafetensorsFile]:
        return {}

    def open(self, path: Path) -> SafetensorsFile:
        """One of the files, for all who ask. Raises `BadInputError` for one that is malformed."""
        file = self._opened.get(path)
        if file is None:
            file = self._opened[path] = SafetensorsFile(path)
        return file


class Siblings(Closing):
    """The other files of a checkpoint, opened when one of them is needed.

    ``paths`` are all of its files; that of ``path`` itself is left out. Those of
    `CheckpointFiles` stay open, for the next of them has nearly the same siblings.
    """

    def __init__(self, path: Path, paths: Sequence[Path] = ()) -> None:
        self._path = path
        self._paths = paths
        self._stack = ExitStack()

    def __bool__(self) -> bool:
        return bool(self._paths)

    @cached_property
    def files(self) -> tuple[SafetensorsFile, ...]:
        """Raises `BadInputError` for one that is malformed."""
        others = [path for path in self._paths if not path.samefile(self._path)]
        if isinstance(self._paths, CheckpointFiles):
            return tuple(self._paths.open(path) for path in others)
        return tuple(self._stack.enter_context(SafetensorsFile(path)) for path in others)

    def close(self) -> None:
        self._stack.close()


def find_scale(
    file: SafetensorsFile, entry: TensorEntry, siblings: Siblings | None = None
) -> WeightScale | None:
    """The scale of the FP8 weight ``entry`` of ``file``, there or in a sibling; None if in none.

    Raises:
        BadInputError: two scales, or one whose dtype or shape does not fit the weight.
    """
    home, found = file, _scales_in(file, entry.name)
    if not found and siblings is not None:
        for sibling in siblings.files:
            found += _scales_in(sibling, entry.name)
            if found:
                home = sibling
                break
    if not found:
        return None
    scale, *more = found
    if more:
        raise BadInputError(
            f"{_where(home, scale)}: tensor {quote(entry.name)} has a second scale, "
            f"{quote(more[0].name)}"
        )
    if scale.dtype not in SCALE_DTYPES:
        raise BadInputError(f"{_where(home, scale)}: is {scale.dtype}, no scale")
    shape = (entry.shape[0], entry.shape[1])
    return WeightScale(
        home,
        scale,
        shape,
        _block(home, scale, entry.name, shape),
        _said_block(home, scale, entry.name, shape),
    )


def _scales_in(file: SafetensorsFile, name: str) -> list[TensorEntry]:
    known = file.header.by_name
    return [known[each] for each in candidates(name) if each in known]


def scales_of_siblings(
    file: SafetensorsFile, siblings: Siblings, holds: Callable[[SafetensorsFile, str], bool]
) -> Iterator[str]:
    """The tensors of ``file`` that are scales of a weight in a sibling.

    ``holds`` says whether a file has the weight of a name. Only weights called ``*.weight``.
    """
    if not siblings:
        return
    for entry in file.header.entries:
        for suffix in (f"{WEIGHT_SUFFIX}_scale", f"{WEIGHT_SUFFIX}_scale_inv", ".scale"):
            weight = entry.name.removesuffix(suffix) + WEIGHT_SUFFIX
            if (
                entry.name.endswith(suffix)
                and not holds(file, weight)
                and any(holds(sibling, weight) for sibling in siblings.files)
            ):
                yield entry.name


def _usual_block(file: SafetensorsFile, name: str) -> tuple[int, int] | None:
    """The block that the file, or the config.json beside it, gives for the weight ``name``."""
    said = origins(file).get(name)
    usual = said.scale.block if said is not None else None
    return usual or _block_of_config(Path(file.path))


def _needed(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, ...]:
    """How many scales a weight in blocks of that size has."""
    return tuple(-(-length // side) for length, side in zip(shape, block, strict=True))


def _said_block(
    file: SafetensorsFile, scale: TensorEntry, name: str, shape: tuple[int, int]
) -> tuple[int, int] | None:
    """The block that the weight ``name`` is said to have, where there are as many scales."""
    if len(scale.shape) != 2:
        return None
    usual = _usual_block(file, name)
    return usual if usual and scale.shape == _needed(shape, usual) else None


def _block(
    file: SafetensorsFile, scale: TensorEntry, name: str, shape: tuple[int, int]
) -> tuple[int, int]:
    """What one scale of the weight ``name`` covers, from how many there are of them."""
    if scale.shape in ((), (1,)):
        return shape
    counts = (*scale.shape, 1) if scale.shape == shape[:1] else scale.shape
    if len(counts) == 2:
        usual = _usual_block(file, name)
        if usual and scale.name.endswith(_BLOCK_SUFFIX):
            needed = _needed(shape, usual)
            if counts != needed:
                raise BadInputError(
                    f"{_where(file, scale)}: shape {list(scale.shape)}, but a weight {list(shape)} "
                    f"in blocks of {usual[0]}x{usual[1]}, as it is said to be, has {list(needed)}"
                )
        sides = [_side(shape[i], counts[i], usual[i] if usual else None) for i in (0, 1)]
        if sides[0] is not None and sides[1] is not None:
            return sides[0], sides[1]
    raise BadInputError(
        f"{_where(file, scale)}: shape {list(scale.shape)} gives no block size for a weight "
        f"{list(shape)} (weight_block_size in a config.json beside the file would)"
    )


def _side(length: int, count: int, usual: int | None) -> int | None:
    """How many of ``length`` one of ``count`` scales covers; None where that is not plain.

    Several sizes give the same count when the last block is cut: a wrong one would be a silent
    error, so a guess must be the usual size, or the one that divides the length or is a power of
    two and has no rival.
    """
    if count == length:
        return 1
    if count == 1:
        return length
    if not 0 < count < length:
        return None
    for side in (usual, _USUAL_SIDE):
        if side is not None and -(-length // side) == count:
            return side
    power = 1 << (-(-length // count) - 1).bit_length()
    likely = {power} if -(-length // power) == count else set()
    if length % count == 0:
        likely.add(length // count)
    return likely.pop() if len(likely) == 1 else None


def _block_of_config(path: Path) -> tuple[int, int] | None:
    """The block size that the config.json beside a file, or in a folder, gives, if any."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        return _read_block(config, config.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _read_block(path: Path, changed: int) -> tuple[int, int] | None:
    """``changed`` is its time: another one is another file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(quantization, dict):
        return None
    found = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found += [weights.get("block_structure"), [1, weights.get("group_size")]]
    for block in found:
        if isinstance(block, list) and len(block) == 2:
            rows, columns = block
            if type(rows) is type(columns) is int and min(rows, columns) > 0:
                return rows, columns
    return None


def _where(file: SafetensorsFile, entry: TensorEntry) -> str:
    return f"{label(file.path)}: tensor {quote(entry.name)}"
