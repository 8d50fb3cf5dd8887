"""The instrument on a simulated chip that slows down as it heats up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest

from sp24cli.bench.instrument import Instrument, State
from sp24cli.bench.statistics import Settings


@dataclass(frozen=True)
class Reading:
    power_w: float | None
    throttle: tuple[str, ...]
    mem_mhz: float | None = 3201.0
    temp_c: float | None = None
    limit_w: float | None = 700.0
    energy_mj: float | None = None


class Chip:
    """A clock that host and device share. Work runs at full speed for 100 ms after an idle
    pause, then takes 1.5 times as long; pausing 200 ms cools it again."""

    def __init__(self, telemetry: bool = True, counter: bool = False) -> None:
        self.counter = counter
        self.now = 0.0  # host, ms
        self.free_at = 0.0  # device, ms
        self.cold_since = 0.0
        self.log: list[tuple[str, float]] = []
        self.captures = 0
        self.capturing: list[tuple[object, int]] | None = None
        self.telemetry = telemetry

    # host
    def clock(self) -> float:
        return self.now / 1000

    def sleep(self, seconds: float) -> None:
        self.now += 1000 * seconds
        if seconds >= 0.2:
            assert self.free_at <= self.now, "idled while the device was busy"
            self.cold_since = self.now
            self.log.append(("idle", self.now))

    # device
    def enqueue(self, work: Simulated, slot: int) -> None:
        if self.capturing is not None:
            self.capturing.append((work, slot))
        else:
            work.warmed.add(slot)
            self.spend(work)

    def spend(self, work: Simulated) -> None:
        start = max(self.free_at, self.now)
        slow = 1.5 if start - self.cold_since > 100 else 1.0
        self.free_at = start + slow * work.ms

    def capture(self, enqueue):
        self.captures += 1
        self.capturing = []
        enqueue()
        graph = Graph(self, self.capturing)
        self.capturing = None
        return graph

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def event(self) -> Event:
        return Event(self)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return end.at - start.at

    def sample(self) -> Reading | None:
        if not self.telemetry:
            return None
        hot = self.now - self.cold_since > 100
        energy = None
        if self.counter:  # 640 W, told every 20 ms
            energy = 640.0 * 20 * (self.now // 20)
        return Reading(700.0 if hot else 500.0, ("power",) * hot, energy_mj=energy)

    def marks(self, count: int) -> Marks:
        return Marks(self, count)


class Marks:
    """Cycles at 1980 MHz while the chip is cold, at 1320 after that."""

    def __init__(self, chip: Chip, count: int) -> None:
        self.chip, self.count = chip, count
        self.at: list[float] = []  # ms since the pause

    def record(self, mark: int) -> None:
        assert mark == len(self.at) < self.count
        self.at.append(max(self.chip.free_at, self.chip.now) - self.chip.cold_since)

    def mhz(self, first: int, last: int) -> float:
        assert len(self.at) == self.count
        begin, end = self.at[first], self.at[last]
        cold = max(0.0, min(end, 100.0) - begin)
        return round((1980.0 * cold + 1320.0 * (end - begin - cold)) / (end - begin), 6)

    def free(self) -> None:
        self.count = 0


class Event:
    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.at = -1.0

    def record(self) -> None:
        self.at = max(self.chip.free_at, self.chip.now)

    def synchronize(self) -> None:
        self.chip.synchronize()


class Graph:
    def __init__(self, chip: Chip, launches: list) -> None:
        self.chip = chip
        self.launches = launches

    def launch(self) -> None:
        for work, slot in self.launches:
            assert slot in work.warmed, "captured before it ever ran"
            work.ran.append(slot)
            self.chip.spend(work)
        self.chip.log.append((self.launches[0][0].name, self.chip.free_at))


class Simulated:
    def __init__(self, chip: Chip, name: str, ms: float, slots: int = 1) -> None:
        self.chip, self.name, self.ms, self.slots = chip, name, ms, slots
        self.warmed: set[int] = set()
        self.ran: list[int] = []

    def enqueue(self, slot: int) -> None:
        self.chip.enqueue(self, slot)


def measure(chip, works, **settings):
    instrument = Instrument(chip, Settings(**settings), clock=chip.clock, sleep=chip.sleep)
    return instrument.measure(works)


def test_burst_and_sustained_are_told_apart():
    chip = Chip()
    (found,) = measure(chip, [Simulated(chip, "a", 0.125, slots=2)])
    assert found.burst.us.median == pytest.approx(125.0)
    assert found.sustained.us.median == pytest.approx(187.5)
    assert found.launches == 8  # whole turns of 2 that reach a millisecond
    assert found.burst.us.samples == 3 * 12  # 12 ms hold twelve graphs, in three rounds
    assert found.burst.drift == pytest.approx(0.0, abs=1e-9)
    assert found.burst.us.mad == pytest.approx(0.0, abs=1e-9)


def test_telemetry_stands_beside_its_own_window():
    chip = Chip()
    (found,) = measure(chip, [Simulated(chip, "a", 0.1)])
    assert found.burst.state == State(1980.0, 3201.0, None, None, 700.0, ())
    assert found.sustained.state == State(1320.0, 3201.0, 700.0, None, 700.0, ("power",))


def test_power_comes_from_the_energy_counter_where_there_is_one():
    chip = Chip(counter=True)
    (found,) = measure(chip, [Simulated(chip, "a", 0.1)])
    assert found.sustained.state.power_w == pytest.approx(640.0, rel=0.02)


def test_without_telemetry_there_are_time_and_clock():
    chip = Chip(telemetry=False)
    (found,) = measure(chip, [Simulated(chip, "a", 0.1)])
    assert found.sustained.state == State(sm_mhz=1320.0)
    assert found.sustained.us.median == pytest.approx(150.0)


def test_every_run_starts_cold_and_runs_take_turns():
    chip = Chip()
    works = [Simulated(chip, name, ms) for name, ms in (("a", 0.2), ("b", 0.3), ("c", 0.4))]
    measure(chip, works, rounds=4)
    first_idle = next(i for i, (what, _) in enumerate(chip.log) if what == "idle")
    turns = [
        after for (before, _), (after, _) in pairwise(chip.log[first_idle:]) if before == "idle"
    ]
    assert len(turns) == 12
    for start in range(0, 12, 3):
        assert sorted(turns[start : start + 3]) == ["a", "b", "c"]
    assert turns[3:6] == turns[0:3][::-1]


def test_the_rotation_touches_every_copy_equally():
    chip = Chip()
    work = Simulated(chip, "a", 0.05, slots=4)
    measure(chip, [work], rounds=1)
    assert work.ran[:8] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert len({work.ran.count(slot) for slot in range(4)}) == 1


@pytest.mark.parametrize("ms", [0.002, 0.07, 0.9, 7.0, 40.0])
def test_graphs_are_long_enough_whatever_the_kernel_takes(ms):
    chip = Chip()
    (found,) = measure(chip, [Simulated(chip, "a", ms)], rounds=1)
    assert found.launches * ms >= 0.9
    assert found.burst.us.median == pytest.approx(1000 * ms)
    assert found.sustained.us.median == pytest.approx(1500 * ms)


def test_a_kernel_longer_than_the_window_is_doubted():
    chip = Chip()
    (found,) = measure(chip, [Simulated(chip, "a", 40.0)], rounds=1)
    assert any("samples" in doubt for doubt in found.burst.doubts(0.02))


def test_noise_and_drift_are_doubted():
    chip = Chip()
    work = Simulated(chip, "a", 1.0)
    plain_spend = chip.spend
    calls = 0

    def uneven(of):
        nonlocal calls
        calls += 1
        of.ms = 1.0 if calls % 2 else 1.2
        plain_spend(of)

    chip.spend = uneven
    (found,) = measure(chip, [work])
    assert any(doubt.startswith("noise") for doubt in found.burst.doubts(0.02))
    assert found.burst.doubts(0.5) == ()


def test_quick_ranking_orders_by_time():
    chip = Chip()
    instrument = Instrument(chip, Settings(), clock=chip.clock, sleep=chip.sleep)
    times = [instrument.quick_us(Simulated(chip, "x", ms, slots=2)) for ms in (0.3, 0.1, 0.2)]
    assert times[1] < times[2] < times[0]


def test_all_take_their_turn_in_every_round_and_are_captured_for_one():
    """To put a graph together takes the host longer than the chip to run it."""
    chips = [Chip(), Chip()]
    for chip, repeats, rounds in zip(chips, (1, 2), (1, 3), strict=True):
        instrument = Instrument(chip, Settings(), clock=chip.clock, sleep=chip.sleep)
        works = [Simulated(chip, *work, slots=2) for work in (("a", 0.3), ("b", 0.1), ("c", 0.2))]
        found = instrument.quick_all_us(works, repeats, rounds)
        assert found[1] < found[2] < found[0]
    assert chips[0].captures == chips[1].captures
    assert [name for name, _ in chips[1].log[-18:]] == [*"aabbcc"] * 3


def test_quick_ranking_spends_little_on_the_hopeless():
    spent = {}
    for limit in (math.inf, 150.0, 100.0):
        chip = Chip()
        instrument = Instrument(chip, Settings(), clock=chip.clock, sleep=chip.sleep)
        us = instrument.quick_us(Simulated(chip, "x", 0.12, slots=2), hopeless_us=limit)
        assert us == pytest.approx(120.0)
        spent[limit] = chip.clock()
    assert spent[math.inf] == spent[150.0] > 4 * spent[100.0]


def test_progress_counts_the_runs():
    chip = Chip()
    seen = []
    instrument = Instrument(chip, Settings(rounds=2), clock=chip.clock, sleep=chip.sleep)
    instrument.measure(
        [Simulated(chip, "a", 0.5), Simulated(chip, "b", 0.5)],
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
