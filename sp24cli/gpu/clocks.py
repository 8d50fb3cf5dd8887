"""The clock of the SMs, by their own counters, between marks in the device's stream."""

from __future__ import annotations

import numpy as np

from sp24cli.gpu.arguments import pack_struct
from sp24cli.gpu.device import Device
from sp24cli.kernels import manifest


class ClockMarks:
    """``count`` marks, each a kernel of a few microseconds that is put on the stream by `record`.

    NVML reads a clock too, which at the power cap is up to a third above the one that the SMs
    count.
    """

    def __init__(self, device: Device, count: int) -> None:
        loaded = manifest.load()
        entry = loaded.conversion("clocks")
        assert entry is not None
        self._device, self._shape = device, (count, device.sm_count, 2)
        nbytes = 16 * device.sm_count
        self._marks = device.alloc(count * nbytes)
        device.memset(self._marks, 0)
        self._kernel = device.kernel(entry)
        layout, sms = loaded.args[entry.args], device.sm_count
        self._args = [
            pack_struct(layout, {"marks": self._marks.ptr + i * nbytes, "sms": sms})
            for i in range(count)
        ]

    def record(self, mark: int) -> None:
        """Enqueues that mark."""
        device = self._device
        device.launch(self._kernel, device.sm_count, [self._args[mark]], device.stream)

    def mhz(self, first: int, last: int) -> float | None:
        """The clock between two marks that have been passed, the median of the SMs; None where
        no SM has seen both."""
        marks = self._device.download(self._marks, np.uint64, self._shape)[[first, last]]
        marks = marks[:, (marks[..., 1] > 0).all(axis=0)]
        cycles, ns = (marks[1] - marks[0]).T.astype(np.float64)
        return float(np.median(1e3 * cycles / ns)) if len(ns) and ns.min() > 0 else None

    def free(self) -> None:
        self._marks.free()
