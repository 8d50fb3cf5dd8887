"""Comparing by bands: verdict, worst element, first wrong place."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sp24cli.verify.compare import Comparison


def compare(got: object, want: object, bound: object) -> Comparison:
    comparison = Comparison("x")
    comparison.add(np.array(got, np.float32), np.array(want, np.float64), np.array(bound))
    return comparison


def test_the_worst_element_is_the_one_nearest_its_bound() -> None:
    check = compare([[1, 2.5, 3.1]], [[1, 2, 3]], [[9, 9, 0.2]]).check()
    assert check.passed
    assert check.max_error == pytest.approx(0.1, abs=1e-6)
    assert check.bound == 0.2
    assert check.first_bad is None
    assert check.rel_frobenius == pytest.approx(math.sqrt((0.25 + 0.01) / 14), rel=1e-5)


def test_the_first_bad_place_counts_over_bands() -> None:
    comparison = Comparison("x")
    good = np.ones((3, 4), np.float32)
    bad = good.copy()
    bad[1, 2] = 5
    bad[2, 0] = 9
    for band, got in enumerate((good, bad, bad)):
        comparison.add(got, good, 0.5, first_row=3 * band)
    check = comparison.check()
    assert not check.passed
    assert check.first_bad == (4, 2)
    assert (check.max_error, check.bound) == (4.0, 0.5)


def test_the_first_bad_place_counts_over_columns_and_parts() -> None:
    good = np.ones((3, 4), np.float32)
    left, right = good.copy(), good.copy()
    left[2, 1], right[1, 3] = 5, 9
    later = Comparison("x")
    later.add(left, good, 0.5, first_row=6)
    earlier = Comparison("x")
    earlier.add(left, good, 0.5, first_row=3)
    earlier.add(right, good, 0.5, first_row=3, first_column=4)
    for parts in ((earlier, later), (later, earlier)):
        comparison = Comparison("x")
        for part in parts:
            comparison.merge(part)
        check = comparison.check()
        assert check.first_bad == (4, 7)
        assert (check.max_error, check.bound) == (8.0, 0.5)
        assert check.rel_frobenius == pytest.approx(math.sqrt((16 + 64 + 16) / 36))


def test_the_worst_element_counts_over_bands() -> None:
    comparison = Comparison("x")
    for error in (0.25, 0.5, 0.125):
        comparison.add(np.array([[1 + error]]), np.array([[1.0]]), 1.0)
    check = comparison.check()
    assert check.passed
    assert check.max_error == 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_must_be_the_same(value: float) -> None:
    assert compare([[value, 1]], [[value, 1]], 0.0).check().passed
    for got, want in (([[value]], [[1.0]]), ([[1.0]], [[value]])):
        check = compare(got, want, 1e9).check()
        assert not check.passed
        assert check.max_error == math.inf


def test_zero_bound_means_equal() -> None:
    assert compare([[0.0, -0.0]], [[-0.0, 0.0]], 0.0).check().passed
    assert not compare([[1e-45]], [[0.0]], 0.0).check().passed


def test_an_infinite_bound_allows_everything() -> None:
    check = compare([[np.inf, np.nan, 1]], [[1, 2, 3]], np.inf).check()
    assert check.passed


def test_nothing_to_compare_passes() -> None:
    check = compare(np.zeros((0, 4)), np.zeros((0, 4)), 0.0).check()
    assert check.passed
    assert check.rel_frobenius == 0
