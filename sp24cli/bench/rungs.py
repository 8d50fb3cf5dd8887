"""Why each rung of the ladders helps, what the tuning log says it gave, and where an H200 says
otherwise.

The log is the public record of two tuning runs of a sparse GEMM at 4096×8192×8192 on an H800 PCIe
(114 SMs), FP16 from 368 to 655 TFLOPS and E4M3 from 671 to 1127. Its kernels accumulate in FP16,
which halves their registers, so that two of them may share an SM; the rungs accumulate in f32.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sp24cli.kernels.manifest import RungEntry

#: The label of the last rung, which is the kernel that sp24 chooses for the shape.
PRODUCTION = "sp24"

#: What tells the last rung from the one before.
PRODUCTION_CHANGED = "the kernel that sp24 chooses: launches overlap, two threads copy"


@dataclass(frozen=True)
class Note:
    """A rung explained. ``log_tflops`` is the log's figure where it has one, ``log_step`` its gain
    over the log's step before (0.13: 13 %); both None for sp24's own rungs."""

    why: str
    log_tflops: float | None = None
    log_step: float | None = None


_TWO_CONSUMERS = (
    "B of a stage is read from L2 once for 128 rows of A instead of 64, and one warpgroup's waits "
    "are filled by the other's wgmmas. One warpgroup cannot hold 128 x 256 itself: that takes 256 "
    "accumulators a thread."
)
_PIPELINED = (
    "Waiting for all wgmmas before the next stage leaves the tensor cores idle while the barrier, "
    "the metadata and the issue pass. With wait_group 1 they work on one stage while the next is "
    "issued. The registers of the metadata are read while a wgmma runs, so they must alternate: "
    "the loop is unrolled twice, and check.py proves it on the machine code."
)
_WARP_RELEASE = (
    "The stage was given back by the warpgroup as a whole, after a barrier of 128 threads each "
    "step; now each warp arrives for itself as soon as its own wait has returned."
)
_IMAGE = (
    "64 rows of A and their metadata lie in memory as the wgmma reads them, swizzle included: one "
    "contiguous copy of {size} a warpgroup instead of two tensor copies, fewer requests to L2, and "
    "a lane's words in one load."
)
_MULTICAST = (
    "Two CTAs on neighbouring SMs take tiles below one another, so they need the same B: each "
    "fetches half and the copy lands in both. L2 delivers about 35 bytes a cycle to an SM; without "
    "the sharing tiles of 128 x 256 are bound by that."
)
_STAGES = (
    "More bytes in flight cover the latency of L2 and memory, and let the two CTAs of a cluster "
    "drift apart. Shared memory is full with five: {size}."
)
_PERSISTENT = (
    "The producer goes on to the next tile while consumers still store this one, and barriers are "
    "set up once: there is no empty ring at a tile's start. The grid is what the chip runs at once."
)
_TILE_ORDER = (
    "What runs together should read little, and leave in L2 what is read again. Where one operand "
    "fits half of L2, its tiles run together and the other is streamed past it, marked to leave "
    "first; else tiles go in groups of eight rows of clusters. At M = 4096 the plain order, all "
    "rows of M first, is the right one already, and the mark is what is left."
)
_WIDE = (
    "Stored alone, the 32 elements of a warp's store make four pieces of 16 bytes in four rows of "
    "D, half a sector each. Turned through shared memory, by stmatrix, a row of D gets its 128 "
    "bytes at once, an eighth of the stores. Scales come by asynchronous copies during the tile."
)
_OVERLAPPED = (
    "A side rung: rounded to 16 bits a finished tile takes 64 registers a thread, which fit beside "
    "the accumulators of the next, so it can be stored a chunk a step while the tensor cores work. "
    "It paid while stores were scattered and scales were loaded at a tile's end. Now the other "
    "warpgroup's wgmmas hide a tile's end as well, and the steps that store are the longer ones."
)
_ONE_WARP = (
    "The wgmmas alone fill the port of shared memory, so each access beside them lengthens the "
    "loop: three warps of four need not ask the barrier of a stage, nor arrive there, if the first "
    "does it for them and they meet at barriers of the warpgroup, which are not in shared memory."
)
_REGISTERS = (
    "A side rung: A is brought to registers by ldmatrix and the wgmma reads only B from shared "
    "memory, a ninth less for its read port; but each word of A is read twice and costs power and "
    "registers. By descriptor is ahead where it counts, in the full kernel."
)
_LAST = (
    "The same pipeline with what a chain of products gains from: CTAs of the next launch start "
    "where CTAs of this one have ended (programmatic dependent launch), and a B so small that all "
    "CTAs read it at once is brought into L2 first. If the choice is a kernel of three consumers "
    "(w3), its tiles of 192 rows fetch B two thirds as often."
)

NOTES: dict[tuple[str, str], Note] = {
    ("e4m3", "baseline"): Note(
        "Every load of metadata goes to global memory with its latency in the way of the wgmmas "
        "that need it, twice a stage. Two stages of K 128 and a wait for all wgmmas leave nothing "
        "to hide it behind.",
        671.0,
    ),
    ("e4m3", "meta_copied"): Note(
        "The producer brings metadata by TMA with the operands, a stage ahead, and lanes read it "
        "from shared memory: a few dozen cycles instead of hundreds.",
        759.0,
        0.13,
    ),
    ("e4m3", "early_release"): Note(
        "One barrier to wait for instead of two, and the stage goes back right after the wait that "
        "proves it read, not after the next stage's wgmmas have been issued. The log's kernel gave "
        "it back before its wgmmas had been waited for, which is a race. The safe part alone gives "
        "704 TFLOPS after 569 on an H200.",
        772.0,
        0.017,
    ),
    ("e4m3", "pipelined"): Note(
        _PIPELINED + " The log's kernel released the stage before it committed the wgmmas that "
        "read it; here the stage before goes back, once its group is waited for. With two stages, "
        "both held then, that is slower on an H200, 580 TFLOPS after 704, until there are three.",
        811.0,
        0.051,
    ),
    ("e4m3", "two_consumers"): Note(_TWO_CONSUMERS, 897.0, 0.106),
    ("e4m3", "three_stages"): Note(
        "With two stages and a group in flight the producer has one stage to fill, and only from "
        "the moment the other is given back: every copy's latency shows. A third lets it run "
        "ahead.",
        1090.0,
        0.215,
    ),
    ("e4m3", "warp_release"): Note(
        _WARP_RELEASE + " The log's last kernel arrives between the two wgmmas that read the very "
        "stage it gives back: a race, and its gain cannot be had safely. This is the earliest safe "
        "point, the wait that proves the stage before.",
        1127.0,
        0.034,
    ),
    ("e4m3", "block_image"): Note(_IMAGE.format(size="5 KB")),
    ("e4m3", "multicast"): Note(_MULTICAST),
    ("e4m3", "five_stages"): Note(_STAGES.format(size="210 KB")),
    ("e4m3", "persistent"): Note(
        _PERSISTENT + " At this height it is slower on an H200, 1812 TFLOPS after 1869: tiles "
        "still end slowly, and it pays once they do not (wide_stores)."
    ),
    ("e4m3", "tile_order"): Note(_TILE_ORDER),
    ("e4m3", "wide_stores"): Note(_WIDE),
    ("e4m3", "a_from_registers"): Note(_REGISTERS),
    ("e4m3", "overlapped_store"): Note(_OVERLAPPED),
    ("e4m3", "one_warp"): Note(_ONE_WARP),
    ("e4m3", PRODUCTION): Note(_LAST),
    ("f16", "baseline"): Note(
        "K tile 64 (packed rows of 64 bytes under the 64-byte swizzle), two stages, and a metadata "
        "word from global memory before each wgmma: lanes of a warp touch eight lines of it.",
        368.0,
    ),
    ("f16", "two_consumers"): Note(
        _TWO_CONSUMERS + " The third stage lets the producer run ahead. In the log's order this is "
        "the best that its compiler could express, 434 TFLOPS with the waits tightened before.",
        434.0,
        0.09,
    ),
    ("f16", "pipelined"): Note(_PIPELINED, None, 0.04),
    ("f16", "split_batch"): Note(
        "Each wgmma is a commit group of its own, and two of them may run. In the log it kept the "
        "issue slots full; with f32 accumulators the two form one chain on the same registers "
        "either way, and the wait falls on the same wgmma.",
        None,
        0.05,
    ),
    ("f16", "meta_readonly"): Note(
        "ld.global.nc tells that nobody writes the metadata, so that its loads need not be ordered "
        "with other memory operations. ptxas uses that: in the unrolled loop it lifts every second "
        "load above the wait for its stage.",
        None,
        0.005,
    ),
    ("f16", "meta_grouped"): Note(
        "What a warp reads of a stage lies in one cache line of 128 bytes, in the lanes' order: "
        "one line asked for instead of eight.",
        None,
        0.007,
    ),
    ("f16", "meta_pairs"): Note(
        "A lane's words of both steps lie side by side and come by one 8-byte load: half the load "
        "instructions, and one latency instead of two.",
        None,
        0.08,
    ),
    ("f16", "meta_hoisted"): Note(
        "Metadata does not come by the ring, so its load need not wait for the stage: issued "
        "before the wait it runs beside the copies. Half of the loads were there already, lifted "
        "by ptxas since they are read-only; now all are.",
        None,
        0.07,
    ),
    ("f16", "unrolled"): Note(
        "The loop over K unrolled 24 times turns ring positions and branches into straight code. "
        "FTZ saves nothing in the loop, where only the tensor cores compute: it touches the "
        "epilogue's two multiplications, and no bit of a product of 16-bit operands.",
        543.0,
    ),
    ("f16", "k_128"): Note(
        "Half as many steps, each with four wgmmas in a batch: packed rows of 128 bytes under the "
        "128-byte swizzle, metadata by TMA on a barrier of its own, and B by two copies, since a "
        "swizzled box is at most 128 bytes wide. A stage is twice as large, so there are two, both "
        "held while wgmmas run: that is slower on an H200, 572 TFLOPS after 693.",
        655.0,
        0.206,
    ),
    ("f16", "warp_release"): Note(_WARP_RELEASE + " Metadata shares the operands' barrier."),
    ("f16", "block_image"): Note(_IMAGE.format(size="4.5 KB")),
    ("f16", "multicast"): Note(_MULTICAST),
    ("f16", "five_stages"): Note(_STAGES.format(size="205 KB")),
    ("f16", "persistent"): Note(_PERSISTENT),
    ("f16", "tile_order"): Note(_TILE_ORDER),
    ("f16", "wide_stores"): Note(_WIDE),
    ("f16", "a_from_registers"): Note(_REGISTERS),
    ("f16", "overlapped_store"): Note(_OVERLAPPED),
    ("f16", "one_warp"): Note(_ONE_WARP),
    ("f16", PRODUCTION): Note(_LAST),
}

#: The operand types that have a ladder.
LADDERS = tuple(dict.fromkeys(ladder for ladder, _ in NOTES))


def explain(rungs: tuple[RungEntry, ...], name: str, ladder: str | None = None) -> str | None:
    """The text on the rungs called ``name`` (a label, a number or a kernel), None if there is none.

    ``ladder`` keeps to one operand type, else every ladder that has such a rung is told of.
    """
    parts = []
    for (of, label), note in NOTES.items():
        if ladder is not None and of != ladder:
            continue
        mine = [r for r in rungs if r.a_type == of]
        entry = next((r for r in mine if r.label == label), None)
        if entry is None:
            number, kernel, changed, side = len(mine), None, PRODUCTION_CHANGED, False
            if label != PRODUCTION:
                continue
        else:
            number, kernel, changed, side = entry.number, entry.name, entry.changed, entry.side
        if name not in (label, str(number), kernel):
            continue
        head = f"{of} rung {number}{' (side)' if side else ''}, {label}: {changed}"
        parts.append("\n".join([head, *_wrapped(note.why), *_log(note)]))
    return "\n\n".join(parts) or None


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 96, initial_indent="  ", subsequent_indent="  ")


def _log(note: Note) -> list[str]:
    told = []
    if note.log_tflops is not None:
        told.append(f"{note.log_tflops:.0f} TFLOPS")
    if note.log_step is not None:
        told.append(f"{note.log_step:+.1%} over the step before")
    return [f"  In the log (H800 PCIe, FP16 accumulation): {', '.join(told)}."] if told else []
