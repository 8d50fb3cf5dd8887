"""Timing on the device: graphs of launches, events around each, telemetry beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from sp24cli.bench.statistics import (
    Settings,
    Spread,
    drift,
    interleave,
    launches_for,
    marks_within,
    power_from_energy,
    window,
)


class Work(Protocol):
    """A product that can be put on the device's stream again and again."""

    @property
    def slots(self) -> int:
        """Copies of the inputs it cycles through."""

    def enqueue(self, slot: int) -> None:
        """One launch on the inputs of that copy."""


class GraphLike(Protocol):
    def launch(self) -> None: ...


class Marks(Protocol):
    """Places in the device's work between which the SMs' clock is known (gpu/clocks.py)."""

    def record(self, mark: int) -> None: ...

    def mhz(self, first: int, last: int) -> float | None: ...

    def free(self) -> None: ...


class Timer(Protocol):
    """What the instrument asks of a device; `DeviceTimer` is the real one."""

    def capture(self, enqueue: Callable[[], None]) -> GraphLike: ...

    def synchronize(self) -> None: ...

    def event(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...

    def marks(self, count: int) -> Marks: ...

    def sample(self) -> Any:
        """A telemetry sample (see gpu/telemetry.py), or None where there is no telemetry."""


class DeviceTimer:
    """`Timer` by sp24cli.gpu."""

    def __init__(self, device: Any, telemetry: Any = None) -> None:
        from sp24cli.gpu.device import elapsed_ms

        self._device = device
        self._telemetry = telemetry
        self.elapsed_ms = elapsed_ms
        self.capture = device.capture
        self.synchronize = device.synchronize
        self.event = device.event

    def marks(self, count: int) -> Marks:
        from sp24cli.gpu.clocks import ClockMarks

        return ClockMarks(self._device, count)

    def sample(self) -> Any:
        return self._telemetry.sample() if self._telemetry is not None else None


@dataclass(frozen=True)
class State:
    """The chip during a window: the clock that its SMs counted, and medians of what telemetry
    read; None where it cannot.

    ``power_w`` is only known of a sustained window: the card's own reading is an average over
    longer than a burst.
    """

    sm_mhz: float | None = None
    mem_mhz: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    limit_w: float | None = None
    throttle: tuple[str, ...] = ()

    @classmethod
    def middle(cls, readings: Sequence[Any]) -> State:
        """The medians of some readings, which have no clock of the SMs, or of the states of
        several runs."""

        def of(name: str) -> float | None:
            values = [v for v in (getattr(r, name, None) for r in readings) if v is not None]
            return float(median(values)) if values else None

        reasons = {reason for reading in readings for reason in reading.throttle}
        return cls(
            of("sm_mhz"),
            of("mem_mhz"),
            of("power_w"),
            of("temp_c"),
            of("limit_w"),
            tuple(sorted(reasons)),
        )


@dataclass(frozen=True)
class Timing:
    """Time of one product in a window, in microseconds, and the chip meanwhile.

    ``drift`` is the relative distance between the fastest and the slowest round's median.
    """

    us: Spread
    state: State
    drift: float

    def doubts(self, noise_limit: float) -> tuple[str, ...]:
        """What a reader must know before trusting the number."""
        found = []
        if self.us.mad > noise_limit:
            found.append(f"noise {self.us.mad:.1%}")
        if self.drift > 2 * noise_limit:
            found.append(f"rounds differ by {self.drift:.1%}")
        if self.us.samples < 5:
            found.append(f"only {self.us.samples} samples")
        return tuple(found)


@dataclass(frozen=True)
class Measurement:
    """Both figures of one candidate. ``launches`` is how many products one sample averages."""

    burst: Timing
    sustained: Timing
    launches: int


@dataclass(frozen=True)
class _Prepared:
    graph: GraphLike
    launches: int
    graph_ms: float

    @property
    def us(self) -> float:
        """Of one product."""
        return 1000.0 * self.graph_ms / self.launches


@dataclass(frozen=True)
class _Run:
    """Milliseconds of one product in each sample of the two windows, and the chip in each."""

    burst: list[float]
    sustained: list[float]
    burst_state: State
    sustained_state: State


class Instrument:
    """Times candidates on one device. ``clock`` and ``sleep`` are the host's, in seconds."""

    def __init__(
        self,
        timer: Timer,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timer = timer
        self._clock = clock
        self._sleep = sleep
        self.settings = settings

    def measure(
        self,
        candidates: Sequence[Work],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Measurement]:
        """Burst and sustained of each candidate, in their order; runs of all are interleaved.

        ``progress`` gets (runs done, runs in all).
        """
        settings = self.settings
        prepared = [self._prepare(work) for work in candidates]
        runs: list[list[_Run]] = [[] for _ in candidates]
        orders = interleave(len(candidates), settings.rounds, settings.seed)
        done = 0
        for order in orders:
            for index in order:
                runs[index].append(self._run(prepared[index]))
                done += 1
                if progress is not None:
                    progress(done, settings.rounds * len(candidates))
        return [
            _combine(of_one, ready.launches) for of_one, ready in zip(runs, prepared, strict=True)
        ]

    def quick_us(self, work: Work, repeats: int = 5, hopeless_us: float = math.inf) -> float:
        """A rough time of one product, microseconds, to rank many candidates: the least of
        ``repeats`` graphs on a warm chip. One that takes more than ``hopeless_us`` at first is
        not repeated."""
        ready = self._prepare(work, hopeless_us)
        if ready.us > hopeless_us:
            return ready.us
        return self._least_us(ready, repeats)

    def quick_all_us(self, works: Sequence[Work], repeats: int, rounds: int) -> list[float]:
        """`quick_us` of each, the least of ``rounds`` in which all take their turn, so that heat
        falls on all alike."""
        prepared = [self._prepare(work) for work in works]
        times = [[self._least_us(ready, repeats) for ready in prepared] for _ in range(rounds)]
        return [min(of_one) for of_one in zip(*times, strict=True)]

    def _least_us(self, ready: _Prepared, repeats: int) -> float:
        """Microseconds of one product, the least of ``repeats`` graphs."""
        return 1000.0 * min(self._time(ready.graph) for _ in range(repeats)) / ready.launches

    def _prepare(self, work: Work, hopeless_us: float = math.inf) -> _Prepared:
        """A graph long enough, found by measuring shorter ones; a short one of a product that
        takes more than ``hopeless_us``. Leaves the chip warm."""
        for slot in range(work.slots):
            work.enqueue(slot)  # loads modules, which a capture must not
        self._timer.synchronize()
        launches = work.slots
        for _ in range(4):
            ready = self._capture(work, launches)
            if ready.graph_ms >= 0.9 * self.settings.graph_ms or ready.us > hopeless_us:
                break
            enough = launches_for(ready.graph_ms / launches, work.slots, self.settings.graph_ms)
            launches = max(enough, launches + work.slots)
        return ready

    def _capture(self, work: Work, launches: int) -> _Prepared:
        def enqueue() -> None:
            for launch in range(launches):
                work.enqueue(launch % work.slots)

        graph = self._timer.capture(enqueue)
        self._time(graph)  # the first launch also uploads the graph
        return _Prepared(graph, launches, self._time(graph))

    def _time(self, graph: GraphLike) -> float:
        start, end = self._timer.event(), self._timer.event()
        start.record()
        graph.launch()
        end.record()
        end.synchronize()
        return self._timer.elapsed_ms(start, end)

    def _run(self, ready: _Prepared) -> _Run:
        """One run after an idle pause, gapless but for the marks: microseconds, between samples
        and twice or so in a burst."""
        settings = self.settings
        # The clock was estimated on a warm chip; a quarter more covers one that runs faster.
        graphs = 1 + int(1.25 * settings.sustained_to_ms / ready.graph_ms)
        every = max(1, int(settings.burst_ms / 2 / ready.graph_ms))
        marked = range(0, graphs, every)
        ends = [self._timer.event() for _ in range(graphs)]
        starts = [ends[i - 1] if i % every else self._timer.event() for i in range(graphs)]
        marks = self._timer.marks(len(marked) + 1)
        self._timer.synchronize()
        self._sleep(settings.idle_ms / 1000.0)
        began = self._clock()
        for i in range(graphs):
            if i in marked:
                marks.record(i // every)
                starts[i].record()
            ready.graph.launch()
            ends[i].record()
        marks.record(len(marked))
        burst_state, sustained_state = self._watch(began)
        self._timer.synchronize()
        samples = list(map(self._timer.elapsed_ms, starts, ends))
        marks_ms = [*(math.fsum(samples[:i]) for i in marked), math.fsum(samples)]

        def figures(state: State, start_ms: float, end_ms: float) -> tuple[list[float], State]:
            inside = window(samples, start_ms, end_ms)
            mhz = marks.mhz(*marks_within(marks_ms, start_ms, end_ms))
            return [sample / ready.launches for sample in inside], replace(state, sm_mhz=mhz)

        burst, burst_state = figures(burst_state, 0.0, settings.burst_ms)
        sustained, sustained_state = figures(
            sustained_state, settings.sustained_from_ms, settings.sustained_to_ms
        )
        marks.free()
        return _Run(burst, sustained, burst_state, sustained_state)

    def _watch(self, began: float) -> tuple[State, State]:
        """Telemetry until the run's end by the host's clock: the state in either window.

        A window too short for a reading of its own takes the first one after its start.
        """
        settings = self.settings
        readings: list[tuple[float, Any]] = []
        while not readings or readings[-1][0] < settings.sustained_to_ms:
            at = 1000.0 * (self._clock() - began)
            reading = self._timer.sample()
            if reading is None:
                return State(), State()
            readings.append((at, reading))
            self._sleep(0.002)
        early = [r for at, r in readings if at <= settings.burst_ms] or [readings[0][1]]
        late = [r for at, r in readings if at >= settings.sustained_from_ms]
        energy = [
            (at, float(r.energy_mj))
            for at, r in readings
            if at > settings.burst_ms and r.energy_mj is not None
        ]
        burst, sustained = State.middle(early), State.middle(late)
        power = power_from_energy(energy)
        return replace(burst, power_w=None), replace(
            sustained, power_w=sustained.power_w if power is None else power
        )


def _combine(runs: Sequence[_Run], launches: int) -> Measurement:
    def timing(samples: list[list[float]], states: list[State]) -> Timing:
        us = [[1000.0 * ms for ms in of_run] for of_run in samples]
        return Timing(
            Spread.of([x for of_run in us for x in of_run]),
            State.middle(states),
            drift([median(of_run) for of_run in us]),
        )

    return Measurement(
        timing([r.burst for r in runs], [r.burst_state for r in runs]),
        timing([r.sustained for r in runs], [r.sustained_state for r in runs]),
        launches,
    )
