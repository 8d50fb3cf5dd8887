"""A GPU made of host memory with simulated time, for the tests of the bench."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

import sp24cli.gpu.device
import sp24cli.gpu.matmul
from sp24cli.bench import run as bench
from sp24cli.bench.statistics import Settings
from sp24cli.optypes import Operands
from sp24cli.peers.loading import NUMPY_TYPES, PeerAbsent, PeerError
from sp24cli.reference import widened
from sp24cli.verify.result import Check, NumericsResult

SETTINGS = Settings(
    idle_ms=0.0, burst_ms=1.0, sustained_from_ms=1.0, sustained_to_ms=2.0, graph_ms=0.1, rounds=2
)


class Memory:
    def __init__(self, device, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.nbytes = nbytes
        self.ptr = device.next
        device.next += nbytes + 64
        device.buffers[self.ptr] = self
        self.device = device

    def free(self):
        self.device.buffers.pop(self.ptr, None)

    def __enter__(self):
        return self

    def __exit__(self, *rest):
        self.free()


class HostDevice:
    """As sp24cli.gpu.device.Device, with simulated time: ``spend`` microseconds a product."""

    name, sm_count, driver_version = "Simulated H200", 132, 13000
    l2_bytes, clock_khz_max, mem_bytes, uuid, stream = 4096, 1_980_000, 1 << 34, "", 0

    def __init__(self):
        self.buffers, self.next, self.time_us, self.captured = {}, 4096, 0.0, None
        self.log = []
        self.launch_us = {}  # by kernel: for each CTA of `launch`

    def alloc(self, nbytes):
        return Memory(self, nbytes)

    def upload(self, array):
        buffer = Memory(self, array.nbytes)
        buffer.bytes[:] = np.ascontiguousarray(array).view(np.uint8).ravel()
        return buffer

    def download(self, buffer, dtype, shape):
        return self.array(buffer.ptr, dtype, shape).copy()

    def array(self, ptr, dtype, shape):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.buffers[ptr].bytes[:count].view(dtype).reshape(shape)

    def copy_d2d(self, dst, src, nbytes):
        self.time_us += 2 * nbytes / 4e6  # 4 TB/s
        self.buffers[dst].bytes[:nbytes] = self.buffers[src].bytes[:nbytes]

    def memset(self, buffer, byte):
        buffer.bytes[:] = byte

    def kernel(self, entry):
        return entry

    def launch(self, kernel, grid, parameters, stream):
        if kernel.name == "clocks":
            self.mark(int(parameters[0]["marks"]), grid)
        else:
            self.do(kernel.name, self.launch_us.get(kernel.name, 1.0) * grid, lambda: None)

    def mark(self, address, sms):
        """What the clocks' kernel writes, at 1700 MHz; it takes no time."""
        start = max(ptr for ptr in self.buffers if ptr <= address)
        place = self.buffers[start].bytes[address - start :][: 16 * sms]
        now = np.array([1700 * self.time_us, 1000 * self.time_us], np.uint64)
        place[:] = np.tile(now + np.uint64(10**9), sms).view(np.uint8)

    def synchronize(self):
        pass

    def do(self, who, us, action):
        """Work on the stream: recorded while capturing (not executed again at replay)."""
        if self.captured is not None:
            self.captured.append((who, us))
        else:
            action()
            self.spend(who, us)

    def spend(self, who, us):
        self.time_us += us
        self.log.append(who)

    def capture(self, enqueue):
        self.captured = []
        enqueue()
        launches, self.captured = self.captured, None
        return SimpleNamespace(launch=lambda: [self.spend(who, us) for who, us in launches])

    def event(self):
        event = SimpleNamespace(at=None, synchronize=lambda: None)

        def record():
            event.at = self.time_us

        event.record = record
        return event


class Weight:
    """As sp24cli.gpu.matmul.SparseWeight, by numpy. ``fault`` spoils the output array [M, N],
    ``us`` holds the times of kernels that do not take 10 microseconds. ``split`` are their parts of
    K."""

    fault = staticmethod(lambda got, n: got)
    split = 1
    us: ClassVar[dict[str, float]] = {}

    def __init__(self, device, packed, activations=None):
        self.device, self.packed, self.activations = device, packed, activations

    @classmethod
    def upload(cls, device, packed, *, activations=None):
        return cls(device, packed, activations)

    def plan(
        self,
        n,
        out_dtype="bf16",
        order="nm",
        kernel=None,
        accumulate="fast",
        scale_b_k=0,
        types=None,
    ):
        choice = "kernel_of_choice" if accumulate == "fast" else f"kernel_of_choice_{accumulate}"
        return KernelPlan(self, n, out_dtype, order, kernel or choice, types, scale_b_k=scale_b_k)

    def summation(self, accumulate, scale_b_k):
        return accumulate


@dataclass
class KernelPlan:
    weight: Weight
    n: int
    out: str
    order: str
    name: str
    types: Operands
    chosen_by: str = "model"
    scale_b_k: int = 0

    @property
    def kernel(self):
        return SimpleNamespace(name=self.name, split=self.weight.split)

    def enqueue(self, x, ldx, out, scale_b=None, scale_b_rows=False, scale_b_strides=None):
        packed, device = self.weight.packed, self.weight.device
        k = packed.shape[1]

        def multiply():
            tokens = device.array(x.ptr, self.types.b.dtype, (self.n, ldx))[:, :k]
            tokens = tokens.astype(np.float64)
            if self.scale_b_k:
                blocks = -(-k // self.scale_b_k)
                apart = scale_b_strides or (blocks, 1)
                scale = np.lib.stride_tricks.as_strided(
                    device.array(
                        scale_b.ptr, np.float32, (1 + np.dot(apart, (self.n - 1, blocks - 1)),)
                    ),
                    (self.n, blocks),
                    [4 * step for step in apart],
                )
                tokens *= np.repeat(scale, self.scale_b_k, axis=1)[:, :k]
            if self.out == "s32":
                assert scale_b is None
                weight = packed.original_order(packed.codes()).astype(np.float64)
            elif self.weight.activations is not None and packed.info.scale.block is not None:
                weight = packed.original_order(widened(packed, self.types.b.dtype))
                weight = weight.astype(np.float64)
            else:
                weight = packed.original_order(packed.dequantize(np.float64))
            product = weight @ tokens.T
            if scale_b is not None and not self.scale_b_k:
                product *= device.array(scale_b.ptr, np.float32, (self.n,))
                assert scale_b_rows
            product = Weight.fault(product.astype(NUMPY_TYPES[self.out]), self.n)
            stored = product.T if self.order == "nm" else product
            device.array(out.ptr, NUMPY_TYPES[self.out], stored.shape)[:] = stored

        device.do("sp24", Weight.us.get(self.name, 10.0), multiply)


class PeerLibrary:
    """Either peer. ``times`` maps (order, id) to microseconds; id None is the default. Those in
    ``wrong`` spoil an element, those in ``idle`` write nothing, those in ``refused`` raise."""

    version = "9.9"

    def __init__(self, times, wrong=(), refused=(), idle=()):
        self.times, self.wrong, self.refused, self.idle = times, wrong, refused, idle
        self.device = None

    def open(self, device):
        self.device = device

    def close(self):
        self.device = None

    def plan(self, problem, algorithm=None):
        if problem.operand == "f64":
            return PeerPlan(self, problem, None, 1.0)
        if (problem.order, algorithm) in self.refused:
            raise PeerError("matmul: not supported")
        return PeerPlan(self, problem, algorithm, self.times[problem.order, algorithm])


class PeerPlan:
    compressed_bytes = 64

    def __init__(self, library, problem, algorithm, us):
        self.opened, self.problem, self.us = library, problem, us
        self.algorithm = 0 if algorithm is None else algorithm
        self.key = (problem.order, algorithm)
        self.algorithm_count = 1 + max(
            (i for o, i in library.times if o == problem.order and i is not None), default=0
        )
        self.dense = None

    def compress(self, dense, compressed):
        p = self.problem
        self.dense = self.opened.device.array(dense, NUMPY_TYPES[p.operand], (p.m, p.k)).copy()

    def enqueue(self, a, b, d):
        p, device = self.problem, self.opened.device
        operand = NUMPY_TYPES[p.operand]

        def multiply():
            if self.key in self.opened.idle:
                return
            weight = self.dense if self.dense is not None else device.array(a, operand, (p.m, p.k))
            other = NUMPY_TYPES[p.operand_b or p.operand]
            tokens = device.array(b, other, (p.n, p.k)).astype(np.float64)
            got = p.alpha * (weight.astype(np.float64) @ tokens.T)
            if self.key in self.opened.wrong:
                got[p.m - 1, 0] += 5 * got.std()
            stored = got.T if p.order == "nm" else got
            device.array(d, NUMPY_TYPES[p.out], stored.shape)[:] = stored

        device.do(self.key, self.us, multiply)

    def free(self):
        pass


def simulate(monkeypatch):
    """A `HostDevice` where the bench expects a GPU, without peers."""
    device = HostDevice()
    monkeypatch.setattr(sp24cli.gpu.matmul, "SparseWeight", Weight)
    monkeypatch.setattr(
        sp24cli.gpu.device, "elapsed_ms", lambda start, end: (end.at - start.at) / 1000
    )
    verify = SimpleNamespace(
        verify_matrix=lambda packed, seed, activations=(): NumericsResult(
            "simulated", (Check("identity", True, 0.0, 0.0, 0.0),)
        )
    )
    monkeypatch.setitem(sys.modules, "sp24cli.verify.gpu", verify)
    absent(monkeypatch)
    return device


def absent(monkeypatch):
    for kind, name in ((bench.CublasLt, "cuBLASLt"), (bench.CusparseLt, "cuSPARSELt")):
        monkeypatch.setattr(kind, "load", classmethod(lambda cls, name=name: _absent(name)))


def _absent(name):
    raise PeerAbsent(f"no {name} here")


def libraries(monkeypatch, *, dense=None, sparse=None):
    """Put simulated peers in place: ``dense`` microseconds, ``sparse`` (times, wrong, refused)."""

    def install(kind, version, *arguments):
        made = type("Simulated", (PeerLibrary, kind), {"version": version})(*arguments)
        monkeypatch.setattr(kind, "load", classmethod(lambda cls: made))

    if dense is not None:
        install(bench.CublasLt, "13", {(order, None): dense for order in ("nm", "mn")})
    if sparse is not None:
        install(bench.CusparseLt, "0.8", *sparse)
