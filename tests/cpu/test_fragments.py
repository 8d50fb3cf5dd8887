"""The image of weights that are widened, read as the kernel and the tensor core read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli import fragments
from sp24cli.bits import widen
from sp24cli.errors import Sp24Error
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import PackedMatrix, pack
from sp24cli.reference import widened
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24
from tests.cpu.modelfile import DTYPES, Array

E4M3 = OPERAND_TYPES["e4m3"]
BF16, F16 = DTYPES["BF16"], DTYPES["F16"]
SPECS = [
    ScaleSpec("block", (16, 16)),
    ScaleSpec("block", (32, 32)),
    ScaleSpec("block", (48, 16)),
    ScaleSpec("block", (128, 128)),
    ScaleSpec.parse("mx"),
    ScaleSpec("vector"),
]


def random_packed(m: int, k: int, spec: ScaleSpec, seed: int = 0) -> PackedMatrix:
    """Random weights of all magnitudes, so that scales of neighbours differ by much."""
    random = np.random.default_rng([m, k, seed])
    dense = random.standard_normal((m, k)) * np.exp2(random.integers(-20, 14, (m, k)))
    dense = prune_24(dense.astype(np.float32))
    packed, _ = pack(dense, E4M3, spec, source_dtype="F32")
    return packed.to_layout("row")


def image_of(packed: PackedMatrix) -> Array:
    values, meta = packed.row_order()
    return fragments.to_fragments(values, meta, packed.shape[1], packed.scale, packed.info.scale)


def load_scales(block: Array, kind: str, warp: int, lane: int) -> Array:
    """float32 [2 steps, 4 registers], by the addresses of ``Widener::load_scales``."""
    scale = np.ones((2, 4), np.float32)
    if kind == "block":
        v = block[2560 + 16 * warp :][:16].view("<f4")
        scale[0] = v[[0, 0, 1, 1]]
        scale[1] = v[[2, 2, 3, 3]]
    elif kind == "mx":
        row = 16 * warp + lane // 4
        for h in range(2):
            both = int(block[2560 + 2 * row + 16 * h :][:2].view("<u2")[0])
            bits = np.array([both << 23 & 0x7F800000, both << 15 & 0x7F800000], np.uint32)
            scale[:, h] = scale[:, h + 2] = bits.view(np.float32)
    return scale


def widen_pair(codes: Array, scale: Any, dtype: Any, limit: float) -> Array:
    """Two codes as the kernel makes operands of them, in the order of its instructions."""
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        rounded = (exact * np.float32(scale)).astype(dtype)
    most = np.array(limit, dtype)
    return np.where(np.abs(rounded) > most, np.copysign(most, rounded), rounded).astype(dtype)


def emulated(image: Array, kind: str, dtype: Any, limit: float = np.inf) -> Array:
    """The dense A [64 Mb, 64 Kb] in ``dtype`` that ``wgmma.mma_async.sp.m64nNk32`` multiplies.

    From the threads' registers and the metadata words that the selector picks, as the PTX ISA
    places them: register j of a lane holds the kept columns 2q + 8 (j >> 1) and the next of row
    g + 8 (j & 1) of its warp's sixteen; of a word, bits 15:0 are four groups of row g, bits 31:16
    of row g + 8, from lanes q = 2 selector (the lower half of the step) and 2 selector + 1.
    """
    mb, kb, _ = image.shape
    dense = np.zeros((64 * mb, 64 * kb), dtype)
    for rb, cb in np.ndindex(mb, kb):
        block = image[rb, cb]
        words = block[2048:2560].view("<u4")
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            g, q = divmod(lane, 4)
            codes = block[16 * thread :][:16]
            scale = load_scales(block, kind, warp, lane)
            for step in range(2):
                for j in range(4):
                    pair = codes[8 * step + 2 * j :][:2]
                    kept = widen_pair(pair, scale[step, j], dtype, limit)
                    row = 16 * warp + g + 8 * (j & 1)
                    group = (2 * q + 8 * (j >> 1)) // 2  # of the step's eight
                    selector = step
                    word = int(words[32 * warp + 4 * g + 2 * selector + group // 4])
                    nibble = word >> (16 * (j & 1) + 4 * (group % 4)) & 15
                    at = 64 * cb + 32 * step + 4 * group
                    dense[64 * rb + row, at + (nibble & 3)] = kept[0]
                    dense[64 * rb + row, at + (nibble >> 2)] = kept[1]
    return dense


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}{s.block or ''}")
def test_the_tensor_core_multiplies_widened_weights(spec: ScaleSpec, dtype: Any) -> None:
    packed = random_packed(64, 64, spec)
    kind = fragments.weight_scales(spec)
    limit = float(ml_dtypes.finfo(dtype).max)
    a = emulated(image_of(packed), kind, dtype, limit)
    if kind == "none":  # the epilogue's scales
        assert np.array_equal(widen(a), widen(packed.codes()))
        return
    want = widened(packed, dtype)
    assert np.array_equal(a.view(np.uint16), want.view(np.uint16))
    b = np.random.default_rng(5).integers(-3, 4, (24, 64)).astype(np.float64)
    assert np.array_equal(widen(a).astype(np.float64) @ b.T, widen(want).astype(np.float64) @ b.T)
    assert np.abs(widen(a)).max() > 100  # there is something to compare


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}{s.block or ''}")
@pytest.mark.parametrize("shape", [(65, 132), (8, 4), (130, 68), (64, 128)], ids=str)
def test_ragged_shapes_are_padded_with_empty_groups(
    shape: tuple[int, int], spec: ScaleSpec
) -> None:
    m, k = shape
    packed = random_packed(m, k, spec, seed=3)
    image = image_of(packed)
    kind = fragments.weight_scales(spec)
    assert image.shape == (*fragments.blocks(m, k), fragments.BLOCK_BYTES[kind])
    a = emulated(image, kind, F16, 65504.0)
    want = packed.codes().astype(np.float16) if kind == "none" else widened(packed, F16)
    assert np.array_equal(a[:m, :k], want)
    assert not a[m:].any() and not a[:, k:].any()
    # Padding is groups of nibble 0100, and scale 1.
    words = image[:, :, 2048:2560]
    if k % 64 == 4:
        assert (words[:, -1].view("<u4")[:, 2::4] == 0x44444444).all()
    if kind == "mx" and m % 64:
        assert (image[-1, :, 2560 + 2 * (m % 64) :] == 127).all()


def test_every_code_and_both_ways_past_the_end() -> None:
    """All 256 codes, with scales that bring them to where f16 is subnormal and past its end."""
    info = random_packed(64, 64, SPECS[0]).info
    codes = np.arange(2048, dtype=np.uint32).astype(np.uint8).reshape(64, 32)
    meta = np.full((64, 8), 0b1110_0100, np.uint8)
    scale = np.exp2(np.arange(16, dtype=np.float32) - 24).reshape(4, 4) * np.float32(1.37)
    scale[:, 3] = [150.0, 146.2857, 146.24, 2.0**100]
    for overflow, limit in (("satfinite", 65504.0), ("nan", np.inf)):
        packed = PackedMatrix(
            replace(info, overflow=overflow, layout="row"),
            codes.view(E4M3.dtype),
            meta,
            None,
            scale,
        )
        a = emulated(image_of(packed), "block", F16, limit)
        want = widened(packed, F16)
        assert np.array_equal(a, want, equal_nan=True)
        assert np.isinf(want).any() == (overflow == "nan")
        sizes = np.abs(want[np.isfinite(want)])
        assert ((sizes > 0) & (sizes < 2.0**-14)).any() and (sizes == 65504).any()


def test_a_wrong_order_does_not_pass() -> None:
    """The emulation can fail: two rows of a fragment exchanged, and another block's scale."""
    packed = random_packed(64, 64, SPECS[0])
    image = image_of(packed)
    want = widened(packed, F16)
    swapped = image.copy()
    swapped[0, 0, :2] = image[0, 0, 2:4]
    moved = image.copy()
    moved[0, 0, 2560:2576] = image[0, 0, 2576:2592]
    for wrong in (swapped, moved):
        assert not np.array_equal(emulated(wrong, "block", F16, 65504.0), want)


def test_blocks_without_a_kernel_are_refused() -> None:
    for block in ((1, 32), (8, 16), (16, 24)):
        with pytest.raises(Sp24Error, match=f"scales of {block[0]}x{block[1]} need a kernel"):
            fragments.weight_scales(ScaleSpec("block", block))
