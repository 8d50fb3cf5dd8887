"""What the rungs of the ladder read, by the addresses that their kernels form."""

from __future__ import annotations

import numpy as np
import pytest

from sp24cli.errors import Sp24Error
from sp24cli.gpu.ladder import FORMS, ROWS, meta_form, value_rows
from sp24cli.packed import pack
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import prune_24

THREAD = np.arange(128)
WARP, LANE = THREAD // 32, THREAD % 32
R, Q = LANE >> 2, LANE & 3


def packed(type_name, m, k):
    dense = np.random.default_rng([m, k]).standard_normal((m, k), np.float32)
    scale = "vector" if type_name == "e4m3" else "none"
    from sp24cli.optypes import operand_type

    result, _ = pack(
        prune_24(dense), operand_type(type_name), ScaleSpec.parse(scale, None), source_dtype="F32"
    )
    return result


def image_words(matrix, step):
    """[row blocks, K blocks, 128]: the word that each thread gives to a step, from the image.

    For 16-bit types it is what selector 0 reads of lanes q = 0 and 1, and the same for q = 2 and 3.
    """
    optype = matrix.info.optype
    blocks = matrix.to_layout("sm90").blocks
    words = np.ascontiguousarray(blocks[:, :, 4096:]).view("<u4")
    if optype.itemsize == 1:
        return words[:, :, 2 * THREAD + step]
    return words[:, :, 32 * WARP + 4 * R + 2 * step + (Q & 1)]


def kernel_words(form, raw, optype, blocks, block, k_block, step):
    """[128] words by the address arithmetic of ladder_meta.cuh, in numpy."""
    memory = raw.reshape(-1)
    byte = optype.itemsize == 1
    if form == "rows":
        lane_row = 16 * WARP + R + 8 * (Q & 1) if byte else 8 * WARP + R
        lane_byte = 4 * (Q >> 1 if byte else Q & 1)
        meta_rows = 64 if byte else 32
        at = (block * meta_rows + lane_row) * blocks * 16 + lane_byte + 16 * k_block + 8 * step
    else:
        among = 2 * (LANE >> 2) + (LANE & 1)
        at = block * blocks * 512 + WARP * 128 + 512 * k_block
        at = at + (among * 8 + 4 * step if form == "pairs" else among * 4 + 64 * step)
    return memory[at[:, None] + np.arange(4)].view("<u4").ravel()


@pytest.mark.parametrize(("m", "k"), [(64, 128), (300, 1412), (65, 132), (1000, 4092), (8, 4)])
@pytest.mark.parametrize(
    ("type_name", "form"), [("e4m3", "rows"), ("f16", "rows"), ("f16", "grouped"), ("f16", "pairs")]
)
@pytest.mark.parametrize("panels", [1, 2])
def test_every_thread_finds_the_words_of_the_image(type_name, form, m, k, panels):
    matrix = packed(type_name, m, k)
    optype = matrix.info.optype
    inside = -(-k // optype.block_k)
    blocks = -(-inside // panels) * panels
    raw = meta_form(matrix, form, blocks)
    for step in range(2):
        want = image_words(matrix, step)
        for block in range(ROWS // 64 * -(-m // ROWS)):
            for k_block in range(blocks):
                got = kernel_words(form, raw, optype, blocks, block, k_block, step)
                if block < want.shape[0] and k_block < inside:
                    assert np.array_equal(got, want[block, k_block]), (block, k_block, step)
                else:
                    assert np.array_equal(got, np.full(128, 0x44444444))


def test_the_eight_bit_matrix_is_what_the_file_holds():
    matrix = packed("e4m3", 256, 1024)
    assert np.array_equal(meta_form(matrix, "rows", 8), matrix.to_layout("row").meta)
    with pytest.raises(Sp24Error, match="no form 'pairs'"):
        meta_form(matrix, "pairs", 8)


@pytest.mark.parametrize(("type_name", "k"), [("e4m3", 132), ("f16", 132), ("e4m3", 128)])
def test_values_lie_in_rows_of_whole_16_bytes(type_name, k):
    matrix = packed(type_name, 65, k)
    values = value_rows(matrix)
    row = matrix.to_layout("row")
    used = k // 2 * row.values.dtype.itemsize
    assert values.shape == (65, -(-used // 16) * 16)
    assert np.array_equal(values[:, :used].view(row.values.dtype), row.values)
    assert not values[:, used:].any()


def test_every_way_to_metadata_has_a_form():
    assert set(FORMS.values()) == {"rows", "grouped", "pairs", None}
