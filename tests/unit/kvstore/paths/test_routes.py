"""How messages go along paths: which paths are known, who forwards, and what goes around failed links."""

from __future__ import annotations

import math

import msgspec
import pytest

from netstorm.errors import NoRoom, ProtocolViolation
from netstorm.kvstore.paths.routes import (
    KnownRoutes,
    check_path,
    check_route,
    delivery_confirmation,
    forwarded_send,
    queue_order,
    relay_confirmation,
    reroute_message,
    reroute_part,
)
from netstorm.lab.testing.recorder import part
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Delivered, Part, Phase, Tick
from netstorm.pslite.machine import URGENT, ForwardedBytes, Order, Send, WaitingBytes
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.rounds.ranks import legal_part


def forwarded(
    message: Part | m.Routed, payload: bytes | None, payload_crc: int | None, order: Order
) -> Send | None:
    return forwarded_send(message, payload, payload_crc, order, peer=Peer(0), counts=ForwardedBytes())


PART = legal_part(key=3, round=4, chunk=5, phase=Phase.BROADCAST, is_aux=True, path=(2, 0, 3, 1), hop=1)


def test_a_part_goes_along_its_path_and_its_confirmation_comes_back_the_same_way():
    part, sender, nodes = PART, 2, []
    while True:
        rank = part.path[part.hop]
        check_path(part, Peer(sender), rank, 4)
        nodes.append(rank)
        send = forwarded(part, b"1234", 77, (0, 0, 0))
        if send is None:
            break
        assert (send.payload, send.payload_crc) == (b"1234", 77)
        assert isinstance(send.message, Part)
        part, sender = send.message, rank
        assert int(send.peer) == part.path[part.hop]
    assert nodes == [0, 3, 1]
    send = delivery_confirmation(part)
    sender, back = rank, []
    while True:
        message = send.message
        assert isinstance(message, Delivered)
        rank = message.path[message.hop]
        assert int(send.peer) == rank
        assert send.back
        check_path(message, Peer(sender), rank, 4)
        back.append(rank)
        following = relay_confirmation(message)
        if following is None:
            break
        send, sender = following, rank
    assert back == [3, 0, 2]
    assert (message.key, message.round, message.chunk, message.phase) == (3, 4, 5, Phase.BROADCAST)


@pytest.mark.parametrize(
    ("changes", "peer", "rank"),
    [
        ({}, 2, 3),  # not the node that it is for
        ({}, 3, 0),  # not from the node before
        ({"hop": 0}, 1, 2),  # sent by nobody
        ({"hop": -1}, 3, 1),
        ({"hop": 4}, 1, 0),
        ({"hop": 9}, 1, 0),
        ({"path": (2, 0)}, 2, 0),  # no detour
        ({"path": ()}, 2, 0),
        ({"path": (2, 0, 2)}, 2, 0),  # a loop
        ({"path": (2, 0, 4)}, 2, 0),  # no such rank
        ({"path": (-2, 0, 1)}, -2, 0),
        ({"path": (2, 0, *range(10**4))}, 2, 0),
    ],
)
def test_a_path_that_makes_no_sense_is_refused(changes, peer, rank):
    with pytest.raises(ProtocolViolation, match="path"):
        check_path(msgspec.structs.replace(PART, **changes), Peer(peer), rank, 4)


@pytest.mark.parametrize(("hop", "peer", "rank"), [(2, 1, 0), (2, 0, 3), (3, 1, 1), (-1, 2, 1), (9, 0, 0)])
def test_a_confirmation_from_anywhere_else_is_refused(hop, peer, rank):
    message = delivery_confirmation(msgspec.structs.replace(PART, hop=3)).message
    assert isinstance(message, Delivered)
    message = msgspec.structs.replace(message, hop=hop)
    with pytest.raises(ProtocolViolation, match="path"):
        check_path(message, Peer(peer), rank, 4)


def plain(peer):
    part = msgspec.structs.replace(PART, is_aux=False, path=(), hop=0)
    return Send(peer=Peer(peer), message=part, payload=b"1234", order=(1,))


def walk(send, rank, size):
    """Follow a part from `rank` to its end; return the nodes that get it, and whom the end takes it for."""
    nodes: list[int] = []
    while True:
        part = send.message
        if not part.is_aux:
            return [*nodes, int(send.peer)], rank
        sender, rank = rank, int(send.peer)
        check_path(part, Peer(sender), rank, size)
        nodes.append(rank)
        further = forwarded(part, send.payload, 0, send.order)
        if further is None:
            return nodes, part.path[0]
        send = further


@pytest.mark.parametrize(
    ("send", "rank", "way", "nodes", "sender"),
    [
        (plain(1), 0, (0, 2, 1), [2, 1], 0),
        (plain(1), 0, (0, 3, 2, 1), [3, 2, 1], 0),
        # on a path 2-0-3-1, at 0, whose link to 3 has failed
        (forwarded(PART, None, 0, ()), 0, (0, 1, 3), [1], 2),  # the end is on the way
        (forwarded(PART, None, 0, ()), 0, (0, 2, 3), [2, 3, 1], 2),  # back over the node where it began
        (forwarded(PART, None, 0, ()), 0, (0, 4, 3), [4, 3, 1], 2),
        # its own path 0-3-1 begins with the link that failed
        (
            Send(peer=Peer(3), message=msgspec.structs.replace(PART, path=(0, 3, 1), hop=1)),
            0,
            (0, 1, 3),
            [1],
            0,
        ),
    ],
)
def test_around_a_failed_link_a_part_comes_to_its_end_as_if_its_first_node_had_sent_it(
    send, rank, way, nodes, sender
):
    around_it = reroute_part(send, rank, way)
    assert walk(around_it, rank, 5) == (nodes, sender)
    assert around_it.payload == send.payload


def test_two_failed_links_one_after_the_other():
    first = reroute_part(plain(1), 0, (0, 2, 1))
    assert isinstance(first.message, Part)
    at_2 = forwarded(first.message, b"1234", 7, (1,))
    assert at_2 is not None
    second = reroute_part(at_2, 2, (2, 0, 3, 1))
    assert walk(second, 2, 4) == ([0, 3, 1], 0)


# -------------------------------------------------------------------- paths that messages may have come along

CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1, 2)),), weights=(1,))
STAR = Policy(version=2, trees=(Tree.undirected(Rank(2), (2, 2, -1, 2)),), weights=(1,))


def routes(policy: Policy = CHAIN, waiting: WaitingBytes | None = None) -> KnownRoutes:
    return KnownRoutes(0, policy, Counters(), waiting or WaitingBytes())


def message(*path: int) -> m.CountRequest:
    return m.CountRequest(path=path, hop=len(path) - 1)


def aux(*path: int, **fields: object) -> m.Part:
    fields = {"is_aux": True, "path": path, "hop": len(path) - 1, **fields}
    return msgspec.structs.replace(part(0), **fields)


def admits(known: KnownRoutes, one: m.Part | m.Routed, payload: bytes | None = None) -> bool:
    return known.admits(Peer(one.path[-2]), one, payload, None)


def has_news(known: KnownRoutes) -> bool:
    return known.has_news


def test_messages_come_along_the_path_that_a_policy_has_for_their_first_rank():
    known = routes()
    assert admits(known, message(3, 2, 1, 0))
    assert admits(known, message(3, 2, 1, 0))
    assert not admits(known, message(3, 1, 0))
    assert not admits(known, message(1, 2, 0))


def test_who_sends_a_message_itself_needs_no_path():
    assert admits(routes(), message(3, 0))


def test_what_goes_on_to_others_is_theirs_to_check():
    known = routes()
    assert known.admits(Peer(3), m.CountRequest(path=(3, 0, 2), hop=1), None, None)


def test_paths_of_earlier_policies_count_while_messages_may_be_on_their_way():
    known = routes()
    known.new_policy(STAR)
    assert admits(known, message(3, 2, 0))
    assert admits(known, message(3, 2, 1, 0))
    known.new_policy(msgspec.structs.replace(STAR, version=100))
    assert not admits(known, message(3, 2, 1, 0))


def test_paths_of_a_policy_that_rounds_still_run_under_count_however_old_it_is():
    known = KnownRoutes(0, CHAIN, Counters(), WaitingBytes(), {CHAIN.version})
    known.new_policy(msgspec.structs.replace(STAR, version=100))
    assert admits(known, message(3, 2, 1, 0))


def test_parts_come_along_detours_of_a_policy():
    detour = Detour(path=(1, 3, 0), links=((1e6, 0.0), (1e6, 0.0)))
    known = routes(msgspec.structs.replace(CHAIN, detours=(detour,)))
    assert admits(known, aux(1, 3, 0))
    assert not admits(known, aux(1, 2, 0))
    assert not admits(known, message(1, 3, 0)), "which is for parts alone"


def test_results_of_an_earlier_policy_come_along_the_trees_of_one_that_takes_over():
    known = routes()
    known.new_policy(msgspec.structs.replace(STAR, takes_over=True))
    result = aux(1, 2, 0, phase=m.Phase.BROADCAST, version=1, around=True)
    assert admits(known, result)
    assert not admits(known, msgspec.structs.replace(result, version=2))
    assert not admits(known, msgspec.structs.replace(result, phase=m.Phase.REDUCE))


def test_around_a_link_of_its_path_that_has_failed_any_path_does():
    known = routes()
    known.failed_links(m.FailedLinks(links=(m.FailedLink(2, 1, (2, 3, 1)),)))
    assert admits(known, message(3, 2, 0))
    assert not admits(known, message(1, 2, 0)), "its path does not lead over that link"
    known.failed_links(m.FailedLinks(links=()))
    assert admits(known, message(3, 2, 0)), "what was sent before the link worked again may still come"


def test_what_is_held_is_released_once_when_something_new_is_known():
    known = routes()
    assert not admits(known, message(3, 2, 0))
    assert not has_news(known)
    known.new_policy(STAR)
    assert has_news(known)
    assert [one for _, one, *_ in known.release()] == [message(3, 2, 0)]
    assert not has_news(known)
    assert list(known.release()) == []


def test_what_is_held_of_one_forwarding_node_is_bounded_in_bytes():
    waiting = WaitingBytes(of_one=3000)
    known = routes(waiting=waiting)
    waiting.begin(Peer(2))
    assert not admits(known, aux(1, 2, 0), b"x" * 60)
    with pytest.raises(NoRoom, match=r"wait here for paths such as \[1, 2, 0\], which no policy has"):
        admits(known, aux(1, 2, 0), b"x" * 1000)
    assert not admits(known, aux(1, 2, 0), b"x")
    with pytest.raises(NoRoom):
        admits(known, aux(1, 2, 0))
    waiting.begin(Peer(3))
    assert not admits(known, aux(1, 3, 0)), "another node is not to blame"
    known.new_policy(STAR)
    assert len(list(known.release())) == 3
    assert waiting.room(Peer(2)) == math.inf
    assert waiting.take_ready(), "what had no room is asked for"


def tick(path: tuple[int, ...], hop: int) -> Tick:
    return Tick(path=path, hop=hop, namespace=0, clock=1, pushed=0)


def test_a_message_is_passed_on_until_the_end_of_its_path():
    first = tick((3, 1, 2), 1)
    check_route(first, Peer(3), rank=1, size=4)
    send = forwarded(first, None, 0, queue_order(first, 0))
    assert send is not None
    assert (send.peer, send.message) == (2, msgspec.structs.replace(first, hop=2))
    assert forwarded(tick((3, 1, 2), 2), None, 0, URGENT) is None


@pytest.mark.parametrize(
    ("path", "hop"),
    [((), 0), ((1,), 0), ((3, 1), 0), ((3, 2), 1), ((2, 1), 1), ((3, 1, 1), 1), ((3, 1, 9), 1), ((3, 1), 2),
     ((3, 1), -1), ((0, 3, 1, 2, 0, 3), 2)],
)  # fmt: skip
def test_a_message_on_a_path_that_does_not_lead_here_is_refused(path, hop):
    with pytest.raises(ProtocolViolation, match="does not lead"):
        check_route(tick(path, hop), Peer(3), rank=1, size=4)


def test_a_message_goes_around_a_link_that_has_failed_and_on_to_its_end():
    send = Send(peer=Peer(2), message=tick((3, 1, 2, 0), 2))
    around = reroute_message(send, 1, (1, 0, 2))
    assert isinstance(around.message, Tick)
    assert (around.peer, around.message.path, around.message.hop) == (0, (3, 1, 0), 2)
    check_route(around.message, Peer(1), rank=0, size=4)
    own = reroute_message(Send(peer=Peer(2), message=tick((1, 2), 1)), 1, (1, 3, 2))
    assert isinstance(own.message, Tick)
    assert (own.peer, own.message.path, own.message.hop) == (3, (1, 3, 2), 1)
    back = reroute_message(Send(peer=Peer(2), message=tick((3, 1, 2), 2)), 1, (1, 3, 2))
    assert isinstance(back.message, Tick)
    check_route(back.message, Peer(1), rank=3, size=4)  # over the first again: that is no loop
