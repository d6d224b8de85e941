"""What a node refuses for who its sender is, whatever the message says."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.options import NodeOptions
from netstorm.lab.testing.decoders import example, message_classes
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, may_send
from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Peer, decode_body
from netstorm.pslite.machine import Admit, Connect, Refuse, Send
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree

MEMBERS = tuple(
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
        node.receive(
            SCHEDULER,
            m.Joined(
                rank=rank, members=MEMBERS, policy=policy, heartbeat_interval_s=1.0, heartbeat_timeout_s=9.0
            ),
            None,
            None,
            0.0,
        )
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
        accepted=False, scheduler="s:9", rank=0, members=MEMBERS, unproven=True
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
    aux = m.Part(
        key=0,
        round=0,
        chunk=0,
        phase=m.Phase.REDUCE,
        version=1,
        tree=0,
        contributors=b"\x02",
        dtype="float32",
        is_aux=True,
        path=path,
        hop=2,
    )
    return msgspec.structs.replace(aux, **fields)


def confirmed(node):
    return [i for i in node.take_instructions() if isinstance(i, Send) and isinstance(i.message, m.Delivered)]


def test_a_part_counts_as_its_first_ranks_along_a_detour_of_a_policy_and_along_no_other_path():
    detour = Detour(path=(1, 3, 0), links=((1e6, 0.0), (1e6, 0.0)))
    node = new_node(policy=msgspec.structs.replace(CHAIN, detours=(detour,)))
    node.receive(Peer(3), part((1, 3, 0)), b"\0" * 16, None, 1.0)
    assert len(confirmed(node)) == 1
    node.receive(Peer(2), part((1, 2, 0)), b"\0" * 16, None, 1.0)
    assert confirmed(node) == []
    assert node.counters.get("messages_held") == 1


def test_a_part_around_a_failed_link_waits_until_the_scheduler_has_announced_that():
    node = new_node()
    node.receive(Peer(2), part((1, 2, 0), around=True), b"\0" * 16, None, 1.0)
    assert node.counters.get("messages_held") == 1
    node.receive(SCHEDULER, m.FailedLinks(links=(m.FailedLink(1, 0, (1, 2, 0)),)), None, None, 1.1)
    node.tick(1.1)
    assert node.counters.get("parts_kept_early") == 1, "it waits for its key, as any part does"
