"""Jobs that nodes leave and join at random: every result is the exact sum of the contributors it names."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import WaitTimeout
from netstorm.kvstore.forms import ChunkSum
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.rounds.node_rounds import NodeRounds
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.views import ViewChanges
from netstorm.lab.simulation.elastic import WrongResult
from tests.simulated.elastic import chaos
from tests.simulated.jobs import examples

SEEDS = int(os.environ.get("ELASTIC_SEEDS", "0"))
"""Seeds of the longest test. A failing one is replayed by `python -m tests.simulated.elastic.chaos SEED`."""


@given(st.integers(0, 2**32))
@examples(3)
def test_whatever_happens_results_are_exact_equal_and_in_time(seed):
    chaos.run(seed, steps=8, faults=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*chaos.KINDS}))
def test_each_kind_of_fault_alone(kind):
    assert chaos.run(33, steps=8, faults=3, kinds=(kind,)).happened


@pytest.mark.slow
def test_views_change_and_some_results_are_of_some_ranks_only_in_these_jobs():
    report = chaos.run(27)
    assert report.views >= 4
    assert 0 < report.partial < report.checked


def test_the_same_seed_is_the_same_job():
    first, second = (chaos.Chaos(5, steps=6, faults=3) for _ in range(2))
    assert first.run() == second.run()
    assert first.cluster.digest() == second.cluster.digest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(224, id="a newcomer's session breaks before it hears that it has joined"),
        pytest.param(567, id="a policy takes over a round of which a newcomer has no binding"),
        pytest.param(669, id="a state has a result that was lost with the rank it came from"),
        pytest.param(782, id="a newcomer gets results of a round that all others have begun"),
        pytest.param(855, id="a rank of a group comes back, and is in no group any more"),
    ],
)
def test_long_jobs_that_have_failed_once(seed):
    chaos.run(seed, **chaos.LONG)


def test_who_is_removed_before_it_hears_that_it_has_joined_ends_soon():
    report = chaos.run(78)
    assert report.happened["out: NodeRemoved"] == 1
    assert report.virtual_s < 60, "not after NETSTORM_JOIN_TIMEOUT"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_sixty_random_jobs(first):
    for seed in range(first, first + 20):
        chaos.run(seed)


@pytest.mark.slow
@pytest.mark.timeout(36000)
@pytest.mark.skipif(
    not SEEDS, reason="ELASTIC_SEEDS=1000 runs as many jobs of 200 rounds, which takes an hour"
)
def test_many_long_random_jobs():
    for seed in range(1000, 1000 + SEEDS):
        assert chaos.run(seed, **chaos.LONG).rounds >= 200


# ----------------------------------- the checks notice nodes that sum wrongly, or break the protocol of views

NOTICED = (WrongResult, WaitTimeout, AssertionError)


def fails(seeds=range(1, 13), **more) -> bool:
    """Return whether some job fails its checks."""
    for seed in seeds:
        try:
            chaos.run(seed, steps=12, faults=6, **more)
        except NOTICED:
            return True
    return False


def drop_an_addend(monkeypatch):
    add = ChunkSum.add_received

    def wrong(self, payload, contributors):
        add(self, None if payload is not None and contributors & 4 else payload, contributors)

    monkeypatch.setattr(ChunkSum, "add_received", wrong)


def count_one_twice(monkeypatch):
    add = ChunkSum.add_own

    def wrong(self, values, bit):
        add(self, values, bit)
        if bit == 2:
            add(self, values, bit)

    monkeypatch.setattr(ChunkSum, "add_own", wrong)


def take_parts_of_former_views(monkeypatch):
    receive = NodeRounds._receive

    def wrong(self, peer, part, payload, payload_crc):
        version = self.views.version
        self.views.version = -1
        try:
            receive(self, peer, part, payload, payload_crc)
        finally:
            self.views.version = version

    monkeypatch.setattr(NodeRounds, "_receive", wrong)


def go_on_while_the_view_changes(monkeypatch):
    begin = ViewChanges.begin

    def wrong(self, message):
        report = begin(self, message)
        self.version = -1
        return report

    changing = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(ViewChanges, "begin", wrong)
    monkeypatch.setattr(ViewChanges, "changing", changing, raising=False)


def forget_results_that_others_need(monkeypatch):
    monkeypatch.setattr(ViewChanges, "_settled", lambda _, round, *__: round.round)


def send_no_results_to_those_who_lack_them(monkeypatch):
    monkeypatch.setattr(ViewChanges, "_send_results", lambda *_: None)


def name_contributors_that_are_not_in_a_result(monkeypatch):
    record = Operation.record_result

    def wrong(self, chunk, contributors):
        record(self, chunk, contributors | contributors << 1)

    monkeypatch.setattr(Operation, "record_result", wrong)


def contribute_another_round(monkeypatch):
    own = Round.own_values

    def wrong(self, chunk):
        values = own(self, chunk)
        return values if self.round != 5 else None

    monkeypatch.setattr(Round, "own_values", wrong)


def begin_where_the_program_does_not(monkeypatch):
    begin_at = NodeRounds.begin_at
    monkeypatch.setattr(
        NodeRounds,
        "begin_at",
        lambda self, rounds: begin_at(self, {key: one + 1 for key, one in rounds.items()}),
    )


MUTATIONS = (
    drop_an_addend,
    count_one_twice,
    take_parts_of_former_views,
    go_on_while_the_view_changes,
    forget_results_that_others_need,
    send_no_results_to_those_who_lack_them,
    name_contributors_that_are_not_in_a_result,
    contribute_another_round,
    begin_where_the_program_does_not,
)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda one: one.__name__)
def test_the_checks_notice_a_node_that_would(mutate, monkeypatch):
    mutate(monkeypatch)
    assert fails()
