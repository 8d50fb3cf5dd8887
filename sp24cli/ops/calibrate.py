"""What scales are calibrated by: the rule of their choice, and files of amax beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sp24cli.bits import Array, widen
from sp24cli.calibration import AMAX, HistoryPick, ScaleRule
from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.names import DENSE_DTYPES
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.sharded import open_tensors
from sp24cli.closing import Closing
from sp24cli.errors import BadInputError
from sp24cli.ops.plan import tensor_label
from sp24cli.packed import PackInfo
from sp24cli.scaling import scales_from_amax
from sp24cli.smoothing import ALPHA, check_amax


@dataclass(frozen=True)
class Calibration:
    """How scales are chosen and columns smoothed.

    ``history`` and ``activations`` are safetensors files (or checkpoints) with a tensor under the
    name of each weight: the amax of past steps [H], newest first, for a ``rule`` of method
    ``history``; the largest magnitudes of the input channels [K], for smoothing by ``alpha``.
    """

    rule: ScaleRule = AMAX
    history: Path | None = None
    activations: Path | None = None
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        if (self.history is not None) != (self.rule.method == "history"):
            raise ValueError(f"calibration {self.rule.text!r} and a history do not go together")

    @property
    def smooth(self) -> float | None:
        """The alpha of the factors, None where nothing is smoothed."""
        return None if self.activations is None else float(self.alpha)


class Calibrator(Closing):
    """The files of a `Calibration`, open, with a right tensor for each of the ``entries``.

    ``pick`` is that of the rule, where there is a history.

    Raises:
        BadInputError: a file lacks a tensor or has one that cannot be, with file, tensor, place.
    """

    def __init__(
        self,
        history: Path | None,
        activations: Path | None,
        entries: Sequence[TensorEntry] = (),
        pick: HistoryPick | None = None,
    ) -> None:
        self._history: SafetensorsFile | None = None
        self._activations: SafetensorsFile | None = None
        with ExitStack() as stack:
            if history is not None:
                self._history = stack.enter_context(open_tensors(history))
                for entry in entries:
                    _read_history(self._history, entry.name, pick)
            if activations is not None:
                self._activations = stack.enter_context(open_tensors(activations))
                for entry in entries:
                    _read_activations(self._activations, entry.name, entry.shape)
            self._files = stack.pop_all()

    def close(self) -> None:
        self._files.close()

    def scale(self, name: str, info: PackInfo) -> Array | None:
        """The scale [1] of a tensor by its history, None where there is none.

        As Transformer Engine's delayed scaling: from the largest amax of the history, or from its
        first, the newest. The values at hand are not asked.
        """
        if self._history is None:
            return None
        largest = _read_history(self._history, name, info.calibration.pick)
        return scales_from_amax(largest, info.optype.max_finite)

    def activations(self, entry: TensorEntry) -> Array | None:
        """The largest magnitudes [K] of a tensor's input channels, None without smoothing."""
        if self._activations is None:
            return None
        return _read_activations(self._activations, entry.name, entry.shape)


def _read_history(file: SafetensorsFile, name: str, pick: HistoryPick | None) -> Array:
    """The amax [1] that a history gives."""
    entry, where = file.entry(name), tensor_label(file, name)
    if entry.dtype not in DENSE_DTYPES:
        raise BadInputError(f"{where}: {entry.dtype} is no history (F64, F32, F16 or BF16)")
    if len(entry.shape) != 1 or 0 in entry.shape:
        raise BadInputError(f"{where}: a history must be [H], H > 0, not {list(entry.shape)}")
    history = widen(file.array(name))
    bad = ~(np.isfinite(history) & (history >= 0))
    if bad.any():
        step = int(bad.argmax())
        raise BadInputError(f"{where}: amax {step} of the history is {history[step]}")
    largest = history.max(keepdims=True) if pick == "max" else history[:1]
    if not largest.any():
        # Transformer Engine would go on with the scale of before; there is none here.
        raise BadInputError(f"{where}: its {pick} amax is 0, which gives no scale")
    return largest


def _read_activations(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Array:
    entry, where = file.entry(name), tensor_label(file, name)
    if entry.dtype not in DENSE_DTYPES:
        raise BadInputError(f"{where}: {entry.dtype} are no amax (F64, F32, F16 or BF16)")
    if entry.shape != shape[1:]:
        raise BadInputError(
            f"{where}: the amax of the channels of a weight {list(shape)} must be "
            f"{list(shape[1:])}, not {list(entry.shape)}"
        )
    try:
        return check_amax(file.array(name), shape[1])
    except BadInputError as fault:
        raise BadInputError(f"{where}: {fault}") from fault
