"""Finding and opening the vendor libraries that sp24 is compared with.

None of them is a dependency: one that is not installed is `PeerAbsent` with a reason that the
bench prints beside its table.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sp24cli.errors import Sp24Error

#: ``cudaDataType_t`` by sp24 type name (library_types.h).
CUDA_DATA_TYPES = {
    "f32": 0,
    "tf32": 0,
    "f64": 1,
    "f16": 2,
    "s8": 3,
    "s32": 10,
    "bf16": 14,
    "e4m3": 28,
    "e5m2": 29,
}

#: The numpy type of each type that a peer reads or writes.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "s32": np.dtype(np.int32),
    "tf32": np.dtype(np.float32),
}


class PeerAbsent(Exception):
    """A peer library cannot be used at all; the message is the reason, one line."""


class PeerError(Sp24Error):
    """A peer library refused a call or a shape; the message names the call and its status."""


@dataclass(frozen=True)
class PeerProblem:
    """One product D = A·Bᵀ as a peer sees it.

    A is M×K row-major and 2:4 along K (1:2 for "tf32") of type ``operand`` (an operand type; "f64"
    for the reference of cuBLASLt), B is N×K row-major of type ``operand_b``, the same unless given.
    The products are summed in ``accumulate``. D is of type ``out``, written M×N (``order`` "mn")
    or N×M ("nm"). ``alpha`` multiplies the product: the tensor scale.
    """

    m: int
    n: int
    k: int
    operand: str
    out: str
    order: str
    alpha: float = 1.0
    operand_b: str = ""
    accumulate: str = "f32"

    def __post_init__(self) -> None:
        if self.order not in ("nm", "mn"):
            raise ValueError(f"order is 'nm' or 'mn', not {self.order!r}")

    @property
    def operand_types(self) -> tuple[int, int]:
        """``cudaDataType_t`` of A and of B."""
        return CUDA_DATA_TYPES[self.operand], CUDA_DATA_TYPES[self.operand_b or self.operand]

    @property
    def out_bytes(self) -> int:
        return self.m * self.n * NUMPY_TYPES[self.out].itemsize


@dataclass(frozen=True)
class LibrarySource:
    """Where a library may lie: an environment variable, wheels, the loader's own path."""

    name: str
    sonames: tuple[str, ...]
    env: str
    wheel_folders: tuple[str, ...]
    wheel: str

    def candidates(self) -> Iterable[str]:
        """Paths to try, best first; the last are bare names for the dynamic loader."""
        for folder in nvidia_wheel_roots():
            for inner in self.wheel_folders:
                for soname in self.sonames:
                    path = folder / inner / soname
                    if path.is_file():
                        yield str(path)
        for root in _toolkit_roots():
            for soname in self.sonames:
                path = root / "lib64" / soname
                if path.is_file():
                    yield str(path)
        yield from self.sonames

    def open(self) -> tuple[ctypes.CDLL, str]:
        """The opened library and the path or name it was opened by; `PeerAbsent` otherwise.

        A path given in the environment is the only one tried: a typing error there must not
        silently measure another version.
        """
        explicit = os.environ.get(self.env)
        if explicit:
            try:
                return ctypes.CDLL(explicit), explicit
            except OSError as error:
                raise PeerAbsent(f"{self.env}={explicit}: {_one_line(error)}") from None
        fault = ""
        for candidate in self.candidates():
            try:
                return ctypes.CDLL(candidate), candidate
            except OSError as error:
                # A file that is there but does not load says more than a missing bare name.
                fault = fault or (_one_line(error) if os.sep in candidate else "")
        hint = f"pip install {self.wheel}, or set {self.env} to the library"
        raise PeerAbsent(fault or f"{self.sonames[0]} not found ({hint})")


def nvidia_wheel_roots() -> list[Path]:
    """The folders of the ``nvidia`` namespace package, into which NVIDIA's wheels unpack."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]


def _toolkit_roots() -> list[Path]:
    named = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return [Path(root) for root in (*named, "/usr/local/cuda") if root]


def _one_line(error: OSError) -> str:
    return " ".join(str(error).split())


def declare(library: ctypes.CDLL, signatures: Mapping[str, Sequence[Any]]) -> None:
    """Give each function of ``signatures`` its argument types; all return an int status.

    A missing symbol means an older or newer library than the one coded for: `PeerAbsent`.
    """
    for name, arguments in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise PeerAbsent(f"this version of the library has no {name}") from None
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
