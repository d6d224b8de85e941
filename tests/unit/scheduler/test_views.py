"""Whatever members report, each result that somebody has reaches all who lack it, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer, bits_from_wire, bits_of, bits_to_wire, ranks_in
from netstorm.protocol.messages import RoundResults, ViewReport
from netstorm.pslite.machine import Refuse
from netstorm.scheduler.members import Members
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.rendezvous import Applicant, Refusal
from netstorm.scheduler.replay_log import LoggedOutbox
from netstorm.scheduler.snapshot import JobPhase
from netstorm.scheduler.views import Latecomers, RankPlace, ViewAgreement, with_free_places
from tests.unit.scheduler.driving import begun, key, running

ROUNDS = 4


def results(key, round, chunks, *, known=(), of=0):
    return RoundResults(key, round, bits_to_wire(bits_of(chunks)), bits_to_wire(bits_of(known)), of)


def report(complete, *found, fresh=False, begins=None, view=1):
    return ViewReport(view=view, complete=complete, results=found, fresh=fresh, begins=begins or {})


def agreement(members, *, silent=(), groups=None):
    return ViewAgreement(1, members, silent, lambda key: (groups or {}).get(key, ()))


def agree(agreement, reports):
    answers = [agreement.report(rank, one) for rank, one in reports.items()]
    assert answers[:-1] == [None] * (len(reports) - 1)
    return answers[-1]


def sends(agreed):
    """Return each result that is sent, as (key, round, chunk, source, target)."""
    return [
        (one.key, one.round, chunk, one.source, one.target)
        for one in agreed.recoveries
        for chunk in ranks_in(bits_from_wire(one.chunks))
    ]


@st.composite
def situations(draw):
    """Draw members, those that are silent, groups of keys, and any reports."""
    members = sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=5)))
    silent = draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
    groups = (
        {1: tuple(sorted(draw(st.sets(st.sampled_from(members), min_size=1))))} if draw(st.booleans()) else {}
    )
    chunks = draw(st.integers(1, 5))
    some = st.integers(0, 2**chunks - 1).map(lambda bits: set(ranks_in(bits)))  # sets are slow to draw
    reports = {}
    for rank in members:
        found = [
            results(key, round, has, known=known - has, of=chunks)
            for key in range(2)
            for round in range(ROUNDS)
            if (has := draw(some)) or draw(st.booleans())
            if (known := draw(some)) is not None
        ]
        complete = {key: draw(st.integers(-1, ROUNDS - 1)) for key in range(2)}
        reports[rank] = report(complete, *found, fresh=rank in silent and draw(st.booleans()))
    return members, silent, groups, reports


@given(situations())
def test_each_result_reaches_all_who_lack_it_once_and_from_one_who_has_it(situation):
    members, silent, groups, reports = situation
    agreed = agree(agreement(members, silent=silent, groups=groups), reports)
    assert agreed is not None
    has = {
        (one.key, one.round, chunk, rank)
        for rank, said in reports.items()
        for one in said.results
        for chunk in ranks_in(bits_from_wire(one.chunks))
    }
    known = {
        (one.key, one.round, chunk, rank)
        for rank, said in reports.items()
        for one in said.results
        for chunk in ranks_in(bits_from_wire(one.known))
    }
    made = sends(agreed)
    assert all((key, round, chunk, source) in has for key, round, chunk, source, _ in made)
    received = [(key, round, chunk, target) for key, round, chunk, _, target in made]
    assert len(received) == len(set(received))
    for rank, said in reports.items():
        for number, round, chunk in {one[:3] for one in has}:
            first = agreed.first_rounds.get(number, 0)
            complete = first - 1 if said.fresh else said.complete[number]
            needs = round > complete and (rank in groups.get(number, members))
            lacks = (number, round, chunk, rank) not in has | known
            if number in agreed.first_rounds:
                assert ((number, round, chunk, rank) in received) == (needs and lacks)


def test_a_view_is_agreed_on_once_all_members_have_reported():
    one = agreement((0, 2, 3))
    assert one.report(2, report({0: 1})) is None
    assert one.report(0, report({0: 1})) is None
    assert one.missing == {3}
    agreed = one.report(3, report({0: 0}))
    assert (agreed.view, agreed.first_rounds, agreed.recoveries) == (1, {0: 1}, ())


def test_a_report_on_a_view_that_was_given_up_counts_for_nothing():
    one = agreement((0, 1))
    assert one.report(0, report({}, view=0)) is None
    assert one.missing == {0, 1}


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_reports_once_and_only_if_it_is_in_the_view(rank):
    one = agreement((0, 1))
    one.report(0, report({}))
    with pytest.raises(ProtocolViolation, match=f"rank {rank} reports twice, or is not in view 1"):
        one.report(rank, report({}))


def test_those_who_have_results_share_the_work():
    has = results(0, 3, range(6), of=6)
    agreed = agree(
        agreement(range(4)),
        {0: report({0: 3}, has), 1: report({0: 3}, has), 2: report({0: 2}), 3: report({0: 2})},
    )
    sources = [source for _, _, _, source, target in sends(agreed) if target == 2]
    assert (sources.count(0), sources.count(1)) == (3, 3)


def test_results_that_were_formed_and_nobody_has_are_lost():
    agreed = agree(
        agreement((0, 1)), {0: report({0: 4}, results(0, 5, {0}, known={1}, of=2)), 1: report({0: 4})}
    )
    assert [(one.round, ranks_in(bits_from_wire(one.chunks))) for one in agreed.lost] == [(5, (1,))]


def test_a_newcomer_gets_results_from_the_first_round_on_that_somebody_lacks():
    said = {
        0: report({0: 7}, results(0, 6, {0}, of=1), results(0, 7, {0}, of=1)),
        1: report({0: 6}, results(0, 6, {0}, of=1)),
        2: report({}, fresh=True),
    }
    agreed = agree(agreement((0, 1, 2), silent=(2,)), said)
    assert agreed.first_rounds == {0: 7}
    assert sorted(sends(agreed)) == [(0, 7, 0, 0, 1), (0, 7, 0, 0, 2)]


def test_a_rank_with_the_state_of_one_that_was_ahead_and_has_left_cannot_stay():
    """Rank 2 has the state after round 5, of which nobody else has all results."""
    said = {
        0: report({0: 4}, results(0, 5, {0}, of=2)),
        1: report({0: 4}, results(0, 5, {0}, of=2)),
        2: report({0: 4}, begins={0: 6}),
    }
    one = agreement((0, 1, 2), silent=(2,))
    assert agree(one, said) is None
    assert one.ahead == (2,)


def test_it_may_stay_if_the_others_have_all_results_between_them_or_have_ended_the_round():
    parts = {0: report({0: 4}, results(0, 5, {0}, of=2)), 1: report({0: 4}, results(0, 5, {1}, of=2))}
    late = report({0: 4}, begins={0: 6})
    one = agreement((0, 1, 2), silent=(2,))
    assert agree(one, {**parts, 2: late}) is not None
    assert one.ahead == ()
    ended = {0: report({0: 5}), 1: report({0: 5})}
    assert agree(agreement((0, 1, 2), silent=(2,)), {**ended, 2: late}) is not None


def test_if_nobody_else_has_the_job_s_state_it_stays():
    said = {0: report({0: 4}, begins={0: 6}), 1: report({0: 4}, begins={0: 5})}
    one = agreement((0, 1), silent=(1,))
    assert agree(one, said) is not None
    assert one.ahead == ()


# -------------------------------------------------------------------------- the scheduler of an elastic job


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
    event = driven.machine.job.changes[-1]
    assert (event.view, event.members) == (1, 3)
    assert "out of memory" in event.text
    driven.say(1, m.CaughtUp())
    assert driven.heard(0, m.NewPolicy) == [], "it was not silent"


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


def test_the_job_ends_if_nobody_is_left_who_has_its_state():
    driven = grown()
    driven.join("late", 3)
    for rank in (0, 1):
        driven.say(rank, m.Leave())
    assert driven.machine.phase.value == "running"
    driven.say(2, m.Leave())
    assert driven.machine.phase.value == "running", "the newcomer may have fetched the state"
    driven.say("late", m.ViewReport(view=5, complete={}, results=(), fresh=True))
    assert driven.machine.phase.value == "failed"
    reason = driven.gone("late").reason
    assert "rank 2 is out of the job since view 5: rank 2 (n2:4000, site2) is lost" in reason
    assert "no rank is left that has the job's state" in reason


def test_newcomers_that_have_fetched_the_state_go_on_in_a_view_of_their_own():
    driven = elastic(3)
    driven.say(1, m.Leave())
    driven.say(2, m.Leave())
    for name, rank in (("heir", 1), ("late", 2)):
        driven.join(name, rank)
        for old in range(rank):
            driven.say(old, m.ViewReport(view=2 + rank, complete={}, results=(), fresh=old > 0))
        driven.say(name, m.ViewReport(view=2 + rank, complete={}, results=(), fresh=True))
    driven.forget()
    driven.say(0, m.Leave())
    assert [view.policy.silent for view in driven.heard("heir", m.NewView)] == [(1, 2)]
    driven.say("late", m.ViewReport(view=5, complete={}, results=(), fresh=True))
    driven.say("heir", m.CaughtUp())
    driven.forget()
    driven.say("heir", m.ViewReport(view=5, complete={0: 1}, results=(), begins={0: 2}))
    (view,) = driven.heard("late", m.NewView)
    assert (view.view, view.policy.members, view.policy.silent) == (6, (1, 2), (2,))
    driven.say("late", m.ViewReport(view=6, complete={}, results=(), fresh=True))
    driven.say("heir", m.ViewReport(view=6, complete={0: 1}, results=(), begins={0: 2}))
    assert [agreed.first_rounds for agreed in driven.heard("late", m.ViewAgreed)] == [{0: 2}]
    text = driven.machine.job.changes[-1].text
    assert text == "only newcomers are left; the state is with rank 1 (heir:4000)"
    assert driven.machine.phase is JobPhase.RUNNING


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
    driven = running(2)
    with pytest.raises(ProtocolViolation, match=r"which the scheduler does not take|it is from"):
        driven.say(0, message)


def test_two_signs_that_a_process_has_ended_are_enough():
    driven = elastic(4)
    driven.machine.connection_gone(driven.peer_of(2), "reset", driven.now, refused=False)
    driven.take()
    assert driven.machine.phase is JobPhase.RUNNING
    assert driven.heard(0, m.NewView) == []
    driven.say(1, m.Suspect(rank=2, reason="connection refused", refused=True))
    (view,) = driven.heard(0, m.NewView)
    assert [one.rank for one in view.departures] == [2]
    assert "its connections have ended, and rank 1 says: connection refused" in view.departures[0].reason


# ----------------------------------------------- which place a node gets that comes after its job has begun


OPTIONS = SchedulerOptions(
    num_workers=4, job="j", release="1", job_wide={}, elastic=(1, 4), heartbeat_timeout_s=5.0
)


def members(*ranks):
    """Return the members of a job of four places in which some are taken."""
    present = [(Peer(100 + rank), m.Member(rank, f"n{rank}", 4000, "", rank + 1)) for rank in ranks]
    return Members(with_free_places(present, 4), OPTIONS, LoggedOutbox(), 0.0)


def applicant(name="new", rank=-1, peer=7, port=4000):
    join = m.Join(asked_rank=rank, num_workers=4, host=name, port=port, site="", release="1", pid=1)
    return Applicant(peer=Peer(peer), incarnation=peer, join=join, heard_at=0.0)


def placed(latecomers, here, now=0.0):
    """Return who is placed or refused at a time, at which the waiting node shows that it is alive."""
    latecomers.heard(Peer(7), now)
    return list(latecomers.place(here, now))


def test_places_that_no_node_has_are_members_without_a_port():
    filled = with_free_places([(Peer(5), m.Member(1, "n1", 4000, "", 9))], 3)
    assert [(peer, member.rank, member.port) for peer, member in filled] == [
        (SCHEDULER, 0, 0),
        (Peer(5), 1, 4000),
        (SCHEDULER, 2, 0),
    ]


@pytest.mark.parametrize(
    ("name", "asked", "here", "place"),
    [("new", -1, (0, 2), 1), ("new", 3, (0, 1), 3), ("n2", -1, (0, 1, 2, 3), 2)],
    ids=[
        "the lowest that is free",
        "the one that it asks for",
        "of a member at its address, which has ended",
    ],
)
def test_a_node_gets_a_place(name, asked, here, place):
    latecomers = Latecomers(OPTIONS)
    assert latecomers.add(applicant(name, rank=asked), 0.0) is None
    (placed_at,) = placed(latecomers, members(*here))
    assert isinstance(placed_at, RankPlace)
    assert (placed_at.rank, placed_at.replaces) == (place, place in here)
    assert Peer(7) not in latecomers


def test_a_node_whose_place_is_taken_waits_until_it_is_free_or_the_one_who_has_it_proves_alive():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(rank=1), 0.0)
    assert placed(latecomers, members(0, 1), 9.0) == []
    assert Peer(7) in latecomers
    (place,) = placed(latecomers, members(0), 9.5)
    assert isinstance(place, RankPlace)
    latecomers.add(applicant(rank=1), 20.0)
    (refusal,) = placed(latecomers, members(0, 1), 35.0)
    assert isinstance(refusal, Refusal)
    assert "asks for rank 1, and rank 1 (n1:4000) is alive" in refusal.reason


def test_one_node_too_many_is_told_so_after_a_while_also_if_it_asks_again_and_is_forgotten_if_it_leaves():
    latecomers = Latecomers(OPTIONS)
    for now in (0.0, 8.0):
        latecomers.add(applicant(), now)
    assert placed(latecomers, members(0, 1, 2, 3), 14.9) == []
    (refusal,) = placed(latecomers, members(0, 1, 2, 3), 15.0)
    assert isinstance(refusal, Refusal)
    assert "NETSTORM_ELASTIC allows 4 nodes" in refusal.reason
    latecomers.add(applicant(), 20.0)
    latecomers.remove(Peer(7))
    assert placed(latecomers, members(0), 40.0) == []


def test_a_node_of_another_release_is_refused():
    refusal = Latecomers(replace(OPTIONS, release="2")).add(applicant(), 0.0)
    assert refusal is not None
    assert "runs NetStorm 1, the scheduler 2" in refusal.reason


def test_a_node_that_has_gone_silent_while_it_waited_gets_no_place_and_is_forgotten():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(rank=1), 0.0)
    assert list(latecomers.place(members(0), 4.0)) == []
    assert Peer(7) in latecomers
    assert list(latecomers.place(members(0), 5.1)) == []
    assert Peer(7) not in latecomers
