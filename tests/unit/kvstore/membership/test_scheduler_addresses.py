"""The addresses at which a node looks for a scheduler."""

from netstorm.kvstore.membership import SchedulerAddresses

FIRST, STANDBY, NEW, OTHER = ("first", 1), ("standby", 1), ("new", 1), ("other", 1)


def tried(addresses, times):
    """Return which addresses are tried, one after the other."""
    found = []
    for _ in range(times):
        found.append(addresses.present)
        addresses.try_next()
    return found


def test_all_that_are_known_are_tried_in_turn():
    addresses = SchedulerAddresses(FIRST, (STANDBY,))
    addresses.remember(NEW)
    assert tried(addresses, 4) == [FIRST, STANDBY, NEW, FIRST]


def test_once_one_has_taken_over_nobody_goes_back_to_those_before_but_for_standbys():
    addresses = SchedulerAddresses(FIRST, (STANDBY,))
    addresses.remember(OTHER)
    addresses.go_over(NEW)
    assert addresses.is_recovering
    addresses.forget_earlier()
    assert tried(addresses, 3) == [NEW, STANDBY, NEW]


def test_in_a_job_that_nodes_may_not_leave_only_those_that_take_over_are_tried():
    addresses = SchedulerAddresses(FIRST, ())
    addresses.go_over(NEW)
    addresses.forget_all_but_recovering()
    assert not addresses.several
    addresses.remember(OTHER)
    assert tried(addresses, 3) == [NEW, OTHER, NEW]


def test_few_are_remembered_and_never_without_the_present_one():
    addresses = SchedulerAddresses(FIRST, ())
    addresses.go_over(NEW)
    for number in range(100):
        addresses.remember((f"host{number}", 1))
        assert addresses.present == NEW
    assert tried(addresses, 5) == [NEW, ("host97", 1), ("host98", 1), ("host99", 1), FIRST]
