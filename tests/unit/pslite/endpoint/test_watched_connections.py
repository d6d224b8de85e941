"""A machine that watches connections hears which peers' are gone, and where no process listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from netstorm.lab.testing.recorder import part
from netstorm.protocol.frames import Peer
from netstorm.pslite.endpoint import WatchedConnections
from netstorm.pslite.machine import Inquire
from netstorm.pslite.session import SessionState
from netstorm.pslite.van import Broken
from tests.unit.pslite.world import World


class Watcher:
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def connection_gone(self, peer, reason, now, *, refused):
        self.heard.append((peer, reason, now, refused))

    def may_be_busy(self, peer, now):
        return peer == 3

    def peer_busy(self, peer, seconds, now):
        self.heard.append((peer, seconds, now))


def session(state=SessionState.DISCONNECTED, *, opened_here=False):
    return SimpleNamespace(peer=Peer(3), state=state, reason="reset", opened_here=opened_here)


def test_the_end_of_a_connection_that_the_peer_opened_is_told_once():
    watcher = Watcher()
    watched = WatchedConnections(watcher)
    watched.changed(session())
    assert watched.tell(5.0)
    assert not watched.tell(6.0)
    assert watcher.heard == [(Peer(3), "reset", 5.0, False)]


def test_other_changes_of_sessions_are_not_told():
    watcher = Watcher()
    watched = WatchedConnections(watcher)
    watched.changed(session(opened_here=True))
    watched.changed(session(SessionState.CLOSING))
    assert not watched.tell(5.0)


def test_that_nobody_listens_at_an_address_is_told_at_once():
    watcher = Watcher()
    WatchedConnections(watcher).refused(Peer(2), "connection refused", 1.0)
    assert watcher.heard == [(Peer(2), "connection refused", 1.0, True)]


def test_that_a_peer_is_busy_is_asked_and_told():
    watcher = Watcher()
    watched = WatchedConnections(watcher)
    assert [watched.may_be_busy(Peer(peer), 1.0) for peer in (2, 3)] == [False, True]
    assert not WatchedConnections(SimpleNamespace()).may_be_busy(Peer(3), 1.0)
    watched.busy(Peer(3), 12.0)
    watched.busy(Peer(3), 11.0)
    assert watched.tell(5.0)
    assert not watched.tell(5.0)
    assert watcher.heard == [(Peer(3), 12.0, 5.0)]


def test_a_machine_that_does_not_watch_is_told_nothing():
    watched = WatchedConnections(SimpleNamespace())
    watched.refused(Peer(2), "connection refused", 1.0)
    watched.changed(session())
    assert not watched.tell(5.0)


class Transmitter:
    """Keeps the connections that it is told to open."""

    def __init__(self):
        self.opened = []

    def open(self, connection, host, port):
        self.opened.append((connection, host, port))

    def close(self, connection):
        pass


def test_a_process_that_ends_may_close_its_sockets_one_after_the_other():
    world = World()
    here, there = world.pair()
    here.send(there, part(0))
    world.run(1)
    van: Any = Transmitter()
    watcher = Watcher()
    endpoint: Any = there.endpoint
    endpoint.watched = WatchedConnections(watcher)
    [connection] = endpoint._sessions.by_connection
    endpoint.handle(Broken(connection, "reset"), world.now)
    [peer] = [peer for peer, _ in endpoint.watched.gone]
    endpoint.inquire(Inquire(peer=peer, host="there", port=9), world.now)
    endpoint.flush(van, world.now)
    endpoint.handle(Broken(van.opened[0][0], "reset by the one that had listened"), world.now)
    assert watcher.heard == []
    endpoint.flush(van, world.now)
    endpoint.handle(Broken(van.opened[1][0], "connection refused", refused=True), world.now)
    assert watcher.heard == [(peer, "connection refused", world.now, True)]
    endpoint.flush(van, world.now)
    assert [place for _, *place in van.opened] == [["there", 9]] * 2


def test_an_address_at_which_whoever_connects_is_cut_off_is_not_tried_for_ever():
    world = World()
    here, there = world.pair()
    here.send(there, part(0))
    world.run(1)
    van: Any = Transmitter()
    endpoint = there.endpoint
    [connection] = endpoint._sessions.by_connection
    peer = endpoint._sessions.by_connection[connection].peer
    endpoint.handle(Broken(connection, "reset"), world.now)
    endpoint.inquire(Inquire(peer=peer, host="there", port=9), world.now)
    for trials in (1, 2, 3, 4, 4):
        endpoint.flush(van, world.now)
        assert len(van.opened) == trials
        endpoint.handle(Broken(van.opened[-1][0], "reset"), world.now)
