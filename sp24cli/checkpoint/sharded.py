"""Reading a whole checkpoint as if it were one safetensors file."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy.typing as npt

from sp24cli.checkpoint import header
from sp24cli.checkpoint.folder import Checkpoint, is_checkpoint, open_checkpoint
from sp24cli.checkpoint.header import Header, PathLike
from sp24cli.checkpoint.reader import SafetensorsFile


class ShardedFile(SafetensorsFile):
    """The tensors of all shards of a checkpoint, read as those of one file.

    ``header.entries`` come shard by shard, and the offsets of each are those in its own shard.
    ``metadata`` has the keys of all shards, the first that has one deciding; ``shards`` are the
    open files by name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.folder
        self._where = header.label(self.path)
        self.checkpoint = checkpoint
        with ExitStack() as stack:
            self.shards: dict[str, SafetensorsFile] = {
                shard.name: stack.enter_context(SafetensorsFile(shard.path))
                for shard in checkpoint.shards
            }
            stack.pop_all()
        self.stacks = {}
        self._join()

    def _join(self) -> None:
        """Make the header, and the way to each tensor, from those of the shards."""
        files = self.shards.values()
        metadata: dict[str, str] = {}
        for file in files:
            metadata = {**file.metadata, **metadata}
        self.header = Header(
            tuple(entry for file in files for entry in file.header.entries),
            metadata,
            sum(file.header.file_bytes for file in files),
        )
        self._home = {name: file for file in files for name in file.header.by_name}

    def parts(self) -> tuple[SafetensorsFile, ...]:
        return tuple(self.shards.values())

    def split(self, names: Iterable[str]) -> None:
        for name in names:
            self._file(name).split([name])
            self.stacks.update(self._file(name).stacks)
        self._join()

    def close(self) -> None:
        """Let go of all shards; views that are still alive stay valid."""
        for file in self.shards.values():
            file.close()

    def raw(self, name: str) -> memoryview:
        return self._file(name).raw(name)

    def array(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        return self._file(name).array(name, rows)

    def drop_cache(self, name: str, rows: slice | None = None) -> None:
        self._file(name).drop_cache(name, rows)

    def _file(self, name: str) -> SafetensorsFile:
        self.entry(name)
        return self._home[name]


def open_tensors(path: PathLike) -> SafetensorsFile:
    """The tensors of a safetensors file, or of a whole checkpoint: a folder or its index.

    Raises:
        BadInputError: what is there cannot be read as either.
    """
    place = Path(path)
    return ShardedFile(open_checkpoint(place)) if is_checkpoint(place) else SafetensorsFile(path)
