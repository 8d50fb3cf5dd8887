"""Rungs of the ladder on the GPU: what each reads, in which form, and its launch.

The forms differ in where the metadata words lie; the bits are those of the packed matrix, padded
with empty groups to whole stages along K and to `ROWS` rows:

* ``rows``, the metadata matrix: 16 bytes a row against one block along K. 8-bit types have a row a
  row of A, as the file holds it. In a 16-bit type a word holds four groups of row i (low half) and
  of row i + 8, so that 16 rows of A make eight of the matrix.
* ``grouped``, 16-bit types: by block, warp, step, then the sixteen words that a step reads: the 128
  bytes of a warp and block are one cache line.
* ``pairs``, 16-bit types: by block and warp, and in the line both steps' words of a lane together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.errors import Sp24Error
from sp24cli.gpu.arguments import pack_struct, tensor_map
from sp24cli.gpu.device import Buffer, Device, Kernel
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight
from sp24cli.gpu.order import cluster_rows, tile_order
from sp24cli.kernels import manifest
from sp24cli.kernels.manifest import RungEntry
from sp24cli.metadata import EMPTY_NIBBLE
from sp24cli.optypes import OperandType
from sp24cli.packed import PackedMatrix

Array = npt.NDArray[Any]

#: Rows that metadata is padded to: the most that a cluster takes at a time.
ROWS = 256

#: The form in which each way of getting metadata finds it; None where the image holds it.
FORMS = {
    "scalar": "rows",
    "readonly": "rows",
    "tensor": "rows",
    "grouped": "grouped",
    "pairs": "pairs",
    "hoisted": "pairs",
    "image": None,
}


def value_rows(packed: PackedMatrix) -> Array:
    """The kept values as bytes, uint8 [M, pitch], rows filled with zeros to whole 16 bytes."""
    row = packed.to_layout("row")
    assert row.values is not None
    raw = np.ascontiguousarray(row.values).view(np.uint8)
    out = np.zeros((raw.shape[0], -(-raw.shape[1] // 16) * 16), np.uint8)
    out[:, : raw.shape[1]] = raw
    return out


def meta_form(packed: PackedMatrix, form: str, blocks: int) -> Array:
    """The metadata of ``packed``, over ``blocks`` blocks along K, in a form of the module's head.

    uint8: [rows, 16 * blocks] for ``rows``, else one dimension.
    """
    row = packed.to_layout("row")
    assert row.meta is not None
    m, k = packed.shape
    optype = packed.info.optype
    shape = -(-m // ROWS) * ROWS, blocks * optype.block_k // 8
    nibbles = np.full(shape, 0x11 * EMPTY_NIBBLE, np.uint8)
    nibbles[:m, : row.meta.shape[1]] = row.meta
    if k % 8:
        nibbles[:m, row.meta.shape[1] - 1] |= EMPTY_NIBBLE << 4
    if optype.itemsize == 1:
        if form != "rows":
            raise Sp24Error(f"8-bit metadata has no form {form!r}")
        return nibbles
    # (16 rows, +8, row of eight, word): the halves of a word come together.
    halves = nibbles.view("<u2").reshape(-1, 2, 8, 4 * blocks).astype(np.uint32)
    words = (halves[:, 0] | halves[:, 1] << 16).astype("<u4")
    if form == "rows":
        return words.reshape(-1, 4 * blocks).view(np.uint8)
    # (block of 64 rows, warp, row, block along K, step, word of the step)
    split = words.reshape(-1, 4, 8, blocks, 2, 2)
    order = {"grouped": (0, 3, 1, 4, 2, 5), "pairs": (0, 3, 1, 2, 5, 4)}[form]
    return np.ascontiguousarray(split.transpose(order)).view(np.uint8).ravel()


class RungWeight:
    """A packed weight in the forms that rungs read, each uploaded when first asked for."""

    def __init__(self, weight: SparseWeight, packed: PackedMatrix) -> None:
        self.weight = weight
        self._packed = packed.to_layout("row")
        self._values: tuple[Buffer, int] | None = None
        self._meta: dict[tuple[str, int], Buffer] = {}

    def values(self) -> tuple[Buffer, int]:
        """The packed rows and their pitch in bytes."""
        if self._values is None:
            rows = value_rows(self._packed)
            self._values = self.weight.device.upload(rows), rows.shape[1]
        return self._values

    def meta(self, form: str, blocks: int) -> Buffer:
        """The metadata in a form, over so many blocks along K."""
        key = form, blocks
        if key not in self._meta:
            self._meta[key] = self.weight.device.upload(meta_form(self._packed, form, blocks))
        return self._meta[key]

    def free(self) -> None:
        """Free the forms; the weight itself is its owner's."""
        if self._values is not None:
            self._values[0].free()
            self._values = None
        while self._meta:
            self._meta.popitem()[1].free()

    def plan(
        self,
        entry: RungEntry,
        n: int,
        x: Buffer,
        ldx: int,
        out: Buffer,
        *,
        scale_b: Buffer | None = None,
        scale_b_rows: bool = False,
        bias: Buffer | None = None,
        raster: int | None = None,
    ) -> RungPlan:
        """The product of B = ``x`` [n, K] (rows of ``ldx`` elements, a multiple of 16 bytes) into
        ``out`` [n, M] by a rung.

        ``scale_b`` is one f32, or one a row of B with ``scale_b_rows``; ``bias`` one f32 a row of
        A. ``raster`` is the tile order's where the rung has one, chosen by the sizes if not given.

        Raises:
            Sp24Error: the weight has another operand type than the rung, or is to be widened.
        """
        weight, device = self.weight, self.weight.device
        if entry.a_type != weight.type.name or weight.widened is not None:
            wide = "" if weight.widened is None else f" widened to {weight.widened.name}"
            raise Sp24Error(
                f"{entry.name} multiplies {entry.a_type}, the weight is {weight.type.name}{wide}"
            )
        m, k = weight.shape
        item = weight.type.itemsize
        nothing = np.zeros(16, np.uint64)
        map_a = map_meta = nothing
        meta = 0
        if entry.source == "rows":
            values, pitch = self.values()
            map_a = tensor_map(
                values.ptr, k // 2 * item, m, pitch, entry.box_a, swizzle=entry.box_a[0]
            )
        form = FORMS[entry.meta]
        if form is not None:
            blocks = meta_blocks(entry, weight.type, k)
            words = self.meta(form, blocks)
            if entry.meta == "tensor":
                width = 16 * blocks
                map_meta = tensor_map(
                    words.ptr, width, words.nbytes // width, width, entry.box_meta, swizzle=0
                )
            else:
                meta = words.ptr
        map_b = tensor_map(x.ptr, k * item, n, ldx * item, entry.box_b)
        loaded = device.kernel(entry)
        columns = -(-n // entry.tile_n)
        rows = cluster_rows(entry, m, columns, loaded.max_clusters)
        tiles = rows * columns * entry.cluster_ctas
        order = tile_order(
            rows,
            columns,
            loaded.max_clusters,
            weight.image.nbytes,
            n * ldx * item,
            device.l2_bytes,
            raster,
        )
        layout = manifest.load().args[entry.args]
        args = pack_struct(
            layout,
            # What else GEMM kernels can be asked for is off at 0.
            dict.fromkeys((name for name, _, _ in layout.fields), 0)
            | {
                "a": weight.image.ptr,
                "d": out.ptr,
                "scale_a": weight.scale.ptr if weight.scale else 0,
                "scale_b": 0 if scale_b is None else scale_b.ptr,
                "bias": 0 if bias is None else bias.ptr,
                "ldd": m,
                "m": m,
                "n": n,
                "m_blocks": weight.blocks[0],
                "k_blocks": weight.blocks[1],
                "scale_a_stride": int(weight.scale_rows),
                "scale_b_stride": int(scale_b_rows),
                "vector_store": int(m * OUT_DTYPES[entry.out_type].itemsize % 16 == 0),
                "raster": order.raster,
                "cluster_rows": rows,
                "read_once": order.read_once,
                "meta": meta,
            },
        )
        grid = min(tiles, loaded.max_clusters * entry.cluster_ctas) if entry.persistent else tiles
        maps = np.concatenate([map_a, map_b, map_meta])
        return RungPlan(device, loaded, grid, maps, args)


def meta_blocks(entry: RungEntry, optype: OperandType, k: int) -> int:
    """Blocks along K that a rung's stages cover."""
    panels = entry.tile_k // optype.block_k
    return max(1, -(-k // entry.tile_k)) * panels


@dataclass(frozen=True)
class RungPlan:
    """A rung's launch on given operands, which outlive it."""

    device: Device
    loaded: Kernel
    grid: int
    maps: Array
    args: Array

    def enqueue(self) -> None:
        self.device.launch(self.loaded, self.grid, [self.maps, self.args], self.device.stream)
