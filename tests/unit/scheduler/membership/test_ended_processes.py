"""A process has ended if its connection is gone and nobody listens where it was."""

from __future__ import annotations

import math

from netstorm.scheduler.members import EndedProcesses

TEXT = "its process has ended: its connections have ended, and rank 0 says: refused"


def test_both_signs_together_are_certain_in_either_order():
    one, other = EndedProcesses(0.0), EndedProcesses(0.0)
    one.disconnected(2, 5.0)
    assert one.take(5.0) is None
    one.refused(2, "rank 0 says: refused", 6.0)
    assert one.take(6.0) == (2, TEXT)
    other.refused(2, "rank 0 says: refused", 5.0)
    assert other.take(5.0) is None
    other.disconnected(2, 6.0)
    assert other.take(6.0) == (2, TEXT)


def test_whoever_knows_why_has_a_moment_to_say_so():
    ended = EndedProcesses(0.3)
    ended.disconnected(1, 5.0)
    assert ended.next_due() == math.inf
    ended.refused(1, "refused", 5.1)
    ended.refused(1, "refused again", 5.3)
    assert ended.next_due() == 5.1 + 0.3
    assert ended.take(5.3) is None
    assert ended.take(5.4) is not None
    assert ended.take(5.4) is None


def test_signs_of_different_ranks_mean_nothing_together():
    ended = EndedProcesses(0.0)
    ended.disconnected(1, 5.0)
    ended.refused(2, "refused", 5.0)
    assert ended.take(9.0) is None


def test_a_sign_of_life_makes_both_worthless():
    ended = EndedProcesses(0.3)
    ended.disconnected(1, 5.0)
    ended.heard(1)
    ended.refused(1, "refused", 5.0)
    assert ended.take(9.0) is None
    ended.heard(1)
    ended.disconnected(1, 9.0)
    assert ended.take(10.0) is None
    ended.refused(1, "refused", 10.0)
    ended.heard(1)
    assert ended.take(11.0) is None
