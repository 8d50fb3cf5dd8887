"""The arithmetic of a measurement, by values worked out by hand."""

from __future__ import annotations

import pytest

from sp24cli.bench.statistics import (
    MAX_SLOTS,
    Settings,
    Spread,
    drift,
    interleave,
    launches_for,
    marks_within,
    power_from_energy,
    quantile,
    rotation,
    window,
)

MB = 10**6


def test_spread_of_known_samples():
    spread = Spread.of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert spread.median == 3.0
    assert spread.mad == pytest.approx(1.0 / 3.0)  # deviations 1 2 1 0 97
    assert spread.p5 == pytest.approx(1.2)
    assert spread.p95 == pytest.approx(80.8)
    assert spread.samples == 5


def test_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 2.5), (1.0, 3.0)])
def test_quantile_interpolates(q, expected):
    assert quantile([3.0, 1.0, 2.0], q) == pytest.approx(expected)


def test_quantile_of_one_sample_is_that_sample():
    assert quantile([7.0], 0.95) == 7.0


@pytest.mark.parametrize(
    ("input_mb", "slots", "past"),
    [
        (45, 7, True),  # 8192x128x8192: 300 MB / 45 MB
        (147, 3, True),
        (300, 1, True),
        (1000, 1, True),
        (1, MAX_SLOTS, False),  # 300 copies would be needed
    ],
)
def test_rotation_passes_the_l2(input_mb, slots, past):
    turn = rotation(input_mb * MB, 0, 60 * MB, 10**12)
    assert (turn.slots, turn.past_l2) == (slots, past)
    assert not past or turn.slots * input_mb >= 5 * 60


def test_rotation_stays_within_memory():
    turn = rotation(100 * MB, 0, 60 * MB, 250 * MB)
    assert (turn.slots, turn.past_l2) == (2, False)
    # Each copy has an output: a product of few columns writes far more than it reads.
    assert rotation(MB, 2000 * MB, 60 * MB, 18000 * MB).slots == 8


def test_rotation_of_nothing_still_runs():
    assert rotation(0, 0, 60 * MB, 10**9).slots == MAX_SLOTS
    assert rotation(10**10, 0, 60 * MB, 10**9).slots == 1


@pytest.mark.parametrize(
    ("launch_ms", "slots", "launches"),
    [(0.25, 1, 4), (0.25, 3, 6), (0.3, 4, 4), (3.0, 1, 1), (3.0, 2, 2), (0.003, 64, 384)],
)
def test_graphs_hold_whole_turns_and_last_long_enough(launch_ms, slots, launches):
    found = launches_for(launch_ms, slots, 1.0)
    assert found == launches
    assert found % slots == 0
    assert found * launch_ms >= 1.0


def test_rounds_are_permutations_and_pairs_balance_positions():
    orders = interleave(5, 6, seed=1)
    assert all(sorted(order) == list(range(5)) for order in orders)
    for first, second in zip(orders[::2], orders[1::2], strict=True):
        assert second == first[::-1]
    positions = [sum(order.index(i) for order in orders) for i in range(5)]
    assert len(set(positions)) == 1
    assert len({tuple(order) for order in orders}) > 2


def test_interleaving_depends_on_the_seed_alone():
    assert interleave(6, 3, seed=9) == interleave(6, 3, seed=9)
    assert interleave(6, 3, seed=9) != interleave(6, 3, seed=10)


def test_window_takes_samples_wholly_inside():
    samples = [1.0, 2.0, 3.0, 4.0, 5.0]  # end at 1 3 6 10 15
    assert window(samples, 0.0, 6.0) == [1.0, 2.0, 3.0]
    assert window(samples, 0.0, 5.9) == [1.0, 2.0]
    assert window(samples, 3.0, 10.0) == [3.0, 4.0]


def test_window_shorter_than_a_sample_takes_the_one_that_covers_it():
    assert window([5.0, 20.0, 5.0], 8.0, 12.0) == [20.0]


def test_window_past_the_end_takes_the_last_sample():
    assert window([5.0, 6.0], 100.0, 200.0) == [6.0]


def test_marks_of_a_window_or_else_those_around_its_middle():
    marks = [0.0, 6.0, 12.0, 18.0, 40.0]
    assert marks_within(marks, 0.0, 12.0) == (0, 2)
    assert marks_within(marks, 5.0, 39.0) == (1, 3)
    assert marks_within(marks, 7.0, 13.0) == (1, 2)  # one inside: the middle is 10
    assert marks_within(marks, 13.0, 14.0) == (2, 3)
    assert marks_within(marks, 19.0, 30.0) == (3, 4)
    assert marks_within(marks, 100.0, 200.0) == (3, 4)
    assert marks_within([0.0, 90.0], 0.0, 12.0) == (0, 1)


def test_drift_is_relative_to_the_middle():
    assert drift([1.0, 1.1, 0.9]) == pytest.approx(0.2)
    assert drift([2.0]) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"burst_ms": 0.0},
        {"burst_ms": 160.0},
        {"sustained_from_ms": 200.0},
        {"rounds": 0},
        {"graph_ms": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"windows|round"):
        Settings(**wrong)


def test_power_is_taken_between_moves_of_the_counter():
    # 500 W; the counter moves every 20 ms and is read every 7
    readings = [(t, 500.0 * 20 * (t // 20)) for t in range(3, 197, 7)]
    assert power_from_energy(readings) == pytest.approx(500.0, rel=0.1)
    # Reading it at both ends only would have been wrong by much more.
    assert (readings[-1][1] - readings[0][1]) / (readings[-1][0] - readings[0][0]) < 0.96 * 500
    # Seven moves are too few: one more or less would be too much.
    assert power_from_energy(readings[: 7 * 20 // 7 + 1]) is None


@pytest.mark.parametrize("energies", [[], [5.0], [5.0, 5.0, 5.0], [5.0, 5.0, 6.0]])
def test_a_counter_that_hardly_moves_tells_nothing(energies):
    assert power_from_energy([(float(t), e) for t, e in enumerate(energies)]) is None
