"""The options that say how scales are chosen, and the `Calibration` they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from sp24cli.calibration import PERCENTILE, HistoryPick, Method, ScaleRule
from sp24cli.cli.options import PATH
from sp24cli.errors import BadInputError
from sp24cli.fp8 import Overflow
from sp24cli.ops.calibrate import Calibration
from sp24cli.scaling import ScaleSpec
from sp24cli.smoothing import ALPHA, check_alpha

_Command = TypeVar("_Command", bound=Callable[..., Any])


def scale_choice_options(command: _Command) -> _Command:
    for option in (
        click.option(
            "--alpha",
            type=float,
            metavar="SHARE",
            help=f"For --smooth: how much of it moves, 0 to 1 (default: {ALPHA}).",
        ),
        click.option(
            "--smooth",
            metavar="FILE",
            type=PATH,
            help="SmoothQuant: multiply column j by amax|x_j|^alpha / amax|w_j|^(1 - alpha), by "
            "which the activations are to be divided. FILE is a safetensors file (or checkpoint) "
            "with the amax of the input channels [K] under each weight's name. The factors are "
            "written beside the weight, as X.weight_smooth.",
        ),
        click.option(
            "--amax-compute",
            type=click.Choice(get_args(HistoryPick)),
            help="For --amax-history: the largest amax, or the first, the newest (default: max).",
        ),
        click.option(
            "--amax-history",
            metavar="FILE",
            type=PATH,
            help="Delayed scaling: take the scale by tensor from the amax of past steps. FILE is "
            "a safetensors file (or checkpoint) with [H] of them, newest first, under each "
            "weight's name. Values beyond saturate.",
        ),
        click.option(
            "--percentile",
            type=float,
            metavar="P",
            help=f"For --calibrate percentile: above 0, up to 100 (default: {PERCENTILE}).",
        ),
        click.option(
            "--calibrate",
            type=click.Choice(["amax", "percentile", "mse"]),
            help="How a scale is chosen: by the largest magnitude (amax, the default), by a "
            "percentile of the magnitudes, or by the least squared error (mse).",
        ),
    ):
        command = option(command)
    return command


def make_calibration(
    spec: ScaleSpec,
    overflow: Overflow,
    *,
    calibrate: Method | None,
    percentile: float | None,
    history: Path | None,
    pick: HistoryPick | None,
    smooth: Path | None,
    alpha: float | None,
) -> Calibration:
    """The calibration that the options make; a usage error for those that do not go together."""
    if spec.kind == "none" and (calibrate or history or smooth):
        raise click.UsageError(
            "--calibrate, --amax-history and --smooth go with types that have a scale"
        )
    if percentile is not None and calibrate != "percentile":
        raise click.UsageError("--percentile goes with --calibrate percentile only")
    if pick is not None and history is None:
        raise click.UsageError("--amax-compute goes with --amax-history only")
    if alpha is not None and smooth is None:
        raise click.UsageError("--alpha goes with --smooth only")
    if history is not None and calibrate is not None:
        raise click.UsageError("--amax-history and --calibrate do not go together")
    if history is not None and spec.kind != "tensor":
        raise click.UsageError("--amax-history goes with --scale tensor only")
    if calibrate == "percentile" and overflow != "satfinite":
        raise click.UsageError("--calibrate percentile goes with --overflow satfinite only")
    alpha = ALPHA if alpha is None else alpha
    try:
        check_alpha(alpha)
    except BadInputError as fault:
        raise click.UsageError(f"--alpha: {fault}") from fault
    if history is not None:
        return Calibration(ScaleRule("history", pick=pick or "max"), history, smooth, alpha)
    if calibrate == "percentile":
        try:
            rule = ScaleRule("percentile", PERCENTILE if percentile is None else percentile)
        except BadInputError as fault:
            raise click.UsageError(f"--percentile: {fault}") from fault
        return Calibration(rule, None, smooth, alpha)
    return Calibration(ScaleRule(calibrate or "amax"), None, smooth, alpha)
