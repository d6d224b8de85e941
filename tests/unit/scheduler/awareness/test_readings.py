"""A quantity that is measured with noise, and changes now and then."""

from __future__ import annotations

import random

import pytest

from netstorm.scheduler.measured_links import Readings


def fed(values, error=0.05):
    readings = Readings()
    for now, value in enumerate(values):
        readings.add(value, error, float(now))
    return readings


def noisy(level, sigma, count, seed=0):
    chance = random.Random(seed)
    return [level * (1 + chance.gauss(0, sigma)) for _ in range(count)]


def test_the_first_reading_is_the_estimate():
    readings = fed([100.0])
    assert readings.value == 100.0
    assert readings.error(0.0) == pytest.approx(0.05)


def test_nothing_read_is_false():
    assert not Readings()
    assert fed([1.0])


@pytest.mark.parametrize("seed", range(20))
def test_many_readings_are_better_than_one(seed):
    readings = fed(noisy(100.0, 0.05, 15, seed))
    assert readings.value == pytest.approx(100.0, rel=0.07)
    assert readings.error(14.0) < 0.065


def test_one_outlier_is_no_change():
    readings = fed([*noisy(100.0, 0.05, 10), 20.0])
    assert readings.value == pytest.approx(100.0, rel=0.05)


def test_a_reading_that_may_be_an_outlier_makes_what_was_before_no_newer():
    readings = fed([100.0] * 10)
    readings.add(20.0, 0.05, 15.0)
    assert readings.age(16.0) == 7.0
    readings.add(20.0, 0.05, 16.0)
    assert readings.age(16.0) == 0.0
    assert readings.value == pytest.approx(20.0)


@pytest.mark.parametrize("error", [0.2, 0.5])
def test_a_fall_is_a_change_however_unsure_the_low_readings_are_by_themselves(error):
    readings = fed([24e6] * 10, 0.02)
    readings.add(4.1e6, error, 10.0)
    readings.add(4.9e6, error, 11.0)
    assert readings.value == pytest.approx(4.5e6, rel=0.05)
    assert readings.changed_at == 11.0


def test_a_rise_that_is_as_unsure_as_it_is_high_is_none():
    readings = fed([5e6] * 10, 0.02)
    readings.add(11e6, 0.5, 10.0)
    readings.add(11e6, 0.5, 11.0)
    assert readings.value == pytest.approx(5e6, rel=0.05)


def test_two_that_agree_are_a_change_and_the_past_is_forgotten():
    readings = fed([*noisy(100.0, 0.05, 10), 20.0, 21.0])
    assert readings.value == pytest.approx(20.5, rel=0.03)


def test_an_outlier_down_and_one_up_are_no_change():
    readings = fed([*noisy(100.0, 0.05, 10), 20.0, 500.0, 100.0])
    assert readings.value == pytest.approx(100.0, rel=0.05)


def test_who_says_to_be_exact_and_scatters_is_not_believed():
    readings = fed(noisy(100.0, 0.2, 15, seed=3), error=0.0)
    assert 0.05 < readings.error(14.0) < 0.3
    assert readings.value == pytest.approx(100.0, rel=0.3)


def test_errors_grow_while_nothing_is_read():
    readings = fed([100.0] * 10)
    assert readings.error(9.0) < 0.05
    assert readings.error(9.0 + 120.0) == pytest.approx(0.2, rel=0.1)
    assert readings.age(129.0) == 120.0


def test_a_slow_drift_is_followed():
    readings = fed([100.0 * 1.01**second for second in range(60)])
    assert readings.value == pytest.approx(100.0 * 1.01**59, rel=0.1)


def test_after_a_long_time_one_reading_is_enough_for_a_change():
    readings = fed([100.0] * 6)
    readings.add(20.0, 0.05, 60.0)
    assert readings.value == 20.0
    assert readings.changed_at == 60.0
    assert fed([100.0] * 6).changed_at < 0


def test_who_has_seen_the_change_is_believed_though_the_reading_rests_on_little():
    readings = fed([27e6] * 6)
    readings.add(11e6, 0.5, 6.0, jumped=True)
    assert readings.value == 11e6
    assert readings.changed_at == 6.0


def test_a_lower_bound_above_the_estimate_is_the_estimate_and_no_change():
    readings = fed([100.0, 101.0, 99.0])
    readings.at_least(150.0, 0.05, 5.0)
    assert readings.value == 150.0
    assert readings.error(5.0) == pytest.approx(0.05)
    assert readings.age(6.0) == 1.0
    assert readings.changed_at == float("-inf")


@pytest.mark.parametrize("value", [10.0, 99.0, 104.0])
def test_a_lower_bound_that_is_not_clearly_above_the_estimate_says_nothing(value):
    readings = fed([100.0, 100.0])
    readings.at_least(value, 0.05, 9.0)
    assert readings.value == pytest.approx(100.0)
    assert readings.age(9.0) == 8.0


def test_the_first_lower_bound_is_all_that_is_known():
    readings = Readings()
    readings.at_least(7.0, 0.1, 1.0)
    assert readings
    assert readings.value == 7.0
    readings.add(3.0, 0.05, 2.0, jumped=True)
    assert readings.value == 3.0
