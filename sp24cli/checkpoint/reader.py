"""Reading: tensors of a safetensors file as views of a read-only memory map."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sp24cli.checkpoint import header, stacks
from sp24cli.checkpoint.header import DTYPES, Header, PathLike, TensorEntry
from sp24cli.closing import Closing
from sp24cli.errors import BadInputError


class SafetensorsFile(Closing):
    """An open safetensors file.

    Arrays are views of the map: they cost no memory beyond the pages touched, which
    `drop_cache` gives back, and they stay valid after `close`. Should the file shrink
    meanwhile, the next array asked for is an error; one that is in use would end the process.

    Raises:
        BadInputError: the file cannot be read, its header is malformed, or it shrank since.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = path
        #: The tensors that `split` has taken apart, with the number of their experts.
        self.stacks: dict[str, int] = {}
        self._where = header.label(path)
        with header.open_input(path) as file:
            self.header: Header = header.read(file, path)
            try:
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise BadInputError(f"{self._where}: cannot be mapped: {error}") from error
        if len(self._map) < self.header.file_bytes:
            raise BadInputError(f"{self._where}: shrank while it was opened")

    def close(self) -> None:
        """Let go of the map; views that are still alive keep it until they go."""
        # Not mmap.close, which fails while there are views; the last of them unmaps.
        self._map = None

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's ``__metadata__``; empty where it has none."""
        return self.header.metadata

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order of their bytes."""
        return tuple(self.header.by_name)

    def parts(self) -> tuple[SafetensorsFile, ...]:
        """The files that this one is made of: itself, or the shards of a checkpoint."""
        return (self,)

    def split(self, names: Iterable[str]) -> None:
        """From now on, have the experts ``NAME.<e>`` [M, K] in the place of stacks [E, M, K].

        Raises:
            BadInputError: an expert's name is taken.
        """
        wanted = {name: self.entry(name).shape[0] for name in names}
        self.header = stacks.split(self.header, wanted, self._where)
        self.stacks.update(wanted)

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and place of a tensor; `BadInputError` for one that is not there."""
        try:
            return self.header.by_name[name]
        except KeyError:
            raise BadInputError(f"{self._where}: has no tensor {header.quote(name)}") from None

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor of any dtype, read-only, not copied."""
        entry = self.entry(name)
        self._check_size()
        return memoryview(self._mapped())[entry.begin : entry.end]

    def array(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        """A tensor, or the rows of it that ``rows`` selects along its first axis; read-only.

        A view of the map, but a copy of what was asked for where the file does not align the
        tensor to its elements.

        Raises:
            BadInputError: no such tensor, a dtype narrower than a byte, or rows of a scalar.
        """
        entry = self.entry(name)
        where = f"{self._where}: tensor {header.quote(name)}"
        dtype = DTYPES[entry.dtype].numpy
        if dtype is None:
            raise BadInputError(f"{where}: {entry.dtype} can only be read as raw bytes")
        if rows is not None and not entry.shape:
            raise BadInputError(f"{where}: is 0-D and has no rows")
        self._check_size()
        count = entry.nbytes // dtype.itemsize
        array = np.frombuffer(self._mapped(), dtype, count, entry.begin).reshape(entry.shape)
        if rows is not None:
            array = array[rows]
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array

    def drop_cache(self, name: str, rows: slice | None = None) -> None:
        """Give back the memory of the pages of a tensor (or of a run of its rows) read so far.

        Views stay valid: the pages are read again when touched. Does nothing where the
        system has no ``madvise``.
        """
        entry = self.entry(name)
        begin, end = entry.begin, entry.end
        if rows is not None and entry.nbytes:
            first, last, _ = rows.indices(entry.shape[0])
            row_bytes = entry.nbytes // entry.shape[0]
            begin, end = begin + first * row_bytes, begin + last * row_bytes
        # A page shared with a neighbour may go as well: the map is read-only, so nothing is
        # lost, and dropping row block by row block would otherwise leave one page a block.
        begin -= begin % mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped().madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _check_size(self) -> None:
        if self._mapped().size() < self.header.file_bytes:
            raise BadInputError(f"{self._where}: shrank while it was read")

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self._where}: is closed")
        return self._map
