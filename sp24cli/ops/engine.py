"""What an operation may leave to a GPU, behind the one interface that it knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

from sp24cli.bits import Array
from sp24cli.checkpoint.header import TensorEntry
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.ops.choose import Losses
from sp24cli.ops.pack import Arrangement, Band
from sp24cli.packed import PackInfo
from sp24cli.pruning.pattern import TWO_OF_FOUR, Pattern

#: Where work is to be done; "auto" takes a GPU when there is one.
DeviceChoice = Literal["auto", "cpu", "cuda"]


class Engine(Protocol):
    """Prunes by magnitude or wanda and packs, to the same bytes and reports as the CPU.

    Arrays that it yields are valid until the next is asked for. Its errors are those of the
    functions of `sp24cli.ops` that it stands for.
    """

    #: The device's name, for the report.
    name: str

    def prunes(self, entry: TensorEntry, pattern: Pattern = TWO_OF_FOUR) -> bool:
        """Whether it takes that weight, and prunes it to that pattern."""
        ...

    def packs(self, info: PackInfo, arrange: Arrangement | None = None) -> bool:
        """Whether it makes what ``info`` says of what it was made from, arranged so."""
        ...

    def prune(
        self,
        file: SafetensorsFile,
        name: str,
        *,
        norms: Array | None = None,
        pattern: Pattern = TWO_OF_FOUR,
        workers: int,
    ) -> Iterator[tuple[Array, Sequence[Losses]]]:
        """The rows of a tensor pruned, some at a time, and the losses of their bands: by wanda
        with ``norms`` as `wanda.check_norms` gives them, else by magnitude."""
        ...

    def scale(
        self,
        file: SafetensorsFile,
        name: str,
        info: PackInfo,
        *,
        workers: int,
        arrange: Arrangement | None = None,
    ) -> Array | None:
        """As `pack.tensor_scale` of what is pruned if ``arrange`` says how, by amax."""
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
        arrange: Arrangement | None = None,
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
