"""One Hopper GPU: memory, streams, events, graphs and the kernels loaded on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.closing import Closing
from sp24cli.errors import NoGpuError, Sp24Error
from sp24cli.gpu.driver import api, check
from sp24cli.kernels import manifest

#: CUDA 13.0, the first that reads these fatbins (driver R580).
MIN_DRIVER = 13000


class Current:
    """A context that calls of this thread go to inside of ``with``, whichever was current before,
    or none; that one is again afterwards."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        check(api().cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        check(api().cuCtxPopCurrent())


class Buffer(Closing):
    """Device memory of ``nbytes`` bytes at ``ptr``; freed with the object or by `free`, in any
    thread."""

    def __init__(self, nbytes: int, current: Current) -> None:
        self.nbytes, self._current = nbytes, current
        with current:
            self.ptr = int(check(api().cuMemAlloc(max(nbytes, 1))))

    def free(self) -> None:
        if self.ptr:
            ptr, self.ptr = self.ptr, 0
            with suppress(Sp24Error), self._current:  # the driver may be gone before the object
                api().cuMemFree(ptr)

    close = free

    def __del__(self) -> None:
        # __init__ may have failed before there was anything to free.
        if getattr(self, "ptr", 0):
            self.free()


class Pinned(Closing):
    """Page-locked host memory, which copies to and from the GPU go straight into.

    ``array`` is all of it, uint8; no view of it may outlive this.
    """

    def __init__(self, nbytes: int, current: Current) -> None:
        self._current = current
        with current:
            self._ptr = int(check(api().cuMemHostAlloc(max(nbytes, 1), 0)))
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self._ptr)
        self.array: npt.NDArray[Any] = np.frombuffer(memoryview(memory), np.uint8)[:nbytes]

    def close(self) -> None:
        if self._ptr:
            ptr, self._ptr = self._ptr, 0
            with suppress(Sp24Error), self._current:
                api().cuMemFreeHost(ptr)

    def __del__(self) -> None:
        if getattr(self, "_ptr", 0):
            self.close()


class Event:
    """A point in a stream, with the time it was passed."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.handle = check(api().cuEventCreate(0))

    def record(self) -> None:
        check(api().cuEventRecord(self.handle, self._stream))

    def synchronize(self) -> None:
        check(api().cuEventSynchronize(self.handle))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            api().cuEventDestroy(self.handle)


def elapsed_ms(start: Event, end: Event) -> float:
    """Milliseconds between two passed events."""
    return float(check(api().cuEventElapsedTime(start.handle, end.handle)))


class Graph:
    """A captured piece of work that `launch` enqueues again."""

    def __init__(self, graph: Any, stream: int) -> None:
        self._stream = stream
        self._graph = graph
        self._executable = check(api().cuGraphInstantiate(graph, 0))

    def launch(self) -> None:
        check(api().cuGraphLaunch(self._executable, self._stream))

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            api().cuGraphExecDestroy(self._executable)
            api().cuGraphDestroy(self._graph)


@dataclass(frozen=True)
class Kernel:
    """A loaded entry point. ``max_clusters`` is how many of its clusters the chip runs at once."""

    handle: Any
    entry: manifest.AnyEntry
    max_clusters: int


class Launch:
    """A kernel with its grid, parameters and stream, put together once to be started any number of
    times.

    ``parameters`` are the kernel's, as host arrays in order. ``overlap``: CTAs may start before
    the kernel before has ended (programmatic dependent launch), for kernels that wait for it
    themselves.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        parameters: list[npt.NDArray[Any]],
        stream: int,
        overlap: bool = False,
    ) -> None:
        cu, entry = api(), kernel.entry
        self._handle = kernel.handle
        self._parameters = parameters  # the pointers' memory
        self._pointers = np.array([p.ctypes.data for p in parameters], np.uint64)
        self._config = config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = entry.threads, 1, 1
        config.sharedMemBytes = entry.smem_bytes
        config.hStream = stream
        if overlap:
            early = cu.CUlaunchAttribute()
            early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1

    def start(self) -> None:
        check(api().cuLaunchKernelEx(self._config, self._handle, self._pointers.ctypes.data, 0))


class Device:
    """An open GPU, by `Device.open`. Calls enqueue on ``stream`` unless told otherwise."""

    def __init__(self, ordinal: int) -> None:
        cu = api()
        self.ordinal = ordinal
        self._device = check(cu.cuDeviceGet(ordinal))
        attribute = cu.CUdevice_attribute

        def get(name: str) -> int:
            key = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(check(cu.cuDeviceGetAttribute(key, self._device)))

        self.name = check(cu.cuDeviceGetName(256, self._device)).split(b"\0")[0].decode()
        capability = (get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR"))
        if capability != (9, 0):
            raise NoGpuError(
                f"no usable GPU: {self.name} has compute capability {capability[0]}."
                f"{capability[1]}, the kernels need Hopper's 9.0"
            )
        self.driver_version = int(check(cu.cuDriverGetVersion()))
        if self.driver_version < MIN_DRIVER:
            raise NoGpuError(
                f"no usable GPU: the driver supports CUDA {self.driver_version // 1000}."
                f"{self.driver_version % 1000 // 10}, the kernels need 13.0 (driver R580 or newer)"
            )
        self.uuid = bytes(check(cu.cuDeviceGetUuid(self._device)).bytes).hex()
        self.sm_count = get("MULTIPROCESSOR_COUNT")
        self.l2_bytes = get("L2_CACHE_SIZE")
        self.clock_khz_max = get("CLOCK_RATE")
        # The primary context is the one that other libraries of the process use too.
        self._context = check(cu.cuDevicePrimaryCtxRetain(self._device))
        self.current = Current(self._context)
        self.mem_bytes = int(check(cu.cuDeviceTotalMem(self._device)))
        flag = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self.current:
            self.stream = int(check(cu.cuStreamCreate(flag)))
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Kernel] = {}

    @classmethod
    def open(cls, ordinal: int = 0, *, current: bool = True) -> Device:
        """The GPU of that number, opened once; `NoGpuError` in one line if none fits. ``current``:
        it is then this thread's current one, as most methods need it; the others say so."""
        if ordinal not in _opened:
            count = int(check(api().cuDeviceGetCount()))
            if ordinal >= count:
                raise NoGpuError(f"no usable GPU: number {ordinal} of {count} does not exist")
            _opened[ordinal] = cls(ordinal)
        if current:
            _opened[ordinal].make_current()
        return _opened[ordinal]

    def make_current(self) -> None:
        """Make calls of this thread go to this device: the context is current by thread."""
        check(api().cuCtxSetCurrent(self._context))

    def alloc(self, nbytes: int) -> Buffer:
        """Whichever GPU is current."""
        return Buffer(nbytes, self.current)

    def pinned(self, nbytes: int) -> Pinned:
        """Whichever GPU is current."""
        return Pinned(nbytes, self.current)

    def new_stream(self) -> int:
        """One more stream, for as long as the process lasts."""
        return int(check(api().cuStreamCreate(api().CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def wait(self, stream: int) -> None:
        """Until all is done that was enqueued on ``stream``."""
        check(api().cuStreamSynchronize(stream))

    def copy_in(self, dst: int, host: npt.NDArray[Any], stream: int) -> None:
        """Enqueue a copy of ``host``, contiguous and pinned, which must stay as it is till then."""
        if host.nbytes:
            check(api().cuMemcpyHtoDAsync(dst, host.ctypes.data, host.nbytes, stream))

    def copy_out(self, host: npt.NDArray[Any], src: int, stream: int) -> None:
        """Enqueue a copy into ``host``, contiguous and pinned."""
        if host.nbytes:
            check(api().cuMemcpyDtoHAsync(host.ctypes.data, src, host.nbytes, stream))

    def clear(self, ptr: int, nbytes: int, stream: int) -> None:
        """Enqueue setting memory to zero."""
        if nbytes:
            check(api().cuMemsetD8Async(ptr, 0, nbytes, stream))

    @contextmanager
    def scratch(self, nbytes: int, stream: int) -> Iterator[int]:
        """The address of memory for the work that the block enqueues on ``stream``."""
        ptr = int(check(api().cuMemAllocAsync(max(nbytes, 1), stream)))
        try:
            yield ptr
        finally:
            check(api().cuMemFreeAsync(ptr, stream))

    def upload(self, array: npt.NDArray[Any]) -> Buffer:
        """A device copy of ``array``, C-contiguous, whichever GPU is current."""
        host = np.ascontiguousarray(array)
        buffer = self.alloc(host.nbytes)
        if host.nbytes:
            with self.current:
                check(api().cuMemcpyHtoD(buffer.ptr, host.ctypes.data, host.nbytes))
            # From pageable memory the copy may return early, and our stream would not wait.
            self.synchronize()
        return buffer

    def download(
        self, buffer: Buffer, dtype: npt.DTypeLike, shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """A host copy of the start of ``buffer``, once the work enqueued so far is done, whichever
        GPU is current."""
        host = np.empty(shape, dtype)
        if host.nbytes > buffer.nbytes:
            raise Sp24Error(f"a buffer of {buffer.nbytes} bytes holds no {shape} {host.dtype}")
        with self.current:
            check(api().cuCtxSynchronize())
            if host.nbytes:
                check(api().cuMemcpyDtoH(host.ctypes.data, buffer.ptr, host.nbytes))
        return host

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: int | None = None) -> None:
        check(api().cuMemcpyDtoDAsync(dst, src, nbytes, self.stream if stream is None else stream))

    def copy_rows(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        rows: int,
        stream: int | None = None,
    ) -> None:
        """``rows`` rows of ``width`` bytes between two pitches."""
        cu = api()
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = src, src_pitch
        copy.dstDevice, copy.dstPitch = dst, dst_pitch
        copy.WidthInBytes, copy.Height = width, rows
        check(cu.cuMemcpy2DAsync(copy, self.stream if stream is None else stream))

    def memset(self, buffer: Buffer, byte: int) -> None:
        if buffer.nbytes:
            check(api().cuMemsetD8Async(buffer.ptr, byte, buffer.nbytes, self.stream))

    def synchronize(self) -> None:
        """Until all work of this GPU is done, whichever is current."""
        with self.current:
            check(api().cuCtxSynchronize())

    def event(self) -> Event:
        return Event(self.stream)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """A graph of what ``enqueue`` puts on the device's stream."""
        cu = api()
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(self.stream, mode))
        try:
            enqueue()
        finally:
            graph = check(cu.cuStreamEndCapture(self.stream))
        return Graph(graph, self.stream)

    def load_module(self, image: bytes) -> Any:
        return check(api().cuModuleLoadData(image))

    def kernel(self, entry: manifest.AnyEntry) -> Kernel:
        """The loaded kernel of a manifest entry, from the package's fatbins."""
        if entry.name not in self._kernels:
            if entry.fatbin not in self._modules:
                self._modules[entry.fatbin] = self.load_module(manifest.load().fatbin(entry.fatbin))
            self._kernels[entry.name] = self.kernel_from(self._modules[entry.fatbin], entry)
        return self._kernels[entry.name]

    def kernel_from(self, module: Any, entry: manifest.AnyEntry) -> Kernel:
        cu = api()
        handle = check(cu.cuModuleGetFunction(module, entry.name.encode()))
        clusters = 0
        if entry.smem_bytes:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(handle, attribute, entry.smem_bytes))
        if isinstance(entry, (manifest.Entry, manifest.RungEntry)):
            config = cu.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = entry.cluster_ctas, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = entry.threads, 1, 1
            config.sharedMemBytes = entry.smem_bytes
            size = cu.CUlaunchAttribute()
            size.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size.value.clusterDim.x = entry.cluster_ctas
            size.value.clusterDim.y = size.value.clusterDim.z = 1
            config.attrs, config.numAttrs = [size], 1
            clusters = int(check(cu.cuOccupancyMaxActiveClusters(handle, config)))
            if not clusters:
                raise NoGpuError(f"kernel {entry.name} does not fit on {self.name}")
        return Kernel(handle, entry, clusters)

    def launch(
        self, kernel: Kernel, grid: int, parameters: list[npt.NDArray[Any]], stream: int
    ) -> None:
        """Starts ``grid`` CTAs once; see `Launch`."""
        Launch(kernel, grid, parameters, stream).start()


#: Open devices by number: kernels are loaded once a process.
_opened: dict[int, Device] = {}
