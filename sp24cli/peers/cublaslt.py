"""Dense products by cuBLASLt: what the same layer costs without sparsity, and a float64 reference.

Coded against the C API of cublasLt.h 13 (``cublasLtMatmul`` and the heuristics' first answer,
which is what a caller gets who does not search).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from sp24cli.closing import Closing
from sp24cli.peers.loading import (
    CUDA_DATA_TYPES,
    NUMPY_TYPES,
    LibrarySource,
    PeerError,
    PeerProblem,
    declare,
)

if TYPE_CHECKING:
    from sp24cli.gpu.device import Buffer, Device

SOURCE = LibrarySource(
    name="cuBLASLt",
    sonames=("libcublasLt.so.13",),
    env="SP24_CUBLASLT",
    wheel_folders=("cu13/lib", "cublas/lib"),
    wheel="nvidia-cublas",
)

#: What NVIDIA recommends for Hopper (cuBLAS documentation, "cublasSetWorkspace").
WORKSPACE_BYTES = 32 << 20

_OP_N, _OP_T = 0, 1
_COMPUTE_16F, _COMPUTE_32F, _COMPUTE_64F, _COMPUTE_32I = 64, 68, 70, 72
_COMPUTE_32F_FAST_TF32 = 77
_DESC_TRANSA, _DESC_TRANSB, _DESC_FAST_ACCUM = 3, 4, 25
_PREF_MAX_WORKSPACE_BYTES = 1


class MatmulAlgo(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``: 64 opaque bytes."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``: 96 bytes."""

    _fields_ = [
        ("algo", MatmulAlgo),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", c_int * 4),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtDestroy": [c_void_p],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [
        c_void_p,  # handle
        c_void_p,  # operation
        c_void_p,  # layouts of A, B, C, D
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,  # preference
        c_int,
        POINTER(HeuristicResult),
        POINTER(c_int),
    ],
    "cublasLtMatmul": [
        c_void_p,  # handle
        c_void_p,  # operation
        c_void_p,  # alpha
        c_void_p,  # A
        c_void_p,
        c_void_p,  # B
        c_void_p,
        c_void_p,  # beta
        c_void_p,  # C
        c_void_p,
        c_void_p,  # D
        c_void_p,
        POINTER(MatmulAlgo),
        c_void_p,  # workspace
        c_size_t,
        c_void_p,  # stream
    ],
}


class CublasLt(Closing):
    """The opened library. `load` needs no GPU; `open` does."""

    name = SOURCE.name

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        declare(library, _SIGNATURES)
        library.cublasLtGetVersion.argtypes = []
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtGetStatusString.argtypes = [c_int]
        library.cublasLtGetStatusString.restype = ctypes.c_char_p
        self._library = library
        self._handle = c_void_p()
        self._device: Device | None = None
        self._workspace: Buffer | None = None
        self.path = path

    @classmethod
    def load(cls) -> CublasLt:
        """Find and load the library; `PeerAbsent` where there is none."""
        return cls(*SOURCE.open())

    @property
    def version(self) -> str:
        number = int(self._library.cublasLtGetVersion())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def status_text(self, status: int) -> str:
        text = self._library.cublasLtGetStatusString(status)
        return text.decode(errors="replace") if text else f"status {status}"

    def open(self, device: Device) -> None:
        """Create the handle in the device's current context and the shared workspace."""
        self._call("cublasLtCreate", byref(self._handle))
        self._device = device
        self._workspace = device.alloc(WORKSPACE_BYTES)

    def close(self) -> None:
        if self._workspace is not None:
            self._workspace.free()
            self._workspace = None
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = c_void_p()

    def plan(self, problem: PeerProblem) -> DensePlan:
        """The heuristics' first algorithm for this problem; `PeerError` when there is none."""
        return DensePlan(self, problem)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise PeerError(f"{name}: {self.status_text(status)}")


def _compute(problem: PeerProblem) -> tuple[int, str]:
    """The compute type and the type of alpha and beta (cuBLAS documentation, "cublasLtMatmul",
    table of supported types)."""
    if problem.operand == "f64":
        return _COMPUTE_64F, "f64"
    if problem.accumulate == "s32":
        return _COMPUTE_32I, "s32" if problem.out == "s32" else "f32"
    if problem.accumulate == "f16":
        return _COMPUTE_16F, "f16"
    return _COMPUTE_32F_FAST_TF32 if problem.operand == "tf32" else _COMPUTE_32F, "f32"


class DensePlan:
    """One dense product. ``enqueue`` may be captured into a graph.

    cuBLASLt is column-major and its FP8 kernels want the first operand transposed: an N×K
    row-major matrix is K×N column-major, so both operands stand as they are, and the written
    order follows from which of the two comes first.
    """

    label = "cuBLASLt dense"

    def __init__(self, owner: CublasLt, problem: PeerProblem) -> None:
        self._owner = owner
        self.problem = problem
        self._made: list[tuple[str, c_void_p]] = []
        self._algorithm = HeuristicResult()
        compute, scale = _compute(problem)
        # Alpha and beta are of the scale type; numpy has f16, which ctypes lacks.
        self._scalars = np.array([problem.alpha, 0.0], NUMPY_TYPES[scale])
        self._alpha = self._scalars.ctypes.data
        self._beta = self._alpha + self._scalars.itemsize
        try:
            self._prepare(compute, scale)
        except PeerError:
            self.free()
            raise

    def _prepare(self, compute: int, scale: str) -> None:
        problem, call = self.problem, self._owner._call
        operation = self._make("cublasLtMatmulDesc", compute, CUDA_DATA_TYPES[scale])
        self._set(operation, _DESC_TRANSA, c_int32(_OP_T))
        self._set(operation, _DESC_TRANSB, c_int32(_OP_N))
        if problem.operand in ("e4m3", "e5m2"):
            # The sparse kernels do not promote either; without this the peer would do more work.
            self._set(operation, _DESC_FAST_ACCUM, ctypes.c_int8(1))
        (first_type, second_type), rows, cols = problem.operand_types, problem.m, problem.n
        if problem.order == "mn":
            first_type, second_type, rows, cols = second_type, first_type, cols, rows
        out = CUDA_DATA_TYPES[problem.out]
        first = self._make("cublasLtMatrixLayout", first_type, problem.k, rows, problem.k)
        second = self._make("cublasLtMatrixLayout", second_type, problem.k, cols, problem.k)
        result = self._make("cublasLtMatrixLayout", out, rows, cols, rows)
        preference = self._make("cublasLtMatmulPreference")
        limit = c_uint64(WORKSPACE_BYTES)
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _PREF_MAX_WORKSPACE_BYTES,
            byref(limit),
            ctypes.sizeof(limit),
        )
        found = c_int()
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._owner._handle,
            operation,
            first,
            second,
            result,
            result,
            preference,
            1,
            byref(self._algorithm),
            byref(found),
        )
        if found.value == 0 or self._algorithm.state != 0:
            raise PeerError(f"cuBLASLt has no algorithm for {problem}")
        self._operation, self._first, self._second, self._result = operation, first, second, result

    def enqueue(self, a: int, b: int, d: int) -> None:
        """Put D = alpha·A·Bᵀ on the device's stream; arguments are device addresses."""
        owner = self._owner
        assert owner._device is not None
        assert owner._workspace is not None
        if self.problem.order == "mn":
            a, b = b, a
        owner._call(
            "cublasLtMatmul",
            owner._handle,
            self._operation,
            self._alpha,
            a,
            self._first,
            b,
            self._second,
            self._beta,
            d,
            self._result,
            d,
            self._result,
            byref(self._algorithm.algo),
            owner._workspace.ptr,
            owner._workspace.nbytes,
            owner._device.stream,
        )

    def free(self) -> None:
        while self._made:
            kind, made = self._made.pop()
            self._owner._call(f"{kind}Destroy", made)

    def _make(self, kind: str, *arguments: int) -> c_void_p:
        made = c_void_p()
        self._owner._call(f"{kind}Create", byref(made), *arguments)
        self._made.append((kind, made))
        return made

    def _set(self, operation: c_void_p, attribute: int, value: Any) -> None:
        self._owner._call(
            "cublasLtMatmulDescSetAttribute",
            operation,
            attribute,
            byref(value),
            ctypes.sizeof(value),
        )
