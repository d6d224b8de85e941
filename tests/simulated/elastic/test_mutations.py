"""The checks of simulated elastic jobs notice nodes that sum wrongly, or break the protocol of views."""

from __future__ import annotations

import pytest

from netstorm.errors import WaitTimeout
from netstorm.kvstore.forms import ChunkSum
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.rounds.node_rounds import NodeRounds
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.views import ViewChanges
from netstorm.lab.simulation.elastic import WrongResult
from tests.simulated.elastic import chaos

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


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda one: one.__name__)
def test_the_checks_notice_a_node_that_would(mutate, monkeypatch):
    mutate(monkeypatch)
    assert fails()
