"""Where prune and quantize work: the option, and what it opens."""

from __future__ import annotations

import click

from sp24cli.calibration import AMAX
from sp24cli.errors import NoGpuError
from sp24cli.ops.calibrate import Calibration
from sp24cli.ops.choose import Choice
from sp24cli.ops.engine import DeviceChoice, Engine

device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the work is done; auto takes a Hopper GPU when there is one. The bytes are the "
    "same. --method sparsegpt, --permute, --calibrate, --amax-history and --smooth are the CPU's "
    "work with either.",
)


def open_engine(
    device: DeviceChoice,
    choice: Choice,
    calibration: Calibration | None = None,
) -> Engine | None:
    """The GPU as the operations know it, None for the CPU.

    What a GPU does not do the operations leave to the CPU, and report. "auto" takes no GPU for a
    choice of which it would do nothing.

    Raises:
        NoGpuError: "cuda", and there is no usable Hopper GPU.
    """
    calibration = calibration or Calibration()
    cpu_only = (
        choice.method == "sparsegpt"
        or choice.permute
        or calibration.rule != AMAX
        or calibration.activations is not None
    )
    if device == "cpu" or (device == "auto" and cpu_only):
        return None
    try:
        # Late: CUDA is loaded for those alone who use it.
        from sp24cli.gpu.convert import Converter
        from sp24cli.gpu.device import Device

        return Converter(Device.open())
    except NoGpuError:
        if device == "cuda":
            raise
        return None
