"""What an operation may leave to a GPU, behind the one interface that it knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

from sp24cli.bits import Array
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.ops.choose import Losses
from sp24cli.ops.pack import Band
from sp24cli.packed import PackInfo

#: Where work is to be done; "auto" takes a GPU when there is one.
DeviceChoice = Literal["auto", "cpu", "cuda"]


class Engine(Protocol):
    """Prunes by magnitude and packs, to the same bytes and reports as the CPU.

    Arrays that it yields are valid until the next is asked for. Its errors are those of the
    functions of `sp24cli.ops` that it stands for.
    """

    #: The device's name, for the report.
    name: str

    def prunes(self, dtype: str) -> bool:
        """Whether it takes weights of that safetensors dtype."""
        ...

    def packs(self, info: PackInfo) -> bool:
        """Whether it makes what ``info`` says of what it was made from."""
        ...

    def prune(
        self, file: SafetensorsFile, name: str, *, workers: int
    ) -> Iterator[tuple[Array, Sequence[Losses]]]:
        """The rows of a tensor pruned to 2:4, some at a time, and the losses of their bands."""
        ...

    def scale(
        self, file: SafetensorsFile, name: str, info: PackInfo, *, workers: int
    ) -> Array | None:
        """As `pack.tensor_scale`."""
        ...

    def pack(
        self,
        file: SafetensorsFile,
        name: str,
        info: PackInfo,
        scale: Array | None,
        *,
        prune: bool,
        workers: int,
    ) -> Iterator[Band]:
        """As `pack.pack_bands`."""
        ...

    def check(
        self,
        file: SafetensorsFile,
        name: str,
        look: Callable[[int, int], object],
        *,
        find_violations: bool,
        workers: int,
    ) -> Iterator[int]:
        """Read a tensor for NaN, infinity and, if wanted, groups that are not 2:4; yield the bytes
        that were all right. ``look(start, stop)`` is called on a band of `stream.prune_ranges`
        that is not, to say what is wrong."""
        ...
