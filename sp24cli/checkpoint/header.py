"""The header of a safetensors file: read with every claim checked, and built.

A file is an 8-byte little-endian length, that many bytes of JSON, then the data. The JSON maps
each tensor's name to its dtype, shape and place in the data, and ``__metadata__`` to a table of
strings. Nothing here trusts it: a header that the safetensors library refuses is refused, with
the file, the tensor and the place named.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from sp24cli.checkpoint.jsontext import Number
from sp24cli.errors import BadInputError

PathLike = str | os.PathLike[str]
#: What a tensor is before it has a place in a file: name, safetensors dtype, shape.
TensorSpec = tuple[str, str, tuple[int, ...]]

#: The library's limit on the JSON, in bytes.
MAX_HEADER_BYTES = 100_000_000
#: The length field before the JSON, and the alignment that the library pads the JSON to.
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
#: How a repository's text in the place of a large file begins; as a length, far over the limit.
_LFS_POINTER = b"version "
#: numpy cannot hold an array of more bytes than this, even one that is empty along an axis.
MAX_BYTES = 2**63 - 1
#: Nor one of more axes than this (64 since numpy 2).
MAX_RANK = 32


@dataclass(frozen=True)
class Dtype:
    """A safetensors dtype. ``numpy`` is None for the types that are narrower than a byte."""

    name: str
    bits: int
    numpy: np.dtype[Any] | None


def _dtype(name: str, scalar: Any) -> Dtype:
    numpy = np.dtype(scalar)
    return Dtype(name, 8 * numpy.itemsize, numpy)


#: All dtypes of safetensors 0.8, in the library's order: data lies by descending dtype.
DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        _dtype("BOOL", np.bool_),
        Dtype("F4", 4, None),
        Dtype("F6_E2M3", 6, None),
        Dtype("F6_E3M2", 6, None),
        _dtype("U8", "u1"),
        _dtype("I8", "i1"),
        _dtype("F8_E5M2", ml_dtypes.float8_e5m2),
        _dtype("F8_E4M3", ml_dtypes.float8_e4m3fn),
        _dtype("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        _dtype("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        _dtype("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
        _dtype("I16", "<i2"),
        _dtype("U16", "<u2"),
        _dtype("F16", "<f2"),
        _dtype("BF16", ml_dtypes.bfloat16),
        _dtype("I32", "<i4"),
        _dtype("U32", "<u4"),
        _dtype("F32", "<f4"),
        _dtype("C64", "<c8"),
        _dtype("F64", "<f8"),
        _dtype("I64", "<i8"),
        _dtype("U64", "<u8"),
    )
}
#: The safetensors name of a numpy dtype.
DTYPE_NAMES: dict[np.dtype[Any], str] = {
    d.numpy: d.name for d in DTYPES.values() if d.numpy is not None
}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its bytes are ``[begin, end)``, counted from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape, as the writer takes them."""
        return self.name, self.dtype, self.shape


@dataclass(frozen=True)
class Header:
    """The tensors of a file in the order of their bytes, and its ``__metadata__``."""

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    file_bytes: int

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        return {e.name: e for e in self.entries}


def label(path: PathLike) -> str:
    """``path`` for a message: as it is, or quoted where it would break the line."""
    text = os.fsdecode(path)
    return text if text and text.isprintable() else repr(text)


def quote(name: str) -> str:
    """A tensor's name for a message: on one line, of bounded length."""
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:196]}...{text[-1]}"


def tensor_bytes(dtype: str, shape: Sequence[int], where: str) -> int:
    """Bytes of a tensor; `BadInputError`, beginning with ``where``, for one that cannot be."""
    if dtype not in DTYPES:
        raise BadInputError(f"{where}: unknown dtype {quote(dtype)}")
    if len(shape) > MAX_RANK:
        raise BadInputError(f"{where}: has {len(shape)} axes, more than {MAX_RANK}")
    bits = DTYPES[dtype].bits
    elements = 1
    for size in shape:
        # A zero does not excuse the other sizes: numpy refuses such a shape, too.
        elements *= size or 1
        if not 0 <= size <= MAX_BYTES or elements * bits > 8 * MAX_BYTES:
            raise BadInputError(f"{where}: shape {_shape(shape)} is negative or too large")
    if 0 in shape:
        return 0
    if elements * bits % 8:
        raise BadInputError(f"{where}: {elements} elements of {dtype} do not fill whole bytes")
    return elements * bits // 8


def open_input(path: PathLike) -> BinaryIO:
    """Open a regular file to read; `BadInputError` for anything else, without waiting on it."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise BadInputError(f"{label(path)}: is a directory, not a safetensors file")
        if not stat.S_ISREG(mode):
            raise BadInputError(f"{label(path)}: is not a regular file")
        return open(path, "rb")
    except OSError as error:
        raise BadInputError(f"{label(path)}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{label(path)}: cannot be read: {error}") from error


def parse(path: PathLike) -> Header:
    """The header of the file at ``path``.

    Raises:
        BadInputError: the file cannot be read, or is not a safetensors file in every respect.
    """
    with open_input(path) as file:
        return read(file, path)


def read(file: BinaryIO, path: PathLike) -> Header:
    """`parse` for a file that is open and at its start. Allocates no more than the file holds."""
    where = label(path)
    try:
        file_bytes = os.fstat(file.fileno()).st_size
        field = file.read(LENGTH_BYTES)
        if len(field) < LENGTH_BYTES:
            raise BadInputError(
                f"{where}: truncated: {len(field)} bytes, a header begins with {LENGTH_BYTES}"
            )
        if field == _LFS_POINTER:
            raise BadInputError(f"{where}: is a Git LFS pointer, not the file it stands for")
        length = int.from_bytes(field, "little")
        if length > MAX_HEADER_BYTES:
            raise BadInputError(
                f"{where}: header length {length} at byte 0 is over the limit of {MAX_HEADER_BYTES}"
            )
        if length > file_bytes - LENGTH_BYTES:
            raise BadInputError(
                f"{where}: truncated: header of {length} bytes at byte {LENGTH_BYTES}"
                f" in a file of {file_bytes} bytes"
            )
        text = file.read(length)
    except OSError as error:
        raise BadInputError(f"{where}: cannot be read: {error.strerror}") from error
    return decode(text, file_bytes, where)


def decode(text: bytes, file_bytes: int, where: str) -> Header:
    """The header whose JSON is ``text``, of a file of ``file_bytes`` bytes in all.

    Raises:
        BadInputError: beginning with ``where``, the file's name.
    """
    try:
        table = load_object(text.decode("utf-8"), f"{where}: header")
    except UnicodeDecodeError as error:
        place = LENGTH_BYTES + error.start
        raise BadInputError(f"{where}: header is not UTF-8 at byte {place}") from error
    metadata = _metadata(table.pop(METADATA_KEY, None), where)
    base = LENGTH_BYTES + len(text)
    entries = [_entry(name, info, base, file_bytes, where) for name, info in table.items()]
    # Empty tensors may share a place; the name makes their order one.
    entries.sort(key=lambda e: (e.begin, e.end, e.name))
    _check_cover(entries, base, file_bytes, where)
    return Header(tuple(entries), metadata, file_bytes)


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """``specs`` in the library's order of data: widest dtype first (so that each tensor is
    aligned to its elements), then by name."""
    return sorted(specs, key=lambda spec: (-_RANK.get(spec[1], 0), spec[0]))


def build(specs: Sequence[TensorSpec], metadata: Mapping[str, str], where: str) -> bytes:
    """Length field and JSON of a file with these tensors one after the other, in this order.

    Byte for byte what the library writes, but that metadata lies by key (the library's order
    is random): compact, UTF-8, padded with spaces so that the data begins at a multiple of 8.

    Raises:
        BadInputError: beginning with ``where``: a name twice, an unknown dtype, a shape that
            cannot be, a header over the limit, or text that UTF-8 cannot hold.
    """
    table: dict[str, Any] = {}
    if metadata:
        table[METADATA_KEY] = dict(sorted(metadata.items()))
    begin = 0
    for name, dtype, shape in specs:
        this = f"{where}: tensor {quote(name)}"
        if name in table or name == METADATA_KEY:
            raise BadInputError(f"{this}: the name is taken")
        sizes = [int(size) for size in shape]
        end = begin + tensor_bytes(dtype, sizes, this)
        table[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]}
        begin = end
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{where}: a name or metadata is not valid Unicode") from error
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise BadInputError(
            f"{where}: header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _DuplicateKey(f"key {quote(key)} appears twice")
        table[key] = value
    return table


def _integer(text: str) -> int | float:
    """An integer of the JSON. ``-0`` is no size to the library, nor here; and the time to read
    a number of a million digits as an int grows as their square."""
    return float(text) if text == "-0" or len(text) > 20 else int(text)


def load_object(text: str, where: str, *, as_written: bool = False) -> dict[str, Any]:
    """The JSON object ``text``, in which no key may appear twice; ``as_written`` gives every
    number as a `Number`.

    Raises:
        BadInputError: beginning with ``where``.
    """
    try:
        table = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=Number if as_written else _integer,
            parse_float=Number if as_written else None,
        )
    except _DuplicateKey as error:
        raise BadInputError(f"{where}: {error}") from error
    except RecursionError as error:
        raise BadInputError(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise BadInputError(f"{where} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise BadInputError(f"{where} is not a JSON object")
    return table


def _check_unicode(text: str, where: str) -> None:
    # JSON can spell half a surrogate pair, which no file name, terminal or library takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{where}: {quote(text)} is not valid Unicode") from error


def _metadata(table: Any, where: str) -> dict[str, str]:
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise BadInputError(f"{where}: {METADATA_KEY} is not a JSON object")
    for key, value in table.items():
        _check_unicode(key, f"{where}: {METADATA_KEY}")
        if not isinstance(value, str):
            raise BadInputError(f"{where}: {METADATA_KEY} {quote(key)} is not a string")
        _check_unicode(value, f"{where}: {METADATA_KEY} {quote(key)}")
    return table


_FIELDS = ("dtype", "shape", "data_offsets")


def _entry(name: str, info: Any, base: int, file_bytes: int, where: str) -> TensorEntry:
    _check_unicode(name, f"{where}: tensor name")
    where = f"{where}: tensor {quote(name)}"
    if not isinstance(info, dict):
        raise BadInputError(f"{where}: is not a JSON object")
    for field in _FIELDS:
        if field not in info:
            raise BadInputError(f"{where}: has no {field}")
    for field in info:
        # To pass such a tensor on would drop the field without a word.
        if field not in _FIELDS:
            raise BadInputError(f"{where}: unknown field {quote(field)}")
    dtype, shape, offsets = (info[field] for field in _FIELDS)
    if not isinstance(dtype, str):
        raise BadInputError(f"{where}: dtype is not a string")
    if not _are_integers(shape):
        raise BadInputError(f"{where}: shape is not a list of integers")
    if not _are_integers(offsets) or len(offsets) != 2:
        raise BadInputError(f"{where}: data_offsets is not a list of two integers")
    nbytes = tensor_bytes(dtype, shape, where)
    begin, end = (base + offset for offset in offsets)
    span = f"bytes {begin} to {end}"
    if begin < base:
        raise BadInputError(f"{where}: {span} begin before the data, at {base}")
    if end < begin:
        raise BadInputError(f"{where}: {span} run backwards")
    if end > file_bytes:
        raise BadInputError(f"{where}: {span} reach beyond the file's end at {file_bytes}")
    if end - begin != nbytes:
        raise BadInputError(
            f"{where}: {span} are {end - begin}, but {dtype} {_shape(shape)} takes {nbytes}"
        )
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _check_cover(entries: list[TensorEntry], base: int, file_bytes: int, where: str) -> None:
    """The tensors, by offset, must follow one another from ``base`` to the end of the file."""
    covered, last = base, "the header"
    for entry in entries:
        this = f"{where}: tensor {quote(entry.name)}"
        if entry.begin < covered:
            raise BadInputError(f"{this}: overlaps {last} at byte {entry.begin}")
        if entry.begin > covered:
            raise BadInputError(
                f"{this}: bytes {covered} to {entry.begin} before it belong to no tensor"
            )
        covered, last = entry.end, f"tensor {quote(entry.name)}"
    if covered != file_bytes:
        raise BadInputError(f"{where}: bytes {covered} to {file_bytes} belong to no tensor")


def _are_integers(values: Any) -> bool:
    # bool is an int to isinstance, but not to JSON.
    return isinstance(values, list) and all(type(value) is int for value in values)


def _shape(shape: Sequence[int]) -> str:
    text = "[" + ",".join(map(str, shape[:8])) + "]"
    return text if len(shape) <= 8 else text[:-1] + ",...]"
