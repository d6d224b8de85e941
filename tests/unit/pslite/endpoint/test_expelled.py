"""A process whose key was removed: its sessions end at once, whoever opened them."""

from __future__ import annotations

from netstorm.lab.testing.recorder import part
from netstorm.protocol.frames import Peer
from netstorm.pslite.van import Broken
from tests.unit.pslite.world import World


def test_all_sessions_with_an_expelled_process_are_lost_at_once_and_the_machine_is_told():
    world = World(3)
    here, there, other = world.processes
    for one, to in ((here, there), (there, here), (other, here)):
        one.connect(to)
        one.send(to, part(0))
    world.run(1)
    connection = here.endpoint._sessions.accepted[Peer(1)].connection
    assert connection is not None
    assert connection < 0
    here.stack.handle(Broken(connection, "the key of paris was removed", expelled=True), world.now)
    assert {peer for peer, _ in here.machine.lost} == {Peer(1)}
    assert {reason for _, reason in here.machine.lost} == {"the key of paris was removed"}
    assert len(here.machine.lost) == 2, "the session that each of the two has opened"
    assert here.endpoint._sessions.of(Peer(1)) is None
    assert here.endpoint._sessions.of(Peer(2)) is not None


def test_a_connection_that_is_not_in_use_any_more_expels_nobody():
    world = World()
    here, there = world.pair()
    there.connect(here)
    there.send(here, part(0))
    world.run(1)
    old = here.endpoint._sessions.accepted[Peer(1)].connection
    assert old is not None
    world.network.reset("host0", "host1")
    there.send(here, part(0))
    world.run(5)
    assert here.endpoint._sessions.accepted[Peer(1)].connection != old
    here.stack.handle(Broken(old, "the key of paris was removed", expelled=True), world.now)
    assert here.machine.lost == []
