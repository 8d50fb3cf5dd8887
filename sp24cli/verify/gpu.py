"""Numerics on the GPU: run the kernels on a packed matrix and compare every element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from sp24cli.bits import Array, widen
from sp24cli.gpu.activations import quantize_tokens
from sp24cli.gpu.arrays import DeviceArray
from sp24cli.gpu.device import Device
from sp24cli.gpu.matmul import OUT_DTYPES, SparseWeight, poison
from sp24cli.gpu.select import MANY_ROWS, needs_widening, outputs
from sp24cli.kernels.manifest import Entry, load
from sp24cli.ops.stream import bands
from sp24cli.optypes import OPERANDS, Operands, OperandType
from sp24cli.packed import PackedMatrix
from sp24cli.pruning import permute
from sp24cli.reference import widened
from sp24cli.verify.compare import Comparison
from sp24cli.verify.cpu import random_activations
from sp24cli.verify.result import ORIGINAL, Check, NumericsResult
from sp24cli.verify.smoothed import SmoothedTokens
from sp24cli.verify.tensorcore import element_bound, frobenius_bound

#: Rows of the random activations: more than the widest tile, and ragged.
TOKENS = 333

#: And of those that stand for decoding, where they are summed in another order
#: (`select.sums_from_the_start`).
DECODED = 17

#: Columns that a scale of the activations covers beside a weight with block scales.
SCALE_K = 128

#: Columns of the identity multiplied at a time.
_IDENTITY = 1024


def verify_matrix(
    packed: PackedMatrix, seed: int, activations: tuple[str, ...] = ()
) -> NumericsResult:
    """Check all of ``packed`` by every kernel that multiplies its type, by each type of
    activations and of sums.

    "identity": A times the identity in float32, which must give every dequantized weight exactly,
    and so proves values, metadata and scales as the tensor core reads them. Then, kernel by kernel,
    A times random rows of type B, with a scale a row and a bias (sums of integers: exactly, without
    either); every element within `tensorcore.element_bound` of float64, and the whole within
    `tensorcore.frobenius_bound`. e4m3 weights with one scale, or one a row, are multiplied with
    fast and, by e4m3, with precise sums; to one with block scales come activations with a scale a
    row and `SCALE_K` columns. To a weight with smoothed columns come, besides, float32 activations
    for each type B: the kernel that quantizes them divides them by its factors, bit for bit as on
    the CPU ("smooth_tokens"), and the product by the kernel that `matmul` takes is compared with
    that of the original ("original product", see `smoothed`).

    A weight that must be widened for its scales is multiplied by bf16 and f16 activations alone;
    ``activations`` widens any other e4m3 weight so, too. "bf16 identity" must give every weight as
    `reference.widened` has it (scales of tensors and rows apart, which come after the sum), and the
    products are bounded like those of 16-bit types.

    Raises:
        Sp24Error: the GPU fails, or the scales are such that no kernel applies them.
    """
    device = Device.open()
    checks = []
    for wide in activations or needs_widening(packed.info.type, packed.info.scale) or (None,):
        weight = SparseWeight.upload(device, packed, activations=wide)
        checks.append(_identity(device, weight, packed))
        for types in OPERANDS.values():
            if (types.a, types.multiplied) == (weight.type, weight.multiplied):
                checks += _products(device, weight, packed, types, seed)
                if packed.smooth is not None and wide is None:
                    checks += _original(device, weight, packed, types, seed)
    return NumericsResult(device.name, tuple(checks))


def padded_rows(x: Array, optype: OperandType) -> Array:
    """``x`` [N, K] with rows of whole 16 bytes; what is added is NaN (s8: -1), which no kernel may
    read."""
    step = 16 // optype.itemsize
    pitch = -(-x.shape[1] // step) * step
    if pitch == x.shape[1]:
        return x
    # All bits: NaN in every float.
    padded = np.full((x.shape[0], pitch * x.itemsize), 0xFF, np.uint8).view(x.dtype)
    padded[:, : x.shape[1]] = x
    return padded


def multiply(
    device: Device,
    weight: SparseWeight,
    x: Array,
    out: str,
    order: str,
    *,
    scale_b: Array | None = None,
    scale_b_k: int = 0,
    bias: Array | None = None,
    kernel: str | None = None,
    accumulate: str = "fast",
    types: Operands | None = None,
) -> Array:
    """D of ``x`` [N, K] (type B of ``types``) as the kernel writes it: [M, N] or, for ``nm``,
    [N, M].

    The output is filled with what no product is before, so an element that is not written does
    not pass.
    """
    n = x.shape[0]
    rows = padded_rows(x, weight.multiplied)
    plan = weight.plan(
        n, out, order, kernel, accumulate=accumulate, scale_b_k=scale_b_k, types=types
    )
    shape = (n, weight.shape[0]) if order == "nm" else (weight.shape[0], n)
    dtype = OUT_DTYPES[out]
    with (
        device.upload(rows.view(np.uint8)) as b,
        device.alloc(shape[0] * shape[1] * dtype.itemsize) as d,
        device.upload(np.ones(1, np.float32) if scale_b is None else scale_b) as scales,
        device.upload(np.zeros(1, np.float32) if bias is None else bias) as biases,
    ):
        device.memset(d, poison(out))
        plan.enqueue(
            b,
            rows.shape[1],
            d,
            scale_b=None if scale_b is None else scales,
            scale_b_rows=scale_b is not None and scale_b.size > 1,
            bias=None if bias is None else biases,
        )
        return device.download(d, dtype, shape)


def _identity(device: Device, weight: SparseWeight, packed: PackedMatrix) -> Check:
    columns = packed.shape[1]
    got = np.empty(packed.shape, np.float32)
    for start in range(0, columns, _IDENTITY):
        stop = min(start + _IDENTITY, columns)
        x = np.zeros((stop - start, columns), weight.multiplied.dtype)
        x[np.arange(stop - start), np.arange(start, stop)] = 1
        got[:, start:stop] = multiply(device, weight, x, "f32", "mn")
    comparison = Comparison(f"{weight.widened.name} identity" if weight.widened else "identity")
    for rows, band in _bands(packed):
        if weight.weight_scales == "none":
            want = band.original_order(band.dequantize(np.float32))
        else:
            want = band.original_order(_operand(weight, band)).astype(np.float32)
        # An infinite weight times the zeros of all other columns is NaN.
        infinite = ~np.isfinite(want)
        want[infinite.sum(axis=1, keepdims=True) > infinite] = np.nan
        comparison.add(got[rows], want, 0.0, first_row=rows.start)
    return comparison.check()


def _bands(packed: PackedMatrix) -> Iterator[tuple[slice, PackedMatrix]]:
    """The rows of a matrix, some at a time: in float64 the whole would take much memory."""
    for start, stop in bands(*packed.shape, multiple=packed.row_step):
        rows = slice(start, stop)
        yield rows, packed.rows(rows)


def _exact(
    packed: PackedMatrix, operand: Callable[[PackedMatrix], Array], b: Array
) -> tuple[Array, Array] | None:
    """The product of ``operand`` of ``packed``, float64 [M, K], and ``b`` [N, K], and the norm of
    each sum's products: float64 [M, N]. None if an operand is not finite."""
    sums = np.empty((packed.shape[0], len(b)))
    norms = np.empty_like(sums)
    squares = np.square(b).T
    for rows, band in _bands(packed):
        a = operand(band)
        if not np.isfinite(a).all():
            return None
        sums[rows] = a @ b.T
        np.sqrt(np.square(a, out=a) @ squares, out=norms[rows])
    return sums, norms


def _operand(weight: SparseWeight, packed: PackedMatrix) -> Array:
    """What the kernels multiply, scales that come after the sum included: float64 [M, K], the
    columns as they are stored."""
    if weight.weight_scales == "none":
        return packed.dequantize(np.float64)
    return widen(widened(packed, weight.multiplied.dtype)).astype(np.float64)


def _products(
    device: Device, weight: SparseWeight, packed: PackedMatrix, types: Operands, seed: int
) -> list[Check]:
    m, k = packed.shape
    random = np.random.default_rng(seed)
    x = random_activations(random, TOKENS, k, types.b)
    scale_b_k = SCALE_K if weight.block is not None else 0
    columns = max(1, -(-k // scale_b_k)) if scale_b_k else 1
    scale_b = random.uniform(0.5, 2.0, (TOKENS, columns)).astype(np.float32)
    # Columns as they are stored, for so the scales of the activations count them.
    stored = widen(x if packed.perm is None else permute.apply(x, packed.perm)).astype(np.float64)
    b = stored * np.repeat(scale_b, scale_b_k or max(1, k), axis=1)[:, :k]
    found = _exact(packed, lambda band: _operand(weight, band), b)
    if found is None:
        return []  # the type does not hold this weight: the identity has shown where
    want, norms = found
    size = float(np.sqrt(np.mean(want * want))) if want.size else 0.0
    bias = (size * random.standard_normal(m)).astype(np.float32)
    want += bias[:, None].astype(np.float64)
    checks = []
    for out in outputs(types.name):
        if out == "f16" and np.abs(want).max(initial=0) > 60000:
            continue  # this weight's products do not fit the type
        if types.accumulate == "f16" and norms.max(initial=0) > 6000:
            continue  # nor would its sums: ten norms are far beyond what they come to on the way
        exact = want
        if out == "s32":  # the sums of the codes, without scales
            found = _exact(packed, lambda band: widen(band.codes()).astype(np.float64), stored)
            assert found is not None, "codes of s8 are finite"
            exact = found[0]
        # Many kernels sum in one order and give the same bits, which need be compared but once.
        passed: list[tuple[tuple[int, int], Array, Check]] = []
        few = f", {DECODED} tokens"
        for entry in _kernels(weight, types, out, scale_b_k):
            seen = []
            for count in (TOKENS, DECODED) if m >= MANY_ROWS else (TOKENS,):
                d = multiply(
                    device,
                    weight,
                    x[:count],
                    out,
                    entry.order,
                    scale_b=scale_b[:count] if entry.scales else None,
                    scale_b_k=scale_b_k if entry.scales else 0,
                    bias=bias if entry.scales else None,
                    kernel=entry.name,
                    types=types,
                )
                d = np.ascontiguousarray(d.T if entry.order == "nm" else d)
                bits, what = d.view(f"u{d.itemsize}"), (count, entry.promote_k)
                check = next(
                    (
                        known
                        for which, same, known in passed
                        if which == what and np.array_equal(same, bits)
                    ),
                    None,
                )
                if check is None:
                    check = _compared(entry, types, k, norms[:, :count], d, exact[:, :count])
                    if check.passed:
                        passed.append((what, bits, check))
                name = f"{entry.name} {check.name}".rstrip()
                seen.append(replace(check, name=name + few * (count < TOKENS)))
            check = next((check for check in seen if not check.passed), seen[0])
            summation = entry.summation if out == "f32" else ""
            checks.append(replace(check, summation=summation))
    return checks


def _compared(entry: Entry, types: Operands, k: int, norms: Array, d: Array, exact: Array) -> Check:
    """``d`` against ``exact``; the name says whether it is every element's or the whole's."""
    comparison = Comparison("")
    comparison.add(d, exact, element_bound(types, k, norms, entry.out_type, exact, entry.promote_k))
    check = comparison.check()
    # The bias is added after the sum, so it only dilutes the relative error.
    relative = frobenius_bound(types, k, entry.out_type, entry.promote_k)
    if check.rel_frobenius > relative:
        error = check.rel_frobenius
        return Check("as a whole", False, error, relative, error, check.first_bad)
    return check


def _original(
    device: Device, weight: SparseWeight, packed: PackedMatrix, types: Operands, seed: int
) -> list[Check]:
    """The checks of a weight with smoothed columns, from activations on that are no codes yet."""
    m, k = packed.shape
    scale_b_k = SCALE_K if weight.block is not None else 0
    if not _kernels(weight, types, "f32", scale_b_k):
        return []
    assert packed.smooth is not None
    random = np.random.default_rng(seed)
    divided = SmoothedTokens.random(random, TOKENS, packed.smooth, types.b)
    given = DeviceArray(device, divided.given.shape, np.float32, device.upload(divided.given))
    codes, scale = (
        made.numpy()
        for made in quantize_tokens(device, given, smooth=weight.smooth, type_name=types.b.name)
    )
    # The scale is the column after the last.
    quantized = Comparison(f"smooth_tokens_{types.b.name}_f32")
    quantized.add(
        np.column_stack([widen(codes), scale]),
        np.column_stack([widen(divided.tokens.codes), divided.scale]),
        0.0,
    )
    columns = max(1, -(-k // scale_b_k)) if scale_b_k else 1
    kernel = weight.plan(TOKENS, "f32", "mn", scale_b_k=scale_b_k, types=types).kernel
    d = multiply(
        device,
        weight,
        codes,
        "f32",
        "mn",
        scale_b=np.repeat(scale[:, None], columns, axis=1),
        scale_b_k=scale_b_k,
        kernel=kernel.name,
        types=types,
    )
    b = widen(codes).astype(np.float64) * scale[:, None]
    product = Comparison(f"{ORIGINAL} by {types.b.name}")
    for rows, band in _bands(packed):
        a = band.original_order(band.dequantize(np.float64))
        sums, norms = a @ b.T, np.sqrt(np.square(a) @ np.square(b).T)
        want, off = divided.original_product(band, m)
        bound = element_bound(types, k, norms, "f32", sums, kernel.promote_k) + off
        product.add(d[rows], want, bound, first_row=rows.start)
    return [quantized.check(), product.check()]


def _kernels(weight: SparseWeight, types: Operands, out: str, scale_b_k: int) -> list[Entry]:
    """Every kernel of these types into ``out`` that a product of this weight may be given to."""
    sums = ("fast", "precise") if weight.widened is None else ("fast",)
    ways = {weight.summation(accumulate, scale_b_k) for accumulate in sums}
    return [
        entry
        for entry in load().entries
        if (entry.type, entry.out_type) == (types.name, out) and entry.summation in ways
    ]
