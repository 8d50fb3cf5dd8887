"""Which kernel multiplies a given problem.

`choose` asks, in this order:

1. a measurement of this very problem, the user's own (``cache``) before the package's (``table``):
   its fastest kernel, unless by 2. one that was not timed there is faster by `_MARGIN` (kernels of
   which it was plain that they are slow are not, nor are those that are newer than a table);
2. the time of every kernel by the model (`gpu/model.py`), corrected by how far the model was off at
   problems alike that either of them has measured (`gpu/correction.py`); the least wins;
3. the model alone, on a GPU that nothing was measured on.

Measurements of all operand and output types and orders correct one another, since the kernels of
one tile are alike; only the first rule asks for the same types.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from sp24cli.errors import BadInputError, Sp24Error
from sp24cli.fragments import WIDENED, WeightScales, weight_scales
from sp24cli.gpu.correction import Correction
from sp24cli.kernels import choices
from sp24cli.kernels.choices import Measured, Problem, Table
from sp24cli.kernels.manifest import SUMMATIONS, WIDENED_SUMMATIONS, Entry, load
from sp24cli.scaling import ScaleSpec

if TYPE_CHECKING:
    from sp24cli.gpu.device import Device

_LOG = logging.getLogger(__name__)

#: Three to four times what the model, corrected, loses in the mean.
_MARGIN = 0.02


@dataclass(frozen=True)
class Choice:
    """A kernel and, in words, what it was chosen by."""

    kernel: Entry
    by: str


def candidates(
    type_name: str, out_type: str, order: str, summation: str = "fast", *, able: bool = False
) -> list[Entry]:
    """Every kernel for these operands (`optypes.OPERANDS`) that sums so, in manifest order;
    `Sp24Error` if there is none.

    ``able``: also those that can, but do more than is needed.
    """
    widens = summation not in SUMMATIONS
    more = able and not widens
    ways = SUMMATIONS[SUMMATIONS.index(summation) :] if more else (summation,)
    found = [
        e
        for e in load().entries
        if (e.type, e.out_type, e.order) == (type_name, out_type, order) and e.summation in ways
    ]
    if not found:
        how = "" if summation == "fast" or widens else f", summing {summation}"
        known = ", ".join(outputs(type_name, ways))
        only = f" (only into {known})" if known else ""
        raise Sp24Error(f"no kernel multiplies {type_name} into {out_type} {order}{how}{only}")
    return found


def outputs(type_name: str, ways: Sequence[str] | None = None) -> tuple[str, ...]:
    """The output types that kernels for these operands write, by any of these ways to sum, or
    any at all."""
    return tuple(
        dict.fromkeys(
            e.out_type
            for e in load().entries
            if e.type == type_name and (ways is None or e.summation in ways)
        )
    )


def block_summation(rows: int, block_k: int) -> str:
    """The summation for scales of ``rows`` rows of A that change along K at multiples of
    ``block_k`` alone (0: nowhere); `Sp24Error` where no kernel has one."""
    if block_k % 128 == 0:
        return "row128" if rows % 64 else "block128" if rows % 128 else "tile128"
    if block_k % 64 == 0:
        return "row64"
    raise Sp24Error(
        f"scales that change every {block_k} of K need a kernel that is not in this version: "
        "the kernels take multiples of 64"
    )


def summation(
    accumulate: str,
    block: tuple[int, int] | None,
    scale_rows: bool,
    scale_b_k: int,
    widened: WeightScales | None = None,
) -> str:
    """How a product sums (`manifest.SUMMATIONS`): as ``accumulate`` says, "fast" or "precise",
    unless scales of A, one a ``block``, or of B, one every ``scale_b_k`` of K (0: of all of it),
    change along K. "f16" is fast: what it says is the type of the sums. ``scale_rows``: A has a
    scale a row. A widened weight's, of `manifest.WIDENED_SUMMATIONS`, are fast; ``widened`` are the
    scales that it meets before. `Sp24Error` where no kernel sums so."""
    if accumulate not in ("fast", "precise", "f16"):
        raise Sp24Error(f"accumulation is fast, precise or f16, not {accumulate!r}")
    if widened is not None:
        if accumulate != "fast" or scale_b_k:
            what = f"scales every {scale_b_k} of K" if scale_b_k else f"{accumulate} sums"
            raise Sp24Error(f"no kernel that widens weights has {what}")
        return WIDENED_SUMMATIONS[widened]
    accumulate = "fast" if accumulate == "f16" else accumulate
    if block is None and not scale_b_k:
        return accumulate
    rows, columns = block or (int(scale_rows), 0)
    return block_summation(rows, math.gcd(columns, scale_b_k))


def check_block_scales(type_name: str, block: tuple[int, int]) -> None:
    """`Sp24Error` where no kernel applies such scales of a weight of this type."""
    summation = block_summation(*block)
    if not outputs(type_name, (summation,)):
        raise Sp24Error(
            f"block scales of {type_name} need a kernel that is not in this version: "
            "the kernels take those of e4m3"
        )


def needs_widening(type_name: str, spec: ScaleSpec) -> tuple[str, ...]:
    """The types of activations, of 16 bits, that a weight with such scales must be widened to;
    none where kernels of its own type apply them. `Sp24Error` where no kernel does."""
    if spec.block is None:
        return ()
    if type_name == "e4m3" and spec.is_small:
        weight_scales(spec)
        return WIDENED
    check_block_scales(type_name, spec.block)
    return ()


#: Of so many tokens, by a weight of so many rows, rows of tiles begin their sums at different
#: places along K. Source: kFewTokens and kManyRows in cuda/include/sp24/body.cuh (Round).
FEW_TOKENS, MANY_ROWS = 256, 3072


def sums_from_the_start(entry: Entry, m: int, n: int) -> bool:
    """Whether a kernel adds up all of K from its start on, as the ladder's rungs do: such sums are
    of the same bits, whatever the tile."""
    return entry.split == 1 and (n > FEW_TOKENS or m < MANY_ROWS)


class Selector:
    """Chooses kernels on ``sm_count`` SMs by ``known``: tables of this kind of GPU with their
    names, the first to be trusted most."""

    def __init__(self, sm_count: int, known: Sequence[tuple[str, Table]]) -> None:
        self._known = [(name, table) for name, table in known if table.measured]
        measured = [row for _, table in self._known for row in table.measured]
        self._correction = Correction(measured, sm_count)
        self._exact: dict[Problem, list[tuple[str, Measured]]] = {}
        for name, table in self._known:
            for row in table.measured:
                self._exact.setdefault(row.problem, []).append((name, row))

    def times_us(self, problem: Problem) -> dict[str, float]:
        """What every kernel is likely to take, in manifest order."""
        p = problem
        entries = candidates(p.type, p.out, p.order, p.summation)
        times = self._correction.times_us(entries, problem)
        return {e.name: float(us) for e, us in zip(entries, times, strict=True)}

    def choose(self, problem: Problem) -> Choice:
        """The kernel for a problem; see the module's head."""
        p = problem
        by_name = {e.name: e for e in candidates(p.type, p.out, p.order, p.summation)}
        likely = self.times_us(problem)
        exact = self._exact.get(problem, ())
        timed = {kernel for _, row in exact for kernel in row.times if kernel in by_name}
        for name, row in exact:
            times = {kernel: us for kernel, us in row.times.items() if kernel in by_name}
            if times:
                fastest = Measured(problem, times).kernel
                others = {kernel: us for kernel, us in likely.items() if kernel not in timed}
                if likely[fastest] <= (1 + _MARGIN) * min(others.values(), default=math.inf):
                    return Choice(by_name[fastest], name)
                likely = others
                break
        best = by_name[min(likely, key=likely.__getitem__)]
        names = " and ".join(name for name, _ in self._known)
        return Choice(best, f"model, corrected by {names}" if names else "model")


def choose(problem: Problem, sm_count: int, known: Sequence[tuple[str, Table]]) -> Choice:
    """The kernel for one problem; for several, `Selector` reads the tables once."""
    return Selector(sm_count, known).choose(problem)


@lru_cache(maxsize=4096)
def chosen(device: Device, problem: Problem) -> Choice:
    """`choose` by what is known of this device: the user's cache, then the package's table."""
    return selector(device).choose(problem)


@cache
def selector(device: Device) -> Selector:
    """`Selector` by the same."""
    return Selector(device.sm_count, known(device))


@cache
def known(device: Device) -> tuple[tuple[str, Table], ...]:
    """The tables for this device, by name. A cache that cannot be read is warned of and left."""
    found = [("table", table) for table in choices.shipped() if table.gpu == device.name]
    try:
        cached = choices.read_cache(choices.cache_path(device.uuid, load().sha256))
    except BadInputError as error:
        _LOG.warning("sp24: warning: choices of kernels ignored: %s", error)
        cached = None
    return (("cache", cached), *found) if cached is not None else tuple(found)


def forget() -> None:
    """Read the tables anew at the next choice."""
    known.cache_clear()
    selector.cache_clear()
    chosen.cache_clear()
