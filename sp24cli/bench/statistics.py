"""The arithmetic of a measurement, apart from the device: what to repeat, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Settings:
    """How every candidate is timed. Times in milliseconds.

    A run starts on a chip that idled ``idle_ms`` and goes on without a gap to
    ``sustained_to_ms``. *Burst* is the median over its first ``burst_ms``, *sustained* the median
    from ``sustained_from_ms`` to ``sustained_to_ms``, when clock and power have settled. A sample
    is one graph of at least ``graph_ms``. There are ``rounds`` runs of each candidate, taken in
    turn. A spread above ``noise_limit`` (relative median deviation) is reported as a doubt.
    """

    idle_ms: float = 300.0
    burst_ms: float = 12.0
    sustained_from_ms: float = 150.0
    sustained_to_ms: float = 200.0
    graph_ms: float = 1.0
    rounds: int = 3
    noise_limit: float = 0.02
    seed: int = 24

    def __post_init__(self) -> None:
        if not 0 < self.burst_ms <= self.sustained_from_ms < self.sustained_to_ms:
            raise ValueError("the windows must follow one another: burst, then sustained")
        if self.rounds < 1 or self.graph_ms <= 0:
            raise ValueError("at least one round, of graphs that take time")


@dataclass(frozen=True)
class Spread:
    """Median of some samples and how far they lie from it.

    ``mad`` is the median absolute deviation over the median; ``p5`` and ``p95`` are quantiles by
    linear interpolation.
    """

    median: float
    p5: float
    p95: float
    mad: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if not samples:
            raise ValueError("no samples")
        middle = median(samples)
        deviation = median(abs(x - middle) for x in samples)
        return cls(
            middle,
            quantile(samples, 0.05),
            quantile(samples, 0.95),
            deviation / middle if middle else 0.0,
            len(samples),
        )


def quantile(samples: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0..1) by linear interpolation between order statistics."""
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


#: How many times the L2 the rotated inputs span. A cache that replaces at random still serves a
#: share h of a cycle through W bytes, h = exp(-(W/L2)(1-h)): 11 % at 2.5 × L2, under 1 % at 5.
L2_MULTIPLE = 5

#: Copies of a problem at most; beyond it the inputs stay in L2 and the report says so.
MAX_SLOTS = 64


@dataclass(frozen=True)
class Rotation:
    """How many copies of the inputs a candidate cycles through, and whether they pass the L2."""

    slots: int
    past_l2: bool


def rotation(input_bytes: int, output_bytes: int, l2_bytes: int, memory_bytes: int) -> Rotation:
    """Copies needed so that no input is still in L2 when its turn comes again.

    ``input_bytes`` is what one product reads (packed A and B), ``output_bytes`` what it writes, of
    which every copy has its own, ``memory_bytes`` what all of them may take together.
    """
    wanted = max(1, -(-L2_MULTIPLE * l2_bytes // max(1, input_bytes)))
    room = max(1, memory_bytes // max(1, input_bytes + output_bytes))
    slots = min(wanted, MAX_SLOTS, room)
    return Rotation(slots, slots == wanted)


def launches_for(launch_ms: float, slots: int, graph_ms: float) -> int:
    """Launches a graph holds: whole turns of the rotation that take at least ``graph_ms``.

    Two events cost a few microseconds, so a graph of a millisecond keeps them under 1 %.
    """
    turn = max(launch_ms, 1e-6) * slots
    return slots * max(1, int(-(-graph_ms // turn)))


def interleave(candidates: int, rounds: int, seed: int) -> list[list[int]]:
    """The order of the candidates in each round.

    Rounds come in pairs of a shuffled order and its reverse, so that over a pair everyone stands
    equally early and equally late, and nobody always follows the hottest one.
    """
    rng = random.Random(seed)
    orders: list[list[int]] = []
    while len(orders) < rounds:
        order = list(range(candidates))
        rng.shuffle(order)
        orders += [order, order[::-1]]
    return orders[:rounds]


def window(samples_ms: Sequence[float], start_ms: float, end_ms: float) -> list[float]:
    """Those samples of a gapless run that lie wholly between two times since its start.

    If none does (one product may outlast the window), the sample that covers its middle.
    """
    inside: list[float] = []
    covering: list[float] = []
    begin = 0.0
    middle = (start_ms + end_ms) / 2
    for sample in samples_ms:
        end = begin + sample
        if start_ms <= begin and end <= end_ms:
            inside.append(sample)
        if begin <= middle < end:
            covering.append(sample)
        begin = end
    return inside or covering or list(samples_ms[-1:])


def marks_within(marks_ms: Sequence[float], start_ms: float, end_ms: float) -> tuple[int, int]:
    """The first and the last of some marks of a run that lie between two times since its start;
    if less than two do, the neighbours around the middle. There are two marks at least."""
    inside = [i for i, at in enumerate(marks_ms) if start_ms <= at <= end_ms]
    if len(inside) > 1:
        return inside[0], inside[-1]
    middle = (start_ms + end_ms) / 2
    after = min(max(sum(at <= middle for at in marks_ms), 1), len(marks_ms) - 1)
    return after - 1, after


def drift(medians: Sequence[float]) -> float:
    """Largest distance between the medians of the rounds, relative to their median."""
    middle = median(medians)
    return (max(medians) - min(medians)) / middle if middle else 0.0


#: Moves of the energy counter that make a figure.
_MOVES = 8


def power_from_energy(readings: Sequence[tuple[float, float]]) -> float | None:
    """Mean watts from readings of an energy counter, (milliseconds, millijoules).

    The counter moves in steps, so only the moments at which it was seen to move count. A step more
    or less between the first and the last is an error of one in their number: None with fewer than
    `_MOVES`. (On an H200 the few moves of a 200 ms run gave 390 W or 830 W at a cap of 700.)
    """
    moves = [now for before, now in pairwise(readings) if now[1] != before[1]]
    if len(moves) < _MOVES:
        return None
    (start, first), (end, last) = moves[0], moves[-1]
    return (last - first) / (end - start)
