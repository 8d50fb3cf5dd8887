"""The header parser against malformed files, and against the safetensors library."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from sp24cli.checkpoint import header
from sp24cli.errors import BadInputError

#: Dtypes by the name that the library's serializer takes; it takes no 6-bit type.
LIBRARY_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def file_bytes(text: str | bytes | dict[str, Any], data: bytes = b"") -> bytes:
    """A file whose header is ``text``, as it stands."""
    if isinstance(text, dict):
        text = json.dumps(text)
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def parse_bytes(path: Path, raw: bytes) -> header.Header:
    path.write_bytes(raw)
    return header.parse(path)


def contents(got: header.Header, raw: bytes) -> dict[str, dict[str, Any]]:
    """What the library's ``deserialize`` says, by our reading."""
    return {
        e.name: {"dtype": e.dtype, "shape": list(e.shape), "data": raw[e.begin : e.end]}
        for e in got.entries
    }


def library_takes(raw: bytes) -> bool:
    try:
        deserialize(raw)
    except SafetensorError:
        return False
    return True


ONE = json.dumps(tensor())
#: What is wrong, the file, what the message must say, whether the library refuses it, too.
MALFORMED: list[tuple[str, bytes, str, bool]] = [
    ("empty file", b"", "truncated: 0 bytes", True),
    ("half a length", b"\x08\0\0", "truncated: 3 bytes", True),
    ("no header", file_bytes(""), "not JSON", True),
    ("length over the limit", struct.pack("<Q", 100_000_001) + b"{}", "100000001 at byte 0", True),
    ("LFS", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer", True),
    ("length of 2^64-1", b"\xff" * 8 + b"{}", "over the limit", True),
    ("length beyond the file", struct.pack("<Q", 3) + b"{}", "truncated: header of 3 bytes", True),
    ("header cut", file_bytes({"a": tensor()})[:-4], "truncated", True),
    ("data cut", file_bytes({"a": tensor()}, b"123"), "'a': bytes 68 to 72 reach beyond", True),
    ("data too long", file_bytes({"a": tensor()}, b"12345"), "bytes 72 to 73 belong to no", True),
    ("data without tensors", file_bytes("{}", b"1"), "bytes 10 to 11 belong to no tensor", True),
    ("not JSON", file_bytes("{"), "not JSON", True),
    ("two objects", file_bytes("{}{}"), "not JSON", True),
    ("not UTF-8", file_bytes(b'{"\xff":1}'), "not UTF-8 at byte 10", True),
    ("byte order mark", file_bytes("\ufeff{}"), "not JSON", True),
    ("padded with NUL", file_bytes("{}\0\0"), "not JSON", True),
    ("not an object", file_bytes("[]"), "header is not a JSON object", True),
    ("nested", file_bytes("[" * 200_000), "nested too deeply", True),
    ("nested objects", file_bytes('{"a":' * 200_000), "nested too deeply", True),
    ("name twice", file_bytes(f'{{"a":{ONE},"a":{ONE}}}', b"1234"), "key 'a' appears twice", False),
    (
        "field twice",
        file_bytes('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
        "key 'dtype' appears twice",
        True,
    ),
    ("metadata twice", file_bytes('{"__metadata__":{},"__metadata__":{}}'), "twice", True),
    ("metadata key twice", file_bytes('{"__metadata__":{"k":"","k":""}}'), "'k' appears", False),
    ("metadata a list", file_bytes({"__metadata__": []}), "__metadata__ is not a JSON obj", True),
    ("metadata a number", file_bytes({"__metadata__": {"n": 1}}), "'n' is not a string", True),
    ("metadata a table", file_bytes({"__metadata__": {"n": {}}}), "'n' is not a string", True),
    ("half a surrogate", file_bytes(f'{{"\\ud800":{ONE}}}', b"1234"), "not valid Unicode", True),
    ("surrogate key", file_bytes('{"__metadata__":{"\\ud800":""}}'), "not valid Unicode", True),
    ("surrogate value", file_bytes('{"__metadata__":{"k":"\\udc00"}}'), "not valid Unic", True),
    ("tensor null", file_bytes({"a": None}), "'a': is not a JSON object", True),
    ("no dtype", file_bytes('{"a":{"shape":[],"data_offsets":[0,0]}}'), "'a': has no dtype", True),
    ("no shape", file_bytes('{"a":{"dtype":"U8","data_offsets":[0,0]}}'), "has no shape", True),
    ("no offsets", file_bytes('{"a":{"dtype":"U8","shape":[]}}'), "has no data_offsets", True),
    ("unknown field", file_bytes({"a": tensor(z=1)}, b"1234"), "'a': unknown field 'z'", False),
    ("unknown dtype", file_bytes({"a": tensor("F8")}, b"1234"), "'a': unknown dtype 'F8'", True),
    ("dtype in lower case", file_bytes({"a": tensor("u8")}, b"1234"), "unknown dtype 'u8'", True),
    ("dtype a number", file_bytes({"a": tensor(8)}, b"1234"), "'a': dtype is not a string", True),
    ("shape a number", file_bytes({"a": tensor(shape=4)}, b"1234"), "shape is not a list", True),
    ("shape of a float", file_bytes({"a": tensor(shape=[4.0])}, b"1234"), "shape is not", True),
    ("shape of a bool", file_bytes({"a": tensor(shape=[True, 4])}, b"1234"), "shape is not", True),
    ("shape negative", file_bytes({"a": tensor(shape=[-4])}, b"1234"), "negative or too", True),
    (
        "two negatives",
        file_bytes({"a": tensor(shape=[-2, -2])}, b"1234"),
        "'a': shape [-2,-2] is negative",
        True,
    ),
    ("2^32 twice", file_bytes({"a": tensor(shape=[2**32] * 2)}, b"1234"), "too large", True),
    ("2^64 + 4", file_bytes({"a": tensor(shape=[2**64 + 4])}, b"1234"), "too large", True),
    ("bits overflow", file_bytes({"a": tensor("F64", [2**61])}, b"1234"), "too large", True),
    (
        "overflow before a zero",
        file_bytes({"a": tensor(shape=[2**63, 2, 0], offsets=[0, 0])}),
        "too large",
        True,
    ),
    (
        "overflow after a zero",
        file_bytes({"a": tensor(shape=[0, 2**40, 2**40], offsets=[0, 0])}),
        "too large",
        False,
    ),
    (
        "a million digits",
        file_bytes('{"a":{"dtype":"U8","shape":[' + "9" * 1_000_000 + '],"data_offsets":[0,4]}}'),
        "'a': shape is not a list of integers",
        True,
    ),
    ("33 axes", file_bytes({"a": tensor(shape=[1] * 33, offsets=[0, 1])}, b"1"), "33 axes", False),
    ("-0", file_bytes(f'{{"a":{ONE.replace("[0", "[-0")}}}', b"1234"), "data_offsets is not", True),
    ("three offsets", file_bytes({"a": tensor(offsets=[0, 4, 4])}, b"1234"), "two integers", True),
    ("offset a string", file_bytes({"a": tensor(offsets=["0", 4])}, b"1234"), "two integ", True),
    (
        "offset negative",
        file_bytes({"a": tensor(offsets=[-4, 0])}, b"1234"),
        "'a': bytes 65 to 69 begin before the data, at 69",
        True,
    ),
    ("reversed", file_bytes({"a": tensor(offsets=[4, 0])}, b"1234"), "72 to 68 run back", True),
    ("far beyond", file_bytes({"a": tensor(offsets=[0, 2**63])}, b"1234"), "reach beyond", True),
    (
        "size mismatch",
        file_bytes({"a": tensor("U16")}, b"1234"),
        "'a': bytes 69 to 73 are 4, but U16 [4] takes 8",
        True,
    ),
    (
        "scalar of no bytes",
        file_bytes({"a": tensor(shape=[], offsets=[0, 0])}),
        "are 0, but U8 [] takes 1",
        True,
    ),
    (
        "odd F4",
        file_bytes({"a": tensor("F4", [3], [0, 2])}, b"12"),
        "3 elements of F4 do not",
        True,
    ),
    (
        "odd F6",
        file_bytes({"a": tensor("F6_E2M3", [2], [0, 2])}, b"12"),
        "2 elements of F6_E2M3 do not fill whole bytes",
        True,
    ),
    (
        "overlap",
        file_bytes({"a": tensor(), "b": tensor(offsets=[2, 6])}, b"123456"),
        "'b': overlaps tensor 'a' at byte 130",
        True,
    ),
    (
        "two names on one range",
        file_bytes({"b": tensor(), "a": tensor()}, b"1234"),
        "'b': overlaps tensor 'a' at byte 128",
        True,
    ),
    (
        "empty tensor inside another",
        file_bytes({"a": tensor(), "b": tensor(shape=[0], offsets=[2, 2])}, b"1234"),
        "'b': overlaps tensor 'a'",
        True,
    ),
    (
        "gap at the front",
        file_bytes({"a": tensor(offsets=[1, 5])}, b"12345"),
        "'a': bytes 68",
        True,
    ),
    (
        "gap",
        file_bytes({"b": tensor(offsets=[5, 9]), "a": tensor()}, b"123456789"),
        "'b': bytes 132 to 133 before it belong to no tensor",
        True,
    ),
]


@pytest.mark.parametrize(
    ("raw", "says", "library_refuses"),
    [case[1:] for case in MALFORMED],
    ids=[case[0] for case in MALFORMED],
)
def test_malformed_is_one_line_that_names_file_and_place(
    tmp_path: Path, raw: bytes, says: str, library_refuses: bool
) -> None:
    path = tmp_path / "bad.safetensors"
    began = time.perf_counter()
    with pytest.raises(BadInputError) as caught:
        parse_bytes(path, raw)
    assert time.perf_counter() - began < 10  # whole seconds are a loop gone quadratic
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message
    assert len(message) < 600
    assert library_takes(raw) is not library_refuses


LEGAL: list[tuple[str, bytes]] = [
    ("no tensors", file_bytes("{}")),
    ("only metadata", file_bytes({"__metadata__": {"k": "v"}})),
    ("metadata null", file_bytes({"__metadata__": None, "a": tensor()}, b"1234")),
    ("no metadata", file_bytes({"a": tensor()}, b"1234")),
    ("trailing space", file_bytes(f'{{"a":{ONE}}} \n\t  ', b"1234")),
    ("leading space", file_bytes(f' {{"a":{ONE}}}', b"1234")),
    ("scalar", file_bytes({"a": tensor("F32", [])}, b"1234")),
    (
        "zero sizes anywhere",
        file_bytes(
            {
                "z": tensor("F4", [0, 3], [4, 4]),
                "a": tensor(),
                "y": tensor("F32", [2, 0], [0, 0]),
                "x": tensor(shape=[0], offsets=[0, 0]),
            },
            b"1234",
        ),
    ),
    ("F4", file_bytes({"a": tensor("F4", [2, 3], [0, 3])}, b"123")),
    ("F6", file_bytes({"a": tensor("F6_E3M2", [4], [0, 3])}, b"123")),
    (
        "beyond ASCII",
        file_bytes({"模型.重み.💡": tensor(), "": tensor(offsets=[4, 8])}, b"12345678"),
    ),
    ("escapes", file_bytes(f'{{"\\u00e9\\ud83d\\ude00\\n\\u0000":{ONE}}}', b"1234")),
    ("misaligned", file_bytes({"a": tensor(), "b": tensor("F64", [1], [4, 12])}, b"1" * 12)),
]


@pytest.mark.parametrize("raw", [case[1] for case in LEGAL], ids=[case[0] for case in LEGAL])
def test_legal_reads_as_the_library_reads_it(tmp_path: Path, raw: bytes) -> None:
    got = parse_bytes(tmp_path / "good.safetensors", raw)
    assert contents(got, raw) == dict(deserialize(raw))
    assert [e.begin for e in got.entries] == sorted(e.begin for e in got.entries)
    assert got.file_bytes == len(raw)


def test_metadata_is_read(tmp_path: Path) -> None:
    raw = file_bytes({"__metadata__": {"k": "é\n", "": ""}, "a": tensor()}, b"1234")
    got = parse_bytes(tmp_path / "f", raw)
    assert got.metadata == {"k": "é\n", "": ""}
    assert [e.name for e in got.entries] == ["a"]


def test_offsets_are_absolute(tmp_path: Path) -> None:
    raw = file_bytes({"b": tensor(offsets=[4, 8]), "a": tensor()}, b"aaaabbbb")
    got = parse_bytes(tmp_path / "f", raw)
    assert [(e.name, raw[e.begin : e.end]) for e in got.entries] == [
        ("a", b"aaaa"),
        ("b", b"bbbb"),
    ]
    assert got.by_name["b"].nbytes == 4
    assert got.by_name["b"].spec == ("b", "U8", (4,))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="none: cannot be read: No such file or directory"):
        header.parse(tmp_path / "none")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is a directory, not a safetensors file"):
        header.parse(tmp_path)


def test_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInputError, match="is not a regular file"):
        header.parse(tmp_path / "pipe")


def test_path_with_nul_byte() -> None:
    with pytest.raises(BadInputError, match="'a\\\\x00b': cannot be read"):
        header.parse("a\0b")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(file_bytes("{}"))
    if os.geteuid() == 0:  # whom no mode bits stop

        def refuse(*_: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
    path.chmod(0)
    with pytest.raises(BadInputError, match=r"f: cannot be read: Permission denied$"):
        header.parse(path)


def test_names_in_messages_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines"
    name = "n\n\x1b[31m" + "x" * 10_000
    with pytest.raises(BadInputError) as caught:
        parse_bytes(path, file_bytes({name: tensor("F5")}, b"1234"))
    message = str(caught.value)
    assert message.isprintable()
    assert "two\\nlines" in message
    assert "'n\\n\\x1b[31mxxx" in message
    assert len(message) < 600


def test_lying_length_allocates_nothing(tmp_path: Path) -> None:
    """A sparse file of 1 TB that claims a header near the limit, in 512 MB of address space
    beyond what is in use."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(file_bytes({"a": tensor(shape=[2**40], offsets=[0, 2**40])}))
        file.truncate(file.tell() + 2**40)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**29, hard))
    try:
        got = header.parse(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert got.by_name["a"].nbytes == 2**40


def test_dtypes_are_the_library_s_and_in_its_order() -> None:
    """The library lays data by descending dtype; a serialized file of all shows its order."""
    buffer = np.zeros(1, np.uint8)
    specs = {
        dtype: TensorSpec(dtype=name, shape=[0], data_ptr=buffer.ctypes.data, data_len=0)
        for dtype, name in LIBRARY_NAMES.items()
    }
    raw = serialize(specs)
    length = int.from_bytes(raw[:8], "little")
    in_library = list(json.loads(raw[8 : 8 + length]))
    assert in_library == [d for d in reversed(header.DTYPES) if d in LIBRARY_NAMES]
    assert in_library == [name for name, _, _ in header.file_order((d, d, (0,)) for d in specs)]
    assert set(header.DTYPES) - set(LIBRARY_NAMES) == {"F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("dtype", header.DTYPES)
def test_dtype_widths_are_the_library_s(dtype: str) -> None:
    nbytes = header.tensor_bytes(dtype, [8], "x")
    assert nbytes == header.DTYPES[dtype].bits
    raw = file_bytes({"a": tensor(dtype, [8], [0, nbytes])}, bytes(nbytes))
    assert dict(deserialize(raw))["a"]["dtype"] == dtype
    numpy = header.DTYPES[dtype].numpy
    assert (numpy is None) == (nbytes % 8 != 0)
    assert numpy is None or 8 * numpy.itemsize == nbytes


def test_build_is_what_the_library_writes() -> None:
    names = ["a", 'é\n"\\\x7f\x01\u2028/💡', "b.weight"]
    shapes: list[tuple[int, ...]] = [(1,), (), (0, 3)]
    buffer = np.zeros(4, np.uint8)
    specs = {
        name: TensorSpec(
            dtype="float32",
            shape=list(shape),
            data_ptr=buffer.ctypes.data,
            data_len=0 if 0 in shape else 4,
        )
        for name, shape in zip(names, shapes, strict=True)
    }
    ours = [(n, "F32", s) for n, s in zip(names, shapes, strict=True)]
    for metadata in ({}, {"k\t": "v\0é"}):
        built = header.build(header.file_order(ours), metadata, "f")
        assert built + bytes(8) == serialize(specs, metadata or None)
        assert len(built) % 8 == 0


def test_build_is_deterministic_in_metadata() -> None:
    keys = ["b", "a", "c"]
    built = {header.build([], dict.fromkeys(order, "1"), "f") for order in (keys, sorted(keys))}
    assert len(built) == 1


@pytest.mark.parametrize(
    ("specs", "metadata", "says"),
    [
        ([("a", "U8", (1,)), ("a", "U8", (1,))], {}, "tensor 'a': the name is taken"),
        ([("__metadata__", "U8", (1,))], {}, "'__metadata__': the name is taken"),
        ([("a", "F8", (1,))], {}, "tensor 'a': unknown dtype 'F8'"),
        ([("a", "U8", (-1,))], {}, "tensor 'a': shape [-1] is negative"),
        ([("a", "F4", (3,))], {}, "3 elements of F4"),
        ([("\ud800", "U8", (1,))], {}, "not valid Unicode"),
        ([], {"k": "x" * 100_000_000}, "over the limit"),
    ],
)
def test_build_refuses(specs: Any, metadata: dict[str, str], says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        header.build(specs, metadata, "out")
    assert str(caught.value).startswith("out: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


SEED = file_bytes(
    '{"__metadata__":{"format":"pt"},'
    '"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    '"b":{"dtype":"U8","shape":[0],"data_offsets":[8,8]},'
    '"c":{"dtype":"F4","shape":[4],"data_offsets":[8,10]}}',
    bytes(10),
)
TOKENS = st.sampled_from(
    rb'0 1 8 9 - -0 .0 e1 999999999999999999999 null true NaN [] { } [ ] , : " \ \ud800 F64'.split()
)
EDITS = st.lists(
    st.tuples(st.integers(0, len(SEED)), st.integers(0, 6), TOKENS | st.binary(max_size=2)),
    min_size=1,
    max_size=3,
)


def read_or_refuse(path: Path, raw: bytes) -> header.Header | str:
    try:
        return parse_bytes(path, raw)
    except BadInputError as error:
        return str(error)


def check_against_library(path: Path, raw: bytes) -> None:
    got = read_or_refuse(path, raw)
    if isinstance(got, str):
        assert got.startswith(f"{path}: ")
        assert "\n" not in got
    else:
        assert contents(got, raw) == dict(deserialize(raw))


FUZZ = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(FUZZ, max_examples=1500)
@given(edits=EDITS, fix_length=st.booleans())
def test_edited_header_is_refused_or_read_as_the_library_does(
    tmp_path: Path, edits: list[tuple[int, int, bytes]], fix_length: bool
) -> None:
    raw = SEED
    for place, drop, put in edits:
        raw = raw[:place] + put + raw[place + drop :]
    if fix_length:  # or most edits would end at the length or at the last byte
        raw = struct.pack("<Q", max(len(raw) - 18, 0)) + raw[8:]
    check_against_library(tmp_path / "fuzz", raw)


@settings(FUZZ, max_examples=500)
@given(
    fields=st.lists(
        st.tuples(
            st.sampled_from(["U8", "F4", "F6_E2M3", "F32"]),
            st.lists(st.sampled_from([0, 1, 2, 4, 2**62]), max_size=3),
            st.integers(0, 6),
            st.integers(0, 6),
        ),
        max_size=3,
    ),
    data=st.integers(0, 6),
)
def test_offsets_are_refused_or_read_as_the_library_does(
    tmp_path: Path, fields: list[tuple[str, list[int], int, int]], data: int
) -> None:
    table = {
        str(i): tensor(dtype, shape, [begin, end])
        for i, (dtype, shape, begin, end) in enumerate(fields)
    }
    check_against_library(tmp_path / "fuzz", file_bytes(table, bytes(data)))


@settings(FUZZ, max_examples=300)
@given(raw=st.binary(max_size=64))
def test_noise_is_refused_or_read_as_the_library_does(tmp_path: Path, raw: bytes) -> None:
    check_against_library(tmp_path / "fuzz", raw)
