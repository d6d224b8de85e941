"""When fragments are synchronised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError

pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.local_updates import FragmentSchedule

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
