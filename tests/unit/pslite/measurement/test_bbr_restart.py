"""When BBR starts anew, by what it takes the link for every quarter of a second."""

from __future__ import annotations

from itertools import pairwise

from netstorm.pslite.rates import BbrRestart

LOOK_S = 0.25
KNOWN = 20e6


def starts(bandwidths, *, known=KNOWN, begin=0.0, fresh=None):
    """Return when a connection should start anew; its bandwidths are one look apart, the first at `begin`."""
    fresh = fresh or BbrRestart()
    times = [begin + LOOK_S * number for number in range(len(bandwidths))]
    return [at for at, one in zip(times, bandwidths, strict=True) if fresh.due(one, known, at)]


def test_a_connection_that_is_right_about_its_link_goes_on():
    assert starts([20e6, 19e6, 21e6, 20.5e6] * 40) == []
    assert starts([11e6] * 40) == []


def test_a_connection_that_has_less_than_half_starts_anew_at_once():
    assert starts([20e6] * 8 + [0.4e6]) == [8 * LOOK_S]
    assert starts([20e6] * 8 + [9.9e6]) == [8 * LOOK_S]


def test_a_link_that_nothing_is_known_of_may_be_as_slow_as_bbr_thinks():
    assert starts([20e6] * 8 + [0.4e6] * 8, known=0.0) == []


def test_what_is_not_bbr_is_left_alone():
    assert starts([0.0] * 40) == []


def test_a_new_connection_has_a_second_to_find_out():
    assert starts([0.4e6, 1e6, 3e6, 8e6, 20e6, 20e6, 20e6]) == []
    assert starts([0.4e6] * 5) == [4 * LOOK_S]


def test_what_was_in_vain_is_done_the_more_seldom():
    found = starts([5e6] * 400)
    pauses = [after - before for before, after in pairwise(found)]
    assert pauses == [2.0, 4.0, 8.0, *[16.0] * 5]


def test_and_what_helped_may_be_done_again_after_a_second():
    fresh = BbrRestart()
    assert starts([5e6] * 5, fresh=fresh) == [1.0]
    assert starts([20e6] * 8 + [1e6], begin=1.25, fresh=fresh) == [3.25]
    assert starts([20e6] * 8 + [1e6], begin=3.5, fresh=fresh) == [5.5]
