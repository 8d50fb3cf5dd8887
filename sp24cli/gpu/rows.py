"""Rows of a mapped tensor through the GPU: copies, kernels and the caller at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sp24cli.bits import contiguous_bits
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.gpu.device import Buffer, Device, Pinned

Array = npt.NDArray[Any]
T = TypeVar("T")

#: Batches at once: one on the GPU, one written by the caller, the others read from the file, since
#: one thread does not read as fast as the bus carries.
MOST_LANES = 8


class Lane:
    """What a batch of rows needs on its way: a stream, and memory by name that grows to the
    largest batch and is kept for the next."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.new_stream()
        self._buffers: dict[str, Buffer] = {}
        self._pinned: dict[str, Pinned] = {}

    def memory(self, name: str, nbytes: int) -> int:
        """The address of ``nbytes`` on the GPU."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            if buffer is not None:
                buffer.free()
            buffer = self._buffers[name] = self.device.alloc(nbytes)
        return buffer.ptr

    def host(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A page-locked array."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        pinned = self._pinned.get(name)
        if pinned is None or pinned.array.nbytes < nbytes:
            pinned = self._pinned[name] = self.device.pinned(nbytes)
        return pinned.array[:nbytes].view(dtype).reshape(shape)

    def download(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, host: str | None = None
    ) -> Array:
        """Enqueue a copy of the memory ``name`` into the page-locked array that this is, that of
        the name ``host`` if not the same."""
        into = self.host(name if host is None else host, shape, dtype)
        self.device.copy_out(into, self._buffers[name].ptr, self.stream)
        return into


def stream_rows(
    lanes: Sequence[Lane],
    file: SafetensorsFile,
    name: str,
    ranges: Sequence[tuple[int, int]],
    work: Callable[[Lane, int, int, int], Callable[[], T]],
) -> Iterator[T]:
    """The results of ``work`` for every range of rows of a tensor, in order.

    ``work(lane, source, start, stop)`` enqueues on the lane's stream what is to be done with the
    rows at the device address ``source``, downloads included, and returns what makes the result
    once that is over. Both run on a thread of the lane. A result may lie in the lane's
    memory: it is used again as soon as the next one is asked for.
    """

    def pass_through(lane: Lane, start: int, stop: int) -> T:
        device = lane.device
        device.make_current()
        # As integers, which NumPy copies at once and without the interpreter lock.
        bits = contiguous_bits(file.array(name, slice(start, stop)))
        staged = lane.host("source", bits.shape, bits.dtype)
        np.copyto(staged, bits)
        file.drop_cache(name, slice(start, stop))
        source = lane.memory("source", staged.nbytes)
        device.copy_in(source, staged, lane.stream)
        result = work(lane, source, start, stop)
        device.wait(lane.stream)
        return result()

    free = deque(lanes)
    waiting: deque[tuple[Lane, Future[T]]] = deque()
    pool = ThreadPoolExecutor(len(lanes))
    try:
        for start, stop in ranges:
            if not free:
                lane, future = waiting.popleft()
                yield future.result()
                free.append(lane)
            lane = free.popleft()
            waiting.append((lane, pool.submit(pass_through, lane, start, stop)))
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)
