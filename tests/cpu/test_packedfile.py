"""Packed files: round trips, and every way in which the description and the parts may differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from sp24cli.checkpoint.header import TensorSpec
from sp24cli.checkpoint.packedfile import (
    PackedFile,
    is_packed,
    merge_metadata,
    part_entries,
    user_metadata,
)
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.checkpoint.writer import StreamingWriter
from sp24cli.errors import BadInputError
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.packed import Layout, PackedMatrix, PackInfo
from sp24cli.scaling import ScaleSpec

SPECS = [ScaleSpec("tensor"), ScaleSpec("vector"), ScaleSpec("block", (32, 128))]
NONE = ScaleSpec("none")
PARTS = ("values", "meta", "blocks", "scale")
#: What most tests keep as X.
INFO = PackInfo((8, 16), "F32", "e4m3", SPECS[0], "given", "row", "satfinite")


def packed(m: int, k: int, type_name: str, spec: ScaleSpec, layout: Layout = "row") -> PackedMatrix:
    """Random bytes in every part: files do not look into them."""
    info = PackInfo((m, k), "F32", type_name, spec, "given", layout, "satfinite")
    expected = info.parts().get("scale")
    matrix = PackedMatrix.empty(
        info, None if expected is None else np.empty(expected[1], expected[0])
    )
    rng = np.random.default_rng(m + k)
    for part in PARTS:
        array = getattr(matrix, part)
        if array is not None:
            array.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, array.nbytes)
    return matrix


def save(
    path: Path,
    matrices: dict[str, PackedMatrix],
    *,
    user: dict[str, str] | None = None,
    others: dict[str, tuple[TensorSpec, bytes]] | None = None,
) -> Path:
    others = others or {}
    infos = {name: matrix.info for name, matrix in matrices.items()}
    entries = [e for name, info in infos.items() for e in part_entries(name, info)]
    entries += [spec for spec, _ in others.values()]
    with StreamingWriter(path, entries, merge_metadata(user or {}, infos), overwrite=True) as out:
        for name, matrix in matrices.items():
            for part in PARTS:
                array = getattr(matrix, part)
                if array is not None:
                    out.write(f"{name}_{part}", array)
        for name, (_, raw) in others.items():
            out.write(name, raw)
    return path


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


CASES = [
    (name, spec)
    for name, optype in OPERAND_TYPES.items()
    for spec in (SPECS if optype.scaled else [NONE])
]


@pytest.mark.parametrize("layout", ["row", "sm90"])
@pytest.mark.parametrize(("type_name", "spec"), CASES, ids=lambda v: getattr(v, "kind", v))
@pytest.mark.parametrize(("m", "k"), [(64, 128), (100, 132), (1, 4), (65, 12), (0, 8), (8, 0)])
def test_round_trip(
    tmp_path: Path, m: int, k: int, type_name: str, spec: ScaleSpec, layout: Layout
) -> None:
    matrix = packed(m, k, type_name, spec, layout)
    with PackedFile(save(tmp_path / "f", {"X.weight": matrix})) as file:
        assert file.packed == {"X.weight": matrix.info}
        assert file.others == ()
        got = file.load("X.weight")
    assert got.info == matrix.info
    for part in PARTS:
        assert same(getattr(got, part), getattr(matrix, part)), part


@pytest.mark.parametrize(
    ("type_name", "spec", "layout", "want"),
    [
        (
            "e4m3",
            ScaleSpec("tensor"),
            "row",
            {
                "X.weight_values": ("F8_E4M3", [100, 66]),
                "X.weight_meta": ("U8", [100, 17]),
                "X.weight_scale": ("F32", [1]),
            },
        ),
        (
            "e4m3",
            ScaleSpec("vector"),
            "sm90",
            {"X.weight_blocks": ("U8", [2, 2, 5120]), "X.weight_scale": ("F32", [100, 1])},
        ),
        (
            "e4m3",
            ScaleSpec("block", (32, 64)),
            "sm90",
            {"X.weight_blocks": ("U8", [2, 2, 5120]), "X.weight_scale": ("F32", [4, 3])},
        ),
        (
            "f16",
            NONE,
            "row",
            {"X.weight_values": ("F16", [100, 66]), "X.weight_meta": ("U8", [100, 17])},
        ),
        ("bf16", NONE, "sm90", {"X.weight_blocks": ("U8", [2, 3, 4608])}),
    ],
)
def test_the_file_is_as_the_format_says(
    tmp_path: Path, type_name: str, spec: ScaleSpec, layout: Layout, want: dict[str, Any]
) -> None:
    path = save(tmp_path / "f", {"X.weight": packed(100, 132, type_name, spec, layout)})
    library = dict(deserialize(path.read_bytes()))
    assert {name: (t["dtype"], t["shape"]) for name, t in library.items()} == want
    with SafetensorsFile(path) as file:
        metadata = file.metadata
    assert metadata["sp24.version"] == "1"
    assert metadata["format"] == "pt"
    described = json.loads(metadata["sp24.tensors"])
    assert described == {
        "X.weight": {
            "shape": [100, 132],
            "source_dtype": "F32",
            "type": type_name,
            "scale": spec.kind,
            "block": list(spec.block) if spec.block else None,
            "pruned": "given",
            "layout": layout,
            "overflow": "satfinite",
        }
    }
    compact = json.dumps(described, sort_keys=True, separators=(",", ":"))
    assert metadata["sp24.tensors"] == compact


def test_others_and_the_user_s_metadata_pass_through(tmp_path: Path) -> None:
    others = {
        "é.bias": (("é.bias", "BF16", (3,)), b"abcdef"),
        "q": (("q", "F4", (2, 2)), b"12"),
        "X.weight_zeros": (("X.weight_zeros", "U8", (1,)), b"z"),
    }
    user = {"format": "tf", "licence": "é\n"}
    matrices = {"X.weight": packed(8, 16, "e4m3", SPECS[0]), "Y.weight": packed(4, 8, "f16", NONE)}
    path = save(tmp_path / "f", matrices, user=user, others=others)
    with PackedFile(path) as file:
        assert file.metadata == user
        assert {e.name: (e.spec, bytes(file.file.raw(e.name))) for e in file.others} == others
        assert set(file.packed) == {"X.weight", "Y.weight"}
        for name, matrix in matrices.items():
            assert same(file.load(name).values, matrix.values)


def test_loaded_arrays_are_views(tmp_path: Path) -> None:
    path = save(tmp_path / "f", {"X": packed(64, 128, "e4m3", SPECS[1])})
    with PackedFile(path) as file:
        got = file.load("X")
        for part in ("values", "meta", "scale"):
            array = getattr(got, part)
            assert not array.flags.writeable
            mapped = np.frombuffer(file.file.raw(f"X_{part}"), np.uint8)
            assert np.shares_memory(array, mapped)
        file.drop_cache("X")
        assert same(got.values, packed(64, 128, "e4m3", SPECS[1]).values)


def test_no_packed_tensor_at_all(tmp_path: Path) -> None:
    with PackedFile(save(tmp_path / "f", {})) as file:
        assert file.packed == {}


def test_unknown_name(tmp_path: Path) -> None:
    with PackedFile(save(tmp_path / "f", {"X": packed(4, 8, "f16", NONE)})) as file:
        for ask in (file.load, file.drop_cache):
            with pytest.raises(BadInputError, match="f: has no packed tensor 'X_values'"):
                ask("X_values")


def test_metadata_helpers() -> None:
    infos = {"b": packed(4, 8, "f16", NONE).info, "a": packed(4, 8, "bf16", NONE).info}
    merged = merge_metadata({"k": "v", "sp24.tensors": "old", "sp24.other": "old"}, infos)
    assert set(merged) == {"k", "format", "sp24.version", "sp24.tensors"}
    assert list(json.loads(merged["sp24.tensors"])) == ["a", "b"]
    assert user_metadata(merged) == {"k": "v", "format": "pt"}
    assert is_packed(merged)
    assert not is_packed({"format": "pt"})


Metadata = dict[str, str]


def described(**changes: Any) -> Callable[[Metadata], None]:
    """Changes fields of the description of X; None drops one."""

    def edit(metadata: Metadata) -> None:
        table = json.loads(metadata["sp24.tensors"])
        for field, value in changes.items():
            if value is None:
                del table["X"][field]
            else:
                table["X"][field] = value
        metadata["sp24.tensors"] = json.dumps(table)

    return edit


def tensors(text: str) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.update({"sp24.tensors": text})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.pop("sp24.version"), "is not a packed file (no sp24.version)"),
        (lambda m: m.update({"sp24.version": "2"}), "sp24.version '2' is unknown (known: '1')"),
        (lambda m: m.update({"sp24.version": "1.0"}), "sp24.version '1.0' is unknown"),
        (lambda m: m.pop("sp24.tensors"), "has no sp24.tensors"),
        (tensors("{"), "sp24.tensors is not JSON"),
        (tensors("[]"), "sp24.tensors is not a JSON object"),
        (tensors("[" * 10**5), "sp24.tensors is nested too deeply"),
        (tensors('{"X":{},"X":{}}'), "sp24.tensors: key 'X' appears twice"),
        (tensors('{"X":[]}'), "tensor 'X': "),
        (tensors('{"X":{}}'), "tensor 'X': "),
        (described(layout="sm100"), "tensor 'X': unknown layout 'sm100'"),
        (described(layout=1), "tensor 'X': field 'layout' is 1"),
        (described(layout=None), "tensor 'X': description of a packed tensor lacks 'layout'"),
        (described(type="e3m4"), "tensor 'X': unknown operand type 'e3m4'"),
        (described(type="f16"), "tensor 'X': operand type 'f16' takes no scale"),
        (described(scale="group"), "tensor 'X': unknown scale kind 'group'"),
        (described(scale="none"), "tensor 'X': operand type 'e4m3' needs a scale"),
        (described(source_dtype="F7"), "tensor 'X': unknown source dtype 'F7'"),
        (described(pruned="lottery"), "tensor 'X': unknown pruning 'lottery'"),
        (described(overflow="wrap"), "tensor 'X': unknown overflow mode 'wrap'"),
        (described(order="C"), "tensor 'X': unknown field 'order'"),
        (described(shape=[8]), "tensor 'X': field 'shape' is [8], not two integers"),
        (described(shape=[8, 16.0]), "tensor 'X': field 'shape'"),
        (described(shape=[8, 18]), "tensor 'X': shape [8, 18]"),
        (described(shape=[-8, 16]), "tensor 'X': shape [-8, 16]"),
        (described(shape=[10**30, 16]), "tensor 'X': field 'shape'"),
        (described(shape=[8, 20]), "its part 'X_values' is F8_E4M3 [8, 8], not F8_E4M3 [8, 10]"),
        (described(shape=[9, 16]), "its part 'X_values' is F8_E4M3 [8, 8], not F8_E4M3 [9, 8]"),
        (described(scale="vector"), "its part 'X_scale' is F32 [1], not F32 [8, 1]"),
        (described(layout="sm90"), "its part 'X_blocks' is missing"),
    ],
)
def test_description_that_is_not_known_or_not_true(
    tmp_path: Path, edit: Callable[[Metadata], Any], says: str
) -> None:
    matrix = packed(8, 16, "e4m3", SPECS[0])
    metadata = merge_metadata({}, {"X": matrix.info})
    edit(metadata)
    path = tmp_path / "f"
    with StreamingWriter(path, part_entries("X", matrix.info), metadata) as out:
        for part in ("values", "meta", "scale"):
            out.write(f"X_{part}", getattr(matrix, part))
    with pytest.raises(BadInputError) as caught:
        PackedFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) not in Path("/proc/self/maps").read_text()


VALUES, META, SCALE = part_entries("X", INFO)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([META, SCALE], "its part 'X_values' is missing"),
        ([VALUES, SCALE], "its part 'X_meta' is missing"),
        ([VALUES, META], "its part 'X_scale' is missing"),
        ([("X_values", "U8", (8, 8)), META, SCALE], "'X_values' is U8 [8, 8], not F8_E4M3 [8, 8]"),
        ([VALUES, ("X_meta", "I8", (8, 2)), SCALE], "'X_meta' is I8 [8, 2], not U8 [8, 2]"),
        ([VALUES, ("X_meta", "U8", (2, 8)), SCALE], "'X_meta' is U8 [2, 8], not U8 [8, 2]"),
        ([VALUES, META, ("X_scale", "BF16", (1,))], "'X_scale' is BF16 [1], not F32 [1]"),
        ([VALUES, META, ("X_scale", "F32", ())], "'X_scale' is F32 [], not F32 [1]"),
        ([VALUES, META, SCALE, ("X", "U8", (1,))], "is in the file both packed and dense"),
    ],
)
def test_parts_that_are_missing_or_other(
    tmp_path: Path, entries: list[TensorSpec], says: str
) -> None:
    metadata = merge_metadata({}, {"X": INFO})
    path = tmp_path / "f"
    with StreamingWriter(path, entries, metadata) as out:
        for name, entry in out.header.by_name.items():
            out.write(name, bytes(entry.nbytes))
    with pytest.raises(BadInputError) as caught:
        PackedFile(path)
    assert str(caught.value).startswith(f"{path}: tensor 'X': ")
    assert says in str(caught.value)


def test_plain_file_is_not_packed(tmp_path: Path) -> None:
    with StreamingWriter(tmp_path / "f", [("a", "U8", (1,))], {}) as out:
        out.write("a", b"1")
    with pytest.raises(BadInputError, match=r"f: is not a packed file \(no sp24.version\)"):
        PackedFile(tmp_path / "f")


def test_misaligned_parts_load(tmp_path: Path) -> None:
    """Another tool may lay the parts in any order."""
    matrix = packed(3, 12, "bf16", NONE)
    metadata = merge_metadata({}, {"X": matrix.info})
    assert matrix.values is not None
    assert matrix.meta is not None
    table = {
        "__metadata__": metadata,
        "X_meta": {"dtype": "U8", "shape": [3, 2], "data_offsets": [1, 7]},
        "X_values": {"dtype": "BF16", "shape": [3, 6], "data_offsets": [7, 43]},
        "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    text = json.dumps(table)
    text += " " * (-len(text) % 8)
    data = b"\0" + matrix.meta.tobytes() + matrix.values.tobytes()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    with PackedFile(tmp_path / "f") as file:
        got = file.load("X")
    assert got.values is not None
    assert got.values.dtype == ml_dtypes.bfloat16
    assert same(got.values, matrix.values)
    assert same(got.meta, matrix.meta)
