"""Safetensors files for tests, written and read here in a few lines of their own, and oracles
in plain Python that share no code with the package."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> Path:
    """``tensors`` in the order given, with no ``__metadata__`` at all when it is None."""
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        table[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def load(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """All tensors (copies) and the metadata of a file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    metadata = table.pop("__metadata__", {})
    tensors = {}
    for name, info in table.items():
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        flat = np.frombuffer(raw[begin:end], DTYPES[info["dtype"]])
        tensors[name] = flat.reshape(info["shape"])
    return tensors, metadata


def normal(seed: int, shape: tuple[int, ...], dtype: str = "F32", deviation: float = 0.02) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape) * deviation
    return values.astype(np.float32).astype(DTYPES[dtype])


def naive_prune(dense: Array) -> Array:
    """2:4 by magnitude, group by group; ties keep the lower index; zeros come out as +0."""
    out = np.zeros_like(dense)
    wide = dense.astype(np.float64)
    for row in range(dense.shape[0]):
        for start in range(0, dense.shape[1], 4):
            order = sorted(range(start, start + 4), key=lambda c: (-abs(wide[row, c]), c))
            for column in order[:2]:
                if wide[row, column] != 0:
                    out[row, column] = dense[row, column]
    return out


_CODES = np.arange(256, dtype=np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float64)
#: Finite magnitudes of E4M3 in order; the index is the code.
_MAGNITUDES = _CODES[:0x7F]


def naive_e4m3(value: float) -> int:
    """The code nearest to ``value``, ties to even, saturating."""
    magnitude = abs(value)
    above = int(np.searchsorted(_MAGNITUDES, magnitude))
    if above >= len(_MAGNITUDES):
        code = 0x7E
    elif above == 0:
        code = 0
    else:
        below = above - 1
        down, up = magnitude - _MAGNITUDES[below], _MAGNITUDES[above] - magnitude
        nearer_up = up < down or (up == down and above % 2 == 0)
        code = above if nearer_up else below
    return code | (0x80 if np.signbit(value) else 0)


def naive_pack(dense: Array, scale: Array) -> tuple[Array, Array, Array]:
    """(codes [M, K/2], meta [M, ceil(K/8)]) of a 2:4 matrix, and its dense codes as values.

    ``scale`` broadcasts to [M, K].
    """
    rows, columns = dense.shape
    scale = np.broadcast_to(scale, dense.shape)
    codes = np.zeros((rows, columns // 2), np.uint8)
    meta = np.zeros((rows, -(-columns // 8)), np.uint8)
    back = np.zeros(dense.shape)
    for row in range(rows):
        for group in range(columns // 4):
            filled = [i for i in range(4) if float(dense[row, 4 * group + i]) != 0]
            assert len(filled) <= 2
            if len(filled) == 2:
                pair = (filled[0], filled[1])
            elif len(filled) == 1:
                pair = (filled[0], 3) if filled[0] < 3 else (0, 3)
            else:
                pair = (0, 1)
            for slot, i in enumerate(pair):
                place = row, 4 * group + i
                if float(dense[place]) == 0:
                    continue
                wide = np.float64 if dense.dtype == np.float64 else np.float32
                code = naive_e4m3(float(wide(dense[place]) / wide(scale[place])))
                codes[row, 2 * group + slot] = code
                back[place] = _CODES[code] * float(scale[place])
            meta[row, group // 2] |= (pair[0] | pair[1] << 2) << 4 * (group % 2)
    return codes, meta, back
