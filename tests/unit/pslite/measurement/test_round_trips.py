"""Which round trips are told, and when."""

from __future__ import annotations

from netstorm.protocol.frames import Peer
from netstorm.pslite.link_meter import RoundTrips

A, B = Peer(1), Peer(2)


def test_what_is_new_is_told_once():
    trips = RoundTrips()
    trips.record(A, 0.06)
    trips.record(B, 0.0)  # the kernel does not know
    assert [trips.changed, trips.take_changes(1.0), trips.changed, trips.take_changes(2.0)] == [
        True,
        [A],
        False,
        [],
    ]
    assert (trips.of(A), trips.of(B)) == (0.06, 0.0)


def test_what_is_nearly_the_same_is_no_news():
    trips = RoundTrips()
    trips.record(A, 0.06)
    trips.take_changes(1.0)
    trips.record(A, 0.0605)
    assert not trips.changed
    trips.record(A, 0.05)
    assert trips.take_changes(2.0) == [A]
    assert trips.of(A) == 0.05


def test_all_are_told_again_after_a_while_since_a_report_may_be_lost():
    trips = RoundTrips()
    trips.record(A, 0.06)
    trips.record(B, 0.02)
    assert trips.take_changes(1.0) == [A, B]
    assert trips.take_changes(30.9) == []
    assert not trips.changed  # and no report is made for it
    assert trips.take_changes(31.0) == [A, B]
    assert trips.peers() == [A, B]
