from __future__ import annotations

import functools
import math

from hypothesis import given
from hypothesis import strategies as st

from netstorm.pslite.memory_network import Timeline


@given(st.lists(st.floats(0, 100)))
def test_actions_run_in_order_of_time_and_then_of_asking(times):
    timeline = Timeline()
    done: list[tuple[float, int]] = []
    for number, time in enumerate(times):
        timeline.at(time, functools.partial(done.append, (time, number)))
    while timeline.step():
        pass
    assert done == sorted(done)
    assert len(done) == len(times)


def test_an_action_sees_its_own_time():
    timeline = Timeline(5.0)
    seen = []
    timeline.after(2.5, lambda: seen.append(timeline.now))
    timeline.at(1.0, lambda: seen.append(timeline.now))
    assert timeline.run_until(lambda: len(seen) == 2, 100.0)
    assert seen == [5.0, 7.5]


def test_what_was_called_off_is_not_done_and_takes_no_time():
    timeline = Timeline()
    timeline.at(1.0, lambda: None).cancel()
    assert not timeline.step()
    assert timeline.now == 0.0


def test_time_goes_to_the_limit_and_not_beyond():
    timeline = Timeline()
    timeline.at(3.0, lambda: None)
    assert not timeline.run_until(lambda: False, 2.0)
    assert timeline.now == 2.0
    assert not timeline.step(2.5)
    assert timeline.step(3.0)


def test_never_is_never_reached():
    timeline = Timeline()
    timeline.at(math.inf, lambda: None)
    assert not timeline.step()
