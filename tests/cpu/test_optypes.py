"""Operand types: the sizes that follow from them, and which go together."""

from __future__ import annotations

import pytest

from sp24cli.errors import BadInputError
from sp24cli.optypes import OPERAND_TYPES, OPERANDS, operand_type, operands


@pytest.mark.parametrize(
    ("name", "step_k", "block_k", "meta", "largest"),
    [
        ("e4m3", 64, 128, 1024, 448.0),
        ("e5m2", 64, 128, 1024, 57344.0),
        ("s8", 64, 128, 1024, 127.0),
        ("f16", 32, 64, 512, 65504.0),
        ("bf16", 32, 64, 512, 3.3895313892515355e38),
        ("tf32", 16, 32, 512, 3.4011621342146535e38),
    ],
)
def test_a_block_is_two_steps(
    name: str, step_k: int, block_k: int, meta: int, largest: float
) -> None:
    optype = operand_type(name)
    assert (optype.step_k, optype.block_k, optype.meta_bytes) == (step_k, block_k, meta)
    assert optype.block_k == 2 * optype.step_k
    assert optype.max_finite == largest
    # Four bits a group, for all rows of a block.
    assert optype.meta_bytes == 64 * (optype.block_k // optype.group) // 2


def test_metadata_counts_tf32_in_halves() -> None:
    assert [OPERAND_TYPES[name].meta_k(12) for name in ("e4m3", "s8", "bf16", "tf32")] == [
        12, 12, 12, 24,
    ]  # fmt: skip


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(BadInputError, match="unknown operand type 'u8'"):
        operand_type("u8")


def test_names_tell_what_differs_from_the_plain_type() -> None:
    assert list(OPERANDS) == [
        "e4m3", "e4m3_e5m2", "e5m2", "e5m2_e4m3", "f16", "f16_sum16", "bf16", "s8", "tf32",
        "e4m3_bf16", "e4m3_f16",
    ]  # fmt: skip
    for name, found in OPERANDS.items():
        assert operands(found.a.name, found.b.name, found.accumulate) == found
        assert found.name == name
        # What is multiplied has one width: A's own, or that which it is widened to.
        assert found.multiplied == (found.b if found.widened else found.a)
        assert found.multiplied.itemsize == found.b.itemsize
        assert found.widened == (name in ("e4m3_bf16", "e4m3_f16"))


@pytest.mark.parametrize("name", list(OPERAND_TYPES))
def test_the_default_of_every_type_is_its_own_name(name: str) -> None:
    assert operands(name).name == name
    assert operands(name, name) == operands(name)


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        (("f16", "bf16"), "f16 is not multiplied by bf16 (it is by f16 summed in f32, f16"),
        (("e4m3", "s8"), "(it is by e4m3 summed in f32, e5m2 summed in f32, bf16 summed in f32"),
        (("bf16", None, "f16"), "bf16 is not multiplied by bf16 summed in f16"),
        (("s8", "s8", "f32"), "s8 is not multiplied by s8 summed in f32"),
    ],
)
def test_what_does_not_go_together_is_refused(wanted: tuple[str, ...], fault: str) -> None:
    with pytest.raises(BadInputError) as raised:
        operands(*wanted)
    assert fault in str(raised.value)
