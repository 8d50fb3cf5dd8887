"""2:4 sparse products by cuSPARSELt: its default algorithm, and every other by id.

Coded against the C API of cusparseLt.h 0.8 (the same in 0.10): the weight is A, compressed by the
library itself from the pruned dense matrix, the activations are B in column-major order.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import TYPE_CHECKING, Any

from sp24cli.closing import Closing
from sp24cli.peers.loading import (
    CUDA_DATA_TYPES,
    LibrarySource,
    PeerError,
    PeerProblem,
    declare,
)

if TYPE_CHECKING:
    from sp24cli.gpu.device import Buffer, Device

SOURCE = LibrarySource(
    name="cuSPARSELt",
    sonames=("libcusparseLt.so.0",),
    env="SP24_CUSPARSELT",
    wheel_folders=("cusparselt/lib", "cu13/lib"),
    wheel="nvidia-cusparselt-cu13",
)

_OP_N = 0
_ORDER_COL, _ORDER_ROW = 1, 2
_SPARSITY_50_PERCENT = 0
_COMPUTE = {"s32": 0, "f16": 1, "f32": 2}
_ALG_DEFAULT = 0
_ALG_CONFIG_ID, _ALG_CONFIG_MAX_ID = 0, 1
_ALIGNMENT = 16

#: Bytes set aside for each opaque structure: 512 in 0.8, 1024 in 0.7, about 11 KB before.
_OPAQUE_BYTES = 16384

_SELECTION_DESTROY = "cusparseLtMatmulAlgSelectionDestroy"

_SIGNATURES: dict[str, list[Any]] = {
    "cusparseLtInit": [c_void_p],
    "cusparseLtDestroy": [c_void_p],
    "cusparseLtGetProperty": [c_int, POINTER(c_int)],
    "cusparseLtDenseDescriptorInit": [
        c_void_p,
        c_void_p,
        c_int64,  # rows
        c_int64,  # columns
        c_int64,  # leading dimension
        c_uint32,  # alignment
        c_int,  # cudaDataType
        c_int,  # cusparseOrder_t
    ],
    "cusparseLtStructuredDescriptorInit": [
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_uint32,
        c_int,
        c_int,
        c_int,  # cusparseLtSparsity_t
    ],
    "cusparseLtMatDescriptorDestroy": [c_void_p],
    "cusparseLtMatmulDescriptorInit": [
        c_void_p,
        c_void_p,
        c_int,  # operations on A, B
        c_int,
        c_void_p,  # descriptors of A, B, C, D
        c_void_p,
        c_void_p,
        c_void_p,
        c_int,  # cusparseComputeType
    ],
    "cusparseLtMatmulAlgSelectionInit": [c_void_p, c_void_p, c_void_p, c_int],
    "cusparseLtMatmulAlgSetAttribute": [c_void_p, c_void_p, c_int, c_void_p, c_size_t],
    "cusparseLtMatmulAlgGetAttribute": [c_void_p, c_void_p, c_int, c_void_p, c_size_t],
    "cusparseLtMatmulPlanInit": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cusparseLtMatmulPlanDestroy": [c_void_p],
    "cusparseLtMatmulGetWorkspace": [c_void_p, c_void_p, POINTER(c_size_t)],
    "cusparseLtSpMMACompressedSize": [
        c_void_p,
        c_void_p,
        POINTER(c_size_t),
        POINTER(c_size_t),
    ],
    "cusparseLtSpMMACompress": [
        c_void_p,
        c_void_p,
        c_void_p,  # dense
        c_void_p,  # compressed
        c_void_p,  # scratch
        c_void_p,  # stream
    ],
    "cusparseLtMatmul": [
        c_void_p,
        c_void_p,
        c_void_p,  # alpha
        c_void_p,  # compressed A
        c_void_p,  # B
        c_void_p,  # beta
        c_void_p,  # C
        c_void_p,  # D
        c_void_p,  # workspace
        POINTER(c_void_p),  # streams
        c_int32,
    ],
}


class _Opaque:
    """Room for one of the library's opaque structures, 64-byte aligned."""

    def __init__(self) -> None:
        self._room = ctypes.create_string_buffer(_OPAQUE_BYTES + 64)
        self.address = (ctypes.addressof(self._room) + 63) & ~63


class CusparseLt(Closing):
    """The opened library. `load` needs no GPU; `open` does."""

    name = SOURCE.name

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        declare(library, _SIGNATURES)
        # 0.7 has no such call, and nothing to free.
        if self._has_selection_destroy(library):
            declare(library, {_SELECTION_DESTROY: [c_void_p]})
        library.cusparseLtGetErrorString.argtypes = [c_int]
        library.cusparseLtGetErrorString.restype = ctypes.c_char_p
        self._library = library
        self._handle = _Opaque()
        self._device: Device | None = None
        self.path = path

    @classmethod
    def load(cls) -> CusparseLt:
        """Find and load the library; `PeerAbsent` where there is none."""
        return cls(*SOURCE.open())

    @staticmethod
    def _has_selection_destroy(library: ctypes.CDLL) -> bool:
        return hasattr(library, _SELECTION_DESTROY)

    @property
    def version(self) -> str:
        """major.minor.patch; read by property, since the packed number's encoding has changed."""
        parts = []
        for which in range(3):
            value = c_int()
            self._call("cusparseLtGetProperty", which, byref(value))
            parts.append(str(value.value))
        return ".".join(parts)

    def status_text(self, status: int) -> str:
        text = self._library.cusparseLtGetErrorString(status)
        return text.decode(errors="replace") if text else f"status {status}"

    def open(self, device: Device) -> None:
        """Initialize the library in the device's current context."""
        self._call("cusparseLtInit", self._handle.address)
        self._device = device

    def close(self) -> None:
        if self._device is not None:
            self._device = None
            self._call("cusparseLtDestroy", self._handle.address)

    def plan(self, problem: PeerProblem, algorithm: int | None = None) -> SparsePlan:
        """A plan by algorithm id, or the library's default; `PeerError` if it refuses."""
        return SparsePlan(self, problem, algorithm)

    def _destroy_selection(self, selection: _Opaque) -> None:
        if self._has_selection_destroy(self._library):
            self._call(_SELECTION_DESTROY, selection.address)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise PeerError(f"{name}: {self.status_text(status)}")


class SparsePlan:
    """One sparse product by one algorithm. ``enqueue`` may be captured into a graph.

    ``algorithm`` is the id in use, ``algorithm_count`` how many ids this problem has; split-K is
    left off, as the library has it by default.
    """

    def __init__(self, owner: CusparseLt, problem: PeerProblem, algorithm: int | None) -> None:
        assert owner._device is not None, "open() the library first"
        self._owner = owner
        self.problem = problem
        self._descriptors: list[_Opaque] = []
        self._plan = _Opaque()
        self._planned = False
        self._selected = False
        self._workspace: Buffer | None = None
        self._alpha = ctypes.c_float(problem.alpha)
        self._beta = ctypes.c_float(0.0)
        self._stream = c_void_p(owner._device.stream)
        try:
            self._prepare(owner._device, algorithm)
        except PeerError:
            self.free()
            raise

    @property
    def label(self) -> str:
        return f"cuSPARSELt id {self.algorithm} {self.problem.order}"

    def _prepare(self, device: Device, algorithm: int | None) -> None:
        problem, call, handle = self.problem, self._owner._call, self._owner._handle.address
        (a_type, b_type), out = problem.operand_types, CUDA_DATA_TYPES[problem.out]
        m, n, k = problem.m, problem.n, problem.k
        a, b, d = _Opaque(), _Opaque(), _Opaque()
        call("cusparseLtStructuredDescriptorInit", handle, a.address, m, k, k, _ALIGNMENT,
             a_type, _ORDER_ROW, _SPARSITY_50_PERCENT)  # fmt: skip
        self._descriptors.append(a)
        call("cusparseLtDenseDescriptorInit", handle, b.address, k, n, k, _ALIGNMENT,
             b_type, _ORDER_COL)  # fmt: skip
        self._descriptors.append(b)
        # M×N row-major is "mn"; M×N column-major is N×M row-major, "nm".
        lead, order = (n, _ORDER_ROW) if problem.order == "mn" else (m, _ORDER_COL)
        call("cusparseLtDenseDescriptorInit", handle, d.address, m, n, lead, _ALIGNMENT,
             out, order)  # fmt: skip
        self._descriptors.append(d)

        self._matmul, self._selection = _Opaque(), _Opaque()
        call("cusparseLtMatmulDescriptorInit", handle, self._matmul.address, _OP_N, _OP_N,
             a.address, b.address, d.address, d.address,
             _COMPUTE[problem.accumulate])  # fmt: skip
        selection = self._selection.address
        call("cusparseLtMatmulAlgSelectionInit", handle, selection, self._matmul.address,
             _ALG_DEFAULT)  # fmt: skip
        self._selected = True
        value = c_int(0)
        size = ctypes.sizeof(value)
        if algorithm is not None:
            value.value = algorithm
            call("cusparseLtMatmulAlgSetAttribute", handle, selection, _ALG_CONFIG_ID,
                 byref(value), size)  # fmt: skip
        call("cusparseLtMatmulAlgGetAttribute", handle, selection, _ALG_CONFIG_ID,
             byref(value), size)  # fmt: skip
        self.algorithm = int(value.value)
        call("cusparseLtMatmulAlgGetAttribute", handle, selection, _ALG_CONFIG_MAX_ID,
             byref(value), size)  # fmt: skip
        self.algorithm_count = int(value.value)

        call("cusparseLtMatmulPlanInit", handle, self._plan.address, self._matmul.address,
             selection)  # fmt: skip
        self._planned = True
        workspace, compressed, scratch = c_size_t(), c_size_t(), c_size_t()
        call("cusparseLtMatmulGetWorkspace", handle, self._plan.address, byref(workspace))
        call("cusparseLtSpMMACompressedSize", handle, self._plan.address, byref(compressed),
             byref(scratch))  # fmt: skip
        self.compressed_bytes, self._scratch_bytes = int(compressed.value), int(scratch.value)
        if workspace.value:
            self._workspace = device.alloc(workspace.value)

    def compress(self, dense: int, compressed: int) -> None:
        """Compress the pruned dense A (device address, M×K row-major) for this plan.

        ``compressed`` is the address of `compressed_bytes` bytes. Waits for the end.
        """
        device = self._owner._device
        assert device is not None
        scratch = device.alloc(max(self._scratch_bytes, 16))
        try:
            self._owner._call(
                "cusparseLtSpMMACompress",
                self._owner._handle.address,
                self._plan.address,
                dense,
                compressed,
                scratch.ptr,
                device.stream,
            )
            device.synchronize()
        finally:
            scratch.free()

    def enqueue(self, a: int, b: int, d: int) -> None:
        """Put D = alpha·A·Bᵀ on the device's stream; ``a`` is a compressed A's address."""
        self._owner._call(
            "cusparseLtMatmul",
            self._owner._handle.address,
            self._plan.address,
            ctypes.addressof(self._alpha),
            a,
            b,
            ctypes.addressof(self._beta),
            d,
            d,
            self._workspace.ptr if self._workspace is not None else None,
            byref(self._stream),
            1,
        )

    def free(self) -> None:
        if self._workspace is not None:
            self._workspace.free()
            self._workspace = None
        if self._planned:
            self._planned = False
            self._owner._call("cusparseLtMatmulPlanDestroy", self._plan.address)
        if self._selected:
            self._selected = False
            self._owner._destroy_selection(self._selection)
        while self._descriptors:
            # Bound to a name: the call takes an address, which keeps nothing alive.
            descriptor = self._descriptors.pop()
            self._owner._call("cusparseLtMatDescriptorDestroy", descriptor.address)
