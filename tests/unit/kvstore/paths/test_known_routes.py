"""Which paths a message may have come along, and what waits until its path is known."""

from __future__ import annotations

import math

import msgspec
import pytest

from netstorm.errors import NoRoom
from netstorm.kvstore.paths.routes import KnownRoutes
from netstorm.lab.testing.recorder import part
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import WaitingBytes
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree

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
