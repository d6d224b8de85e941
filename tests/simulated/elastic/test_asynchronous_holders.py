"""States of blocks that their holders do not give, or that are lost with both; members that lie."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np
import pytest

from netstorm.errors import NetStormError, NodeLost, WaitTimeout
from netstorm.lab.simulation.asynchronous import AsynchronousStore
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.decoders import message_classes
from netstorm.lab.testing.hostile_member import HostileMember
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import BlockCopy, CopiesHeld, CopyKept, CopyWanted, HeldCopy
from netstorm.pslite.machine import Send

NODES = 4
WAIT_S = 40.0
"""NETSTORM_WAIT_TIMEOUT: a rank may hold up another one for a quarter of it."""


class Job:
    """An elastic job whose ranks push ones to a key with two blocks for each of them."""

    def __init__(self, **settings):
        self.cluster = SimulatedCluster(
            NODES,
            elastic=f"1:{NODES}",
            wait_timeout_s=WAIT_S,
            chunk_size=8,
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=3.0,
            link_timeout_s=2.0,
            detect_s=1.0,
            **settings,
        )
        self.cluster.join()
        self.stores = {
            node.rank: AsynchronousStore(node, self.cluster.timeline) for node in self.cluster.nodes
        }
        self.ended([store.init("w", np.zeros(NODES * 16, "int64")) for store in self.stores.values()])

    def ended(self, pending, limit_s=WAIT_S):
        self.cluster.run_until_ended(pending, limit_s)
        return [one.result() for one in pending]

    def push(self, ranks):
        self.ended([self.stores[rank].push("w", np.full(NODES * 16, -1)) for rank in ranks])

    def pull(self, rank):
        (value,) = self.ended([self.stores[rank].pull("w")])
        return value

    def crash(self, *ranks):
        for rank in ranks:
            self.cluster.faults.crash(rank)
        self.cluster.run_for(8.0)

    def newcomer(self, rank):
        """Start a crashed rank again, which takes no part yet."""
        self.cluster.start(rank)
        node = self.cluster.started(rank)
        self.cluster.run_until(lambda: node.joined.ended, 20.0, "a rank that comes back")
        store = self.stores[rank] = AsynchronousStore(node, self.cluster.timeline)
        store.join("w", np.zeros(NODES * 16, "int64"))
        return node, store

    def come_back(self, rank):
        """Start a crashed rank again. It has the owners' values, and takes part from then on."""
        node, store = self.newcomer(rank)
        self.ended([store.pull("w")])
        node.process.call(node.machine.begin_without_state)
        self.cluster.run_until(lambda: rank in self.stores[1].machine.owners.ranks, 10.0, "its blocks")


def interpose(node, *, sent=lambda send: send, received=lambda _: True):
    """Change or drop what a node sends, and drop what it receives; return what receives all the same."""
    machine = node.machine
    take, receive = machine.take_instructions, machine.receive

    def take_changed():
        changed = (sent(one) if isinstance(one, Send) else one for one in take())
        return [one for one in changed if one is not None]

    def receive_some(peer, message, *arguments):
        if received(message):
            receive(peer, message, *arguments)

    machine.take_instructions, machine.receive = take_changed, receive_some
    return receive


def without(kind):
    """Return what drops messages of a kind."""
    return lambda send: None if isinstance(send.message, kind) else send


def claims_more(node):
    """Says that it has newer states than anybody, and sends none."""
    everything = tuple(HeldCopy(key=0, block=block, version=1000) for block in range(2 * NODES))

    def lie(send):
        if not isinstance(send.message, CopiesHeld):
            return send
        return replace(send, message=msgspec.structs.replace(send.message, copies=everything))

    interpose(node, sent=lie, received=lambda message: not isinstance(message, CopyWanted))


def sends_nothing(node):
    """Has states of which it says, and sends none."""
    interpose(node, received=lambda message: not isinstance(message, CopyWanted))


def sends_older(node):
    """Sends other states than those of which it has told."""
    wanted = set()

    def note(message):
        if isinstance(message, CopyWanted):
            wanted.add((message.path[0], message.block))
        return True

    def lie(send):
        if (
            not isinstance(send.message, BlockCopy)
            or (send.message.path[-1], send.message.block) not in wanted
        ):
            return send
        return replace(send, message=msgspec.structs.replace(send.message, version=1, applied=(0,) * NODES))

    interpose(node, sent=lie, received=note)


def says_nothing(node):
    """Does not say what it has."""
    interpose(node, sent=without(CopiesHeld))


@pytest.mark.parametrize("lie", [claims_more, sends_nothing, sends_older, says_nothing])
def test_a_job_goes_on_with_the_states_of_others_if_a_rank_does_not_give_what_it_has(lie, caplog):
    job = Job()
    job.push(range(NODES))
    job.push(range(NODES))
    job.crash(3)
    job.push((0, 1, 2))
    lie(job.cluster.nodes[1])  # keeps copies of what was rank 3's, and is rank 0's now
    with caplog.at_level(logging.ERROR):
        job.come_back(3)
        for store in job.stores.values():
            job.ended([store.push("w", np.full(NODES * 16, -1))], WAIT_S / 2)
    for rank in range(NODES):
        assert set(job.pull(rank)) == {2 * 4 + 3 + 4}
    if lie is not sends_older:
        assert "goes on without what ranks [1] have of its blocks: in 10 s" in caplog.text


def test_a_rank_that_gets_no_state_from_anybody_names_those_and_the_job_goes_on_without_it():
    job = Job()
    job.push(range(NODES))
    job.crash(3)
    job.push((0, 1, 2))
    for rank in (0, 1):
        sends_nothing(job.cluster.nodes[rank])
    job.come_back(3)
    job.push((0, 1, 2))  # what rank 3 cannot serve is rank 0's again, which has it
    assert set(job.pull(2)) == {4 + 3 + 3}
    failure = job.cluster.nodes[3].failure
    assert isinstance(failure, NodeLost)
    assert "rank 3 has pulled values with 7 pushes of other ranks" in str(failure)
    assert "ranks [0, 1] have not sent what they have of it" in str(failure)


def test_owner_and_replica_that_are_lost_together_are_both_named():
    job = Job()
    job.push(range(NODES))
    owners = job.stores[2].machine.owners
    key = job.cluster.nodes[2].keys["w"]
    pairs = {(owners.owner(key, block), owners.replica(key, block)) for block in range(2 * NODES)}
    assert (3, 0) in pairs
    job.crash(3, 0)
    pending = [job.stores[rank].push("w", np.full(NODES * 16, -1)) for rank in (1, 2)]
    job.cluster.run_until_ended(pending, WAIT_S)
    first, second = (one.error for one in pending)
    assert isinstance(first, NodeLost)
    assert isinstance(second, NodeLost)
    assert re.search(r"rank 3 has told of 4 updates, .* have left together \(ranks 0, 3\)", str(first))
    # Rank 1, the next owner of what they had, has ended with that; then it was rank 2's.
    assert "its owner and its replica have left together (ranks 0, 1, 3)" in str(second)


def test_a_newcomer_whose_owners_have_all_left_ends_by_name():
    """It has no state and needs none: the values were with them."""
    job = Job()
    job.push(range(NODES))
    job.crash(3)
    _, store = job.newcomer(3)
    for rank in range(3):
        job.cluster.faults.crash(rank)
    pulled = store.pull("w")
    job.cluster.run_until_ended([pulled], WAIT_S)
    assert isinstance(pulled.error, NodeLost)
    assert "no rank is left that has the job's state" in str(pulled.error)


@pytest.mark.parametrize("says", ["before", "after"])
@pytest.mark.parametrize("pulls", [True, False])
def test_a_newcomer_that_takes_part_as_all_owners_are_lost_serves_no_values_of_its_own(pulls, says):
    job = Job()
    job.push(range(NODES))
    job.crash(3)
    node, store = job.newcomer(3)
    if pulls:
        assert set(job.ended([store.pull("w")])[0]) == {4}
    for rank in range(3 if says == "after" else 0):
        job.cluster.faults.crash(rank)
    node.process.call(node.machine.begin_without_state)
    for rank in range(3 if says == "before" else 0):
        job.cluster.faults.crash(rank)
    pulled = store.pull("w")
    job.cluster.run_until_ended([pulled], WAIT_S)
    assert isinstance(pulled.error, NodeLost)
    known = "pulled values with 4 pushes of other ranks" if pulls else "joined later and has pulled no values"
    assert f"rank 3 has {known}" in str(pulled.error)
    assert "its owner and its replica have left together (ranks 0, 1, 2)" in str(pulled.error)


def test_a_newcomer_that_has_all_states_goes_on_alone():
    job = Job()
    job.push(range(NODES))
    for rank in (3, 2, 0):
        job.crash(rank)
    job.come_back(3)
    job.cluster.run_for(1.0)  # of two ranks, each has a state of all blocks
    job.crash(1)
    assert set(job.pull(3)) == {4}
    job.push((3,))
    assert set(job.pull(3)) == {5}


@pytest.mark.parametrize("knows", [1, 2])
def test_who_has_pulled_what_both_holders_of_a_block_have_taken_along_ends_by_name(knows):
    """Only a rank that has left has pushed, so nobody misses pushes of its own. Rank 1 is the next owner, and
    ends first.
    """
    job = Job()
    job.push((3,))
    assert set(job.pull(knows)) == {1}
    job.crash(3, 0)
    pulled = job.stores[knows].pull("w")
    job.cluster.run_until_ended([pulled], WAIT_S)
    assert isinstance(pulled.error, NodeLost)
    assert re.search(
        rf"rank {knows} has pulled values with 1 pushes of other ranks, and the newest state of block \d "
        r"has 0: its owner and its replica have left together \(ranks 0, (1, )?3\)",
        str(pulled.error),
    )


@pytest.mark.parametrize("topology", ["fapt", "star"])
@pytest.mark.parametrize("pulls", [True, False])
def test_who_has_only_heard_of_what_both_holders_of_a_block_have_taken_along_ends_by_name(topology, pulls):
    """Nobody who is left has pushed, or has pulled an update. With a star the hub alone owns everything."""
    job = Job(topology=topology)
    if pulls:
        assert {*job.pull(1), *job.pull(2)} == {0}
    job.push((3,))
    job.cluster.run_for(0.1)
    owners = job.stores[2].machine.owners
    lost = set(owners.ranks) if topology == "star" else {3, 0}
    job.crash(*lost)
    for rank in sorted(set(range(NODES)) - lost):
        pulled = job.stores[rank].pull("w")
        job.cluster.run_until_ended([pulled], WAIT_S)
        assert isinstance(pulled.error, NodeLost)
        assert re.search(
            r"rank \d has told of 1 updates, and the newest state of block \d has 0: "
            r"its owner and its replica have left together \(ranks ",
            str(pulled.error),
        )


def test_blocks_that_nobody_has_updated_go_on_from_their_initial_values():
    job = Job()
    assert set(job.pull(1)) == {0}
    job.crash(3, 0)
    job.push((1, 2))
    assert set(job.pull(2)) == {2}


def test_a_rank_that_sends_states_piece_by_piece_is_not_silent():
    job = Job(delay_s=0.01)
    job.push(range(NODES))
    job.crash(3)
    job.push((0, 1, 2))
    slow = job.cluster.nodes[1]
    late: list[CopyWanted] = []

    def keep(message):
        if isinstance(message, CopyWanted):
            late.append(message)
        return not isinstance(message, CopyWanted)

    receive = interpose(slow, received=keep)

    def one_more():
        if late:
            wanted = late.pop(0)
            slow.process.call(lambda now: receive(Peer(wanted.path[-2]), wanted, None, None, now))
        job.cluster.at(job.cluster.now + WAIT_S / 5, one_more)

    job.cluster.at(job.cluster.now, one_more)
    began = job.cluster.now
    job.come_back(3)
    job.push(range(NODES))
    assert job.cluster.now > began + WAIT_S / 4
    assert set(job.pull(3)) == {4 + 3 + 4}
    assert job.cluster.nodes[3].machine.counters.get("ranks_passed_over") == 0


def test_a_silent_replica_stalls_owners_no_longer_than_the_scheduler_waits_for_its_heartbeats():
    job = Job()
    job.push(range(NODES))
    began = job.cluster.now
    job.cluster.faults.crash(2, silent=True)
    job.push((0, 1, 3))
    assert job.cluster.now - began < 4.0
    assert set(job.pull(1)) == {4 + 3}


def test_a_replica_that_confirms_nothing_is_named_by_whoever_waits():
    job = Job()
    job.push(range(NODES))
    interpose(job.cluster.nodes[2], sent=without(CopyKept))
    pending = [job.stores[rank].push("w", np.full(NODES * 16, -1)) for rank in (0, 1, 3)]
    job.cluster.run_until_ended(pending, 2 * WAIT_S)
    for one in pending:
        assert isinstance(one.error, WaitTimeout)
        assert "owners, ranks [1], which may wait for ranks [2] to confirm copies" in str(one.error)
    assert "here copies wait until ranks [2] have confirmed them" in str(pending[1].error)


def test_states_that_are_asked_for_wait_until_it_is_known_who_has_the_newest(monkeypatch):
    job, late = Job(), []
    job.push((1, 2, 3))
    with monkeypatch.context() as patch:
        slow = job.stores[1].blocks["w"]
        patch.setattr(slow, "states", lambda _, done: late.append(functools.partial(done, b"1")))
        pending, found = job.stores[0].pull_states("w")
        job.cluster.run_until(lambda: len(late) == 2, 5.0, "the store is asked")
    says_nothing(job.cluster.nodes[0])  # rank 1 does not know for 10 s what rank 0 has of its blocks
    job.crash(3)
    for done in late:
        job.cluster.nodes[1].process.call(functools.partial(_call, done))
    job.cluster.run_for(0.5)
    owners, key = job.stores[1].machine.owners, job.cluster.nodes[1].keys["w"]
    assert 1 not in {owners.owner(key, block) for block in found}
    job.cluster.run_until_ended([pending], WAIT_S)
    assert len(found) == 2 * NODES


def _call(done, _now):
    done()


def sends_no_states(node):
    """Sends blocks with right values, and something else than its update rule's states."""

    def lie(send):
        if not isinstance(send.message, BlockCopy):
            return send
        return replace(send, payload=bytes(send.payload)[: send.message.values] + b"many", payload_crc=None)

    interpose(node, sent=lie)


def test_a_state_that_the_update_rule_cannot_take_is_passed_over_for_that_of_another_holder(caplog):
    job = Job()
    job.push(range(NODES))
    job.push(range(NODES))
    job.crash(3)
    job.push((0, 1, 2))
    sends_no_states(job.cluster.nodes[1])  # keeps copies of what was rank 3's, and is rank 0's now
    with caplog.at_level(logging.ERROR):
        job.come_back(3)
        job.push(range(NODES))
    for rank in range(NODES):
        assert set(job.pull(rank)) == {2 * 4 + 3 + 4}
    assert job.cluster.nodes[3].machine.counters.get("states_refused") == 2
    assert re.search(
        r"states of the update rule that rank 1 has sent of block \d of key 'w' are b'many': expected a "
        r"number of updates; version 11 is passed over for the newest state that is left",
        caplog.text,
    )


def test_a_block_of_which_no_state_is_left_names_the_rank_that_sent_something_else():
    job = Job()
    owners, key = job.stores[2].machine.owners, job.cluster.nodes[2].keys["w"]
    pairs = {(owners.owner(key, block), owners.replica(key, block)) for block in range(2 * NODES)}
    assert (3, 0) in pairs
    sends_no_states(job.cluster.nodes[3])
    job.push(range(NODES))
    job.crash(3)
    pending = [job.stores[rank].push("w", np.full(NODES * 16, -1)) for rank in (0, 1, 2)]
    job.cluster.run_until_ended(pending, WAIT_S)
    failure = job.cluster.nodes[0].failure
    assert isinstance(failure, NodeLost)
    assert re.search(
        r"1 pushes of rank \d were confirmed, and the newest state of block \d has 0: the states of the "
        r"update rule that rank 3 has sent of block \d of key 'w' are b'many': expected a number of updates",
        str(failure),
    )


# -------------------------------------------------------------- a member that sends what no correct one would

KINDS = get_args(m.AsynchronousMessage)
OTHERS = tuple(kind for kind in message_classes() if not issubclass(kind, KINDS))
STEPS = 12


class HostileOwner(HostileMember):
    """Sends messages of asynchronous training, most of them to a rank directly, about a key that it has."""

    def _turn(self):
        if self._others():
            super()._turn()

    def _send(self, message, payload):
        target = self._chance.choice(self._others())
        if isinstance(message, KINDS):
            changes = {"path": (self._rank, int(target)), "hop": 1}
            joined = self._node.machine.joined
            if joined is not None and self._chance.random() < 0.9:
                changes["view"] = joined.asynchronous._routed.view
            if hasattr(message, "key") and self._chance.random() < 0.8:
                changes["key"] = 0
            message = msgspec.structs.replace(message, **changes)
        self._send_to(target, message, payload)


def run(seed):
    """Let a member lie while another one dies; what fails names the liar. Return whether that happened."""
    job, hostile, dies = Job(seed=seed), seed % NODES, (seed + 2) % NODES
    job.push(range(NODES))
    spares: tuple[type[m.Message], ...] = OTHERS
    if seed % 8 < 4:
        spares = (*OTHERS, m.Push)  # a push under another rule ends the job at once
    member = HostileOwner(
        job.cluster, hostile, seed=seed, forges_parts=True, most=4000, every_s=0.002, spares=spares
    )
    correct = [rank for rank in range(NODES) if rank not in (hostile, dies)]
    for step in range(STEPS):
        if step == STEPS // 2:
            job.cluster.faults.crash(dies)
        pending = [job.stores[rank].push("w", np.full(NODES * 16, -1)) for rank in correct]
        pending += [job.stores[rank].pull("w") for rank in correct]
        job.cluster.run_until_ended(pending, 100.0)
        errors = [one.error for one in pending if isinstance(one.error, NetStormError)]
        if errors:  # who is owner next may end, too, with what was lost with the first one
            assert any(re.search(rf"\brank {hostile}\b", str(error)) for error in errors), errors
            return True
        assert all(one.error is None for one in pending)
        job.cluster.run_for(0.1)
    assert member.sent
    return False


def test_a_job_goes_on_or_names_the_member_that_lies():
    ends = {run(seed) for seed in range(8)}
    assert True in ends


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 108, 25))
def test_many_members_lie(first):
    for seed in range(first, first + 25):
        run(seed)
