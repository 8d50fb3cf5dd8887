"""``*.safetensors.index.json``: which shard of a checkpoint holds which tensor.

The file is a JSON object: ``weight_map`` maps every tensor to the name of its shard, a file in
the same folder, and ``metadata`` holds ``total_size``, the bytes of all tensors (or nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sp24cli.checkpoint import header
from sp24cli.checkpoint.header import PathLike, label, quote
from sp24cli.checkpoint.jsontext import Number, dump
from sp24cli.errors import BadInputError

SUFFIX = ".safetensors.index.json"
SHARD_SUFFIX = ".safetensors"
#: Larger than the index of any model, and small enough to be read whole.
MAX_INDEX_BYTES = header.MAX_HEADER_BYTES


@dataclass(frozen=True)
class Index:
    """The shard of every tensor by name, and the index's ``metadata`` as it is in the file, each
    number a `Number`."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def shards(self) -> tuple[str, ...]:
        """The names of the shards, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def parse(path: PathLike) -> Index:
    """The index at ``path``, each of its claims about itself checked.

    Raises:
        BadInputError: the file cannot be read or is no index, with the tensor at fault.
    """
    where = label(path)
    with header.open_input(path) as file:
        try:
            raw = file.read(MAX_INDEX_BYTES + 1)
        except OSError as error:
            raise BadInputError(f"{where}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_INDEX_BYTES:
        raise BadInputError(f"{where}: is over the limit of {MAX_INDEX_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{where}: is not UTF-8 at byte {error.start}") from error
    table = header.load_object(text, f"{where}: index", as_written=True)
    if "weight_map" not in table:
        raise BadInputError(f"{where}: has no weight_map")
    weight_map = table["weight_map"]
    if not isinstance(weight_map, dict):
        raise BadInputError(f"{where}: weight_map is not a JSON object")
    if not weight_map:
        raise BadInputError(f"{where}: weight_map is empty")
    for name, shard in weight_map.items():
        _check_shard_name(name, shard, where)
    metadata = table.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise BadInputError(f"{where}: metadata is not a JSON object")
    # Its value is not compared: published models count shared tensors in more ways than one.
    size = metadata.get("total_size", Number("0"))
    if not isinstance(size, Number) or not 0 <= float(size.text) < 2**63:
        raise BadInputError(f"{where}: total_size {quote(str(size))} is no number of bytes")
    return Index(weight_map, metadata)


def check(
    index: Index, path: PathLike, shards: Mapping[str, tuple[PathLike, Iterable[str]]]
) -> None:
    """`BadInputError` unless the index at ``path`` and the shards say the same of every tensor.

    ``shards`` holds, by the name that the index uses, each shard's path and its tensors.
    """
    home: dict[str, str] = {}
    for shard, (place, names) in shards.items():
        for name in names:
            this = f"{label(place)}: tensor {quote(name)}"
            if name in home:
                raise BadInputError(f"{this}: lies in {label(home[name])} as well")
            home[name] = shard
            if name not in index.weight_map:
                raise BadInputError(f"{this}: is not in the index {label(path)}")
    for name, shard in index.weight_map.items():
        if home.get(name) != shard:
            lies = f"lies in {label(home[name])}" if name in home else "lies in no shard"
            raise BadInputError(
                f"{label(path)}: tensor {quote(name)}: is not in {label(shard)}, {lies}"
            )


def build(weight_map: Mapping[str, str], total_size: int, metadata: Mapping[str, Any]) -> bytes:
    """An index: names sorted, ``metadata`` kept but for ``total_size``, two spaces deep."""
    table = {
        "metadata": {**metadata, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (dump(table, ascii_only=False) + "\n").encode()


def _check_shard_name(name: str, shard: Any, where: str) -> None:
    this = f"{where}: tensor {quote(name)}"
    for text in (name, shard):
        if not isinstance(text, str):
            raise BadInputError(f"{this}: its shard is not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInputError(f"{this}: {quote(text)} is not valid Unicode") from error
    # A name with a folder in it could lead out of the checkpoint, and of the output.
    if "/" in shard or "\\" in shard or "\0" in shard:
        raise BadInputError(f"{this}: its shard {quote(shard)} is not a plain file name")
    if not shard.endswith(SHARD_SUFFIX) or shard.startswith("."):
        raise BadInputError(f"{this}: its shard {quote(shard)} is not a safetensors file")
