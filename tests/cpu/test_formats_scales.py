"""FP8 weights with the scales of other tools, read as dense."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.formats.dequantized import open_dense
from sp24cli.formats.scales import find_scale
from sp24cli.ops import (
    prune_checkpoint,
    prune_file,
    quantize_checkpoint,
    quantize_file,
    unpack_checkpoint,
)
from sp24cli.ops.dequantize import dequantize_file
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import verify_file
from tests.cpu.modelfile import DTYPES, Array, load, naive_prune, normal, save

E4M3 = DTYPES["F8_E4M3"]
NAME = "m.a.weight"


def codes(seed: int, shape: tuple[int, int]) -> Array:
    """Every finite code about as often, negative zero among them."""
    raw = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    raw[(raw & 0x7F) == 0x7F] = 0x80
    return raw.view(E4M3)


def naive(weight: Array, scale: Array, block: tuple[int, int]) -> Array:
    """code * scale in float64, value by value."""
    out = np.zeros(weight.shape)
    table = scale.astype(np.float64).reshape(
        -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    )
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            factor = table[row // block[0], column // block[1]]
            out[row, column] = float(weight[row, column]) * factor
    return out


def a_scale(seed: int, shape: tuple[int, ...], dtype: str = "F32") -> Array:
    values = np.random.default_rng(seed).uniform(0.5, 2, shape) * 1e-3
    return values.astype(np.float32).astype(DTYPES[dtype])


CASES = {
    "tensor": ((), (70, 36)),
    "tensor of one": ((1,), (70, 36)),
    "channel": ((70, 1), (1, 36)),
    "channel in one dimension": ((70,), (1, 36)),
    "group": ((70, 9), (1, 4)),
    "block": ((2, 1), (64, 36)),
    "whole as a block": ((1, 1), (70, 36)),
}


@pytest.mark.parametrize("suffix", [".weight_scale", ".weight_scale_inv", ".scale"])
@pytest.mark.parametrize("case", CASES)
def test_a_scale_is_a_multiplier_by_every_name_and_shape(
    tmp_path: Path, case: str, suffix: str
) -> None:
    shape, block = CASES[case]
    if case == "block":
        config = {"quantization_config": {"weight_block_size": [64, 64]}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    weight, scale = codes(1, (70, 36)), a_scale(2, shape)
    source = save(tmp_path / "in", {NAME: weight, f"m.a{suffix}": scale, "b": normal(3, (5,))})
    want = naive(weight, scale, block)
    with open_dense(source, Selection(), "F32") as file:
        assert set(file.header.by_name) == {NAME, "b"}
        entry = file.entry(NAME)
        assert (entry.dtype, entry.shape, entry.nbytes) == ("F32", (70, 36), 4 * 70 * 36)
        assert np.array_equal(file.array(NAME), want.astype(np.float32))
        assert np.array_equal(file.array(NAME, slice(65, 69)), want[65:69].astype(np.float32))
        assert bytes(file.raw(NAME)) == want.astype(np.float32).tobytes()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64", "F8_E8M0"])
def test_scales_come_in_every_float(tmp_path: Path, dtype: str) -> None:
    weight, scale = codes(1, (8, 8)), a_scale(2, (8, 1), dtype)
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale": scale})
    with open_dense(source, Selection(), "F32") as file:
        want = naive(weight, scale, (1, 8)).astype(np.float32)
        assert np.array_equal(file.array(NAME), want)


def test_a_value_is_rounded_once(tmp_path: Path) -> None:
    """Through float32 the product would come to lie on a tie of bfloat16, and go down."""
    weight = np.full((4, 4), 1.125).astype(E4M3)
    scale = np.full(1, np.float32(1 + 2**-8) / np.float32(1.125), np.float32)
    candidates = np.nextafter(scale, np.float32(2)), np.nextafter(scale, np.float32(0)), scale
    for each in candidates:
        source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale": each})
        exact = 1.125 * float(each[0])
        below, above = 1.0, 1 + 2**-7
        want = above if exact > 1 + 2**-8 else below
        with open_dense(source, Selection(), "BF16") as file:
            assert float(file.array(NAME)[0, 0]) == want, exact


def test_ragged_blocks_of_128_need_no_config(tmp_path: Path) -> None:
    weight, scale = codes(1, (200, 260)), a_scale(2, (2, 3))
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale_inv": scale})
    with open_dense(source, Selection(), "F32") as file:
        want = naive(weight, scale, (128, 128)).astype(np.float32)
        assert np.array_equal(file.array(NAME), want)


@pytest.mark.parametrize(
    ("counts", "side", "needed"),
    [((1, 2), 128, (2, 2)), ((2, 2), 64, (3, 4)), ((1, 1), 128, (2, 2)), ((160, 1), 128, (2, 2))],
)
def test_blocks_of_another_size_than_the_config_gives_are_refused(
    tmp_path: Path, counts: tuple[int, int], side: int, needed: tuple[int, int]
) -> None:
    """Of one scale too few, what would be taken is another block."""
    weight, config = codes(1, (160, 256)), {"weight_block_size": [side, side]}
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale_inv": a_scale(2, counts)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    message = (
        rf"tensor 'm.a.weight_scale_inv': shape {list(counts)}, but a weight [160, 256] in blocks "
        rf"of {side}x{side}, as it is said to be, has {list(needed)}"
    )
    with (
        pytest.raises(BadInputError, match=re.escape(message)),
        open_dense(source, Selection(), "F32"),
    ):
        pass


def test_a_weight_wider_than_a_tile_is_right(tmp_path: Path) -> None:
    weight, scale = codes(1, (40, 16640)), a_scale(2, (2, 130))
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale_inv": scale})
    config = {"quantization_config": {"weight_block_size": [32, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    want = weight.astype(np.float32) * np.repeat(np.repeat(scale, 32, axis=0)[:40], 128, axis=1)
    with open_dense(source, Selection(), "F32") as file:
        assert np.array_equal(file.array(NAME), want)
        assert np.array_equal(file.array(NAME, slice(30, 40)), want[30:])


@pytest.mark.parametrize(
    ("rows", "count", "side"),
    [
        (200, 2, 128),
        (576, 5, 128),
        (64, 4, 16),
        (95, 3, 32),
        (90, 3, None),
        (100, 2, None),
        (100, 3, None),
    ],
)
def test_a_block_size_is_never_a_mere_guess(
    tmp_path: Path, rows: int, count: int, side: int | None
) -> None:
    """100 rows with two scales may be 64 + 36 or 50 + 50."""
    source = save(
        tmp_path / "in", {NAME: codes(1, (rows, 8)), f"{NAME}_scale": a_scale(2, (count, 1))}
    )
    with SafetensorsFile(source) as file:
        if side is None:
            with pytest.raises(BadInputError, match="gives no block size"):
                find_scale(file, file.entry(NAME))
            config = {"quantization_config": {"config_groups": {"g": {"weights": {}}}}}
            weights = config["quantization_config"]["config_groups"]["g"]["weights"]
            weights["block_structure"] = [-(-rows // count), 128]  # type: ignore[assignment]
            (tmp_path / "config.json").write_text(json.dumps(config))
            side = -(-rows // count)
        found = find_scale(file, file.entry(NAME))
    assert found is not None
    assert found.block == (side, 8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"tensor 'm.a.weight': is F8_E4M3 without a scale \(looked for 'm.a.weight_scale'"),
        ({"m.a.weight_scale": a_scale(1, (3, 1))}, r"shape \[3, 1\] gives no block size"),
        ({"m.a.weight_scale": a_scale(1, (5, 1))}, r"shape \[5, 1\] gives no block size"),
        ({"m.a.weight_scale": a_scale(1, (4, 1, 1))}, "gives no block size"),
        ({"m.a.weight_scale": a_scale(1, (0, 1))}, "gives no block size"),
        ({"m.a.scale": np.ones(1, np.int64)}, "tensor 'm.a.scale': is I64, no scale"),
        (
            {"m.a.weight_scale": a_scale(1, (1,)), "m.a.scale": a_scale(1, (1,))},
            "has a second scale, 'm.a.scale'",
        ),
        (
            {"m.a.weight_scale": np.array([[1], [2], [np.nan], [1]], np.float32)},
            r"tensor 'm.a.weight_scale': scale nan at \[2, 0\]",
        ),
        ({"m.a.weight_scale": np.array([np.inf], np.float32)}, r"scale inf at \[0\]"),
        ({"m.a.weight_scale": np.array([-1], np.float32)}, r"scale -1.0 at \[0\] is negative"),
    ],
)
def test_what_is_wrong_with_a_scale_is_said(
    tmp_path: Path, tensors: dict[str, Array], message: str
) -> None:
    source = save(tmp_path / "in", {NAME: codes(1, (4, 4))} | tensors)
    with pytest.raises(BadInputError, match=message) as error:
        prune_file(source, tmp_path / "out", dequantize_fp8="BF16")
    assert str(error.value).startswith(str(source))
    assert not (tmp_path / "out").exists()


def test_nothing_is_dequantized_unasked_or_deselected(tmp_path: Path) -> None:
    tensors = {
        NAME: codes(1, (8, 8)),
        f"{NAME}_scale": a_scale(2, (1,)),
        "lm_head.weight": codes(3, (8, 8)),
        "lm_head.weight_scale": a_scale(4, (1,)),
    }
    source = save(tmp_path / "in", tensors)
    prune_file(source, tmp_path / "plain")
    assert {n: t.tobytes() for n, t in load(tmp_path / "plain")[0].items()} == {
        n: t.tobytes() for n, t in tensors.items()
    }
    report = prune_file(source, tmp_path / "out", dequantize_fp8="BF16")
    after = load(tmp_path / "out")[0]
    assert set(after) == tensors.keys() - {f"{NAME}_scale"}
    assert after["lm_head.weight"].tobytes() == tensors["lm_head.weight"].tobytes()
    assert [t.dtype for t in report.tensors] == ["BF16"]
    dense = naive(tensors[NAME], tensors[f"{NAME}_scale"], (8, 8)).astype(np.float32)
    want = naive_prune(dense.astype(ml_dtypes.bfloat16))
    assert after[NAME].tobytes() == want.tobytes()


def test_a_code_that_is_nan_is_named(tmp_path: Path) -> None:
    weight = codes(1, (8, 8)).copy()
    weight.view(np.uint8)[5, 3] = 0x7F
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale": a_scale(2, (1,))})
    with pytest.raises(BadInputError, match=r"'m.a.weight': nan at row 5, column 3"):
        prune_file(source, None, dequantize_fp8="F32")


@pytest.mark.parametrize(
    ("dtype", "factor", "words"),
    [
        ("F16", 200.0, "is beyond F16; take bf16 or f32"),
        ("BF16", 2.0**120, "is beyond BF16; take f32"),
        ("F32", 2.0**120, "is beyond F32"),
    ],
)
def test_an_overflow_is_not_called_an_infinity_of_the_file(
    tmp_path: Path, dtype: str, factor: float, words: str
) -> None:
    weight = np.ones((200, 64), E4M3)
    weight[150, 7] = -448
    scale = np.array([[0.5], [factor]], np.float32)
    folder = tmp_path / "model"
    folder.mkdir()
    source = save(folder / "model.safetensors", {NAME: weight, f"{NAME}_scale_inv": scale})
    said = f"{source}: tensor {NAME!r}: code -448.0 times scale {factor} at row 150, column 7 "
    options: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "prune": True}
    for spec in (ScaleSpec("vector"), ScaleSpec("tensor")):
        with pytest.raises(BadInputError) as raised:
            quantize_file(source, None, dequantize_fp8=dtype, spec=spec, **options)
        assert str(raised.value) == said + words
    for path in (folder, source):
        with pytest.raises(BadInputError, match=re.escape(words) + "$"):
            prune_checkpoint(path, tmp_path / "out", dequantize_fp8=dtype)
        assert not (tmp_path / "out").exists()
    # Unpacking goes on, and counts it.
    report = dequantize_file(source, tmp_path / "dense", dtype=dtype.lower())
    assert report.not_finite == (NAME,)


def test_quantizing_equals_quantizing_what_pruning_wrote(tmp_path: Path) -> None:
    weight, scale = codes(1, (200, 64)), a_scale(2, (2, 1))
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale_inv": scale})
    arguments = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("tensor")}
    quantize_file(source, tmp_path / "one", prune=True, dequantize_fp8="BF16", **arguments)
    prune_file(source, tmp_path / "pruned", dequantize_fp8="BF16")
    quantize_file(tmp_path / "pruned", tmp_path / "two", **arguments)
    one, two = load(tmp_path / "one")[0], load(tmp_path / "two")[0]
    assert {n: t.tobytes() for n, t in one.items()} == {n: t.tobytes() for n, t in two.items()}
    assert verify_file(tmp_path / "one", source, device="cpu").passed


@pytest.mark.parametrize("dtype", [None, "f32"])
def test_unpacking_needs_no_sparsity(tmp_path: Path, dtype: str | None) -> None:
    weight, scale = codes(1, (70, 35)), a_scale(2, (70, 1), "BF16")
    bias = normal(3, (5,))
    source = save(tmp_path / "in", {NAME: weight, f"{NAME}_scale": scale, "b": bias}, {"k": "v"})
    report = dequantize_file(source, tmp_path / "out", dtype=dtype)
    tensors, metadata = load(tmp_path / "out")
    want = naive(weight, scale, (1, 35)).astype(np.float32)
    assert set(tensors) == {NAME, "b"}
    target = DTYPES["BF16" if dtype is None else "F32"]
    assert np.array_equal(tensors[NAME], want.astype(target))
    assert tensors[NAME].dtype == target
    assert tensors["b"].tobytes() == bias.tobytes()
    assert metadata == {"k": "v", "format": "pt"}
    assert [(t.type, t.scale, t.shape) for t in report.tensors] == [("e4m3", "vector", (70, 35))]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards; each has the scale of the other's weight."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    shards = [
        {"m.a.weight": codes(1, (200, 64)), "m.b.weight_scale_inv": a_scale(2, (1, 1))},
        {"m.b.weight": codes(3, (64, 64)), "m.a.weight_scale_inv": a_scale(4, (2, 1))},
    ]
    table = {}
    for name, tensors in zip(names, shards, strict=True):
        save(folder / name, tensors)
        table |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"hidden_size": 64, "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_scales_in_another_shard_are_found(sharded: Path, tmp_path: Path) -> None:
    prune_checkpoint(sharded, tmp_path / "out", dequantize_fp8="F32")
    unpack_checkpoint(sharded, tmp_path / "dense", dtype="f32")
    for n, name in enumerate(("m.a.weight", "m.b.weight"), start=1):
        shard = f"model-0000{n}-of-00002.safetensors"
        weight = load(sharded / shard)[0][name]
        other = load(sharded / f"model-0000{3 - n}-of-00002.safetensors")[0]
        want = naive(weight, other[f"{name}_scale_inv"], (128, 64)).astype(np.float32)
        assert set(load(tmp_path / "dense" / shard)[0]) == {name}
        assert np.array_equal(load(tmp_path / "dense" / shard)[0][name], want)
        assert np.array_equal(load(tmp_path / "out" / shard)[0][name], naive_prune(want))
    for folder in ("out", "dense"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config == {"hidden_size": 64}
        index = json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == {"m.a.weight", "m.b.weight"}


def test_a_checkpoint_that_was_dequantized_is_verified(sharded: Path, tmp_path: Path) -> None:
    options = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector"), "prune": True}
    quantize_checkpoint(sharded, tmp_path / "out", dequantize_fp8="F32", **options)
    report = verify_file(tmp_path / "out", sharded, device="cpu")
    assert report.passed, report.failure
    assert len(report.tensors) == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "original" not in config["quantization_config"]
