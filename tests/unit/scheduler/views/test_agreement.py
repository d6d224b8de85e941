"""Whatever members report, each result that somebody has reaches all who lack it, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import bits_from_wire, bits_of, bits_to_wire, ranks_in
from netstorm.protocol.messages import RoundResults, ViewReport
from netstorm.scheduler.views import ViewAgreement

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
    reports = {}
    for rank in members:
        found = [
            results(key, round, has, known=known - has, of=chunks)
            for key in range(2)
            for round in range(ROUNDS)
            if (has := draw(st.sets(st.integers(0, chunks - 1)))) or draw(st.booleans())
            if (known := draw(st.sets(st.integers(0, chunks - 1)))) is not None
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
        for key, round, chunk in {one[:3] for one in has}:
            first = agreed.first_rounds.get(key, 0)
            complete = first - 1 if said.fresh else said.complete[key]
            needs = round > complete and (rank in groups.get(key, members))
            lacks = (key, round, chunk, rank) not in has | known
            if key in agreed.first_rounds:
                assert ((key, round, chunk, rank) in received) == (needs and lacks)


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
