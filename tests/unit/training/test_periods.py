"""After which steps ranks average, over whom, and when fragments are synchronised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.training.periods import Average, FragmentSchedule, Paced, Periodic, Periods

schedules = st.integers(1, 30).flatmap(
    lambda every: st.builds(
        FragmentSchedule,
        fragments=st.integers(1, 12),
        sync_every=st.just(every),
        delay=st.integers(0, every - 1),
    )
)


def test_fragments_are_spread_evenly():
    schedule = FragmentSchedule(fragments=3, sync_every=6)

    assert [schedule.apply_at(step) for step in range(1, 9)] == [[], [0], [], [1], [], [2], [], [0]]


def test_steps_that_do_not_divide_are_rounded_up():
    schedule = FragmentSchedule(fragments=2, sync_every=5)

    assert [schedule.apply_at(step) for step in range(1, 9)] == [[], [], [0], [], [1], [], [], [0]]


def test_more_fragments_than_steps_share_steps():
    schedule = FragmentSchedule(fragments=3, sync_every=2)

    assert [schedule.apply_at(step) for step in range(1, 5)] == [[0], [1, 2], [0], [1, 2]]


def test_a_sum_begins_its_delay_earlier_but_not_before_the_first_step():
    schedule = FragmentSchedule(fragments=2, sync_every=4, delay=3)

    assert [schedule.begin_at(step) for step in range(1, 6)] == [[1], [], [0], [], [1]]
    assert [schedule.apply_at(step) for step in range(1, 7)] == [[], [], [], [1], [], [0]]


@given(schedules)
def test_every_sum_that_has_begun_is_applied_its_delay_later_before_the_next_begins(schedule):
    for fragment in range(schedule.fragments):
        begun = [step for step in range(1, 121) if fragment in schedule.begin_at(step)]
        applied = [step for step in range(1, 121 + schedule.delay) if fragment in schedule.apply_at(step)]
        assert applied == [step + schedule.delay for step in begun]
        assert all(end < start for end, start in zip(applied, begun[1:], strict=False))


@given(schedules)
def test_a_fragment_is_applied_once_an_interval(schedule):
    for fragment in range(schedule.fragments):
        for start in (schedule.sync_every + 1, 5 * schedule.sync_every + 3):
            interval = range(start, start + schedule.sync_every)
            assert sum(fragment in schedule.apply_at(step) for step in interval) == 1


@pytest.mark.parametrize(
    ("sync_every", "delay", "named"),
    [(0, 0, "sync_every=0"), (4, 4, "fragment_sync_delay=4"), (4, -1, "fragment_sync_delay=-1")],
)
def test_impossible_numbers_are_refused_by_name(sync_every, delay, named):
    with pytest.raises(UsageError, match=named):
        FragmentSchedule(fragments=1, sync_every=sync_every, delay=delay)


@given(schedules, st.integers(1, 200))
def test_a_newcomer_hurries_to_the_next_step_at_which_a_sum_begins_or_is_applied(schedule, step):
    def is_due(step: int) -> bool:
        return bool(schedule.begin_at(step) or schedule.apply_at(step))

    found = schedule.next_all(step)
    assert found >= step
    assert is_due(found)
    assert not any(is_due(between) for between in range(step, found))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 300))
def test_every_k1th_step_averages_the_site_and_every_k2th_of_these_all(k1, k2, step):
    periods = Periods(k1, k2)
    expected = Average.NONE if step % k1 else Average.SITE if step % (k1 * k2) else Average.ALL
    assert periods.after(step) is expected
    found = periods.next_all(step)
    assert periods.after(found) is Average.ALL
    assert not any(periods.after(between) is Average.ALL for between in range(step, found))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Periods(0, 2), "k1=0, k2=2: both must be at least 1"),
        (lambda: Periods.every(0), "sync_every=0: it must be at least 1 step"),
    ],
)
def test_periods_below_one_step_are_refused_by_the_name_that_scripts_know(make, named):
    with pytest.raises(UsageError, match=named):
        make()


def test_who_hurries_skips_to_the_average_of_all_and_counts_those_of_the_site():
    schedule = Periodic("HFA", Periods(2, 3))
    assert [schedule.next_step() for _ in range(3)] == [Average.NONE, Average.SITE, Average.NONE]
    assert schedule.next_step(hurries=True) is Average.ALL
    assert schedule.averages == 3
    assert schedule.next_step(hurries=True) is Average.ALL
    assert schedule.averages == 6
    later = Periodic("HFA", Periods(2, 3))
    later.go_on_at(6)
    assert [later.next_step() for _ in range(6)] == [schedule.next_step() for _ in range(6)]
    assert later.averages == schedule.averages == 9
    with pytest.raises(UsageError, match="at least 1"):
        Periods(1, 0)


def test_who_hurries_does_not_ask_the_pacer_and_tells_it_how_many_steps_it_took():
    class Pacer:
        def __init__(self):
            self.taken = []

        def steps(self):
            return 3

        def round_ends(self, taken):
            self.taken.append(taken)

    pacer = Pacer()
    schedule = Paced("ESync", pacer)
    schedule.go_on_at(7, steps=20)
    assert schedule.next_step(hurries=True) is Average.ALL
    assert [schedule.next_step() for _ in range(3)] == [Average.NONE, Average.NONE, Average.ALL]
    assert (schedule.averages, schedule.steps) == (9, 24)
    assert pacer.taken == [1, 3]
