"""Packed weights in the formats of other tools, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.formats import bitmask
from sp24cli.formats.foreign import BITMASK, FP8, SP24
from sp24cli.metadata import EMPTY_NIBBLE, LEGAL_NIBBLES, encode
from sp24cli.ops import quantize_file, stream, unpack_file
from sp24cli.ops.checkpoint import convert_checkpoint, unpack_checkpoint
from sp24cli.ops.convert import convert_file
from sp24cli.ops.dequantize import dequantize_file
from sp24cli.optypes import OPERAND_TYPES
from sp24cli.scaling import ScaleSpec
from sp24cli.sparsity import keep_indices
from sp24cli.verify import verify_file
from tests.cpu.checkpoints import write_checkpoint
from tests.cpu.modelfile import DTYPES, Array, load, naive_pack, naive_prune, normal, save

SPECS = {
    "tensor": ScaleSpec("tensor"),
    "vector": ScaleSpec("vector"),
    "block": ScaleSpec("block", (64, 8)),
}


def weights() -> dict[str, Array]:
    """One with an odd number of groups, groups with no and one nonzero, and what underflows."""
    first = naive_prune(normal(1, (100, 44), "BF16"))
    first[:, 4:8] = 0
    first[::3, 8:10] = 0
    first[5, 12] = -1e-30
    first[5, 13:16] = 0
    return {
        "m.a.weight": first,
        "m.b.weight": naive_prune(normal(2, (64, 128), "BF16")),
        "m.norm.weight": normal(3, (44,), "BF16"),
        "m.embed.weight": normal(4, (10, 8), "BF16"),
    }


def pack(folder: Path, **options: Any) -> Path:
    source = save(folder / "in", weights(), {"k": "v"})
    arguments = {"optype": OPERAND_TYPES["e4m3"], "spec": SPECS["vector"]} | options
    quantize_file(source, folder / "packed", **arguments)
    return folder / "packed"


def naive_unmask(tensors: dict[str, Array], stem: str) -> Array:
    """The dense matrix of a bitmask, bit by bit, as the format is described."""
    rows, columns = tensors[f"{stem}.shape"].reshape(-1).tolist()
    mask, values = tensors[f"{stem}.bitmask"], tensors[f"{stem}.compressed"]
    assert mask.shape == (rows, -(-columns // 8))
    assert values.shape == (rows, columns // 2)
    dense = np.zeros((rows, columns), values.dtype)
    for row in range(rows):
        taken = 0
        for column in range(columns):
            if mask[row, column // 8] >> (column % 8) & 1:
                dense[row, column] = values[row, taken]
                taken += 1
        assert taken == columns // 2
        assert mask[row, -1] >> (columns - 1) % 8 < 2
    return dense


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_a_bitmask_is_what_its_format_says(
    tmp_path: Path, spec: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BAND_ELEMENTS", 1)
    packed = pack(tmp_path, spec=SPECS[spec], layout=layout)
    report = convert_file(packed, tmp_path / "mask", format=BITMASK)
    unpack_file(packed, tmp_path / "codes", codes=True)
    tensors, metadata = load(tmp_path / "mask")
    codes = load(tmp_path / "codes")[0]
    assert tensors["m.a.shape"].dtype == np.int64
    assert tensors["m.a.shape"].tolist() == [[100], [44]]
    for name in ("m.a", "m.b"):
        assert naive_unmask(tensors, name).tobytes() == codes[f"{name}.weight"].tobytes()
        assert tensors[f"{name}.weight_scale"].tobytes() == codes[f"{name}.weight_scale"].tobytes()
    halves = np.stack([tensors["m.a.bitmask"] & 15, tensors["m.a.bitmask"] >> 4], axis=2)
    bits = np.unpackbits(halves[..., None], axis=3).sum(axis=3).reshape(100, -1)
    assert (bits[:, :11] == 2).all()
    assert (bits[:, 11] == 0).all()
    assert set(tensors) - {"m.norm.weight", "m.embed.weight"} == {
        f"{name}.{part}"
        for name in ("m.a", "m.b")
        for part in ("shape", "compressed", "bitmask", "weight_scale")
    }
    assert {"format": "pt", "k": "v"}.items() <= metadata.items()
    assert (report.copied, len(report.tensors)) == (2, 2)
    assert report.output_bytes == (tmp_path / "mask").stat().st_size


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["row", "sm90"])
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, spec: str, layout: str) -> None:
    packed = pack(tmp_path, spec=SPECS[spec], layout=layout, prune=True)
    convert_file(packed, tmp_path / "mask", format=BITMASK)
    convert_file(tmp_path / "mask", tmp_path / "again", format=SP24, layout=layout)
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()
    convert_file(packed, tmp_path / "fp8", format=FP8)
    convert_file(tmp_path / "fp8", tmp_path / "mask2", format=BITMASK)
    # -1e-30 became -0, which has a place as any other code.
    assert (tmp_path / "mask2").read_bytes() == (tmp_path / "mask").read_bytes()


@pytest.mark.parametrize("operand", ["e5m2", "s8", "tf32"])
@pytest.mark.parametrize("format", [FP8, BITMASK])
def test_types_that_others_do_not_have_are_refused(
    tmp_path: Path, operand: str, format: str
) -> None:
    optype = OPERAND_TYPES[operand]
    spec = ScaleSpec("vector" if optype.scaled else "none")
    packed = pack(tmp_path, optype=optype, spec=spec, prune=True)
    with pytest.raises(BadInputError, match=f"'m.a.weight': is packed as {operand}, which"):
        convert_file(packed, tmp_path / "other", format=format)
    assert not (tmp_path / "other").exists()
    report = convert_file(packed, tmp_path / "image", format=SP24, layout="sm90")
    assert report.tensors[0].type == operand
    convert_file(tmp_path / "image", tmp_path / "row", format=SP24, layout="row")
    assert (tmp_path / "row").read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("operand", ["bf16", "f16"])
def test_unscaled_types_have_a_bitmask_too(tmp_path: Path, operand: str) -> None:
    packed = pack(tmp_path, optype=OPERAND_TYPES[operand], spec=ScaleSpec("none"))
    report = convert_file(packed, tmp_path / "mask", format=BITMASK)
    tensors = load(tmp_path / "mask")[0]
    want = weights()["m.b.weight"].astype(DTYPES[OPERAND_TYPES[operand].safetensors])
    assert naive_unmask(tensors, "m.b").tobytes() == want.tobytes()
    assert report.quantization_config == {
        "quant_method": "compressed-tensors",
        "sparsity_config": {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
            "ignore": ["lm_head", "m.embed"],
        },
    }
    convert_file(tmp_path / "mask", tmp_path / "again", format=SP24)
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()
    with pytest.raises(BadInputError, match=f"'m.a.weight': is packed as {operand}, which"):
        convert_file(packed, tmp_path / "fp8", format=FP8)


@pytest.mark.parametrize("spec", SPECS)
def test_dense_fp8_is_codes_with_their_scale(tmp_path: Path, spec: str) -> None:
    packed = pack(tmp_path, spec=SPECS[spec])
    report = convert_file(packed, tmp_path / "fp8", format=FP8)
    unpack_file(packed, tmp_path / "codes", codes=True)
    tensors, codes = load(tmp_path / "fp8")[0], load(tmp_path / "codes")[0]
    assert {n: t.tobytes() for n, t in tensors.items()} == {
        n: t.tobytes() for n, t in codes.items()
    }
    shape = {"tensor": (1,), "vector": (100, 1), "block": (2, 6)}[spec]
    assert tensors["m.a.weight_scale"].shape == shape
    config = report.quantization_config
    assert config is not None
    group = config["config_groups"]["group_0"]
    assert config["format"] == "float-quantized"
    assert "sparsity_config" not in config
    assert config["ignore"] == ["lm_head", "m.embed"]
    strategy = {"tensor": "tensor", "vector": "channel", "block": "block"}[spec]
    assert group["weights"]["strategy"] == strategy
    assert group["weights"].get("block_structure") == ([64, 8] if spec == "block" else None)
    activations = ("group", 8) if spec == "block" else ("token", None)
    found = group["input_activations"]
    assert (found["strategy"], found.get("group_size")) == activations
    json.dumps(config)


def foreign(folder: Path, **changes: Array | None) -> Path:
    """A bitmask file as another tool writes it: no word of sp24, a scale in bf16."""
    dense = naive_prune(normal(1, (24, 20)))
    scale = (np.abs(dense).max(axis=1, keepdims=True) / 448).astype(DTYPES["BF16"])
    codes, meta, _ = naive_pack(dense, scale.astype(np.float32))
    mask = np.zeros((24, 3), np.uint8)
    for row in range(24):
        for group in range(5):
            nibble = meta[row, group // 2] >> 4 * (group % 2) & 15
            for place in (nibble & 3, nibble >> 2):
                mask[row, group // 2] |= 1 << (4 * (group % 2) + place)
    tensors: dict[str, Array | None] = {
        "m.a.shape": np.array([[24], [20]]),
        "m.a.compressed": codes.view(DTYPES["F8_E4M3"]),
        "m.a.bitmask": mask,
        "m.a.weight_scale": scale,
        "m.b.weight": normal(2, (4, 4)),
    }
    tensors |= {f"m.a.{name}": change for name, change in changes.items()}
    return save(folder / "foreign", {n: t for n, t in tensors.items() if t is not None})


def test_a_file_of_another_tool_is_packed_and_right(tmp_path: Path) -> None:
    source = foreign(tmp_path)
    convert_file(source, tmp_path / "packed", format=SP24, layout="sm90")
    assert verify_file(tmp_path / "packed", device="cpu").passed
    unpack_file(tmp_path / "packed", tmp_path / "dense", dtype="f32")
    dequantize_file(source, tmp_path / "direct", dtype="f32")
    assert (tmp_path / "dense").read_bytes() == (tmp_path / "direct").read_bytes()
    tensors = load(source)[0]
    codes = naive_unmask(tensors, "m.a").astype(np.float32)
    dense = load(tmp_path / "dense")[0]
    assert np.array_equal(
        dense["m.a.weight"], codes * tensors["m.a.weight_scale"].astype(np.float32)
    )
    assert set(dense) == {"m.a.weight", "m.b.weight"}
    dequantize_file(source, tmp_path / "bf16")
    assert load(tmp_path / "bf16")[0]["m.a.weight"].dtype == DTYPES["BF16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": None}, "'m.a.weight': its 'm.a.shape' is missing"),
        ({"compressed": None}, "its 'm.a.compressed' is missing"),
        ({"weight_scale": None}, "is F8_E4M3 without a scale"),
        ({"shape": np.array([24, 24])}, r"'m.a.compressed' is \[24, 10\], not \[24, 12\]"),
        ({"shape": np.array([24, 18])}, r"'m.a.shape': \[24, 18\] is not \[M, K\]"),
        ({"shape": np.array([-1, 20])}, r"\[-1, 20\] is not \[M, K\]"),
        ({"shape": np.array([24, 0])}, r"\[24, 0\] is not \[M, K\]"),
        ({"shape": np.array([2**62, 2**62])}, r"'m.a.compressed' is \[24, 10\], not"),
        ({"shape": np.array([24, 20, 1])}, r"is I64 \[3\], not I64 \[2, 1\]"),
        ({"shape": np.array([24.0, 20.0])}, r"is F64 \[2\], not I64 \[2, 1\]"),
        ({"bitmask": np.full((24, 2), 0x33, np.uint8)}, r"'m.a.bitmask' is \[24, 2\]"),
        ({"bitmask": np.full((24, 3), 0x33, np.uint8)}, "bitmask at row 0, group 5"),
        (
            {"bitmask": np.tile(np.uint8([0x33, 0x73, 0x03]), (24, 1))},
            "bitmask at row 0, group 3 does not have two bits",
        ),
        ({"compressed": np.zeros((24, 10), np.int8)}, "is I8; packed are F8_E4M3"),
        ({"weight_scale": np.zeros((24, 1), np.float32)}, r"scale 0.0 at \[0, 0\] is no positive"),
        ({"weight_scale": np.full((24, 1), 1e-40, np.float64)}, "no positive, normal float32"),
        ({"weight_scale": np.full((24, 1), 1 + 2**-40)}, "no positive, normal float32"),
        (
            {"compressed": np.full((24, 10), 0x7F, np.uint8).view(DTYPES["F8_E4M3"])},
            "'m.a.weight': value nan at row 0, kept column 0 is not finite",
        ),
    ],
)
def test_what_is_wrong_with_a_bitmask_is_said(
    tmp_path: Path, changes: dict[str, Array | None], message: str
) -> None:
    source = foreign(tmp_path, **changes)
    with pytest.raises(BadInputError, match=message) as error:
        convert_file(source, tmp_path / "out", format=SP24)
    assert str(error.value).startswith(str(source))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", [BITMASK, FP8])
def test_unpacking_gives_the_dtype_of_the_original(tmp_path: Path, format: str) -> None:
    source = save(tmp_path / "in", {"a.weight": naive_prune(normal(1, (16, 64)))})
    quantize_file(source, tmp_path / "packed", optype=OPERAND_TYPES["e4m3"], spec=SPECS["vector"])
    convert_file(tmp_path / "packed", tmp_path / "theirs", format=format)
    dequantize_file(tmp_path / "theirs", tmp_path / "dense")
    unpack_file(tmp_path / "packed", tmp_path / "want")
    want = load(tmp_path / "want")[0]["a.weight"]
    assert want.dtype == np.float32
    assert load(tmp_path / "dense")[0]["a.weight"].tobytes() == want.tobytes()


def test_bitmasks_and_dense_fp8_of_one_file_are_unpacked(tmp_path: Path) -> None:
    convert_file(pack(tmp_path), tmp_path / "bitmasks", format=BITMASK)
    tensors, metadata = load(tmp_path / "bitmasks")
    codes = normal(5, (8, 30), deviation=100).astype(DTYPES["F8_E4M3"])
    tensors |= {"m.c.weight": codes, "m.c.weight_scale": np.array([0.5], np.float32)}
    source = save(tmp_path / "mixed", tensors, metadata)
    report = dequantize_file(source, tmp_path / "dense")
    assert {t.name for t in report.tensors} == {"m.a.weight", "m.b.weight", "m.c.weight"}
    dense = load(tmp_path / "dense")[0]
    assert set(dense) == {*weights(), "m.c.weight"}
    want = (codes.astype(np.float32) / 2).astype(DTYPES["BF16"])
    assert dense["m.c.weight"].tobytes() == want.tobytes()


@pytest.mark.parametrize("format", [BITMASK, FP8])
def test_a_scale_in_another_shard_is_found(tmp_path: Path, format: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    convert_file(pack(tmp_path), tmp_path / "whole", format=format)
    tensors, metadata = load(tmp_path / "whole")
    names = ["1.safetensors", "2.safetensors"]
    homes = {key: names[key in ("m.a.weight_scale", "m.norm.weight")] for key in tensors}
    for name in names:
        save(folder / name, {k: t for k, t in tensors.items() if homes[k] == name}, metadata)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert_checkpoint(folder, tmp_path / "out", format=SP24)
    first, second = (load(tmp_path / "out" / name)[0] for name in names)
    assert set(second) == {"m.norm.weight"}
    want = load(tmp_path / "packed")[0]
    for key in ("m.a.weight_values", "m.a.weight_meta", "m.a.weight_scale", "m.b.weight_scale"):
        assert first[key].tobytes() == want[key].tobytes()
    with pytest.raises(BadInputError, match="no weight that is packed"):
        convert_file(folder / names[1], None, format=SP24)
    unpack_checkpoint(folder, tmp_path / "dense")
    first, second = (load(tmp_path / "dense" / name)[0] for name in names)
    assert set(second) == {"m.norm.weight"}
    unpack_file(tmp_path / "packed", tmp_path / "want")
    for key, want_dense in load(tmp_path / "want")[0].items():
        assert (first | second)[key].tobytes() == want_dense.tobytes()


def test_fp8_that_is_not_sparse_is_named(tmp_path: Path) -> None:
    codes = naive_prune(normal(1, (80, 8))).astype(DTYPES["F8_E4M3"]).copy()
    codes[70, 4:8] = 1
    tensors = {"a.weight": codes, "a.weight_scale": np.ones(1, np.float32)}
    source = save(tmp_path / "in", tensors)
    with pytest.raises(BadInputError, match=r"more than two nonzeros at row 70, group 1 \(col"):
        convert_file(source, tmp_path / "out", format=SP24)


def test_negative_zeros_give_way_where_there_is_no_room(tmp_path: Path) -> None:
    raw = np.zeros((8, 8), np.uint8)
    raw[:, :4] = [0x80, 0x38, 0x80, 0xB8]
    tensors = {"a.weight": raw.view(DTYPES["F8_E4M3"]), "a.weight_scale": np.ones(1, np.float32)}
    source = save(tmp_path / "in", tensors)
    convert_file(source, tmp_path / "out", format=SP24)
    assert load(tmp_path / "out")[0]["a.weight_values"].view(np.uint8)[0].tolist() == [
        0x38,
        0xB8,
        0,
        0,
    ]


def test_illegal_metadata_reaches_no_other_tool(tmp_path: Path) -> None:
    packed = pack(tmp_path)
    tensors, metadata = load(packed)
    meta = tensors["m.a.weight_meta"].copy()
    meta[70, 2] = 0x44 ^ 0x04
    save(packed, tensors | {"m.a.weight_meta": meta}, metadata)
    with pytest.raises(BadInputError, match=r"'m\.a\.weight': metadata at row 70, group 4"):
        convert_file(packed, tmp_path / "out", format=BITMASK)


@pytest.mark.parametrize("format", [SP24, FP8, BITMASK])
@pytest.mark.parametrize(
    ("part", "place", "value", "words"),
    [
        ("scale", (70, 0), np.nan, r"scale nan at \[70, 0\] is not positive"),
        ("scale", (70, 0), 0, r"scale 0.0 at \[70, 0\] is not positive"),
        ("values", (70, 3), np.nan, "value at row 70, kept column 3 is not finite"),
    ],
)
def test_what_cannot_be_right_is_not_converted(
    tmp_path: Path, format: str, part: str, place: tuple[int, int], value: float, words: str
) -> None:
    packed = pack(tmp_path)
    tensors, metadata = load(packed)
    damaged = tensors[f"m.a.weight_{part}"].copy()
    damaged[place] = value
    save(packed, tensors | {f"m.a.weight_{part}": damaged}, metadata)
    with pytest.raises(BadInputError, match=rf"'m\.a\.weight': {words}"):
        convert_file(packed, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_permuted_columns_are_only_told_to_who_can_hear(tmp_path: Path) -> None:
    packed = pack(tmp_path)
    tensors, metadata = load(packed)
    table = json.loads(metadata["sp24.tensors"])
    table["m.b.weight"]["permuted"] = True
    order = np.arange(128, dtype=np.int32)[::-1].copy()
    changed = metadata | {"sp24.tensors": json.dumps(table)}
    save(packed, tensors | {"m.b.weight_perm": order}, changed)
    with pytest.raises(BadInputError, match=r"'m\.b\.weight': has its columns permuted"):
        convert_file(packed, tmp_path / "mask", format=BITMASK)
    convert_file(packed, tmp_path / "sm90", format=SP24, layout="sm90")
    convert_file(packed, tmp_path / "fp8", format=FP8)
    unpack_file(packed, tmp_path / "codes", codes=True)
    assert np.array_equal(load(tmp_path / "sm90")[0]["m.b.weight_perm"], order)
    save(packed, tensors | {"m.b.weight_perm": order + 1}, changed)
    for format in (SP24, FP8):
        with pytest.raises(BadInputError, match=r"'m\.b\.weight': permutation has 128 at 0"):
            convert_file(packed, tmp_path / "bad", format=format)
    name = "m.b.weight"
    assert load(tmp_path / "fp8")[0][name].tobytes() == load(tmp_path / "codes")[0][name].tobytes()


@pytest.mark.parametrize("format", [SP24, FP8, BITMASK])
def test_a_plain_file_is_refused(tmp_path: Path, format: str) -> None:
    source = save(tmp_path / "in", {"a.weight": normal(1, (4, 4))})
    with pytest.raises(BadInputError, match="no weight that is packed"):
        convert_file(source, tmp_path / "out", format=format)
    model = write_checkpoint(tmp_path / "model")
    with pytest.raises(BadInputError, match="model: has no weight that is packed"):
        convert_checkpoint(model, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_all_shards_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    codes = naive_prune(normal(1, (8, 64), deviation=1.0)).astype(DTYPES["F8_E4M3"])
    one = np.ones(1, np.float32)
    for number, (last, scale, words) in enumerate(
        [
            (np.ones_like(codes), one, "more than two nonzeros at row 0, group 0"),
            (codes, one * np.float32(np.nan), r"scale nan at \[0\]"),
        ]
    ):
        shards: list[dict[str, Array]] = [
            {"a.weight": codes, "a.weight_scale": one},
            {"b.weight": last, "b.weight_scale": scale},
        ]
        model = write_checkpoint(tmp_path / f"{number}", shards)
        with pytest.raises(BadInputError, match=words):
            convert_checkpoint(model, tmp_path / "out", format=SP24)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", [FP8, BITMASK])
def test_scales_of_several_kinds_stop_before_anything_is_written(
    tmp_path: Path, format: str
) -> None:
    """One config group cannot say them, whether one shard has both or each its own."""
    codes = naive_prune(normal(1, (8, 64), deviation=1.0)).astype(DTYPES["F8_E4M3"])
    shards: list[dict[str, Array]] = [
        {"a.weight": codes, "a.weight_scale": np.ones(1, np.float32)},
        {"b.weight": codes, "b.weight_scale": np.ones((8, 1), np.float32)},
    ]
    words = r"in: weights .* kinds of scale \(tensor of 'a\.weight', vector of 'b\.weight'\)"
    convert_checkpoint(write_checkpoint(tmp_path / "theirs", shards), tmp_path / "in", format=SP24)
    with pytest.raises(BadInputError, match=words):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", format=format)
    save(tmp_path / "both", shards[0] | shards[1])
    (tmp_path / "in").rename(tmp_path / "folder")
    convert_file(tmp_path / "both", tmp_path / "in", format=SP24)
    with pytest.raises(BadInputError, match=words):
        convert_file(tmp_path / "in", tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def rows_of(*shape: int, seed: int = 1) -> Array:
    return normal(seed, shape, deviation=1.0).astype(DTYPES["F8_E4M3"])


def with_dense_fp8(folder: Path, name: str, scale: Array, weight: Array | None = None) -> Path:
    """A packed file, by row, with the scaled FP8 layer m.c that was left as it is."""
    tensors, metadata = load(pack(folder))
    tensors |= {"m.c.weight": rows_of(8, 30) if weight is None else weight, name: scale}
    return save(folder / "mixed", tensors, metadata)


@pytest.mark.parametrize("format", [FP8, BITMASK])
@pytest.mark.parametrize("sharded", [False, True])
def test_dense_fp8_that_stays_is_of_the_group(tmp_path: Path, format: str, sharded: bool) -> None:
    source = with_dense_fp8(tmp_path, "m.c.weight_scale", np.ones((8, 1), np.float32))
    if sharded:
        tensors, metadata = load(source)
        source = write_checkpoint(
            tmp_path / "model",
            [
                {n: t for n, t in tensors.items() if n == "m.c.weight_scale"},
                {n: t for n, t in tensors.items() if n != "m.c.weight_scale"},
            ],
        )
        last = source / "model-00002-of-00002.safetensors"
        save(last, load(last)[0], metadata)
    report = convert_checkpoint(source, tmp_path / "out", format=format).report
    config = report.quantization_config
    assert config is not None
    assert config["ignore"] == ["lm_head", "m.embed"]
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    if format == BITMASK:
        assert config["sparsity_config"]["ignore"] == ["lm_head", "m.c", "m.embed"]
    assert [t.name for t in report.dense] == ["m.c.weight"]


@pytest.mark.parametrize("format", [FP8, BITMASK])
@pytest.mark.parametrize(
    ("name", "scale", "weight", "words"),
    [
        (
            "m.c.weight_scale",
            np.ones(1, np.float32),
            None,
            r"\(vector of 'm\.a\.weight', tensor of 'm\.c\.weight'\)",
        ),
        (
            "m.c.weight_scale_inv",
            np.ones((8, 1), np.float32),
            None,
            r"tensor 'm\.c\.weight': is not packed, and its scale is called 'm\.c\.weight_scale_",
        ),
        (
            "m.c.weight_scale",
            np.ones((8, 1), np.float32),
            normal(1, (8, 8)).astype(DTYPES["F8_E5M2"]),
            r"tensor 'm\.c\.weight': is scaled F8_E5M2",
        ),
    ],
)
def test_dense_fp8_that_the_group_cannot_say_is_refused(
    tmp_path: Path, format: str, name: str, scale: Array, weight: Array | None, words: str
) -> None:
    source = with_dense_fp8(tmp_path, name, scale, weight)
    with pytest.raises(BadInputError, match=words):
        convert_file(source, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()
    convert_file(source, tmp_path / "out", format=SP24)


def test_a_weight_no_larger_than_a_block_is_of_the_kind_of_the_others(tmp_path: Path) -> None:
    shards: list[dict[str, Array]] = []
    for n, shape in enumerate([(256, 384), (64, 256), (128, 128), (4, 4)]):
        counts = tuple(-(-side // 128) for side in shape)
        codes = naive_prune(normal(n, shape, deviation=1.0)).astype(DTYPES["F8_E4M3"])
        scale = np.abs(normal(n, counts)) + np.float32(0.1)
        shards.append({f"l{n}.weight": codes, f"l{n}.weight_scale_inv": scale})
    model = write_checkpoint(tmp_path / "model", shards)
    config = {"quantization_config": {"weight_block_size": [128, 128]}}
    (model / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(model, tmp_path / "fp8", format=FP8).report
    assert {t.scale for t in report.tensors} == {"block 128x128"}
    convert_checkpoint(model, tmp_path / "packed", format=SP24)
    assert verify_file(tmp_path / "packed", device="cpu").passed
    unpack_checkpoint(tmp_path / "packed", tmp_path / "dense", dtype="f32")
    unpack_checkpoint(model, tmp_path / "direct", dtype="f32")
    for n in range(1, 5):
        name = f"model-0000{n}-of-00004.safetensors"
        got, want = (load(tmp_path / f / name)[0] for f in ("dense", "direct"))
        assert {k: t.tobytes() for k, t in got.items()} == {k: t.tobytes() for k, t in want.items()}


@pytest.mark.parametrize("format", [SP24, BITMASK])
def test_a_tensor_that_is_only_called_a_bitmask_is_copied(tmp_path: Path, format: str) -> None:
    other = np.ones((4, 4), np.uint8)
    tensors = {
        "l.weight": naive_prune(normal(1, (8, 8), deviation=1.0)).astype(DTYPES["F8_E4M3"]),
        "l.weight_scale": np.ones(1, np.float32),
        "y.bitmask": other,
    }
    source = save(tmp_path / "in", tensors)
    report = convert_file(source, tmp_path / "out", format=format)
    assert (report.source_format, report.copied) == (FP8, 1)
    assert load(tmp_path / "out")[0]["y.bitmask"].tobytes() == other.tobytes()
    # Beside those that are masks, too.
    tensors = load(foreign(tmp_path))[0] | {"y.bitmask": other}
    report = convert_file(save(tmp_path / "in", tensors), tmp_path / "packed", format=SP24)
    assert [t.name for t in report.tensors] == ["m.a.weight"]
    assert load(tmp_path / "packed")[0]["y.bitmask"].tobytes() == other.tobytes()


def test_a_mask_whose_values_lie_in_another_shard_is_no_other_tensor(tmp_path: Path) -> None:
    tensors = load(foreign(tmp_path))[0]
    mask = {"m.a.bitmask": tensors.pop("m.a.bitmask")}
    model = write_checkpoint(tmp_path / "model", [mask, tensors])
    with pytest.raises(BadInputError, match=r"'m\.a\.bitmask': 'm\.a\.compressed' lies in another"):
        convert_checkpoint(model, tmp_path / "out", format=SP24)
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_taken_is_an_error(tmp_path: Path) -> None:
    source = save(tmp_path / "in", weights() | {"m.a.bitmask": normal(1, (3,))})
    quantize_file(source, tmp_path / "packed", optype=OPERAND_TYPES["e4m3"], spec=SPECS["tensor"])
    with pytest.raises(BadInputError, match=r"'m\.a\.bitmask' is there already"):
        convert_file(tmp_path / "packed", tmp_path / "out", format=BITMASK)
    with pytest.raises(Sp24Error, match="is the input"):
        convert_file(
            tmp_path / "packed", tmp_path / "packed", format=SP24, layout="sm90", overwrite=True
        )


def test_an_origin_is_believed_only_where_it_can_be_true(tmp_path: Path) -> None:
    packed = pack(tmp_path, spec=SPECS["tensor"])
    convert_file(packed, tmp_path / "mask", format=BITMASK)
    tensors, metadata = load(tmp_path / "mask")
    rows = np.ones((100, 1), np.float32)
    save(tmp_path / "mask", tensors | {"m.a.weight_scale": rows}, metadata)
    report = convert_file(tmp_path / "mask", tmp_path / "again", format=SP24)
    assert [t.scale for t in report.tensors] == ["vector", "tensor"]
    save(tmp_path / "mask", tensors, metadata | {"sp24.origin": "[]"})
    with pytest.raises(BadInputError, match=r"sp24\.origin"):
        convert_file(tmp_path / "mask", None, format=SP24)


@pytest.mark.parametrize("format", [SP24, FP8, BITMASK])
def test_progress_reaches_the_end_and_no_further(tmp_path: Path, format: str) -> None:
    packed = pack(tmp_path)
    seen: list[tuple[int, int]] = []
    convert_file(packed, None, format=format, progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)


def test_every_pair_has_its_mask() -> None:
    for high in LEGAL_NIBBLES:
        for low in LEGAL_NIBBLES:
            meta = np.array([[high << 4 | low]], np.uint8)
            mask = bitmask.to_bitmask(meta, 8)
            places = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            assert places == [low & 3, low >> 2, 4 + (high & 3), 4 + (high >> 2)]
            assert bitmask.find_bad_group(mask, 8) is None
            assert bitmask.from_bitmask(mask, 8).tolist() == meta.tolist()
    empty = encode(*keep_indices(np.zeros((1, 4), np.int8)))
    assert empty.tolist() == [[EMPTY_NIBBLE]]
    assert bitmask.to_bitmask(empty, 4).tolist() == [[0b0011]]


def test_compressed_tensors_reads_our_bitmasks(tmp_path: Path) -> None:
    """With the other tool where it is installed: it left the format with 0.15."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.config import Sparse24BitMaskConfig

    packed = pack(tmp_path)
    convert_file(packed, tmp_path / "mask.safetensors", format=BITMASK)
    unpack_file(packed, tmp_path / "codes", codes=True)
    codes = load(tmp_path / "codes")[0]
    compressor = BaseCompressor.load_from_registry(
        "sparse-24-bitmask", config=Sparse24BitMaskConfig()
    )
    read = dict(compressor.decompress(str(tmp_path / "mask.safetensors")))
    for name in ("m.a.weight", "m.b.weight"):
        raw = read[name].view(torch.uint8).numpy()
        assert raw.tobytes() == codes[name].tobytes()


def test_the_library_reads_all_that_is_written(tmp_path: Path) -> None:
    from safetensors import deserialize

    packed = pack(tmp_path, spec=SPECS["block"])
    for format in (SP24, FP8, BITMASK):
        convert_file(packed, tmp_path / format, format=format)
        read = dict(deserialize((tmp_path / format).read_bytes()))
        mine = load(tmp_path / format)[0]
        assert {n: bytes(t["data"]) for n, t in read.items()} == {
            n: t.tobytes() for n, t in mine.items()
        }
