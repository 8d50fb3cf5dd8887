"""Which tensors are taken: every reason, word for word, and real names of every kind."""

from __future__ import annotations

import pytest

from sp24cli.checkpoint.header import DTYPES, TensorEntry
from sp24cli.checkpoint.names import Selection

PROJ = "model.layers.0.mlp.gate_proj.weight"


def decide(
    name: str, dtype: str = "BF16", shape: tuple[int, ...] = (64, 128), **globs: tuple[str, ...]
) -> str | None:
    return Selection(**globs).decide(name, TensorEntry(name, dtype, shape, 0, 0))


@pytest.mark.parametrize(
    "name",
    [
        PROJ,
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.3.mlp.experts.7.down_proj.weight",
        "model.layers.3.mlp.shared_expert.up_proj.weight",
        "encoder.layer.5.attention.output.dense.weight",
        "pooler.dense.weight",
        "blocks.0.mlp.gate_up.weight",
        ".weight",
    ],
)
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_linear_weights_are_taken(name: str, dtype: str) -> None:
    assert decide(name, dtype) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lm_head.weight", "name has 'lm_head'"),
        ("model.embed_tokens.weight", "name has 'embed'"),
        ("embeddings.word_embeddings.weight", "name has 'embed'"),
        ("model.layers.0.input_layernorm.weight", "name has 'norm'"),
        ("encoder.LayerNorm.weight", "name has 'norm'"),
        ("model.layers.0.router.weight", "name has 'router'"),
        ("model.layers.0.mlp.gate.weight", "name has 'mlp.gate.'"),
        ("model.layers.0.block_sparse_moe.gate.weight", "name has 'moe.gate.'"),
        ("layers.3.ffn.gate.weight", "name has 'ffn.gate.'"),
        ("transformer.wte.weight", "name has 'wte'"),
        ("wpe.weight", "name has 'wpe'"),
        ("shared.weight", "name is 'shared.weight'"),
        ("head.weight", "name is 'head.weight'"),
        ("output.weight", "name is 'output.weight'"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "name has 'shared_expert_gate'"),
        ("model.layers.0.linear_attn.conv1d.weight", "name has 'conv1d'"),
        ("rotary_emb.inv.weight", "name has 'rotary'"),
        ("LM_HEAD.weight", "name has 'lm_head'"),
        ("model.layers.0.mlp.down_proj.bias", "name does not end in '.weight'"),
        ("model.layers.0.mlp.experts.gate_up_proj", "name does not end in '.weight'"),
        ("model.weight.T", "name does not end in '.weight'"),
        ("weight", "name does not end in '.weight'"),
    ],
)
def test_skipped_by_name_unless_included(name: str, reason: str) -> None:
    assert decide(name) == reason
    assert decide(name, include=("*",)) is None
    assert decide(name, include=(name,)) is None


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        ("F32", (), "0-D"),
        ("F32", (128,), "1-D"),
        ("BF16", (8, 64, 128), "3-D (stacked experts or a convolution)"),
        ("F8_E4M3", (8, 64, 128), "3-D (stacked experts or a convolution)"),
        ("F32", (64, 3, 3, 4), "4-D"),
        ("F32", (1, 1, 1, 1, 4), "5-D"),
        ("F32", (64, 126), "K = 126 is not a multiple of 4"),
        ("F32", (64, 1), "K = 1 is not a multiple of 4"),
        ("F32", (0, 4), "empty"),
        ("F32", (4, 0), "empty"),
        ("F32", (0, 3), "empty"),
    ],
)
def test_skipped_by_shape_even_when_included(
    dtype: str, shape: tuple[int, ...], reason: str
) -> None:
    assert decide(PROJ, dtype, shape) == reason
    assert decide(PROJ, dtype, shape, include=("*",)) == reason


def test_stacked_experts_without_suffix_say_so() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert decide(name, shape=(8, 64, 128)) == "3-D (stacked experts or a convolution)"


DENSE = {"F64", "F32", "F16", "BF16"}
NOT_FLOAT = {"BOOL", "I16", "U16", "I32", "U32", "I64", "U64", "C64"}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in DENSE])
def test_skipped_by_dtype_even_when_included(dtype: str) -> None:
    what = "not a float" if dtype in NOT_FLOAT else "already quantized"
    assert decide(PROJ, dtype) == f"{what} ({dtype})"
    assert decide(PROJ, dtype, include=("*",)) == f"{what} ({dtype})"


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        (PROJ, True),
        ("*gate_proj*", True),
        ("model.*", True),
        ("model.layers.[0-3].*", True),
        ("model.layers.?.mlp.*", True),
        ("gate_proj", False),
        ("*GATE_PROJ*", False),
        ("model.layers.[!0].*", False),
        ("", False),
    ],
)
def test_globs_match_whole_names_and_case(glob: str, matches: bool) -> None:
    assert decide(PROJ, include=(glob,)) == (None if matches else "not included")
    assert decide(PROJ, exclude=(glob,)) == (f"excluded by {glob!r}" if matches else None)


def test_exclude_wins_over_include() -> None:
    assert decide(PROJ, include=(PROJ,), exclude=("*.bias", "*proj*")) == "excluded by '*proj*'"


def test_any_include_will_do() -> None:
    assert decide("lm_head.weight", include=("*proj*", "lm_head*")) is None


def test_exclude_alone_keeps_the_defaults() -> None:
    assert decide("lm_head.weight", exclude=("*proj*",)) == "name has 'lm_head'"
