"""Reader of ``kernels.json``, the description that the build writes beside the fatbins."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sp24cli.optypes import operands_name

#: Where the fatbins lie; the variable lets another build be tried without installing it.
FOLDER = Path(os.environ.get("SP24_KERNELS", Path(__file__).resolve().parent))


#: How kernels sum: in the tensor cores alone, promoted, and promoted with scales that vary along
#: K, each kind of which can do what the ones before it can.
SUMMATIONS = ("fast", "precise", "tile128", "block128", "row128", "row64")
#: How kernels sum that widen weights first, by the scales that these meet then
#: (`fragments.WeightScales`): each reads another image, and none stands in for another.
WIDENED_SUMMATIONS = {"none": "widened", "block": "widened_block", "mx": "widened_mx"}


@dataclass(frozen=True)
class ArgumentLayout:
    """A kernel's parameter struct: (name, C type, byte offset) of each field."""

    tensor_map_bytes: int
    bytes: int
    fields: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Entry:
    """One GEMM kernel.

    ``tile_m``, ``tile_n``, ``tile_k`` are the logical sizes of one CTA's tile and of one block,
    ``cluster`` the CTAs along M that share B, ``split`` the CTAs that each sum a part of K of one
    tile, ``box_rows_b`` x ``box_bytes_b`` the box of B that one copy brings of a whole tile (of the
    last column of tiles all rows that there are), ``block_bytes`` one block of the image of A.
    ``scales`` are the kinds that it applies: none where D are the sums of integers.

    ``accumulate`` is the type of the accumulators. ``promote_k`` is the K after which partial sums
    are added to float32 registers, 0 where the tensor cores keep all of the sum; ``loop_scales``
    are the scales that are applied then: "none", "tile" (one for 128 rows of A, one a row of B),
    "block" (the same for 64 rows of A) or "row" (one a row of each).

    ``layout`` is the image of A: "sm90", or "widened", that of `fragments`, with the scales
    ``weight_scales`` in it; weights are then widened to ``b_type`` before they are multiplied.
    A stage of the ring holds ``stage_blocks`` blocks along K. ``balanced``: tiles have up to
    ``tile_m`` rows, as the launch says (`gpu.order.cluster_rows`).
    """

    name: str
    fatbin: str
    a_type: str
    b_type: str
    out_type: str
    order: str
    accumulate: str
    scales: tuple[str, ...]
    layout: str
    tile_m: int
    tile_n: int
    tile_k: int
    consumers: int
    cluster: int
    stages: int
    threads: int
    smem_bytes: int
    block_bytes: int
    box_rows_b: int
    box_bytes_b: int
    k_multiple: int
    registers: int
    local_bytes: int
    args: str
    stage_blocks: int = 1
    split: int = 1
    balanced: bool = False
    promote_k: int = 0
    loop_scales: str = "none"
    weight_scales: str = "none"

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster of the launch: those that share B, of every part of K."""
        return self.cluster * self.split

    @property
    def type(self) -> str:
        """The operands' name, as in `optypes.OPERANDS`."""
        return operands_name(self.a_type, self.b_type, self.accumulate)

    @property
    def summation(self) -> str:
        """How the kernel sums, one of `SUMMATIONS` or of `WIDENED_SUMMATIONS`."""
        if self.layout == "widened":
            return WIDENED_SUMMATIONS[self.weight_scales]
        if not self.promote_k:
            return "fast"
        return "precise" if self.loop_scales == "none" else f"{self.loop_scales}{self.promote_k}"


@dataclass(frozen=True)
class PackEntry:
    """A kernel that turns ``row`` into ``sm90``; its grid is one CTA a block."""

    name: str
    fatbin: str
    a_type: str
    threads: int
    smem_bytes: int
    registers: int
    local_bytes: int
    args: str


@dataclass(frozen=True)
class CeilingEntry:
    """A kernel of nothing but wgmmas; its grid is one CTA an SM.

    A CTA multiplies as many tiles of ``tile_m`` x ``tile_n`` as it is told, each over
    ``tile_stages`` stages of ``tile_k``; ``source`` is where A comes from: "ss", shared memory, or
    "rs", registers.
    """

    name: str
    fatbin: str
    a_type: str
    source: str
    tile_m: int
    tile_n: int
    tile_k: int
    tile_stages: int
    threads: int
    smem_bytes: int
    registers: int
    local_bytes: int
    args: str


@dataclass(frozen=True)
class RungEntry:
    """A rung of the ladder of operand type ``a_type``: a GEMM kernel that is there to be compared.

    ``number`` and ``label`` name it within its ladder, ``changed`` says in a few words what tells
    it from the main rung before; a ``side`` rung is one that no other builds on. What it reads:
    ``source`` is how A comes and ``meta`` in what form its metadata (`gpu/ladder.py`); ``box_a``,
    ``box_b`` and ``box_meta`` are (bytes, rows) of their copies, and the first of ``box_a`` is its
    swizzle. A kernel that is not ``persistent`` has a CTA a tile. The other fields are those of
    `Entry`, and the policies of ``cuda/include/sp24/ladder_config.cuh``.
    """

    name: str
    fatbin: str
    a_type: str
    out_type: str
    order: str
    number: int
    label: str
    side: bool
    changed: str
    source: str
    meta: str
    full: str
    release: str
    store: str
    groups: int
    wait: int
    persistent: bool
    raster: bool
    unroll: int
    tile_m: int
    tile_n: int
    tile_k: int
    consumers: int
    cluster: int
    cluster_ctas: int
    stages: int
    threads: int
    smem_bytes: int
    box_a: tuple[int, int]
    box_b: tuple[int, int]
    box_meta: tuple[int, int]
    k_multiple: int
    registers: int
    local_bytes: int
    args: str
    balanced: bool = False


@dataclass(frozen=True)
class ConversionEntry:
    """A kernel that prunes, quantizes or rearranges, or reads the SMs' clocks: ``kind`` says which
    (`CONVERSIONS`).

    ``source`` is the type of what is converted (for ``gather`` the bits of an item, for
    ``pack_widened`` the scales in the image), ``a_type`` that of the result, where the kind knows
    them; empty otherwise.
    """

    name: str
    kind: str
    fatbin: str
    a_type: str
    source: str
    threads: int
    smem_bytes: int
    registers: int
    local_bytes: int
    args: str


#: The kinds of `ConversionEntry`.
CONVERSIONS = (
    "prune_magnitude_24",
    "prune_wanda_24",
    "prune_magnitude_nm",
    "prune_wanda_nm",
    "amax",
    "scales",
    "quantize",
    "tokens",
    "smooth_tokens",
    "gather",
    "pack_widened",
    "clocks",
)

AnyEntry = Entry | PackEntry | CeilingEntry | RungEntry | ConversionEntry


@dataclass(frozen=True)
class Manifest:
    """Everything the package knows of its kernels. ``sha256`` names the set of fatbins."""

    entries: tuple[Entry, ...]
    pack_entries: tuple[PackEntry, ...]
    ceiling_entries: tuple[CeilingEntry, ...]
    rungs: tuple[RungEntry, ...]
    conversion_entries: tuple[ConversionEntry, ...]
    args: dict[str, ArgumentLayout]
    fatbins: dict[str, str]
    sources: str
    nvcc: str

    @property
    def everything(self) -> tuple[AnyEntry, ...]:
        """Every kernel of every kind."""
        return (
            *self.entries,
            *self.pack_entries,
            *self.ceiling_entries,
            *self.rungs,
            *self.conversion_entries,
        )

    @property
    def sha256(self) -> str:
        text = "".join(f"{name} {digest}\n" for name, digest in sorted(self.fatbins.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def conversion(self, kind: str, source: str = "", a_type: str = "") -> ConversionEntry | None:
        """The conversion of that kind and those types, None where there is none."""
        wanted = (kind, source, a_type)
        for entry in self.conversion_entries:
            if (entry.kind, entry.source, entry.a_type) == wanted:
                return entry
        return None

    def fatbin(self, name: str) -> bytes:
        return (FOLDER / f"{name}.fatbin").read_bytes()


def _entry(cls: type[Any], raw: dict[str, Any]) -> Any:
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    if cls is not ConversionEntry:
        del fields["kind"]
    return cls(**fields)


@cache
def load() -> Manifest:
    """The manifest of the fatbins in the package."""
    raw = json.loads((FOLDER / "kernels.json").read_text())
    return Manifest(
        entries=tuple(_entry(Entry, k) for k in raw["kernels"] if k["kind"] == "gemm"),
        pack_entries=tuple(_entry(PackEntry, k) for k in raw["kernels"] if k["kind"] == "pack"),
        ceiling_entries=tuple(
            _entry(CeilingEntry, k) for k in raw["kernels"] if k["kind"] == "ceiling"
        ),
        rungs=tuple(_entry(RungEntry, k) for k in raw["kernels"] if k["kind"] == "rung"),
        conversion_entries=tuple(
            _entry(ConversionEntry, k) for k in raw["kernels"] if k["kind"] in CONVERSIONS
        ),
        args={
            name: ArgumentLayout(
                a["tensor_map_bytes"], a["bytes"], tuple((n, t, o) for n, t, o in a["fields"])
            )
            for name, a in raw["args"].items()
        },
        fatbins=raw["fatbins"],
        sources=raw["sources"],
        nvcc=raw["nvcc"],
    )


def source_files(root: Path) -> list[Path]:
    """The files under ``cuda/`` that the fatbins are made from, in a fixed order."""
    kinds = {".cu", ".cuh", ".def"}
    return sorted(p for p in root.rglob("*") if p.suffix in kinds)


def source_hash(files: Iterable[Path]) -> str:
    """One hash over names and contents, the guard that ties the fatbins to their sources."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
