"""A process has ended if its connection is gone and nobody listens where it was."""

from __future__ import annotations

from netstorm.scheduler.membership.ended_processes import EndedProcesses


def test_both_signs_together_are_certain_in_either_order():
    one, other = EndedProcesses(), EndedProcesses()
    assert one.disconnected(2) == ""
    assert one.refused(2, "rank 0 says: refused") == "its connections have ended, and rank 0 says: refused"
    assert other.refused(2, "rank 0 says: refused") == ""
    assert other.disconnected(2) == "its connections have ended, and rank 0 says: refused"


def test_signs_of_different_ranks_mean_nothing_together():
    ended = EndedProcesses()
    ended.disconnected(1)
    assert ended.refused(2, "refused") == ""


def test_a_sign_of_life_makes_both_worthless():
    ended = EndedProcesses()
    ended.disconnected(1)
    ended.heard(1)
    assert ended.refused(1, "refused") == ""
    ended.heard(1)
    assert ended.disconnected(1) == ""
