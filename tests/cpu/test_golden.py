"""What an H200 made of seeded matrices is what the CPU makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sp24cli import layout
from sp24cli.bits import widen
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.optypes import operand_type, operands
from sp24cli.verify.tensorcore import element_bound, frobenius_bound
from tests.cpu.modelfile import Array

FILE = Path(__file__).parents[1] / "golden" / "h200.safetensors"
with SafetensorsFile(FILE) as _file:
    TYPES = sorted({name.split(".")[0] for name in _file.names})


def test_the_types_are_there() -> None:
    assert set(TYPES) >= {"e4m3", "f16", "bf16"}


@pytest.fixture(scope="module")
def golden() -> Iterator[SafetensorsFile]:
    with SafetensorsFile(FILE) as file:
        yield file


@pytest.mark.parametrize("kind", ["integers", "normal"])
@pytest.mark.parametrize("type_name", TYPES)
def test_image_is_what_the_gpu_packed(golden: SafetensorsFile, type_name: str, kind: str) -> None:
    values, meta, image, x = (
        golden.array(f"{type_name}.{kind}.{part}") for part in ("values", "meta", "image", "x")
    )
    k, optype = x.shape[1], operand_type(type_name)
    assert np.array_equal(layout.to_sm90(values, meta, k, optype), image)
    back = layout.from_sm90(image, values.shape[0], k, optype)
    assert back[0].tobytes() == values.tobytes() and np.array_equal(back[1], meta)


def dense_from_image(golden: SafetensorsFile, type_name: str, kind: str) -> tuple[Array, Array]:
    """The weight as the tensor core reads it, and the activations, in float64."""
    image, x = (golden.array(f"{type_name}.{kind}.{part}") for part in ("image", "x"))
    m, k = golden.entry(f"{type_name}.{kind}.product").shape[0], x.shape[1]
    optype = operand_type(type_name)
    codes, first, second = layout.decode_fragments(image, optype, m, k)
    kept = optype.group // 2
    dense = np.zeros((m, k // optype.group, optype.group))
    # The first index of two halves of a tf32, halved, is that of the value.
    pairs = np.stack([first, second], 2).astype(np.intp) if kept == 2 else first[..., None] // 2
    values = widen(codes).astype(np.float64).reshape(m, -1, kept)
    np.put_along_axis(dense, pairs.astype(np.intp), values, 2)
    a = dense.reshape(m, k)
    name = f"{type_name}.{kind}.scale"
    if name in golden.names:
        a = a * golden.array(name).reshape(-1, 1).astype(np.float64)
    return a, widen(x).astype(np.float64)


@pytest.mark.parametrize("type_name", TYPES)
def test_products_of_integers_are_the_gpus(golden: SafetensorsFile, type_name: str) -> None:
    a, b = dense_from_image(golden, type_name, "integers")
    assert np.array_equal(golden.array(f"{type_name}.integers.product"), a @ b.T)


@pytest.mark.parametrize("type_name", TYPES)
def test_products_of_random_values_are_within_the_bound(
    golden: SafetensorsFile, type_name: str
) -> None:
    a, b = dense_from_image(golden, type_name, "normal")
    exact, types = a @ b.T, operands(type_name)
    error = np.abs(golden.array(f"{type_name}.normal.product") - exact)
    norms = np.sqrt((a * a) @ (b * b).T)
    assert (error <= element_bound(types, a.shape[1], norms, "f32", exact)).all()
    relative = np.linalg.norm(error) / np.linalg.norm(exact)
    assert relative <= frobenius_bound(types, a.shape[1], "f32")
