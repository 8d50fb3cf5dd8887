"""Mapped reading, against the safetensors library and against what the kernel says is resident."""

from __future__ import annotations

import json
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from sp24cli.checkpoint.header import DTYPES, tensor_bytes
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError

WHOLE = [d for d in DTYPES.values() if d.numpy is not None]


def write_file(path: Path, *tensors: tuple[str, str, tuple[int, ...], bytes]) -> Path:
    """A file with these tensors' bytes one after the other, aligned or not."""
    table: dict[str, Any] = {}
    data = b""
    for name, dtype, shape, raw in tensors:
        offsets = [len(data), len(data) + len(raw)]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def random_bytes(dtype: str, shape: tuple[int, ...]) -> bytes:
    count = tensor_bytes(dtype, shape, "x")
    high = 2 if dtype == "BOOL" else 256
    return np.random.default_rng(7).integers(0, high, count).astype(np.uint8).tobytes()


@pytest.mark.parametrize("dtype", [d.name for d in WHOLE])
@pytest.mark.parametrize("pad", [0, 1, 3])
def test_array_has_the_bytes_and_dtype(tmp_path: Path, dtype: str, pad: int) -> None:
    raw = random_bytes(dtype, (5, 3))
    path = write_file(tmp_path / "f", ("p", "U8", (pad,), bytes(pad)), ("x", dtype, (5, 3), raw))
    with SafetensorsFile(path) as file:
        array = file.array("x")
        assert array.dtype == DTYPES[dtype].numpy
        assert array.shape == (5, 3)
        assert array.tobytes() == raw
        assert array.flags.aligned
        assert not array.flags.writeable
        assert array[3].tobytes() == raw[len(raw) // 5 * 3 : len(raw) // 5 * 4]
        assert file.raw("x") == raw
        assert file.raw("x").readonly


@pytest.mark.parametrize(
    ("dtype", "codes", "values"),
    [
        ("BF16", b"\x80\x3f\x20\xc1", [1.0, -10.0]),
        ("F8_E4M3", b"\x7e\x01\x80\x38", [448.0, 2.0**-9, -0.0, 1.0]),
        ("F8_E5M2", b"\x7b\x01\xfc\x3c", [57344.0, 2.0**-16, -np.inf, 1.0]),
        ("F8_E8M0", b"\x7f\x00\x80", [1.0, 2.0**-127, 2.0]),
        ("F8_E4M3FNUZ", b"\x7f\x40", [240.0, 1.0]),
        ("F8_E5M2FNUZ", b"\x7f\x40", [57344.0, 1.0]),
        ("F16", b"\x00\x3c\x00\xc9", [1.0, -10.0]),
    ],
)
def test_floats_decode_to_their_values(
    tmp_path: Path, dtype: str, codes: bytes, values: list[float]
) -> None:
    path = write_file(tmp_path / "f", ("x", dtype, (len(values),), codes))
    with SafetensorsFile(path) as file:
        assert file.array("x").astype(np.float64).tolist() == values


def test_library_s_file_reads_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = {
        "a.weight": rng.standard_normal((7, 4)).astype(np.float32),
        "é": rng.integers(-9, 9, (2, 3, 4)),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float16),
        "flag": np.array([True, False, True]),
    }
    save_file(tensors, tmp_path / "f", {"format": "pt", "k": "v"})
    with SafetensorsFile(tmp_path / "f") as file:
        assert set(file.names) == set(tensors)
        assert file.metadata == {"format": "pt", "k": "v"}
        for name, array in tensors.items():
            got = file.array(name)
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(got, array)


def test_raw_is_what_the_library_deserializes(tmp_path: Path) -> None:
    tensors = [
        (name, name, (4, 8), random_bytes(name, (4, 8))) for name in DTYPES if name != "BOOL"
    ]
    path = write_file(tmp_path / "f", *tensors)
    library = dict(deserialize(path.read_bytes()))
    with SafetensorsFile(path) as file:
        for name, *_ in tensors:
            assert file.raw(name) == library[name]["data"]
            assert file.entry(name).shape == tuple(library[name]["shape"])


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize(
    "rows", [slice(0, 2), slice(2, 5), slice(3, 99), slice(2, 2), slice(None), slice(-1, None)]
)
def test_rows(tmp_path: Path, rows: slice, pad: int) -> None:
    want = np.arange(15, dtype=np.float32).reshape(5, 3)
    path = write_file(
        tmp_path / "f", ("p", "U8", (pad,), bytes(pad)), ("x", "F32", (5, 3), want.tobytes())
    )
    with SafetensorsFile(path) as file:
        np.testing.assert_array_equal(file.array("x", rows), want[rows])


def test_aligned_array_is_no_copy(tmp_path: Path) -> None:
    path = write_file(tmp_path / "f", ("x", "U8", (4, 2), bytes(range(8))))
    with SafetensorsFile(path) as file:
        whole, part = file.array("x"), file.array("x", slice(1, 3))
        assert np.shares_memory(whole, part)
        assert np.shares_memory(whole, np.frombuffer(file.raw("x"), np.uint8))


def test_zero_size_and_scalar(tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "f",
        ("s", "F64", (), b"\0" * 8),
        ("z", "BF16", (0, 4), b""),
        ("y", "F4", (0,), b""),
    )
    with SafetensorsFile(path) as file:
        assert file.array("s").shape == ()
        assert file.array("z").shape == (0, 4)
        assert file.array("z", slice(0, 9)).shape == (0, 4)
        assert file.raw("y") == b""
        file.drop_cache("z", slice(0, 1))
        file.drop_cache("s")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_narrow_types_are_raw_only(tmp_path: Path, dtype: str) -> None:
    raw = random_bytes(dtype, (4,))
    with SafetensorsFile(write_file(tmp_path / "f", ("x", dtype, (4,), raw))) as file:
        assert file.raw("x") == raw
        with pytest.raises(BadInputError, match=f"f: tensor 'x': {dtype} can only be read as raw"):
            file.array("x")


def test_rows_of_a_scalar(tmp_path: Path) -> None:
    path = write_file(tmp_path / "f", ("x", "U8", (), b"1"))
    with SafetensorsFile(path) as file, pytest.raises(BadInputError, match="'x': is 0-D and has"):
        file.array("x", slice(0, 1))


def test_unknown_name(tmp_path: Path) -> None:
    path = write_file(tmp_path / "f", ("x", "U8", (), b"1"))
    with SafetensorsFile(path) as file:
        for ask in (file.entry, file.array, file.raw, file.drop_cache):
            with pytest.raises(BadInputError, match=r"f: has no tensor 'y'"):
                ask("y")


def test_malformed_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"12345678")
    with pytest.raises(BadInputError, match="bad: header length"):
        SafetensorsFile(tmp_path / "bad")


def test_views_outlive_the_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "f", ("x", "U8", (4,), b"abcd"))
    with SafetensorsFile(path) as file:
        array = file.array("x")
    path.unlink()
    assert array.tobytes() == b"abcd"
    with pytest.raises(ValueError, match="f: is closed"):
        file.array("x")


def test_close_without_views_unmaps(tmp_path: Path) -> None:
    path = write_file(tmp_path / "f", ("x", "U8", (4,), b"abcd"))
    file = SafetensorsFile(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    file.close()
    file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


def resident(path: Path) -> int:
    """Bytes of the process's maps of ``path`` that are in memory."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps)
    assert found
    return 1024 * sum(map(int, found))


def test_drop_cache_bounds_resident_memory(tmp_path: Path) -> None:
    """32 MB read by blocks of 1 MB holds little beyond a block: the system maps in large pages,
    so its own rounding is allowed for."""
    rows, row = 2048, 16384 - 40  # rows that begin anywhere in a page
    path = write_file(tmp_path / "f", ("x", "U8", (rows, row), bytes(rows * row)))
    with SafetensorsFile(path) as file:
        assert int(file.array("x").sum()) == 0
        assert resident(path) >= rows * row // 2
        file.drop_cache("x")
        assert resident(path) < 2**20
        for first in range(0, rows, 64):
            block = slice(first, first + 64)
            assert int(file.array("x", block).sum()) == 0
            assert resident(path) < 8 * 2**20
            file.drop_cache("x", block)
        assert resident(path) < 2**20


@pytest.mark.parametrize("rows", [None, slice(3, 20), slice(30, 99), slice(-1, None)])
def test_drop_cache_asks_for_every_page_of_the_rows_and_few_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: slice | None
) -> None:
    page, row = mmap.PAGESIZE, 3 * mmap.PAGESIZE + 100
    path = write_file(tmp_path / "f", ("x", "U8", (40, row), bytes(40 * row)))
    asked = []

    class Map:
        def madvise(self, advice: int, start: int, length: int) -> None:
            asked.append((advice, start, start + length))

    with SafetensorsFile(path) as file:
        monkeypatch.setattr(file, "_map", Map())
        file.drop_cache("x", rows)
        first, last, _ = (rows or slice(None)).indices(40)
        begin, end = (file.entry("x").begin + i * row for i in (first, last))
    [(advice, start, stop)] = asked
    assert advice == mmap.MADV_DONTNEED
    assert start % page == 0
    assert begin - page < start <= begin
    assert end <= stop < end + page


def test_dropped_pages_read_the_same(tmp_path: Path) -> None:
    raw = random_bytes("U8", (40, 1000))
    path = write_file(tmp_path / "f", ("x", "U8", (40, 1000), raw), ("y", "U8", (2,), b"yy"))
    with SafetensorsFile(path) as file:
        array = file.array("x")
        for rows in (None, slice(3, 20), slice(39, 99), slice(5, 5)):
            file.drop_cache("x", rows)
            assert array.tobytes() == raw
            assert file.raw("y") == b"yy"


def test_a_file_that_shrinks_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"a": np.ones((64, 1024), np.float32), "b": np.ones(4, np.float32)}, path)
    with SafetensorsFile(path) as file:
        assert file.array("a", slice(0, 1)).all()
        with open(path, "r+b") as other:
            other.truncate(path.stat().st_size // 2)
        for read in (lambda: file.array("a", slice(63, 64)), lambda: file.raw("b")):
            with pytest.raises(BadInputError, match=r"f\.safetensors: shrank while it was read"):
                read()
