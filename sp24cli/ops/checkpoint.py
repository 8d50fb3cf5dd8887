"""Operations on a file or on a whole checkpoint, and what config.json says of their result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from sp24cli.calibration import AMAX
from sp24cli.checkpoint.packedfile import VERSION
from sp24cli.formats.dequantized import input_files, shard_paths
from sp24cli.formats.scales import FP8_DTYPES
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.ops.convert import ConvertReport, check_shards, convert_file
from sp24cli.ops.dequantize import dequantize_file, is_foreign
from sp24cli.ops.engine import Engine
from sp24cli.ops.prune import PruneReport, prune_file
from sp24cli.ops.quantize import QuantizeReport, quantize_file
from sp24cli.ops.report import add_up, energy_share
from sp24cli.ops.shards import Done, Operation, run
from sp24cli.ops.stream import Progress
from sp24cli.ops.unpack import UnpackReport, unpack_file

CONFIG_KEY = "quantization_config"
QUANT_METHOD = "sp24"


def prune_checkpoint(
    source: Path,
    output: Path | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    engine: Engine | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Done[PruneReport]:
    """`prune_file` for a file or a checkpoint (a folder, or its index); ``options`` are its own.

    ``resume`` goes on with an output folder that an earlier run has left unfinished; by which
    ``engine`` makes no difference, so it is not among the ``options``.

    Raises:
        BadInputError: as `prune_file`, or index and shards disagree; nothing is written then.
        Sp24Error: the output may not or cannot be written; what is finished stays.
    """
    _add_siblings(source, options)
    operation = Operation(
        "prune",
        partial(prune_file, engine=engine),
        PruneReport,
        options,
        workers,
        find_nonfinite=True,
        engine=engine,
        config=_dense_config if options.get("dequantize_fp8") else None,
        beside=_beside(options),
    )
    done = run(operation, source, output, resume, overwrite, progress)
    if done.folder is None:
        return done
    tensors = done.report.tensors
    kept = add_up([(t.kept_energy * t.energy, t.energy_exponent) for t in tensors])
    total = add_up([(t.energy, t.energy_exponent) for t in tensors])
    return replace(done, report=replace(done.report, kept_energy=energy_share(kept, total)))


def quantize_checkpoint(
    source: Path,
    output: Path | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    engine: Engine | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Done[QuantizeReport]:
    """`quantize_file` for a file or a checkpoint, as `prune_checkpoint`.

    A ``config.json`` gets a ``quantization_config`` that says how the weights are packed.
    """
    _add_siblings(source, options)

    def config(config: dict[str, Any], report: QuantizeReport) -> dict[str, Any]:
        # What was FP8 is no more, and unpacking will not make it so.
        before = _dense_config(config, report) if options.get("dequantize_fp8") else config
        return _packed_config(before, report)

    operation = Operation(
        "quantize",
        partial(quantize_file, engine=engine),
        QuantizeReport,
        options,
        workers,
        find_nonfinite=True,
        find_violation=not options.get("prune", False),
        engine=engine,
        config=config,
        beside=_beside(options),
    )
    return run(operation, source, output, resume, overwrite, progress)


def unpack_checkpoint(
    source: Path,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Done[UnpackReport]:
    """`unpack_file`, or `dequantize_file` for the formats of other tools, for a file or a
    checkpoint, as `prune_checkpoint`."""
    function: Callable[..., UnpackReport] = unpack_file
    config = _unpacked_config
    if not options.get("codes") and is_foreign(source):
        function, config = dequantize_file, _dense_config
        options = {"dtype": options.get("dtype"), "siblings": shard_paths(source)}
    operation = Operation("unpack", function, UnpackReport, options, workers, config=config)
    return run(operation, source, output, resume, overwrite, progress)


def convert_checkpoint(
    source: Path,
    output: Path | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Done[ConvertReport]:
    """`convert_file` for a file or a checkpoint, as `prune_checkpoint`."""
    shards = options["siblings"] = shard_paths(source)
    if shards:
        check_shards(source, shards, options["format"])
    operation = Operation(
        "convert",
        convert_file,
        ConvertReport,
        options,
        workers,
        rehearse=True,
        config=_converted_config,
    )
    return run(operation, source, output, resume, overwrite, progress)


def _add_siblings(source: Path, options: dict[str, Any]) -> None:
    """Where the scales of FP8 weights may lie, if those are to be taken."""
    if options.get("dequantize_fp8") is not None:
        options["siblings"] = shard_paths(source)


def _beside(options: dict[str, Any]) -> tuple[Path, ...]:
    """The files of the choice and the calibration among ``options``."""
    choice = options.get("choice") or Choice()
    calibration = options.get("calibration") or Calibration()
    return input_files(choice.calibration, calibration.history, calibration.activations)


def _dense_config(
    config: dict[str, Any], report: PruneReport | QuantizeReport | UnpackReport
) -> dict[str, Any]:
    """The config of a checkpoint whose quantized weights have become dense, but for those that
    were left alone, of which it must go on to speak."""
    if isinstance(report, UnpackReport):
        left = bool(report.without_scale)
    else:
        left = any(skipped.dtype in FP8_DTYPES for skipped in report.skipped)
    if left:
        return config
    return {key: value for key, value in config.items() if key != CONFIG_KEY}


def _packed_config(config: dict[str, Any], report: QuantizeReport) -> dict[str, Any]:
    described: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "type": report.type,
        "scale": report.scale,
        "layout": report.layout,
        "overflow": report.overflow,
    }
    if report.calibration != AMAX.text:
        described["calibration"] = report.calibration
    if report.smooth is not None:
        described["smooth"] = report.smooth
    if CONFIG_KEY in config:
        described["original"] = config[CONFIG_KEY]
    return {**config, CONFIG_KEY: described}


def _converted_config(config: dict[str, Any], report: ConvertReport) -> dict[str, Any]:
    described = report.quantization_config
    before = config.get(CONFIG_KEY)
    if described is None and _is_ours(before):
        # Also what no tensor tells: the calibration, and the config that the dense model had.
        described = {**before, "layout": report.layout}
    elif described is None:
        described = {
            "quant_method": QUANT_METHOD,
            "version": VERSION,
            "type": ", ".join(sorted({t.type for t in report.tensors})),
            "scale": ", ".join(sorted({t.scale for t in report.tensors})),
            "layout": report.layout,
        }
    return {**config, CONFIG_KEY: described}


def _is_ours(described: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(described, dict) and described.get("quant_method") == QUANT_METHOD


def _unpacked_config(config: dict[str, Any], report: UnpackReport) -> dict[str, Any]:
    described = config.get(CONFIG_KEY)
    if not _is_ours(described):
        return config
    dense = {key: value for key, value in config.items() if key != CONFIG_KEY}
    return {**dense, CONFIG_KEY: described["original"]} if "original" in described else dense
