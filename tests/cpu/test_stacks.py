"""Stacked experts: pruned and packed one by one, and put together again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.names import Selection
from sp24cli.checkpoint.packedfile import PackedFile
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.sharded import open_tensors
from sp24cli.checkpoint.stacks import STACKS_KEY
from sp24cli.cli.main import run
from sp24cli.errors import BadInputError
from sp24cli.ops import (
    prune_checkpoint,
    prune_file,
    quantize_checkpoint,
    quantize_file,
    unpack_checkpoint,
    unpack_file,
)
from sp24cli.ops.choose import Choice
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from sp24cli.verify import verify_file
from tests.cpu.checkpoints import contents, tensors_of, write_checkpoint
from tests.cpu.modelfile import Array, load, naive_e4m3, naive_prune, normal, save

NAME = "model.layers.0.mlp.experts.gate_up_proj"
#: More than ten, so that the order of names is not that of numbers.
EXPERTS, ROWS, COLUMNS = 12, 20, 36
ALL = Selection(experts=True)


@pytest.fixture
def stack() -> Array:
    values = normal(1, (EXPERTS, ROWS, COLUMNS), "BF16")
    # Each expert has scales of its own.
    return (values.astype(np.float32) * (1 + np.arange(EXPERTS))[:, None, None]).astype(
        values.dtype
    )


@pytest.fixture
def model(tmp_path: Path, stack: Array) -> Path:
    others = {"a.weight": normal(2, (8, 16)), "norm.weight": normal(3, (8,))}
    return save(tmp_path / "model", {NAME: stack, **others}, {"who": "me"})


def pruned(stack: Array) -> Array:
    return np.stack([naive_prune(matrix) for matrix in stack])


def test_every_expert_is_pruned_and_the_stack_stays_one(
    model: Path, stack: Array, tmp_path: Path
) -> None:
    report = prune_file(model, tmp_path / "out", selection=ALL)
    tensors, metadata = load(tmp_path / "out")
    assert set(tensors) == {NAME, "a.weight", "norm.weight"}
    assert tensors[NAME].shape == stack.shape
    assert tensors[NAME].tobytes() == pruned(stack).tobytes()
    assert metadata == {"who": "me", "format": "pt"}
    names = [t.name for t in report.tensors if t.name != "a.weight"]
    assert names == [f"{NAME}.{e}" for e in range(EXPERTS)]


def test_without_the_option_the_reason_is_named(model: Path, tmp_path: Path) -> None:
    report = prune_file(model, tmp_path / "out")
    assert [t.name for t in report.tensors] == ["a.weight"]
    assert {s.name: s.reason for s in report.skipped}[NAME].startswith("3-D (stacked experts")


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize("kind", ["tensor", "vector"])
def test_each_expert_has_parts_of_its_own_and_unpacking_stacks_them(
    model: Path, stack: Array, tmp_path: Path, layout: Any, kind: Any
) -> None:
    packed = tmp_path / "packed"
    quantize_file(
        model,
        packed,
        optype=OPERAND_TYPES["e4m3"],
        spec=ScaleSpec(kind),
        layout=layout,
        prune=True,
        selection=ALL,
    )
    tensors, metadata = load(packed)
    assert json.loads(metadata[STACKS_KEY]) == {NAME: EXPERTS}
    assert f"{NAME}.11_scale" in tensors
    assert NAME not in tensors
    with PackedFile(packed) as file:
        assert file.stacks == {NAME: EXPERTS}
        assert [n for n in file.packed if n != "a.weight"] == [
            f"{NAME}.{e}" for e in range(EXPERTS)
        ]
        one = file.load(f"{NAME}.7").dequantize()
    want = naive_prune(stack[7]).astype(np.float32)
    axis = None if kind == "tensor" else 1
    scale = (np.abs(want).max(axis=axis, keepdims=True) / np.float32(448)).astype(np.float32)
    codes = [naive_e4m3(float(v)) for v in (want / scale).reshape(-1)]
    assert np.array_equal(one, dense_of(np.array(codes).reshape(want.shape), scale))

    report = verify_file(packed, model, device="cpu")
    assert report.failure is None
    assert len(report.tensors) == EXPERTS + 1
    assert report.passed_through == 1

    unpack_file(packed, tmp_path / "dense")
    dense, metadata = load(tmp_path / "dense")
    assert metadata == {"who": "me", "format": "pt"}
    assert set(dense) == {NAME, "a.weight", "norm.weight"}
    assert dense[NAME].shape == stack.shape
    assert dense[NAME].dtype == stack.dtype
    assert np.array_equal(dense[NAME][7].astype(np.float32), one.astype(stack.dtype))
    for expert in range(EXPERTS):
        assert np.array_equal(dense[NAME][expert] == 0, naive_prune(stack[expert]) == 0)

    unpack_file(packed, tmp_path / "codes", codes=True)
    coded, _ = load(tmp_path / "codes")
    rows = 1 if kind == "tensor" else ROWS
    assert coded[NAME].shape == stack.shape
    assert coded[f"{NAME}_scale"].size == EXPERTS * rows
    scales = coded[f"{NAME}_scale"].reshape(EXPERTS, -1, 1)
    back = (coded[NAME].astype(np.float32) * scales).astype(stack.dtype)
    assert np.array_equal(back.astype(float), dense[NAME].astype(float))


def dense_of(codes: Array, scale: Array) -> Array:
    import ml_dtypes

    values = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * scale


def test_a_changed_expert_is_found(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    options: dict[str, Any] = {"optype": OPERAND_TYPES["e4m3"], "spec": ScaleSpec("vector")}
    quantize_file(model, packed, prune=True, selection=ALL, **options)
    with SafetensorsFile(packed) as file:
        place = file.entry(f"{NAME}.10_values").begin + 5
    raw = bytearray(packed.read_bytes())
    raw[place] ^= 1
    packed.write_bytes(raw)
    failure = verify_file(packed, model, device="cpu").failure
    assert failure is not None
    assert failure.startswith(f"{NAME}.10: agreement")


def test_permuted_experts_come_back_in_their_order(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optype": OPERAND_TYPES["bf16"], "spec": ScaleSpec("none")}
    choice = Choice(permute=True)
    prune_file(model, tmp_path / "pruned", selection=ALL, choice=choice)
    quantize_file(model, tmp_path / "packed", prune=True, choice=choice, selection=ALL, **options)
    assert verify_file(tmp_path / "packed", tmp_path / "pruned", device="cpu").failure is None
    unpack_file(tmp_path / "packed", tmp_path / "dense")
    want, got = load_any(tmp_path / "pruned"), load_any(tmp_path / "dense")
    assert got[NAME].tobytes() == want[NAME].tobytes()


def load_any(path: Path) -> dict[str, Array]:
    with open_tensors(path) as file:
        return {name: file.array(name).copy() for name in file.names}


def test_stacks_of_a_checkpoint_go_round(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    prune_checkpoint(model, tmp_path / "pruned", selection=ALL)
    options: dict[str, Any] = {"optype": OPERAND_TYPES["bf16"], "spec": ScaleSpec("none")}
    quantize_checkpoint(model, tmp_path / "packed", prune=True, selection=ALL, **options)
    report = verify_file(tmp_path / "packed", model, device="cpu")
    assert report.failure is None
    assert len(report.tensors) == 7
    unpack_checkpoint(tmp_path / "packed", tmp_path / "dense")
    # bf16 loses nothing of bf16.
    dense, want = tensors_of(tmp_path / "dense"), tensors_of(tmp_path / "pruned")
    assert {n: a.shape for n, a in dense.items()} == {n: a.shape for n, a in want.items()}
    assert dense[NAME].tobytes() == pruned(tensors_of(model)[NAME]).tobytes()
    table = json.loads((tmp_path / "dense" / "model.safetensors.index.json").read_text())
    assert (
        table["weight_map"]
        == json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    )
    assert contents(tmp_path / "dense").keys() == contents(model).keys()


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "include", "reason"),
    [
        ("x.experts.up", "BF16", (4, 8, 16), (), None),
        ("x.Experts.up", "F32", (4, 8, 16), (), None),
        ("x.stack", "BF16", (4, 8, 16), ("x.*",), None),
        ("x.stack", "BF16", (4, 8, 16), (), "3-D, and its name has no 'expert'"),
        ("x.conv1d.experts", "BF16", (4, 8, 16), (), "name has 'conv1d'"),
        ("x.experts.up", "BF16", (4, 8, 3), (), "3-D with K = 3, a convolution's shape"),
        ("x.experts.up", "BF16", (4, 8, 12), ("*",), "3-D with K = 12, a convolution's shape"),
        ("x.experts.up", "BF16", (4, 8, 18), (), "K = 18 is not a multiple of 4"),
        ("x.experts.up", "BF16", (0, 8, 16), (), "empty"),
        ("x.experts.up", "BF16", (4, 8, 0), (), "empty"),
        ("x.experts.up", "F8_E4M3", (4, 8, 16), (), "already quantized (F8_E4M3)"),
        ("x.experts.up", "BF16", (4, 8, 16, 16), (), "4-D"),
        ("x.experts.up", "BF16", (4, 8, 16), ("y",), "not included"),
    ],
)
def test_which_stacks_are_taken(
    name: str, dtype: str, shape: tuple[int, ...], include: tuple[str, ...], reason: str | None
) -> None:
    entry = TensorEntry(name, dtype, shape, 0, 0)
    assert Selection(include, (), True).decide(name, entry) == reason


def test_a_name_that_is_taken_stops_it(tmp_path: Path) -> None:
    tensors = {NAME: normal(1, (2, 4, 16)), f"{NAME}.1": normal(2, (4,))}
    source = save(tmp_path / "in", tensors)
    with pytest.raises(BadInputError, match=re.escape(f"a tensor '{NAME}.1' already")):
        prune_file(source, tmp_path / "out", selection=ALL)


def test_not_finite_in_an_expert_is_named(tmp_path: Path, stack: Array) -> None:
    stack[3, 7, 11] = np.inf
    source = save(tmp_path / "in", {NAME: stack})
    with pytest.raises(BadInputError, match=re.escape(f"'{NAME}.3': inf at row 7, column 11")):
        prune_file(source, tmp_path / "out", selection=ALL)


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        (f'{{"{NAME}": 13}}', "its expert '.*12' is missing"),
        (f'{{"{NAME}": 0}}', "cannot be a stack of 0 experts"),
        (f'{{"{NAME}": true}}', "cannot be a stack of True experts"),
        (f'{{"{NAME}": 1000000000000}}', "cannot be a stack of 1000000000000"),
        ('{"ghost": 1}', "its expert 'ghost.0' is missing"),
    ],
)
def test_what_a_file_says_of_its_stacks_is_checked(
    stacks: str, words: str, model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optype": OPERAND_TYPES["bf16"], "spec": ScaleSpec("none")}
    quantize_file(model, tmp_path / "packed", prune=True, selection=ALL, **options)
    tensors, metadata = load(tmp_path / "packed")
    save(tmp_path / "packed", tensors, metadata | {STACKS_KEY: stacks})
    with pytest.raises(BadInputError, match=words) as raised:
        PackedFile(tmp_path / "packed")
    assert str(raised.value).startswith(str(tmp_path / "packed"))


def test_experts_that_differ_are_no_stack(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optype": OPERAND_TYPES["bf16"], "spec": ScaleSpec("none")}
    source = save(tmp_path / "in", {f"x.{e}": normal(e, (4 + e, 16)) for e in range(2)})
    selection = Selection(("x.*",))
    quantize_file(source, tmp_path / "packed", prune=True, selection=selection, **options)
    tensors, metadata = load(tmp_path / "packed")
    save(tmp_path / "packed", tensors, metadata | {STACKS_KEY: '{"x": 2}'})
    with pytest.raises(BadInputError, match="its experts differ"):
        PackedFile(tmp_path / "packed")


def test_the_command_takes_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, dense = str(tmp_path / "packed"), str(tmp_path / "dense")
    scale = ["--scale", "block", "--block", "8x12"]
    assert run(["quantize", str(model), "--prune", "--experts", *scale, "-o", packed]) == 0
    assert f"{NAME}.11 " in capsys.readouterr().out
    assert run(["verify", packed, "--against", str(model), "--device", "cpu"]) == 0
    assert run(["unpack", packed, "-o", dense]) == 0
    assert load(Path(dense))[0][NAME].shape == (EXPERTS, ROWS, COLUMNS)
    capsys.readouterr()
    bitmask = ["--format", "sparse-24-bitmask", "-o", str(tmp_path / "mask")]
    assert run(["convert", packed, *bitmask]) == 4
    assert "holds no stacked experts" in capsys.readouterr().err
    other = str(tmp_path / "other")
    assert run(["convert", packed, "--format", "sp24", "--layout", "sm90", "-o", other]) == 0
    assert run(["unpack", other, "-o", dense, "--force"]) == 0
    assert load(Path(dense))[0][NAME].shape == (EXPERTS, ROWS, COLUMNS)
