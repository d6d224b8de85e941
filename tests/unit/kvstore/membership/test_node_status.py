"""How a node says it is doing: rounds and their time, the time that somebody waited."""

from netstorm.kvstore.membership import DriverStatus, NodeStatusTracker
from netstorm.observe.log import Counters


def test_a_round_takes_from_the_begin_of_its_first_key_to_the_end_of_its_last():
    tracker = NodeStatusTracker(Counters())
    tracker.operation_begun(4, 10.0)
    tracker.operation_begun(4, 11.0)
    tracker.operation_ended(4, 12.0)
    assert tracker.report(12.0).last_round == -1
    tracker.operation_ended(4, 13.5)
    report = tracker.report(20.0)
    assert (report.last_round, report.round_s) == (4, 3.5)


def test_a_key_that_comes_late_in_a_round_makes_it_longer():
    tracker = NodeStatusTracker(Counters())
    for begin, end in ((10.0, 11.0), (12.0, 15.0)):
        tracker.operation_begun(0, begin)
        tracker.operation_ended(0, end)
    assert tracker.report(15.0).round_s == 5.0


def test_a_key_that_is_rounds_behind_does_not_hide_the_newest_round():
    tracker = NodeStatusTracker(Counters())
    for round, begin, end in ((30, 1.0, 2.0), (3, 1.0, 9.0)):
        tracker.operation_begun(round, begin)
        tracker.operation_ended(round, end)
    report = tracker.report(9.0)
    assert (report.last_round, report.round_s) == (30, 1.0)


def test_waiting_is_the_time_with_something_under_way_however_much_it_is():
    tracker = NodeStatusTracker(Counters())
    tracker.operation_begun(0, 1.0)
    tracker.operation_begun(1, 2.0)
    tracker.operation_ended(0, 3.0)
    assert tracker.report(4.0).waited_s == 3.0
    tracker.operation_ended(1, 5.0)
    assert tracker.report(50.0).waited_s == 4.0


def test_what_only_the_driver_knows_is_asked_of_it():
    counters = Counters()
    counters.add("rounds", 7)
    tracker = NodeStatusTracker(counters)
    tracker.sample_driver = lambda now: DriverStatus(
        bytes_sent=int(now), clock_offset=0.05, clock_drift=5e-5, clock_error=0.1
    )
    report = tracker.report(99.0)
    assert (
        report.rounds,
        report.bytes_sent,
        report.clock_offset,
        report.clock_drift,
        report.clock_error,
    ) == (
        7,
        99,
        0.05,
        5e-5,
        0.1,
    )


def test_the_begin_of_rounds_long_past_is_forgotten():
    tracker = NodeStatusTracker(Counters())
    for round in range(1000):
        tracker.operation_begun(round, float(round))
        tracker.operation_ended(round, round + 0.5)
    assert len(tracker._since) < 20
