"""Rounds under way when nodes leave and join: aggregations of several ranks, and an agreement, by hand."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest

from netstorm.errors import NodeLost, ProtocolViolation
from netstorm.kvstore.forms import Dense, Key
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.node_rounds import NodeRounds
from netstorm.kvstore.rounds.views import KeptResult, KeptResults, Receipts
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer, bits_to_wire, checksum
from netstorm.protocol.messages import (
    Binding,
    KeyGrant,
    LossTerms,
    NewView,
    Phase,
    RoundResults,
    ViewAgreed,
)
from netstorm.pslite.machine import Call, Send
from netstorm.scheduler.views import ViewAgreement
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.rounds.ranks import legal_part

CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1)),), weights=(1,), members=(0, 1, 2))
"""2 -> 1 -> 0: rank 1 aggregates and forwards, rank 0 is the root."""


class Job:
    """Ranks whose messages are carried by hand, and the scheduler's part in changes of the view."""

    def __init__(self, policy=CHAIN, seed=0):
        self.random = random.Random(seed)
        self.policy = policy
        self.view = 0
        self.nodes, self.outboxes, self.keys, self.counters = {}, {}, {}, {}
        self.in_flight = []
        for rank in policy.members:
            self.add(rank)

    def add(self, rank, *, fresh=False):
        bindings, outbox, counters = Bindings(rank), Outbox(), Counters()
        bindings.install(self.policy)
        node = NodeRounds(rank, bindings, outbox, counters, elastic=True)
        node.views.fresh = fresh
        key = Key(0, "w", (6,), "float32")
        key.set_grant(KeyGrant(namespace=0, name="w", key=0, first_slot=0, offset=0, chunk_size=4))
        bindings.bind(Binding(key=0, from_round=0, version=1, granted=99))
        node.add_key(key)
        self.nodes[rank], self.outboxes[rank], self.keys[rank] = node, outbox, key
        self.counters[rank] = counters

    def push(self, rank, value, **more):
        key = self.keys[rank]
        result = np.full(6, value, np.float32)
        outcome: list[Exception | None] = []
        operation = Operation(
            key=key,
            round=key.take_round(),
            source=result.copy(),
            destination=result,
            done=outcome.append,
            **more,
        )
        self.nodes[rank].submit(operation, now=0.0)
        self.collect(rank)
        return operation, result, outcome

    def collect(self, rank):
        for instruction in self.outboxes[rank].take():
            if isinstance(instruction, Call):
                instruction.function()
            elif isinstance(instruction, Send):
                data = None if instruction.payload is None else bytearray(bytes(instruction.payload))
                self.in_flight.append((rank, int(instruction.peer), instruction.message, data))

    def deliver_all(self, wanted=lambda _: True):
        while chosen := [one for one in self.in_flight if wanted(one)]:
            one = self.random.choice(chosen)
            self.in_flight.remove(one)
            sender, receiver, part, data = one
            if receiver in self.nodes:
                crc = 0 if data is None else checksum(data)
                self.nodes[receiver].receive(Peer(sender), part, data, crc)
                self.collect(receiver)

    def change(self, *members, silent=(), arrivals=()):
        """Begin a view; return its agreement once all have reported."""
        self.view += 1
        version = self.policy.version + 1
        self.policy = msgspec.structs.replace(self.policy, version=version, members=members, silent=silent)
        for rank in set(self.nodes) - set(members):
            del self.nodes[rank]
        for rank in arrivals:
            self.add(rank, fresh=True)
        agreement = ViewAgreement(self.view, members, silent, lambda _: ())
        agreed = None
        for rank in members:
            report = self.nodes[rank].views.begin(
                NewView(view=self.view, policy=self.policy, members=(), arrivals=arrivals)
            )
            self.collect(rank)
            agreed = agreement.report(rank, report)
        return agreed

    def agree(self, agreed, *ranks):
        for rank in ranks or self.policy.members:
            assert self.nodes[rank].agree(agreed)
            self.collect(rank)


def of(rank):
    return lambda one: one[1] == rank


@pytest.mark.parametrize("seed", range(12))
def test_whenever_a_rank_leaves_the_others_have_the_same_sums_of_the_contributors_they_name(seed):
    job = Job(seed=seed)
    pushed = {rank: job.push(rank, 10.0**rank) for rank in range(3)}
    for _ in range(job.random.randrange(12)):
        if job.in_flight:
            one = job.random.choice(job.in_flight)
            job.deliver_all(lambda other, one=one: other is one)
    gone = job.random.randrange(3)
    left = [rank for rank in range(3) if rank != gone]
    job.agree(job.change(*left))
    job.deliver_all()
    operations = [pushed[rank][0] for rank in left]
    assert operations[0].contributors == operations[1].contributors
    for rank in left:
        operation, result, outcome = pushed[rank]
        assert outcome == [None]
        for bits, chunks in operation.contributors.items():
            total = sum(10.0**one for one in range(3) if bits >> one & 1)
            for chunk in range(2):
                if chunks >> chunk & 1:
                    assert set(result[4 * chunk : 4 * chunk + 4].tolist()) == {total}


@pytest.mark.parametrize("before", [False, True], ids=["deadline in the change", "deadline before it"])
def test_from_the_announcement_to_the_agreement_no_late_chunk_is_ended(before):
    job, terms = Job(), LossTerms(bound=0.5, deadline_s=0.05)
    pushed = {rank: job.push(rank, 10.0**rank, loss=terms) for rank in (0, 1)}
    job.nodes[0].tick(1.0)
    job.nodes[1].tick(1.0)
    job.nodes[1].tick(1.05)  # an inner node passes on what it has
    job.collect(1)
    job.deliver_all()
    if before:
        job.nodes[0].tick(1.06)
        job.collect(0)
    agreed = job.change(0, 1)
    job.nodes[0].tick(1.07)
    assert before or job.nodes[0].next_tick() == math.inf
    job.collect(0)
    job.deliver_all()  # what was sent by the policy before is dropped
    job.agree(agreed)
    job.deliver_all()
    for _, result, outcome in pushed.values():
        assert outcome == [None]
        assert set(result.tolist()) == {11.0}


def test_from_the_announcement_to_the_agreement_nothing_is_begun_or_taken():
    job = Job()
    for rank in (1, 2):
        job.push(rank, 1.0)
    agreed = job.change(0, 1, 2)
    _, _, outcome = job.push(0, 1.0)
    job.deliver_all()
    assert outcome == []
    assert job.in_flight == []
    job.agree(agreed)
    job.deliver_all()
    assert outcome == [None]


def test_parts_of_a_former_view_are_dropped_whenever_they_come():
    job = Job()
    for rank in range(3):
        job.push(rank, 1.0)
    late = list(job.in_flight)
    job.in_flight.clear()
    job.agree(job.change(0, 1, 2))
    job.in_flight += late
    results = [operation for node in job.nodes.values() for operation in node.outstanding()]
    job.deliver_all()
    assert all(operation.contributors == {0b111: 0b11} for operation in results)
    assert job.counters[1].snapshot()["parts_of_former_views"] == 2


def test_a_result_that_one_rank_has_reaches_all_others_though_who_forwarded_it_has_left():
    job = Job()
    pushed = [job.push(rank, 1.0) for rank in range(3)]
    job.deliver_all(lambda one: one[2].phase is Phase.REDUCE)
    assert pushed[0][2] == [None]
    agreed = job.change(0, 2)
    assert [(one.source, one.target) for one in agreed.recoveries] == [(0, 2)]
    job.agree(agreed)
    job.deliver_all()
    assert pushed[2][2] == [None]
    assert pushed[2][0].contributors == {0b111: 0b11}


def test_a_result_that_was_not_agreed_on_is_a_violation():
    job = Job()
    job.agree(job.change(0, 1, 2))
    part = legal_part(phase=Phase.RECOVERY, version=2, contributors=bits_to_wire(7))
    with pytest.raises(ProtocolViolation, match="which was not agreed on"):
        job.nodes[1].receive(Peer(0), part, bytearray(16), 0)


def test_an_operation_whose_result_nobody_has_any_more_fails():
    job = Job()
    _, _, outcome = job.push(2, 1.0)
    job.change(0, 1, 2)
    lost = (RoundResults(0, 0, bits_to_wire(1)),)
    job.agree(ViewAgreed(view=1, recoveries=(), first_rounds={0: 0}, lost=lost))
    assert isinstance(outcome[0], NodeLost)


def test_an_agreement_on_a_view_that_was_given_up_changes_nothing():
    job = Job()
    old = job.change(0, 1, 2)
    agreed = job.change(0, 1)
    assert not job.nodes[0].agree(old)
    assert job.nodes[0].views.changing
    job.agree(agreed)
    assert not job.nodes[0].views.changing


def test_views_come_in_order():
    job = Job()
    job.agree(job.change(0, 1, 2))
    again = NewView(view=1, policy=job.policy, members=())
    with pytest.raises(ProtocolViolation, match="view 1 comes after view 1"):
        job.nodes[0].views.begin(again)


def test_a_newcomer_gets_all_results_and_forwards_them_before_and_after_its_program_begins():
    """Rank 1 is between the others. Its program's state has round 0, whose result others still need."""
    job = Job(msgspec.structs.replace(CHAIN, members=(0, 2)))
    job.agree(job.change(0, 1, 2, silent=(1,), arrivals=(1,)))
    pushed = [job.push(rank, 1.0) for rank in (0, 2)]
    job.nodes[1].begin_at({0: 1})
    job.deliver_all()
    assert [outcome for _, _, outcome in pushed] == [[None]] * 2
    assert pushed[1][0].contributors == {0b101: 0b11}
    assert job.nodes[1].views.received() == {0: 0}
    job.keys[1].begin_at(1)
    late = job.push(1, 1.0)
    pushed = [job.push(rank, 1.0) for rank in (0, 2)]
    job.deliver_all()
    assert [outcome for _, _, outcome in (late, *pushed)] == [[None]] * 3
    assert late[1].tolist() == [2.0] * 6


def test_a_rank_that_catches_up_says_so_once():
    job = Job(msgspec.structs.replace(CHAIN, members=(0, 2)))
    job.agree(job.change(0, 1, 2, silent=(1,), arrivals=(1,)))
    job.nodes[1].begin_at({0: 0})
    job.push(1, 1.0)
    assert job.nodes[1].views.take_caught_up()
    assert not job.nodes[1].views.take_caught_up()


def test_a_state_that_comes_before_its_key_is_known_counts_once_the_key_is():
    job = Job()
    node = NodeRounds(1, Bindings(1), Outbox(), Counters(), elastic=True)
    node.begin_at({0: 3})
    node.add_key(job.keys[1])
    assert node.views.begins_at == {0: 3}
    assert node.topology_requests.pending


def test_results_are_kept_until_all_contributors_have_the_round():
    job = Job()
    for _ in range(4):
        pushed = [job.push(rank, 1.0) for rank in range(3)]
        job.deliver_all()
        assert all(outcome == [None] for _, _, outcome in pushed)
        for node in job.nodes.values():
            assert len(list(node.views.kept)) <= 2


# ----------------------------------------------------------------------- results are kept until all have them

FORM = Dense(np.dtype("float32"))
RESULT = KeptResult(b"1234", 0b11)


def keep(kept, round, chunk=0, *, key=0, result=RESULT, settled=-1):
    kept.add(key, round, chunk, result, form=FORM, call=0, settled=settled)


def rounds_of(kept):
    return [(key, round) for key, round, _ in kept]


def test_what_is_kept_can_be_sent_to_others():
    kept = KeptResults()
    keep(kept, 3, 1)
    keep(kept, 3, 2, result=None)
    found = kept.of(3, 0)
    assert found is None
    found = kept.of(0, 3)
    assert found is not None
    assert (found.chunks, found.known, found.form) == ({1: RESULT}, {2}, FORM)


def test_a_result_drops_those_of_rounds_that_all_have():
    kept = KeptResults()
    for round in range(4):
        keep(kept, round, settled=round - 2)
    assert rounds_of(kept) == [(0, 2), (0, 3)]
    keep(kept, 0, key=1)
    keep(kept, 4, settled=3)
    assert rounds_of(kept) == [(0, 4), (1, 0)]


def test_an_older_word_that_comes_later_brings_nothing_back():
    kept = KeptResults()
    keep(kept, 5, settled=4)
    keep(kept, 6, settled=2)
    assert rounds_of(kept) == [(0, 5), (0, 6)]


def test_nothing_is_left_when_the_job_has_failed():
    kept = KeptResults()
    keep(kept, 1)
    kept.clear()
    assert rounds_of(kept) == []


# ---------------------------------------------------------- results are kept for ranks that do not contribute


def test_without_newcomers_nothing_limits_what_is_dropped():
    receipts = Receipts()
    receipts.set_members((0, 1, 2), ())
    assert receipts.limit(0, 0b111) == math.inf


def test_a_silent_rank_has_nothing_until_it_says_so():
    receipts = Receipts()
    receipts.set_members((0, 1, 2), (1, 2))
    assert receipts.limit(0, 0b001) == -1
    receipts.record(1, {0: 5})
    receipts.record(2, {0: 3, 1: 9})
    assert receipts.limit(0, 0b001) == 3
    assert receipts.limit(1, 0b001) == -1


def test_what_a_rank_that_was_silent_has_said_counts_until_results_have_its_contribution():
    receipts = Receipts()
    receipts.set_members((0, 1), (1,))
    receipts.record(1, {0: 5})
    receipts.set_members((0, 1), ())
    assert receipts.limit(0, 0b01) == 5
    assert receipts.limit(0, 0b11) == math.inf


def test_nobody_waits_for_a_rank_that_has_left_nor_counts_what_its_place_had_before():
    receipts = Receipts()
    receipts.set_members((0, 1), (1,))
    receipts.record(1, {0: 5})
    receipts.forget(1)
    assert receipts.limit(0, 0b01) == -1
    receipts.set_members((0,), ())
    assert receipts.limit(0, 0b01) == math.inf


def test_ranks_that_were_never_silent_need_not_say_anything():
    receipts = Receipts()
    receipts.record(1, {0: 5})
    receipts.forget(1)
    assert receipts.limit(0, 0) == math.inf
