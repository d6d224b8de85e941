"""A short round is reported to the scheduler at its begin, and a long one shortly before its end."""

import math

import numpy as np

from netstorm.kvstore.forms import Key
from netstorm.kvstore.rounds.aggregation import TopologyRequests
from netstorm.kvstore.rounds.round import Round
from netstorm.protocol.codecs import COLLECTIVE
from netstorm.protocol.messages import KeyGrant, RoundBegun
from netstorm.topology.network import Rank
from netstorm.topology.policy import Plan, Policy
from netstorm.topology.tree import Tree

CHUNKS = 10
KEY = Key(0, "w", (CHUNKS,), "float32")
PLAN = Plan(Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0)),), weights=(1,)), 0)


def begun(number, key=0):
    return RoundBegun(key=key, round=number, rule="")


def open_round():
    key = Key(0, "w", (CHUNKS,), "float32")
    key.set_grant(KeyGrant(namespace=0, name="w", key=0, first_slot=0, offset=0, chunk_size=1))
    return Round(key, 0, PLAN, key.form)


def test_short_rounds_are_reported_at_once_and_only_once():
    asking = TopologyRequests()
    asking.record_begin(KEY, begun(0), 0.0)
    assert asking.pending
    assert asking.take() == (begun(0),)
    assert not asking.pending
    assert asking.take() == ()


def test_a_long_round_is_reported_when_half_a_second_of_it_is_left():
    asking, round = TopologyRequests(), open_round()
    asking.round_s = 2.0
    asking.record_begin(KEY, begun(0), 0.0)
    for chunk in range(CHUNKS):
        assert bool(asking.pending) == (round.missing * 2.0 / CHUNKS <= 0.5)
        round.store(chunk, np.zeros(1, np.float32), 1)
        asking.record_result(round)
    assert asking.take() == (begun(0),)


def test_who_needs_the_answer_before_that_gets_it_asked_for():
    asking = TopologyRequests()
    asking.round_s = 60.0
    asking.record_begin(KEY, begun(0), 0.0)
    asking.record_begin(KEY, begun(0, key=1), 0.0)
    asking.request_now(0)
    assert asking.take() == (begun(0),)
    asking.record_begin(
        KEY, begun(1, key=1), 0.0
    )  # a round cannot begin without the answer that the one before asked for
    assert asking.take() == (begun(0, key=1),)


def test_a_restarted_scheduler_gets_the_last_rounds_of_each_key():
    asking = TopologyRequests()
    for number in range(5):
        asking.record_begin(KEY, begun(number), 0.0)
    asking.record_begin(KEY, begun(0, key=1), 0.0)
    assert asking.recent() == (begun(2), begun(3), begun(4), begun(0, key=1))
    assert not asking.pending


def test_of_a_key_with_many_rounds_under_way_one_request_reports_several():
    small = Key(0, "g/65536", (65_536,), "float32", form=COLLECTIVE)
    asking = TopologyRequests()
    asking.record_begin(small, begun(0), 5.0)
    assert not asking.pending
    assert 5.0 < asking.due < 6.0
    asking.tick(asking.due)
    assert asking.take() == (begun(0),)
    rounds = [begun(number) for number in range(1, small.rounds_under_way // 4 + 1)]
    for round in rounds:
        assert not asking.pending
        asking.record_begin(small, round, 6.0)
    assert asking.take() == tuple(rounds)
    assert asking.due == math.inf


def test_a_round_that_waits_has_everything_of_its_key_reported():
    small = Key(0, "g/65536", (65_536,), "float32", form=COLLECTIVE)
    asking = TopologyRequests()
    asking.record_begin(small, begun(0), 0.0)
    asking.record_begin(small, begun(0, key=1), 0.0)
    asking.request_all(0)
    assert asking.take() == (begun(0),)
    assert asking.recent() == (begun(0), begun(0, key=1))
    assert not asking.pending
