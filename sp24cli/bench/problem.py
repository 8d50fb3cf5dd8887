"""What is multiplied: shapes, random or given weights and activations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli import rowblocks
from sp24cli.activations import Tokens, quantize_tokens
from sp24cli.bench.rates import Shape
from sp24cli.bits import NUMBER_TYPES
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.optypes import OperandType
from sp24cli.packed import PackedMatrix, pack
from sp24cli.pruning.pattern import TWO_OF_FOUR, pattern_of, prune_magnitude
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24

Array = npt.NDArray[Any]

#: Shapes of large language models: four compute-bound layers, a small batch, and decode steps.
SUITES: dict[str, tuple[Shape, ...]] = {
    "llm": (
        Shape(4096, 8192, 8192),
        Shape(8192, 4096, 28672),
        Shape(28672, 4096, 8192),
        Shape(4096, 4096, 4096),
        Shape(8192, 1024, 8192),
        Shape(14336, 256, 4096),
        Shape(8192, 128, 8192),
        Shape(28672, 64, 8192),
        Shape(28672, 16, 8192),
    )
}

#: Names of all suites; see `suite`.
SUITE_NAMES = (*SUITES, "select30", "grid", "fit", "fit-few")

#: The largest weight and output of made-up suites, in elements: what takes seconds to make.
_MOST_ELEMENTS = 1 << 28

#: Shapes of the suites ``fit`` and ``fit-few``.
_FIT_SHAPES, _FEW_SHAPES = 300, 120

#: The largest sides of drawn shapes, and of those of few tokens.
_MOST, _MOST_FEW = Shape(28672, 8192, 16384), Shape(8192, 64, 8192)

#: Rows drawn from one random stream; part of what a seed means, so not to be tuned.
_STREAM_ROWS = 64


def suite(name: str, seed: int) -> tuple[Shape, ...]:
    """The shapes of a suite.

    ``grid``, ``fit`` and ``fit-few`` are what the table of kernels is measured on: usual shapes,
    others, and more of few tokens, where microseconds hang on small differences. ``select30`` are
    thirty that are in none of them, to check the choice of kernels with; which ones depends on the
    seed.
    """
    if name == "grid":
        return grid_shapes()
    if name == "fit":
        return fit_shapes(_FIT_SHAPES, seed)
    if name == "fit-few":
        return few_shapes(_FEW_SHAPES, seed)
    if name == "select30":
        return select_shapes(30, seed)
    return SUITES[name]


def grid_shapes() -> tuple[Shape, ...]:
    """Sides of usual layers, and tokens by powers of two; shapes of one weight together."""
    regular = (
        Shape(m, 1 << n, k)
        for m in (1024, 2048, 4096, 8192, 14336, 28672)
        for k in (4096, 8192)
        for n in range(3, 14)
    )
    return tuple(dict.fromkeys((*filter(_makable, regular), *SUITES["llm"])))


def select_shapes(count: int, seed: int) -> tuple[Shape, ...]:
    """``count`` shapes that are not of the grid: M a multiple of 64 from 1024 to 28672, N any
    number to 8192, K a multiple of 128 from 1024 to 16384, all drawn evenly in their logarithm."""
    return _drawn(count, seed, _MOST)


def _drawn(count: int, seed: int, most: Shape) -> tuple[Shape, ...]:
    rng = random.Random(seed)

    def draw(low: int, high: int, step: int) -> int:
        return step * round(low * (high / low) ** rng.random() / step)

    grid = set(grid_shapes())
    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = Shape(draw(1024, most.m, 64), draw(1, most.n, 1), draw(1024, most.k, 128))
        if shape not in grid and _makable(shape):
            found[shape] = None
    return tuple(found)


def fit_shapes(count: int, seed: int) -> tuple[Shape, ...]:
    """``count`` shapes drawn as `select_shapes` does, but none that this seed gives there."""
    kept = set(select_shapes(30, seed))
    drawn = select_shapes(count + len(kept), seed + 1)
    return tuple(shape for shape in drawn if shape not in kept)[:count]


def few_shapes(count: int, seed: int) -> tuple[Shape, ...]:
    """``count`` more, of up to 64 tokens, 8192 rows and K of 8192, likewise."""
    kept = {*select_shapes(30, seed), *fit_shapes(_FIT_SHAPES, seed)}
    drawn = _drawn(count + len(kept), seed + 2, _MOST_FEW)
    return tuple(shape for shape in drawn if shape not in kept)[:count]


def _makable(shape: Shape) -> bool:
    return max(shape.m * shape.k, shape.m * shape.n) <= _MOST_ELEMENTS


def parse_shape(text: str) -> Shape:
    """A shape written ``MxNxK``; `ValueError` with what is wrong."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() for p in parts):
        raise ValueError(f"{text!r} is not MxNxK, as in 4096x8192x8192")
    m, n, k = _sizes(parts, f"{text!r}: every side")
    if k % 4:
        raise ValueError(f"{text!r}: K must be a multiple of 4")
    return Shape(m, n, k)


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of tokens written ``N,N,...``; `ValueError` with what is wrong."""
    parts = text.split(",")
    if not all(p.isascii() and p.isdigit() for p in parts):
        raise ValueError(f"{text!r} is not a list of token counts, as in 16,128,4096")
    return _sizes(parts, f"{text!r}: all token counts")


def _sizes(parts: Sequence[str], what: str) -> tuple[int, ...]:
    """Strings of digits as sizes of a problem; `ValueError` about ``what`` for one that is none."""
    # Eleven digits are too many already, and thousands more than int() takes.
    sizes = tuple(int(part.lstrip("0")[:11] or "0") for part in parts)
    if min(sizes) < 1:
        raise ValueError(f"{what} must be positive")
    if max(sizes) >= 1 << 31:
        raise ValueError(f"{what} must be below 2^31")
    return sizes


def random_normal(rows: int, columns: int, seed: int, dtype: npt.DTypeLike, workers: int) -> Array:
    """Normal values of mean 0 and deviation 1, [rows, columns], rounded from float32 to ``dtype``.

    Every block of rows has its own stream, so the values depend on seed and shape alone and all
    of them are drawn independently, also in the largest matrices.
    """
    out = np.empty((rows, columns), dtype)

    def fill(part: slice) -> None:
        stream = np.random.default_rng([seed, rows, columns, part.start])
        drawn = stream.standard_normal((part.stop - part.start, columns), dtype=np.float32)
        out[part] = drawn.astype(out.dtype)

    rowblocks.run(fill, rowblocks.row_slices(rows, _STREAM_ROWS), workers)
    return out


def random_weight(
    m: int, k: int, optype: OperandType, scale: ScaleSpec, seed: int, workers: int
) -> PackedMatrix:
    """A normal weight [m, k], pruned by magnitude and packed (layout ``sm90``).

    The source has the bits that the operand type has, so that none of them is always zero: idle
    bits save power and flatter the clock.
    """
    kind = {"f16": "F16", "tf32": "F32"}.get(optype.name, "BF16")
    dense = random_normal(m, k, seed, NUMBER_TYPES[kind].dtype, workers)
    if pattern_of(optype) == TWO_OF_FOUR:
        prune_24(dense, out=dense, workers=workers)
    else:
        dense = prune_magnitude(dense, pattern_of(optype))
    packed, _ = pack(
        dense,
        optype,
        scale,
        layout="sm90",
        pruned="magnitude",
        source_dtype=kind,
        workers=workers,
    )
    return packed


def random_tokens(
    n: int, k: int, optype: OperandType, seed: int, workers: int, scale_k: int = 0
) -> Tokens:
    """Normal activations [n, k], quantized by row, or by row and ``scale_k`` columns."""
    # Another stream than a weight of the same shape and seed.
    dense = random_normal(n, k, seed + 1, np.float32, workers)
    return quantize_tokens(dense, optype, workers, scale_k)


def load_activations(where: str) -> Array:
    """Activations from ``FILE[:NAME]``, a safetensors or .npy file, as a matrix [tokens, K].

    Leading dimensions are flattened. Without a name the file must hold one tensor. The values
    must be finite floats; `BadInputError` otherwise.
    """
    path, name = _split(where)
    array = _load_npy(path) if path.suffix == ".npy" else _load_safetensors(path, name)
    if array.ndim < 2:
        raise BadInputError(f"{where}: activations need two dimensions, not {array.ndim}")
    flat = array.reshape(-1, array.shape[-1])
    if flat.dtype not in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        raise BadInputError(f"{where}: activations are of type {flat.dtype}, not a float")
    if not flat.size:
        raise BadInputError(f"{where}: activations are empty")
    finite = np.isfinite(flat)
    if not finite.all():
        row, column = np.unravel_index(int(np.argmin(finite)), flat.shape)
        raise BadInputError(f"{where}: row {row}, column {column} is not finite")
    return flat


def _split(where: str) -> tuple[Path, str | None]:
    """FILE and NAME; a colon belongs to the path where a file of that whole name exists."""
    if ":" in where and not Path(where).exists():
        path, name = where.rsplit(":", 1)
        return Path(path), name
    return Path(where), None


def _load_npy(path: Path) -> Array:
    try:
        with path.open("rb") as file:
            # Not np.load: that also takes archives of arrays.
            loaded: Array = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from None
    except (ValueError, SyntaxError, TokenError) as error:
        raise BadInputError(f"{path}: {error}") from None
    return loaded


def _load_safetensors(path: Path, name: str | None) -> Array:
    with SafetensorsFile(path) as file:
        if name is None:
            if len(file.names) != 1:
                raise BadInputError(
                    f"{path}: holds {len(file.names)} tensors; name one as {path}:NAME"
                )
            name = file.names[0]
        return np.array(file.array(name))
