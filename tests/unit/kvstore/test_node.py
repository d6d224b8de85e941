"""A general node alone: its messages to the scheduler, its reactions to the answers, and what it refuses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from netstorm import errors
from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.kvstore.forms import Key
from netstorm.kvstore.node import GeneralNode, NodeState
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.options import NodeOptions
from netstorm.lab.testing.decoders import example, message_classes
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, may_send
from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Peer, decode_body
from netstorm.pslite.machine import Admit, Become, Call, Connect, Disconnect, NotYet, Refuse, Send
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.rounds.ranks import legal_part

MEMBERS = tuple(
    m.Member(rank=rank, host="10.0.0.1", port=4000 + rank, site="denver", incarnation=100 + rank)
    for rank in range(3)
)

STAR = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))
JOINED = m.Joined(rank=1, members=MEMBERS, policy=STAR, heartbeat_interval_s=1, heartbeat_timeout_s=10)


class Driven:
    """A node, with its instructions sorted by kind."""

    def __init__(self, **options):
        self.now = 0.0
        self.node = GeneralNode(
            NodeOptions(
                scheduler_host="10.0.0.9", scheduler_port=9091, host="10.0.0.1", port=4001, **options
            ),
            now=self.now,
        )
        self.all = []
        self.take_instructions()

    def take_instructions(self):
        taken = self.node.take_instructions()
        self.all += taken
        for instruction in taken:
            if isinstance(instruction, Call):
                instruction.function()
        return taken

    def sent(self, kind):
        return [i.message for i in self.all if isinstance(i, Send) and isinstance(i.message, kind)]

    def deliver(self, message, peer=SCHEDULER):
        self.node.receive(peer, message, None, 0, self.now)
        self.take_instructions()

    def wait(self, seconds):
        self.now += seconds
        self.node.tick(self.now)
        self.take_instructions()

    def join(self):
        self.deliver(JOINED)
        return self

    def grant(self, name="w", key=0, granted=0):
        binding = m.Binding(key=key, from_round=0, version=1, granted=granted)
        grant = m.KeyGrant(namespace=0, name=name, key=key, first_slot=0, offset=0, chunk_size=4)
        self.deliver(m.KeysRegistered(grants=(grant,), bindings=(binding,)))

    def push(self, key, rule=""):
        outcome: list[Exception | None] = []
        values = np.ones(key.elements, np.float32)
        operation = Operation(
            key=key, round=key.take_round(), source=values, destination=values, done=outcome.append, rule=rule
        )
        self.node.submit(operation, self.now)
        self.take_instructions()
        return outcome

    def new_key(self, name="w"):
        key = Key(0, name, (4,), "float32")
        self.node.register(key, self.now)
        return key


def test_the_first_message_is_a_request_to_join():
    driven = Driven(asked_rank=2, num_workers=3, site="denver", must_agree=(("CHUNK_SIZE", "4"),))
    assert isinstance(driven.all[0], Connect)
    [join] = driven.sent(m.Join)
    assert (join.asked_rank, join.num_workers, join.site) == (2, 3, "denver")
    assert join.must_agree == {"CHUNK_SIZE": "4"}


def test_joining_gives_a_rank_and_everybodys_address():
    driven = Driven()
    joined: list[Exception | None] = []
    driven.node.when_joined(joined.append)
    driven.join()
    assert joined == [None]
    assert driven.node.rank == 1
    assert Become(rank=1) in driven.all
    assert [c.peer for c in driven.all if isinstance(c, Connect)] == [SCHEDULER, Peer(0), Peer(2)]


def test_a_node_that_is_to_connect_at_once_connects_to_those_to_which_it_sends():
    driven = Driven(connects_at_once=True).join()
    members = [one for one in driven.all if isinstance(one, Connect) and one.peer != SCHEDULER]
    assert {one.peer: one.at_once for one in members} == {Peer(0): True, Peer(2): False}
    assert not any(one.at_once for one in Driven().join().all if isinstance(one, Connect))


def test_only_members_of_the_job_are_admitted():
    driven = Driven()
    hello = m.Hello(job="default", sender=2, incarnation=102, receiver=1, session=7, received=0)
    assert isinstance(driven.node.admit(hello), NotYet)
    driven.join()
    assert driven.node.admit(hello) == Admit(Peer(2))
    for changed in ({"job": "other"}, {"sender": 3}, {"sender": -1}, {"incarnation": 1}, {"receiver": 0}):
        wrong = m.Hello(**{**{f: getattr(hello, f) for f in hello.__struct_fields__}, **changed})
        assert isinstance(driven.node.admit(wrong), Refuse), changed


def test_keys_that_are_registered_together_travel_in_one_message():
    driven = Driven().join()
    for number in range(160):
        driven.new_key(f"k{number}")
    driven.wait(0)
    [request] = driven.sent(m.RegisterKeys)
    assert len(request.keys) == 160


def test_a_round_that_waits_asks_for_its_policy():
    driven = Driven().join()
    key = driven.new_key()
    driven.push(key, rule="SGD")
    driven.wait(0)
    assert driven.sent(m.Part) == []  # the key has no number yet
    driven.grant()
    driven.wait(0)
    assert [part.round for part in driven.sent(m.Part)] == [0]
    assert driven.sent(m.TopologyRequest) == []  # the later it asks, the newer is the policy
    driven.push(key)
    driven.wait(0)
    assert len(driven.sent(m.Part)) == 1  # round 1 has not been granted
    [request] = driven.sent(m.TopologyRequest)
    assert request.begun == (m.RoundBegun(key=0, round=0, rule="SGD"),)
    driven.deliver(m.TopologyAnswer(bindings=(m.Binding(key=0, from_round=0, version=1, granted=1),)))
    assert [part.round for part in driven.sent(m.Part)] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("lost", errors.NodeLost),
        ("failed", errors.NodeFailed),
        ("disagreement", errors.Disagreement),
        ("key", errors.KeyMismatch),
        ("refused", errors.JoinRefused),
        ("timeout", errors.WaitTimeout),
        ("something new", errors.Unavailable),
    ],
)
def test_a_failure_ends_what_is_outstanding_and_everything_later(kind, error):
    driven = Driven().join()
    outcome = driven.push(driven.new_key())
    barrier: list[Exception | None] = []
    driven.node.barrier(barrier.append, driven.now)
    driven.deliver(m.PeerGone(rank=2, kind=kind, reason="rank 2 (10.0.0.1:4002) is gone"))
    later = driven.push(driven.new_key("v"))
    for [raised] in (outcome, barrier, later):
        assert type(raised) is error
        assert "rank 2 (10.0.0.1:4002) is gone" in str(raised)
    assert [d.at_once for d in driven.all if isinstance(d, Disconnect)] == [True, True, False]


def test_a_peer_that_cannot_be_reached_is_reported_and_given_up_if_the_scheduler_decides_nothing():
    driven = Driven().join()
    outcome = driven.push(driven.new_key())
    driven.node.link_lost(Peer(2), "connection refused", [], driven.now)
    driven.take_instructions()
    assert driven.sent(m.Suspect) == [m.Suspect(rank=2, reason="connection refused")]
    driven.wait(23)
    assert outcome == []
    driven.wait(2)
    assert isinstance(outcome[0], errors.NodeLost)
    assert "rank 2 (10.0.0.1:4002, denver) cannot be reached from rank 1" in str(outcome[0])
    assert "cannot be reached" in driven.sent(m.Failed)[0].reason


def test_a_rank_that_finished_early_is_an_error_and_not_a_wait():
    driven = Driven().join()
    key = driven.new_key()
    driven.grant(granted=5)
    driven.push(key)
    outcome = driven.push(key)
    driven.deliver(m.PeerFinished(rank=2, last_rounds={0: 0}))
    assert isinstance(outcome[0], errors.UnevenRounds)
    assert (
        "rank 1 waits for round 1 of key 'w', but rank 2 (10.0.0.1:4002, denver) has finished after round 0"
        in str(outcome[0])
    )


def test_a_push_after_a_rank_has_finished_fails_at_once():
    driven = Driven().join()
    key = driven.new_key()
    driven.grant(granted=5)
    driven.deliver(m.PeerFinished(rank=2, last_rounds={}))
    assert "without ever using that key" in str(driven.push(key)[0])


def test_finishing_waits_until_no_rank_needs_this_node():
    driven = Driven().join()
    key = driven.new_key()
    driven.grant()
    driven.push(key)
    done: list[Exception | None] = []
    driven.node.finish(done.append, driven.now)
    driven.take_instructions()
    assert driven.sent(m.Finished) == [m.Finished(last_rounds={0: 0})]
    assert (done, driven.node.state) == ([], NodeState.FINISHING)
    driven.deliver(m.AllFinished())
    assert (done, driven.node.state) == ([None], NodeState.OVER)
    assert driven.sent(m.Leave) != []


def test_a_node_that_retires_forwards_until_no_rank_needs_it():
    driven = Driven().join()
    done: list[Exception | None] = []
    driven.node.retire("the group was reconfigured", done.append, driven.now)
    driven.take_instructions()
    assert (done, driven.node.state, driven.sent(m.Failed)) == ([], NodeState.FINISHING, [])
    driven.deliver(m.AllFinished())
    assert done == [None]


def test_a_node_that_retires_in_the_middle_of_a_sum_tells_everybody_why():
    driven = Driven().join()
    outcome = driven.push(driven.new_key())
    done: list[Exception | None] = []
    driven.node.retire("the group was reconfigured", done.append, driven.now)
    driven.take_instructions()
    assert driven.sent(m.Failed) == [m.Failed(reason="the group was reconfigured")]
    assert [str(error) for error in (*outcome, *done)] == ["the group was reconfigured"] * 2


def test_no_scheduler_is_asked_for_again_until_the_deadline():
    driven = Driven(join_timeout_s=20)
    joined: list[Exception | None] = []
    driven.node.when_joined(joined.append)
    driven.node.link_lost(SCHEDULER, "connection refused", [], driven.now)
    driven.take_instructions()
    assert len(driven.sent(m.Join)) == 2
    driven.wait(20)
    assert isinstance(joined[0], errors.WaitTimeout)
    assert "the scheduler at 10.0.0.9:9091" in str(joined[0])


def test_the_scheduler_gone_in_the_middle_is_an_error():
    driven = Driven().join()
    outcome = driven.push(driven.new_key())
    driven.node.link_lost(SCHEDULER, "no answer for 10 s", [], driven.now)
    driven.take_instructions()
    assert isinstance(outcome[0], errors.SchedulerLost)


def test_heartbeats_report_what_is_waited_for():
    driven = Driven().join()
    key = driven.new_key()
    driven.grant()
    driven.push(key)
    driven.wait(0)
    driven.wait(3)
    assert driven.sent(m.Heartbeat)[-1].busy == (
        "round 0 of key 'w': 1 of 1 chunks wait for results of ranks [0]"
    )


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (Peer(0), m.AllFinished()),
        (SCHEDULER, m.Join(asked_rank=0, num_workers=1, host="", port=1, site="", release="", pid=1)),
        (SCHEDULER, m.BarrierReached(number=3)),
        (SCHEDULER, JOINED),
    ],
)  # fmt: skip
def test_messages_that_a_peer_may_not_send_are_refused(peer, message):
    driven = Driven().join()
    with pytest.raises(errors.ProtocolViolation):
        driven.node.receive(peer, message, None, 0, 0.0)


def test_each_heartbeat_of_a_node_that_has_joined_comes_with_its_status():
    driven = Driven()
    driven.wait(1.0)
    assert driven.sent(m.Heartbeat)
    assert not driven.sent(m.NodeStatus)
    driven.join()
    driven.wait(1.0)
    (status,) = driven.sent(m.NodeStatus)
    assert (status.rounds, status.last_round, status.waited_s) == (0, -1, 0.0)


def test_an_operation_counts_as_waiting_from_when_the_user_asks_for_it():
    driven = Driven().join()
    driven.wait(1.0)
    driven.push(driven.new_key())
    driven.wait(1.5)
    driven.wait(1.5)
    assert driven.sent(m.NodeStatus)[-1].waited_s == 3.0


# ---------------------------------------------------------------------- what is refused for who its sender is

KEYED_MEMBERS = tuple(
    m.Member(rank=rank, host="h", port=4000 + rank, site="", incarnation=100 + rank, user=f"key {rank}")
    for rank in range(4)
)

CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1, 2)),), weights=(1,))
KINDS = [kind for kind in message_classes() if not issubclass(kind, m.SessionMessage)]
FORBIDDEN = [kind for kind in KINDS if kind not in may_send(Role.MEMBER, Role.MEMBER)]
NOT_THE_SCHEDULERS = [kind for kind in KINDS if kind not in may_send(Role.SCHEDULER, Role.MEMBER)]


def new_node(rank=0, policy=CHAIN, *, joined=True):
    node = GeneralNode(NodeOptions(scheduler_host="s", scheduler_port=9, host="h", port=4000), now=0.0)
    if joined:
        joined = m.Joined(rank, KEYED_MEMBERS, policy, heartbeat_interval_s=1.0, heartbeat_timeout_s=9.0)
        node.receive(SCHEDULER, joined, None, None, 0.0)
    node.take_instructions()
    return node


def an(kind):
    return decode_body(msgspec.msgpack.encode(example(kind, 1)))


@pytest.mark.parametrize("kind", FORBIDDEN, ids=lambda kind: kind.__name__)
def test_what_is_for_the_scheduler_or_from_it_is_refused_of_a_rank_and_does_nothing(kind):
    node = new_node()
    with pytest.raises(NotAuthorised, match=f"rank 2 sent a {kind.__name__}"):
        node.receive(Peer(2), an(kind), None, None, 1.0)
    assert node.take_instructions() == []
    assert node.failure is None


@pytest.mark.parametrize("kind", NOT_THE_SCHEDULERS, ids=lambda kind: kind.__name__)
def test_what_members_say_is_refused_of_the_scheduler(kind):
    with pytest.raises(NotAuthorised, match=f"the scheduler sent a {kind.__name__}"):
        new_node().receive(SCHEDULER, an(kind), None, None, 1.0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_node_that_has_not_joined_takes_little_and_only_of_the_scheduler(kind):
    node = new_node(joined=False)
    with pytest.raises(ProtocolViolation):
        node.receive(Peer(2), an(kind), None, None, 1.0)
    if kind not in may_send(Role.SCHEDULER, Role.APPLICANT):
        with pytest.raises(NotAuthorised):
            node.receive(SCHEDULER, an(kind), None, None, 1.0)


NOT_WHO_TAKES_OVER = [kind for kind in KINDS if kind not in may_send(Role.RECOVERER, Role.MEMBER)]


@pytest.mark.parametrize("kind", NOT_WHO_TAKES_OVER, ids=lambda kind: kind.__name__)
def test_a_scheduler_that_would_take_over_may_say_where_it_is_and_nothing_else(kind):
    node = new_node()
    with pytest.raises(NotAuthorised, match=f"a scheduler that takes over sent a {kind.__name__}"):
        node.receive(UNKNOWN, an(kind), None, None, 1.0)
    assert node.take_instructions() == []
    assert node.failure is None


def test_a_scheduler_that_would_take_over_is_told_whom_this_node_follows_and_changes_nothing():
    node = new_node()
    asking = m.Hello(job="default", sender=-1, incarnation=9, receiver=UNKNOWN, session=1, received=0)
    assert node.admit(asking) == Admit(UNKNOWN)
    node.receive(UNKNOWN, m.Recover(host="elsewhere", port=9), None, None, 1.0)
    (answer,) = node.take_instructions()
    assert isinstance(answer, Send)
    assert answer.message == m.RecoverAnswer(
        accepted=False, scheduler="s:9", rank=0, members=KEYED_MEMBERS, unproven=True
    )
    node.tick(1e3)
    assert not any(isinstance(one, Connect) for one in node.take_instructions())


def test_a_scheduler_of_another_job_is_refused_and_so_is_one_that_comes_too_early():
    asking = m.Hello(job="other", sender=-1, incarnation=9, receiver=UNKNOWN, session=1, received=0)
    refused = new_node().admit(asking)
    assert isinstance(refused, Refuse)
    assert "this is a node of job 'default', not of 'other'" in refused.reason
    early = m.Hello(job="default", sender=-1, incarnation=9, receiver=UNKNOWN, session=1, received=0)
    assert isinstance(new_node(joined=False).admit(early), Refuse)


def hello(sender, incarnation):
    return m.Hello(job="default", sender=sender, incarnation=incarnation, receiver=0, session=1, received=0)


def test_a_rank_is_who_has_the_key_that_it_joined_with():
    node = new_node()
    assert node.admit(hello(2, 102), "key 2") == Admit(Peer(2))
    refused = node.admit(hello(2, 102), "key 3")
    assert isinstance(refused, Refuse)
    assert (
        "rank 2 of this job has another key than this process, which has the key of rank 3" in refused.reason
    )
    unknown = node.admit(hello(2, 102), "a key that nobody has joined with")
    assert isinstance(unknown, Refuse)
    assert "has another key than this process: nobody" in unknown.reason
    assert isinstance(node.admit(hello(2, 102), ""), Refuse)


def small(path, number=0):
    return m.SmallMessage(path=path, hop=len(path) - 1, number=number, channel="c", tag=0, what="1 byte")


def test_a_message_in_the_name_of_a_rank_waits_unless_that_rank_sends_over_the_forwarding_node():
    node = new_node()  # rank 0; the chain leads 3's messages over 2 and 1
    node.receive(Peer(1), small((3, 2, 1, 0)), b"x", None, 1.0)
    assert node.require_joined().point_to_point.stored_bytes(3) > 0
    node.receive(Peer(2), small((1, 2, 0)), b"forged", None, 1.0)
    assert node.require_joined().point_to_point.stored_bytes(1) == 0
    assert node.counters.get("messages_held") == 1


def test_what_waits_for_a_policy_is_handled_once_that_is_here():
    node = new_node()
    node.receive(Peer(2), small((1, 2, 0)), b"x", None, 1.0)
    star = Policy(version=2, trees=(Tree.undirected(Rank(2), (2, 2, -1, 2)),), weights=(1,))
    node.receive(SCHEDULER, m.NewPolicy(policy=star), None, None, 1.1)
    assert node.next_tick() <= 1.1
    node.tick(1.1)
    assert node.require_joined().point_to_point.stored_bytes(1) > 0


def part(path, **fields):
    return legal_part(contributors=b"\x02", is_aux=True, path=path, hop=2, **fields)


def test_a_part_around_a_failed_link_waits_until_the_scheduler_has_announced_that():
    node = new_node()
    node.receive(Peer(2), part((1, 2, 0), around=True), b"\0" * 16, None, 1.0)
    assert node.counters.get("messages_held") == 1
    node.receive(SCHEDULER, m.FailedLinks(links=(m.FailedLink(1, 0, (1, 2, 0)),)), None, None, 1.1)
    node.tick(1.1)
    assert node.counters.get("parts_kept_early") == 1, "it waits for its key, as any part does"
