"""The scheduler of an elastic job: who is in, what everybody is told, and when the job cannot go on."""

from __future__ import annotations

import pytest

from netstorm.protocol import messages as m
from netstorm.protocol.frames import bits_to_wire
from netstorm.pslite.machine import Refuse
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import begun, key, running


def elastic(ranks=3, most=4):
    """Return a scheduler of an elastic job that has begun."""
    driven = running(ranks, elastic=(1, most))
    for rank in range(ranks):
        driven.say(rank, m.RegisterKeys(keys=(key("w"),)))
    driven.forget()
    return driven


def grown():
    """Return a job of three ranks of four places."""
    driven = elastic(4)
    driven.say(3, m.Leave())
    report_all(driven, 0, 1, 2, view=1)
    driven.forget()
    return driven


def report_all(driven, *ranks, view, complete=5, results=()):
    for rank in ranks:
        driven.say(rank, m.ViewReport(view=view, complete={0: complete}, results=results))


def views_of(driven):
    return driven.machine.job


def test_when_a_rank_leaves_all_others_are_asked_what_they_have_and_told_what_is_agreed():
    driven = elastic(4)
    driven.say(2, m.Failed(reason="out of memory"))
    for rank in (0, 1, 3):
        (view,) = driven.heard(rank, m.NewView)
        assert [member.rank for member in view.members] == [0, 1, 3]
        assert (view.view, view.policy.members, view.arrivals) == (1, (0, 1, 3), ())
        assert view.departures[0].rank == 2
        assert "out of memory" in view.departures[0].reason
    has = (m.RoundResults(0, 6, bits_to_wire(1), b"", 1),)
    driven.say(0, m.ViewReport(view=1, complete={0: 5}, results=has))
    report_all(driven, 1, view=1)
    assert [driven.heard(rank) for rank in (0, 1, 3)] == [[], [], []]
    assert "waits for reports of rank 3" in driven.machine.status_text()
    report_all(driven, 3, view=1)
    for rank in (0, 1, 3):
        (agreed,) = driven.heard(rank, m.ViewAgreed)
        assert [(one.source, one.target) for one in agreed.recoveries] == [(0, 1), (0, 3)]
    assert driven.machine.phase is JobPhase.RUNNING


def test_a_rank_that_is_out_is_told_why_when_it_comes_back():
    driven = elastic(4)
    incarnation = driven.machine.members[2].incarnation
    driven.lose(2, "no answer for 10 s")
    verdict = driven.hello("n2", incarnation=incarnation, sender=2)
    assert isinstance(verdict, Refuse)
    assert "rank 2 is out of the job since view 1" in verdict.reason
    assert "no answer for 10 s" in verdict.reason


def test_if_another_rank_is_lost_meanwhile_a_newer_view_begins_all_over():
    driven = elastic(4)
    driven.say(2, m.Leave())
    report_all(driven, 0, view=1)
    driven.say(3, m.Leave())
    assert [view.view for view in driven.heard(1, m.NewView)] == [1, 2]
    report_all(driven, 1, view=1)
    assert driven.heard(1, m.ViewAgreed) == []
    report_all(driven, 0, 1, view=2)
    assert [agreed.view for agreed in driven.heard(1, m.ViewAgreed)] == [2]


def test_a_newcomer_is_silent_until_it_has_caught_up_and_then_contributes_to_rounds_that_nobody_was_granted():
    driven = grown()
    for rank in range(3):
        driven.say(rank, m.TopologyRequest(begun=(begun(0, 0),)))
    driven.join("late", 3)
    (joined,) = driven.heard("late", m.Joined)
    assert (joined.rank, joined.later) == (3, True)
    assert [spec.name for spec in joined.keys] == ["w"]
    (view,) = driven.heard(0, m.NewView)
    assert (view.arrivals, view.policy.silent, view.policy.members) == ((3,), (3,), (0, 1, 2, 3))
    report_all(driven, 0, 1, 2, view=2)
    driven.say(3, m.ViewReport(view=2, complete={}, results=(), fresh=True))
    driven.forget()
    driven.say(3, m.CaughtUp())
    (policy,) = driven.heard(1, m.NewPolicy)
    assert (policy.policy.silent, policy.policy.members) == ((), (0, 1, 2, 3))
    driven.say(0, m.TopologyRequest(begun=(begun(0, 1),)))
    bindings = driven.heard(0, m.TopologyAnswer)[0].bindings
    assert (bindings[-1].from_round, bindings[-1].version) == (2, policy.policy.version)


def test_a_rank_that_catches_up_twice_changes_nothing():
    driven = grown()
    driven.say(1, m.CaughtUp())
    assert driven.heard(0, m.NewPolicy) == []


def test_the_job_ends_if_nobody_is_left_who_has_its_state():
    driven = grown()
    driven.join("late", 3)
    for rank in (0, 1):
        driven.say(rank, m.Leave())
    assert driven.machine.phase.value == "running"
    driven.say(2, m.Leave())
    assert driven.machine.phase.value == "failed"
    assert "no rank is left that has the job's state" in driven.gone("late").reason


def test_a_rank_that_is_ahead_of_all_others_is_let_out():
    driven = grown()
    driven.join("late", 3)
    driven.say(2, m.Leave())
    driven.forget()
    report_all(driven, 0, 1, view=3, complete=4)
    driven.say(3, m.ViewReport(view=3, complete={0: 4}, results=(), begins={0: 6}))
    (view,) = driven.heard(0, m.NewView)
    assert (view.view, [one.rank for one in view.departures]) == (4, [3])
    assert "ahead of all others" in view.departures[0].reason


@pytest.mark.parametrize("message", [m.CaughtUp(), m.ViewReport(view=1, complete={}, results=())])
def test_in_a_job_that_nobody_may_leave_messages_of_views_are_violations(message):
    from netstorm.errors import ProtocolViolation

    driven = running(2)
    with pytest.raises(ProtocolViolation, match=r"which the scheduler does not take|it is from"):
        driven.say(0, message)


def test_views_are_remembered_with_their_reasons():
    driven = elastic(4)
    driven.say(2, m.Failed(reason="boom"))
    event = views_of(driven).changes[-1]
    assert (event.view, event.members) == (1, 3)
    assert "boom" in event.text


def test_two_signs_that_a_process_has_ended_are_enough():
    driven = elastic(4)
    driven.machine.connection_gone(driven.peer_of(2), "reset", driven.now, refused=False)
    driven._take()
    assert driven.machine.phase is JobPhase.RUNNING
    assert driven.heard(0, m.NewView) == []
    driven.say(1, m.Suspect(rank=2, reason="connection refused", refused=True))
    (view,) = driven.heard(0, m.NewView)
    assert [one.rank for one in view.departures] == [2]
    assert "its connections have ended, and rank 1 says: connection refused" in view.departures[0].reason
