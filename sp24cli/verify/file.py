"""Verify a packed file: structure, agreement with the dense original, numerics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import get_args

import numpy as np

from sp24cli.checkpoint.header import TensorEntry, label
from sp24cli.checkpoint.names import DENSE_DTYPES
from sp24cli.checkpoint.packedfile import PackedFile, is_packed
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.sharded import open_tensors
from sp24cli.errors import BadInputError, NoGpuError, Sp24Error, UsageError, check_known
from sp24cli.formats.dequantized import DequantizedFile, shard_paths
from sp24cli.formats.foreign import ForeignFile
from sp24cli.formats.scales import Siblings
from sp24cli.ops.calibrate import Calibrator
from sp24cli.ops.engine import DeviceChoice
from sp24cli.ops.report import scale_text
from sp24cli.ops.stream import Meter, Progress, bands, default_workers, map_bands
from sp24cli.packed import PackedMatrix, PackInfo, check_structure
from sp24cli.verify import cpu
from sp24cli.verify.agreement import compare_codes, compare_packing
from sp24cli.verify.result import Agreement, NumericsResult, TensorVerdict, VerifyReport

#: Bytes of a passed-through tensor that are compared at a time.
_COMPARE_BYTES = 1 << 24


def verify_file(
    path: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    *,
    history: str | PathLike[str] | None = None,
    activations: str | PathLike[str] | None = None,
    device: DeviceChoice = "auto",
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """All that can be checked of the packed file or checkpoint ``path``.

    Structure: parts, legal index pairs, scales, padding. Agreement, with ``against``: mask,
    codes and scales recomputed from the dense original (pruned or not) bit for bit, and all
    other tensors byte for byte; what was converted from another tool's format, by the codes and
    scales that are there; scales of an amax history and the factors of smoothed columns,
    too, if ``history`` and ``activations`` are the files that they come from. Numerics: the
    product of each weight on ``device``, every element (see `cpu.verify_matrix`); not run for a
    tensor whose structure is wrong.

    Raises:
        BadInputError: a file that cannot be read, or ``path`` is not a packed one.
        NoGpuError: ``device`` is "cuda" and there is no usable Hopper GPU.
        UsageError: ``history`` or ``activations`` where no packed tensor is made from such;
            a ``device`` that there is not.
    """
    check_known("device", device, get_args(DeviceChoice))
    path = Path(path)
    against = None if against is None else Path(against)
    history = None if history is None else Path(history)
    activations = None if activations is None else Path(activations)
    workers = workers or default_workers()
    with ExitStack() as stack:
        packed = stack.enter_context(PackedFile(path))
        _check_use(packed, history, activations)
        original = calibrator = None
        converted: dict[str, ForeignFile] = {}
        if against is not None:
            original = stack.enter_context(open_tensors(against))
            if any(is_packed(part.metadata) for part in original.parts()):
                raise BadInputError(f"{label(against)}: is packed; --against takes the dense file")
            original = DequantizedFile(original, lambda entry: _source_dtype(packed, entry))
            converted = _converted(packed, original, shard_paths(against))
            known = original.header.by_name
            calibrator = stack.enter_context(Calibrator(history, activations))
            original.split(n for n in packed.stacks if n in known and len(known[n].shape) == 3)
        numerics, used, note = _choose_device(device, workers)
        meter = Meter(sum(entry.nbytes for entry in packed.file.header.entries), progress)
        verdicts = []
        for name in packed.packed:
            verdicts.append(
                _verify_tensor(
                    packed,
                    name,
                    original,
                    converted.get(name),
                    calibrator,
                    numerics,
                    seed,
                    workers,
                )
            )
            packed.drop_cache(name)
            parts = packed.packed[name].parts()
            meter.add(sum(packed.file.entry(f"{name}_{part}").nbytes for part in parts))
        faults: tuple[str, ...] = ()
        if original is not None:
            taken = {part for name, file in converted.items() for part in file.parts(name)}
            faults = tuple(_compare_others(packed, original, taken, meter))
        return VerifyReport(
            path=str(path),
            against=None if against is None else str(against),
            device=used,
            device_note=note,
            tensors=tuple(verdicts),
            passed_through=None if original is None else len(packed.others),
            faults=faults,
        )


def _check_use(packed: PackedFile, history: Path | None, activations: Path | None) -> None:
    """`UsageError` for a file that would not be read: it would look as if it proved something."""
    infos, where = packed.packed.values(), label(packed.file.path)
    if history is not None and not any(i.calibration.method == "history" for i in infos):
        raise UsageError(f"{label(history)}: proves nothing, no scale in {where} is from a history")
    if activations is not None and not any(i.smooth is not None for i in infos):
        raise UsageError(f"{label(activations)}: proves nothing, no column in {where} is smoothed")


def _source_dtype(packed: PackedFile, entry: TensorEntry) -> str | None:
    """What an FP8 weight of the original was read as when it was packed."""
    info = packed.packed.get(entry.name)
    return info.source_dtype if info is not None and info.source_dtype in DENSE_DTYPES else None


def _converted(
    packed: PackedFile, original: DequantizedFile, shards: Sequence[Path]
) -> dict[str, ForeignFile]:
    """By name the weights that may have been converted, with the file of the original (one of its
    ``shards``, where it has such) that holds the codes and scales they were."""
    dequantized = original.dequantized

    def has_its_scales(name: str, info: PackInfo) -> bool:
        if name not in original.header.by_name:
            # There may be a bitmask.
            return True
        try:
            return name in dequantized and dequantized[name][1].spec() == info.scale
        except BadInputError:
            return False

    wanted = {name for name, info in packed.packed.items() if has_its_scales(name, info)}
    found: dict[str, ForeignFile] = {}
    if wanted:
        for part in original.parts():
            file = ForeignFile(part, Siblings(Path(part.path), shards), only=wanted)
            found |= dict.fromkeys(file.packed, file)
    return found


_Numerics = Callable[[PackedMatrix, int], NumericsResult]


def _choose_device(choice: DeviceChoice, workers: int) -> tuple[_Numerics, str, str]:
    """What runs the products, the device's name, and why it is the CPU if that was not asked."""

    def on_cpu(packed: PackedMatrix, seed: int) -> NumericsResult:
        return cpu.verify_matrix(packed, seed, workers=workers)

    if choice == "cpu":
        return on_cpu, "cpu", ""
    try:
        # Late: CUDA is loaded for those alone who use it.
        from sp24cli.gpu.device import Device

        name = Device.open().name
    except NoGpuError as error:
        if choice == "cuda":
            raise
        return on_cpu, "cpu", str(error)
    from sp24cli.gpu.select import needs_widening
    from sp24cli.verify.gpu import verify_matrix

    def on_gpu(packed: PackedMatrix, seed: int) -> NumericsResult:
        try:
            needs_widening(packed.info.type, packed.info.scale)
        except Sp24Error as error:
            result = on_cpu(packed, seed)
            note = f"not run on the GPU: {error}; run on the CPU"
            return NumericsResult(result.device, result.checks, note)
        return verify_matrix(packed, seed)

    return on_gpu, name, ""


def _verify_tensor(
    packed: PackedFile,
    name: str,
    original: SafetensorsFile | None,
    converted: ForeignFile | None,
    calibrator: Calibrator | None,
    numerics: _Numerics,
    seed: int,
    workers: int,
) -> TensorVerdict:
    matrix = packed.load(name)
    structure = _structure(matrix, workers)
    agreement = None
    if original is not None:
        agreement = _agreement(matrix, original, converted, name, calibrator, workers)
    info = matrix.info
    return TensorVerdict(
        name=name,
        shape=info.shape,
        type=info.type,
        scale=scale_text(info.scale),
        layout=info.layout,
        structure=structure,
        agreement=agreement,
        numerics=numerics(matrix, seed) if structure is None else None,
    )


def _agreement(
    matrix: PackedMatrix,
    original: SafetensorsFile,
    converted: ForeignFile | None,
    name: str,
    calibrator: Calibrator | None,
    workers: int,
) -> Agreement:
    """Whether it is what the original gives when it is converted, or when it is packed anew."""
    taken = None
    if converted is not None:
        taken = compare_codes(matrix, converted, name, workers=workers)
        if taken is not None and taken.fault is None:
            return Agreement(None, "converted; compared with the codes and scales of the original")
    if taken is not None and name not in original.header.by_name:
        return Agreement(taken.fault)
    anew = compare_packing(matrix, original, name, calibrator=calibrator, workers=workers)
    if taken is None or anew.passed:
        return anew
    if taken.scales:
        return Agreement(taken.fault)
    return Agreement(f"{anew.fault}; if it was converted, {taken.fault}")


def _structure(matrix: PackedMatrix, workers: int) -> str | None:
    """`check_structure` by row bands, which bounds its temporaries; the whole names the place."""
    rows, columns = matrix.shape

    def is_right(start: int, stop: int) -> bool:
        return check_structure(matrix.rows(slice(start, stop))) is None

    ranges = bands(rows, columns, multiple=matrix.row_step)
    if ranges and all(map_bands(is_right, ranges, columns, workers)):
        return None
    return check_structure(matrix)


def _compare_others(
    packed: PackedFile, original: SafetensorsFile, parts: Collection[str], meter: Meter
) -> Iterator[str]:
    """Faults of the tensors that were passed through, and of those that got lost; ``parts`` are
    those of converted weights."""
    known = original.header.by_name
    for entry in packed.others:
        there = known.get(entry.name)
        if there is None:
            yield f"{entry.name}: is not in the original"
        elif (there.dtype, there.shape) != (entry.dtype, entry.shape):
            yield (
                f"{entry.name}: is {entry.dtype} {list(entry.shape)}, in the original "
                f"{there.dtype} {list(there.shape)}"
            )
        elif (byte := _first_difference(packed.file, original, entry)) is not None:
            yield f"{entry.name}: differs from the original at its byte {byte}"
        meter.add(entry.nbytes)
    present = {entry.name for entry in packed.others} | packed.packed.keys()
    present |= {f"{name}_perm" for name, info in packed.packed.items() if info.permuted}
    for name in known:
        if name not in present and name not in parts:
            yield f"{name}: is in the original, not here"


def _first_difference(
    file: SafetensorsFile, original: SafetensorsFile, entry: TensorEntry
) -> int | None:
    mine, theirs = (np.frombuffer(f.raw(entry.name), np.uint8) for f in (file, original))
    for start in range(0, entry.nbytes, _COMPARE_BYTES):
        part = slice(start, start + _COMPARE_BYTES)
        differs = mine[part] != theirs[part]
        if differs.any():
            return start + int(differs.argmax())
        for f in (file, original):
            f.drop_cache(entry.name)
    return None
