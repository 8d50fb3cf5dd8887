"""The product D = A Bᵀ of an uploaded sparse weight and dense activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sp24cli import fragments, smoothing
from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.gpu import select
from sp24cli.gpu.activations import gather_columns
from sp24cli.gpu.arguments import pack_struct, tensor_map
from sp24cli.gpu.arrays import DeviceArray, stream_number, vector, view
from sp24cli.gpu.device import Buffer, Device, Kernel, Launch
from sp24cli.gpu.order import balanced_order, cluster_rows, heights, tile_order
from sp24cli.gpu.select import Choice, candidates, chosen, needs_widening
from sp24cli.kernels import manifest
from sp24cli.kernels.choices import Problem
from sp24cli.optypes import (
    BLOCK_ROWS,
    OPERANDS,
    Operands,
    OperandType,
    operand_type,
    operands,
)
from sp24cli.packed import PackedMatrix
from sp24cli.pruning import permute

#: The output types, as numpy knows them.
OUT_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "s32": np.dtype(np.int32),
}


#: Launches that a weight keeps: allocators give the same addresses again and again, and to put one
#: together takes longer than many a product.
_KEPT_LAUNCHES = 128


def poison(out: str) -> int:
    """A byte that, written all over an output, makes NaN or a number that no product is."""
    return 0x80 if out == "s32" else 0xFF


@dataclass(frozen=True)
class Plan:
    """A kernel chosen for a weight and a number of tokens; `enqueue` runs it.

    ``chosen_by`` says in words what the choice rests on; ``raster`` is the tile order's, chosen by
    the operands' sizes if not given. ``scale_b_k`` is the K that a scale of B covers, 0 for all of
    it.
    """

    weight: SparseWeight
    kernel: manifest.Entry
    loaded: Kernel
    n: int
    raster: int | None = None
    chosen_by: str = "name"
    scale_b_k: int = 0

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
        scale_b_strides: tuple[int, int] | None = None,
    ) -> None:
        """Multiplies B = ``x`` [n, K] (rows of ``ldx`` elements) into ``out``.

        ``out`` is [n, M] (order ``nm``) or [M, n] (``mn``), rows of ``ldd`` elements (tight by
        default). ``scale_b`` is one f32, or one a row of B with ``scale_b_rows``, or [n,
        ceil(K/scale_b_k)] f32 with the plan's ``scale_b_k``, ``scale_b_strides`` elements apart
        (tight by default; read fastest where those of neighbouring rows lie side by side);
        ``bias`` one f32 a row of A. ``x``
        and its row pitch in bytes are multiples of 16, unless the weight has a ``column_order``:
        then they are copied in that order first. If it has ``smooth``, ``x`` has been divided by
        that. Into s32 go the sums of the codes: no scale, that
        of the weight neither, and no bias.
        """
        if self.weight.column_order is None:
            self._multiply(x, ldx, out, ldd, scale_b, scale_b_rows, bias, stream, scale_b_strides)
            return
        device, item = self.weight.device, self.weight.multiplied.itemsize
        shape = (self.n, self.weight.shape[1])
        pitch = -(-shape[1] * item // 16) * 16
        on = device.stream if stream is None else stream
        with device.scratch(self.n * pitch, on) as ordered:
            gather_columns(
                device,
                self.weight.column_order.ptr,
                _pointer(x),
                ldx * item,
                ordered,
                pitch,
                shape,
                item,
                on,
            )
            self._multiply(
                ordered,
                pitch // item,
                out,
                ldd,
                scale_b,
                scale_b_rows,
                bias,
                stream,
                scale_b_strides,
            )

    def _multiply(
        self,
        x: Buffer | int,
        ldx: int,
        out: Buffer | int,
        ldd: int | None,
        scale_b: Buffer | int | None,
        scale_b_rows: bool,
        bias: Buffer | int | None,
        stream: int | None,
        scale_b_strides: tuple[int, int] | None,
    ) -> None:
        """`enqueue` of activations whose columns are in the weight's order."""
        weight, entry = self.weight, self.kernel
        if not (weight.shape[0] and self.n):
            return
        stream = weight.device.stream if stream is None else stream
        given = (
            _pointer(x), ldx, _pointer(out), ldd, _pointer(scale_b), scale_b_rows, _pointer(bias),
            stream, scale_b_strides,
        )  # fmt: skip
        # All that the launch follows from, but for the weight, which stays as it is.
        key = (entry.name, self.n, self.raster, self.scale_b_k, *given)
        launch = weight.launches.get(key)
        if launch is None:
            launch = self._launch(*given)
            if len(weight.launches) >= _KEPT_LAUNCHES:
                weight.launches.clear()
            weight.launches[key] = launch
        launch.start()

    def _launch(
        self,
        x: int,
        ldx: int,
        out: int,
        ldd: int | None,
        scale_b: int,
        scale_b_rows: bool,
        bias: int,
        stream: int,
        scale_b_strides: tuple[int, int] | None,
    ) -> Launch:
        """What `enqueue` starts; addresses are 0 where there is nothing."""
        weight, entry, device = self.weight, self.kernel, self.weight.device
        m, k = weight.shape
        item = weight.multiplied.itemsize
        tight = m if entry.order == "nm" else self.n
        ldd = tight if ldd is None else ldd
        if ldd < tight:
            raise Sp24Error(f"rows of {tight} elements do not fit a pitch of {ldd}")
        if not entry.scales and (scale_b or bias):
            raise Sp24Error(f"{entry.out_type} are plain sums: no scale and no bias goes with them")
        maps = [
            tensor_map(x, k * item, self.n, ldx * item, (entry.box_bytes_b, rows))
            for rows in (entry.box_rows_b, (self.n - 1) % entry.tile_n + 1)
        ]
        out_bytes = OUT_DTYPES[entry.out_type].itemsize
        cols = -(-self.n // entry.tile_n)
        clusters = self.loaded.max_clusters
        rows = cluster_rows(entry, m, cols, clusters)
        tiles = rows * cols * entry.cluster_ctas
        order = tile_order(
            rows,
            cols,
            clusters,
            weight.image.nbytes,
            self.n * ldx * item,
            device.l2_bytes,
            self.raster,
        )
        low, high = heights(entry, m, rows) if entry.balanced else (0, 0)
        if self.raster is None:
            order = balanced_order(order, rows, cols, clusters, low, high)
        step = weight.multiplied.step_k
        block_m, block_k = weight.block or (1, 0)
        a_rows = -(-m // block_m) if block_k else 0
        b_strides = (int(scale_b_rows), 0)
        if self.scale_b_k:
            b_strides = scale_b_strides or (-(-k // self.scale_b_k), 1)
            if not scale_b:
                b_strides = (0, 0)
        reach = (self.n - 1) * b_strides[0]
        if self.scale_b_k:
            reach += (-(-k // self.scale_b_k) - 1) * b_strides[1]
        if max(a_rows * -(-k // max(1, block_k)), reach) >= 1 << 31:
            raise Sp24Error(f"more than 2^31 scales at {m}x{self.n}x{k}")
        args = pack_struct(
            manifest.load().args[entry.args],
            {
                "a": weight.image.ptr,
                "d": out,
                "scale_a": weight.scale.ptr if weight.scale else 0,
                "scale_b": scale_b,
                "bias": bias,
                "ldd": ldd,
                "m": m,
                "n": self.n,
                "m_blocks": weight.blocks[0],
                "k_blocks": weight.blocks[1],
                "scale_a_stride": int(bool(block_k) or weight.scale_rows) if weight.scale else 0,
                "scale_b_stride": b_strides[0],
                "vector_store": int(out % 16 == 0 and ldd * out_bytes % 16 == 0),
                "raster": order.raster,
                "cluster_rows": rows,
                "tile_blocks": low,
                "high_rows": high,
                "skew": order.skew,
                "read_once": order.read_once,
                "scale_a_rows": block_m,
                "scale_a_steps": _steps(block_k, k, step),
                "scale_b_steps": _steps(self.scale_b_k, k, step),
                "k_steps": max(1, -(-k // step)),
                "operand_limit": weight.limit,
                "scale_a_along": a_rows,
                "scale_b_along": b_strides[1],
            },
        )
        grid = min(tiles, clusters * entry.cluster_ctas)
        # With few tokens and several tiles a CTA memory sets the pace, and CTAs that start one by
        # one read it less evenly (28672x16x8192: 38.8 us overlapped, 37.0 us not).
        overlap = tiles == grid or entry.tile_n >= 128
        return Launch(self.loaded, grid, [np.concatenate(maps), args], stream, overlap)


class SparseWeight:
    """A packed weight on the GPU, in the layout that the kernels read.

    ``scale`` is one f32, one a row with ``scale_rows``, or one a ``block`` (rows, columns), then
    [blocks along K, blocks along M].
    ``column_order``, int32 [K], is None where it is that of the activations. ``smooth``, f32 [K]
    in their order, are the factors that the columns were multiplied by, None where there are none:
    a product is right if the activations' columns were divided by them, which nothing here does
    (`activations.quantize_tokens` does).

    ``widened`` is the type, that of the activations, that kernels widen the weight to before they
    multiply it, None where they multiply it as it is. The ``weight_scales`` that they do so with
    are in the image (`fragments`), not in ``scale``; ``limit`` is the largest magnitude then, as
    two values of that type, or 0 for a weight that `fragments.plain` knows to need none.
    """

    def __init__(
        self,
        device: Device,
        optype: OperandType,
        shape: tuple[int, int],
        image: Buffer,
        scale: Buffer | None,
        scale_rows: bool,
        block: tuple[int, int] | None = None,
        column_order: Buffer | None = None,
        smooth: DeviceArray | None = None,
        widened: OperandType | None = None,
        weight_scales: fragments.WeightScales = "none",
        limit: int = 0,
    ) -> None:
        self.device = device
        self.type = optype
        self.shape = shape
        self.image = image
        self.scale = scale
        self.scale_rows = scale_rows
        self.block = block
        self.column_order = column_order
        self.smooth = smooth
        self.widened = widened
        self.weight_scales = weight_scales
        self.limit = limit
        #: Products by all that they follow from (`Plan.enqueue`).
        self.launches: dict[tuple[object, ...], Launch] = {}

    @property
    def multiplied(self) -> OperandType:
        """The weight's type as the tensor cores multiply it."""
        return self.widened or self.type

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks along M and along K; a weight without columns still has one, of empty groups."""
        m, k = self.shape
        return -(-m // BLOCK_ROWS), max(1, -(-k // self.multiplied.block_k))

    @classmethod
    def upload(
        cls, device: Device, packed: PackedMatrix, *, activations: str | None = None
    ) -> SparseWeight:
        """Copies a packed matrix to the GPU; one in ``row`` layout is turned there.

        ``activations`` is "bf16" or "f16" for an e4m3 weight that is to be widened to that type
        and multiplied by activations of it, None for activations of 8 bits, or of the weight's own
        type. Scales of ``mx``, and of blocks whose columns are no multiple of 64, are applied to
        widened weights alone.

        `Sp24Error` for scales that the kernels do not apply so. `BadInputError` for a permutation
        that is none, a factor that can be none, and for types that do not go together.
        """
        info = packed.info
        optype = operand_type(info.type)
        spec = info.scale
        widened, limit = None, 0
        kind: fragments.WeightScales = "none"
        if activations is not None and operands(optype.name, activations).widened:
            widened, kind = operand_type(activations), fragments.weight_scales(spec)
            if not fragments.plain(packed.scale, kind, widened.name):
                limit = _limit_word(widened, info.overflow)
        elif needs_widening(optype.name, spec):
            rows, columns = cast(tuple[int, int], spec.block)
            raise Sp24Error(
                f"{optype.name} with scales of {rows}x{columns} is multiplied by activations of "
                f"16 bits alone: upload it with activations={' or '.join(fragments.WIDENED)}"
            )
        scale = None
        if kind == "none" and packed.scale is not None and packed.scale.size:
            # By blocks along K, so that those of neighbouring rows lie side by side.
            scale = device.upload(packed.scale.T.copy() if spec.block else packed.scale)
        with device.current:
            if widened is not None:
                image = turn_to_fragments(device, packed, kind)
            elif packed.blocks is not None:
                image = device.upload(packed.blocks)
            else:
                assert packed.values is not None and packed.meta is not None
                image = device.alloc(_image_bytes(optype, info.shape))
                turn_to_sm90(device, optype, info.shape, packed.values, packed.meta, image)
        column_order = None
        if packed.perm is not None:
            # The gather reads wherever it says.
            permute.check_order(packed.perm, info.shape[1])
            column_order = device.upload(packed.perm.astype(np.int32))
        smooth = None
        if packed.smooth is not None:
            smoothing.check_factors(packed.smooth)
            smooth = DeviceArray(
                device, packed.smooth.shape, np.float32, device.upload(packed.smooth)
            )
        return cls(
            device,
            optype,
            info.shape,
            image,
            scale,
            spec.kind == "vector",
            spec.block if widened is None else None,
            column_order,
            smooth,
            widened,
            kind,
            limit,
        )

    def summation(self, accumulate: str, scale_b_k: int) -> str:
        """How a product sums, as `select.summation` says of this weight; ``scale_b_k`` is the K
        that a scale of B covers, 0 for all of it."""
        wide = None if self.widened is None else self.weight_scales
        return select.summation(accumulate, self.block, self.scale_rows, scale_b_k, wide)

    def plan(
        self,
        n: int,
        out_dtype: str = "bf16",
        order: str = "nm",
        kernel: str | None = None,
        raster: int | None = None,
        accumulate: str = "fast",
        scale_b_k: int = 0,
        types: Operands | None = None,
    ) -> Plan:
        """The kernel for ``n`` tokens, or the one named ``kernel``.

        ``accumulate`` is "fast", "precise" or "f16" (see `summation`); ``scale_b_k`` the K that a
        scale of the tokens will cover, 0 where they have one a row, one in all or none. ``types``
        are the weight's type, that of the tokens and of the sums: as `optypes.operands` has them
        for the weight unless given.
        """
        if types is None:
            wide = None if self.widened is None else self.widened.name
            types = operands(self.type.name, wide, "f16" if accumulate == "f16" else None)
        if types.multiplied != self.multiplied:
            raise Sp24Error(
                f"the weight was uploaded for {self.multiplied.name}, not for {types.b.name}"
            )
        name, summation = types.name, self.summation(accumulate, scale_b_k)
        if kernel is None:
            m, k = self.shape
            problem = Problem(name, out_dtype, order, m, n, k, summation)
            choice = chosen(self.device, problem)
        else:
            found = candidates(name, out_dtype, order, summation, able=True)
            if self.scale_rows:  # which scales of blocks of rows cannot stand for
                found = [e for e in found if e.loop_scales not in ("tile", "block")]
            named = [e for e in found if e.name == kernel]
            if not named:
                raise Sp24Error(
                    f"no kernel {kernel!r} for {name} into {out_dtype} {order}: "
                    f"there are {', '.join(e.name for e in found)}"
                )
            choice = Choice(named[0], "name")
        entry = choice.kernel
        return Plan(self, entry, self.device.kernel(entry), n, raster, choice.by, scale_b_k)


def matmul(
    weight: SparseWeight,
    x: Any,
    *,
    out: Any = None,
    out_dtype: str | None = None,
    order: str = "nm",
    scale: Any = None,
    scale_k: int = 128,
    bias: Any = None,
    accumulate: str = "fast",
    smoothed: bool = False,
    kernel: str | None = None,
    stream: int = 0,
) -> Any:
    """D = A Bᵀ for device arrays of any library that speaks DLPack or the CUDA array interface.

    Args:
        weight: A [M, K], from `SparseWeight.upload`.
        x: B [N, K] of the weight's type, or its bits as unsigned integers, K contiguous; of the
            other FP8 type for an FP8 weight; of bf16 or f16 for a weight that was uploaded for
            these. Of float32 that multiplies tf32, the lowest 13 bits
            are ignored: `fp8.to_tf32` rounds. If its rows do not start at multiples of 16 bytes
            it is copied first, into memory that is allocated and freed: the host waits, and a CUDA
            graph cannot capture it. It is in the original order of columns; for a permuted weight
            they are put in its own first, which reads and writes x once more.
        out: where D goes, [N, M] (order ``nm``) or [M, N] (``mn``), its rows contiguous, of type
            bf16, f16 or f32, or for s8 int32. Without it a `DeviceArray` of ``out_dtype`` is
            returned, by default bf16, or f16 where the sums or a widened weight are. int32 are
            the plain sums of products of codes. If both are given, they agree.
        scale: f32, one for all of x, one a row of it, or [N, ceil(K / scale_k)]: one a row and
            ``scale_k`` columns, a multiple of 64 (not for a permuted weight, in whose order columns
            of one scale lie apart). The latter in any strides: read fastest where the scales of
            neighbouring rows lie side by side (column-major). Of one that is not finite the
            products are undefined, for its row of x alone.
        bias: f32 [M].
        accumulate: "fast"; "precise": sums of e4m3 by e4m3 are promoted to float32 every 256 of K;
            or "f16", of f16 alone: they are kept in f16. Sums with scales that change along K are
            promoted at least every 128, whatever is said here.
        smoothed: that the columns of x were divided by ``weight.smooth`` before x was quantized,
            as ``quantize_tokens(x, smooth=weight.smooth)`` does. x does not show it, so a weight
            with such factors is not multiplied unless it is said; to others it means nothing.
        stream: the CUDA stream, as an integer; 0 is the default stream, torch's and CuPy's too.

    Raises:
        Sp24Error: shapes or types that do not fit, by name.
    """
    if isinstance(weight, PackedMatrix):
        raise Sp24Error("the weight is not on a GPU: upload it first")
    if weight.smooth is not None and not smoothed:
        raise Sp24Error(
            "the weight's columns are smoothed: x must be divided by its factors before it is "
            "quantized, as quantize_tokens(x, smooth=weight.smooth) does; then say smoothed=True"
        )
    if out_dtype not in (None, *OUT_DTYPES):
        raise Sp24Error(f"out_dtype is {out_dtype!r}, the kernels write {', '.join(OUT_DTYPES)}")
    m, k = weight.shape
    device, item, stream = weight.device, weight.multiplied.itemsize, stream_number(stream)
    with device.current:
        on = device.ordinal
        b = view(x, "x", stream, on)
        types = _types(weight.type, weight.multiplied, b.dtype, accumulate)
        if len(b.shape) != 2 or b.shape[1] != k:
            raise Sp24Error(f"x is {list(b.shape)}, the weight {[m, k]} needs [N, {k}]")
        n = b.shape[0]
        # The stride of a single row means nothing, and libraries put anything there.
        ldx = b.strides[0] if n > 1 else k
        if (k > 1 and b.strides[1] != 1) or ldx < k:
            raise Sp24Error("x is not contiguous along K, or its rows overlap")
        d = None if out is None else view(out, "out", stream, on, writable=True)
        if d is not None:
            named = [name for name, dtype in OUT_DTYPES.items() if dtype == d.dtype]
            if not named:
                raise Sp24Error(f"out is {d.dtype}, the kernels write {', '.join(OUT_DTYPES)}")
            if out_dtype not in (None, named[0]):
                raise Sp24Error(f"out is {d.dtype}, asked for is {out_dtype}")
            out_dtype = named[0]
        if out_dtype is None:
            in_f16 = types.accumulate == "f16" or (types.widened and types.b.name == "f16")
            out_dtype = "f16" if in_f16 else "bf16"
        shape = (n, m) if order == "nm" else (m, n)
        if d is None:
            out = DeviceArray(device, shape, OUT_DTYPES[out_dtype])
            d = out.view()
        if d.shape != shape or (shape[1] > 1 and d.strides[1] != 1):
            raise Sp24Error(
                f"out is {list(d.shape)}, order {order} needs {list(shape)}, rows contiguous"
            )
        scales, scale_b_k, strides = None, 0, None
        if scale_k < 1:
            raise Sp24Error(f"scale_k is {scale_k}, not a multiple of 64")
        if scale is not None:
            blocks = -(-k // scale_k)
            by_block = blocks > 1 and view(scale, "scale", stream, on).shape == (n, blocks)
            if by_block and weight.column_order is not None:
                raise Sp24Error("a permuted weight takes one scale of x, or one a row of it")
            scale_b_k = scale_k if by_block else 0
            if by_block:
                scales = view(scale, "scale", stream, on)
                if scales.dtype != np.float32 or min(scales.strides) < 0:
                    raise Sp24Error(
                        f"scale is {scales.dtype} {list(scales.shape)} of strides "
                        f"{list(scales.strides)}, needed is f32, none of them negative"
                    )
                strides = (scales.strides[0], scales.strides[1])
            else:
                scales = vector(scale, "scale", (1, n), stream, on)
        biases = None if bias is None else vector(bias, "bias", (m,), stream, on)
        plan = weight.plan(
            n, out_dtype, order, kernel, accumulate=accumulate, scale_b_k=scale_b_k, types=types
        )
        ptr = b.ptr
        spare = None
        if weight.column_order is None and (ptr % 16 or ldx * item % 16):
            pitch = -(-k * item // 16) * 16
            spare = device.alloc(n * pitch)
            device.copy_rows(spare.ptr, pitch, ptr, ldx * item, k * item, n, stream)
            ptr, ldx = spare.ptr, pitch // item
        plan.enqueue(
            ptr,
            ldx,
            d.ptr,
            d.strides[0] if shape[0] > 1 else None,
            scale_b=None if scales is None else scales.ptr,
            scale_b_rows=scales is not None and scales.shape != (1,),
            bias=None if biases is None else biases.ptr,
            stream=stream,
            scale_b_strides=strides,
        )
        if spare is not None:
            device.synchronize()  # the product still reads the copy
            spare.free()
        return out


@lru_cache(maxsize=256)
def _types(own: OperandType, plain: OperandType, x: np.dtype[Any], accumulate: str) -> Operands:
    """The operands of a weight of type ``own``, multiplied as ``plain``, and an array; `Sp24Error`
    where they do not go together."""
    partners = {
        o.b.dtype: o.b.name for o in OPERANDS.values() if (o.a, o.multiplied) == (own, plain)
    }
    name = plain.name if x == np.dtype(f"u{plain.itemsize}") else partners.get(x)
    if name is None:
        how = "" if own == plain else f", uploaded for {plain.name}"
        raise Sp24Error(f"x is {x}, the weight is {own.dtype}{how}")
    try:
        return operands(own.name, name, "f16" if accumulate == "f16" else None)
    except BadInputError as error:
        raise Sp24Error(str(error)) from None


def _steps(block_k: int, k: int, step: int) -> int:
    """The wgmma steps along K that a scale covers; more than there are where it covers all."""
    return block_k // step if 0 < block_k < k else 1 << 30


def _pointer(buffer: Buffer | int | None) -> int:
    if buffer is None:
        return 0
    return buffer if isinstance(buffer, int) else buffer.ptr


def _image_bytes(optype: OperandType, shape: tuple[int, int]) -> int:
    rows, columns = -(-shape[0] // BLOCK_ROWS), max(1, -(-shape[1] // optype.block_k))
    return rows * columns * optype.block_bytes


def _limit_word(optype: OperandType, overflow: str) -> int:
    """What values past the end of a 16-bit type become, twice in a word: its largest, or
    infinity."""
    limit = optype.max_finite if overflow == "satfinite" else math.inf
    return int(np.array(limit, optype.dtype).view(np.uint16)) * 0x10001


def turn_to_fragments(device: Device, packed: PackedMatrix, kind: fragments.WeightScales) -> Buffer:
    """The image of `fragments` of a packed matrix, made on the GPU."""
    m, k = packed.shape
    rows, columns = fragments.blocks(m, k)
    image = device.alloc(rows * columns * fragments.BLOCK_BYTES[kind])
    if not m:
        return image
    loaded = manifest.load()
    entry = loaded.conversion("pack_widened", kind, packed.info.type)
    if entry is None:
        raise Sp24Error(f"no kernel turns {packed.info.type} into fragments")
    values, meta = packed.row_order()
    scale = np.zeros(1, np.uint8)
    if kind != "none" and packed.scale is not None:
        scale = packed.scale.view(np.uint8)
    scale_rows, scale_k = packed.info.scale.block or (1, 1)
    with (
        device.upload(values.view(np.uint8)) as values_gpu,
        device.upload(meta) as meta_gpu,
        device.upload(scale) as scale_gpu,
    ):
        args = pack_struct(
            loaded.args[entry.args],
            {
                "values": values_gpu.ptr,
                "meta": meta_gpu.ptr,
                "scale": scale_gpu.ptr,
                "image": image.ptr,
                "m": m,
                "k": k,
                "k_blocks": columns,
                "scale_rows": scale_rows,
                "scale_k": scale_k,
                "scale_columns": -(-k // scale_k),
            },
        )
        device.launch(device.kernel(entry), rows * columns, [args], device.stream)
        device.synchronize()
    return image


def turn_to_sm90(
    device: Device,
    optype: OperandType,
    shape: tuple[int, int],
    values: npt.NDArray[Any],
    meta: npt.NDArray[Any],
    image: Buffer,
) -> None:
    """Writes the ``sm90`` image of a matrix in ``row`` layout, on the GPU."""
    if not shape[0]:
        return
    with device.upload(values.view(np.uint8)) as values_gpu, device.upload(meta) as meta_gpu:
        enqueue_turn(device, optype, shape, values_gpu.ptr, meta_gpu.ptr, image.ptr, device.stream)
        # Kernels ask for the image while the kernel before them may still run, so it must be done.
        device.synchronize()


def enqueue_turn(
    device: Device,
    optype: OperandType,
    shape: tuple[int, int],
    values: int,
    meta: int,
    image: int,
    stream: int,
) -> None:
    """`turn_to_sm90` of what lies on the GPU: device addresses; M is not 0."""
    m, k = shape
    columns = max(1, -(-k // optype.block_k))
    rows = -(-m // BLOCK_ROWS)
    loaded = manifest.load()
    # Packing sees bytes and nibbles: types of one width do not differ, and tf32 is two halves.
    width = next(
        e for e in loaded.pack_entries if operand_type(e.a_type).itemsize == min(optype.itemsize, 2)
    )
    args = pack_struct(
        loaded.args[width.args],
        {
            "values": values,
            "meta": meta,
            "image": image,
            "m": m,
            "k": optype.meta_k(k),
            "k_blocks": columns,
        },
    )
    device.launch(device.kernel(width), rows * columns, [args], stream)
