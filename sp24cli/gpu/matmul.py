"""The product D = A Bᵀ of an uploaded sparse weight and dense activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.errors import Sp24Error
from sp24cli.gpu.arguments import pack_struct, tensor_map
from sp24cli.gpu.device import Buffer, Device, Kernel
from sp24cli.gpu.select import candidates, select
from sp24cli.kernels import manifest
from sp24cli.optypes import BLOCK_ROWS, OperandType, operand_type
from sp24cli.packed import PackedMatrix

#: Bytes of an output element.
OUT_BYTES = {"f16": 2, "bf16": 2, "f32": 4}

#: Cluster rows a group of the tile order; groups of eight read the least from memory (hopper.md).
RASTER = 8


@dataclass(frozen=True)
class Plan:
    """A kernel chosen for a weight and a number of tokens; `enqueue` runs it."""

    weight: SparseWeight
    kernel: manifest.Entry
    loaded: Kernel
    n: int
    raster: int = RASTER

    def enqueue(
        self,
        x: Buffer | int,
        ldx: int,
        out: Buffer | int,
        ldd: int | None = None,
        scale_b: Buffer | int | None = None,
        scale_b_rows: bool = False,
        bias: Buffer | int | None = None,
        stream: int | None = None,
    ) -> None:
        """Multiplies B = ``x`` [n, K] (rows of ``ldx`` elements) into ``out``.

        ``out`` is [n, M] (order ``nm``) or [M, n] (``mn``), rows of ``ldd`` elements (tight by
        default). ``scale_b`` is one f32, or one a row of B with ``scale_b_rows``; ``bias`` one f32
        a row of A. ``x`` and its row pitch in bytes are multiples of 16.
        """
        weight, entry, device = self.weight, self.kernel, self.weight.device
        m, k = weight.shape
        if not (m and self.n):
            return
        stream = device.stream if stream is None else stream
        item = weight.type.itemsize
        tight = m if entry.order == "nm" else self.n
        ldd = tight if ldd is None else ldd
        if ldd < tight:
            raise Sp24Error(f"rows of {tight} elements do not fit a pitch of {ldd}")
        out_ptr = _pointer(out)
        b = tensor_map(
            _pointer(x), k * item, self.n, ldx * item, (entry.box_bytes_b, entry.box_rows_b)
        )
        out_bytes = OUT_BYTES[entry.out_type]
        args = pack_struct(
            manifest.load().args[entry.args],
            {
                "a": weight.image.ptr,
                "d": out_ptr,
                "scale_a": weight.scale.ptr if weight.scale else 0,
                "scale_b": _pointer(scale_b),
                "bias": _pointer(bias),
                "ldd": ldd,
                "m": m,
                "n": self.n,
                "m_blocks": weight.blocks[0],
                "k_blocks": weight.blocks[1],
                "scale_a_stride": int(weight.scale_rows),
                "scale_b_stride": int(scale_b_rows),
                "vector_store": int(out_ptr % 16 == 0 and ldd * out_bytes % 16 == 0),
                "raster": self.raster,
            },
        )
        rows = -(-m // (entry.tile_m * entry.cluster))
        tiles = rows * -(-self.n // entry.tile_n)
        grid = min(tiles, self.loaded.max_clusters) * entry.cluster
        device.launch(self.loaded, grid, [b, args], stream)


class SparseWeight:
    """A packed weight on the GPU, in the layout that the kernels read."""

    def __init__(
        self,
        device: Device,
        optype: OperandType,
        shape: tuple[int, int],
        image: Buffer,
        scale: Buffer | None,
        scale_rows: bool,
    ) -> None:
        self.device = device
        self.type = optype
        self.shape = shape
        self.image = image
        self.scale = scale
        self.scale_rows = scale_rows

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks along M and along K; a weight without columns still has one, of empty groups."""
        m, k = self.shape
        return -(-m // BLOCK_ROWS), max(1, -(-k // self.type.block_k))

    @classmethod
    def upload(cls, device: Device, packed: PackedMatrix) -> SparseWeight:
        """Copies a packed matrix to the GPU; one in ``row`` layout is turned there.

        `Sp24Error` for a scale kind that these kernels do not apply (block).
        """
        info = packed.info
        optype = operand_type(info.type)
        kind = info.scale.kind
        if kind not in ("none", "tensor", "vector"):
            raise Sp24Error(f"{kind} scales need a kernel that is not in this version")
        scale = None if packed.scale is None else device.upload(packed.scale)
        if packed.blocks is not None:
            image = device.upload(packed.blocks)
        else:
            assert packed.values is not None and packed.meta is not None
            image = device.alloc(_image_bytes(optype, info.shape))
            turn_to_sm90(device, optype, info.shape, packed.values, packed.meta, image)
        return cls(device, optype, info.shape, image, scale, kind == "vector")

    def plan(
        self,
        n: int,
        out_dtype: str = "bf16",
        order: str = "nm",
        kernel: str | None = None,
        raster: int = RASTER,
    ) -> Plan:
        """The kernel for ``n`` tokens, or the one named ``kernel``."""
        if kernel is None:
            entry = select(self.type.name, out_dtype, order, n)
        else:
            found = candidates(self.type.name, out_dtype, order)
            named = [e for e in found if e.name == kernel]
            if not named:
                raise Sp24Error(
                    f"no kernel {kernel!r} for {self.type.name} into {out_dtype} {order}: "
                    f"there are {', '.join(e.name for e in found)}"
                )
            entry = named[0]
        return Plan(self, entry, self.device.kernel(entry), n, raster)


def _pointer(buffer: Buffer | int | None) -> int:
    if buffer is None:
        return 0
    return buffer if isinstance(buffer, int) else buffer.ptr


def _image_bytes(optype: OperandType, shape: tuple[int, int]) -> int:
    rows, columns = -(-shape[0] // BLOCK_ROWS), max(1, -(-shape[1] // optype.block_k))
    return rows * columns * optype.block_bytes


def turn_to_sm90(
    device: Device,
    optype: OperandType,
    shape: tuple[int, int],
    values: npt.NDArray[Any],
    meta: npt.NDArray[Any],
    image: Buffer,
) -> None:
    """Writes the ``sm90`` image of a matrix in ``row`` layout, on the GPU."""
    m, k = shape
    columns = max(1, -(-k // optype.block_k))
    rows = -(-m // BLOCK_ROWS)
    if not rows:
        return
    loaded = manifest.load()
    # The two 16-bit types differ in nothing that packing sees.
    width = next(
        e
        for e in loaded.pack_entries
        if operand_type(e.a_type).itemsize == optype.itemsize
    )
    with device.upload(values.view(np.uint8)) as values_gpu, device.upload(meta) as meta_gpu:
        args = pack_struct(
            loaded.args[width.args],
            {
                "values": values_gpu.ptr,
                "meta": meta_gpu.ptr,
                "image": image.ptr,
                "m": m,
                "k": k,
                "k_blocks": columns,
            },
        )
        device.launch(device.kernel(width), rows * columns, [args], device.stream)
        device.synchronize()
