"""Messages for which a machine has no room: nothing is lost, others pass them, and nobody takes more."""

from __future__ import annotations

import pytest

from netstorm.errors import NoRoom
from netstorm.lab.testing.recorder import RecordingProcess, part
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite import session
from netstorm.pslite import session as receiving
from netstorm.pslite.endpoint import Endpoint
from netstorm.pslite.machine import Bounded, Charge, WaitingBytes
from tests.unit.pslite.world import World

BULK = (0, 0, 0)


class Keeper:
    """Has a recorder keep parts with even numbers until `let_go`; its room is for two of them."""

    def __init__(self, process: RecordingProcess) -> None:
        self.waiting = WaitingBytes(of_one=3000)
        assert isinstance(self, Bounded)
        process.endpoint._without_room.machine = self
        self.kept: list[Charge] = []
        self.keeps = True
        process.machine.on_receive = self.receive

    def receive(self, message: m.Message) -> None:
        assert isinstance(message, m.Part)
        self.waiting.begin(Peer(0))
        if self.keeps and message.chunk % 2 == 0:
            self.kept.append(self.waiting.take(100, message.chunk, f"chunk {message.chunk}"))

    def let_go(self) -> None:
        for charge in self.kept:
            self.waiting.give_back(charge)
        self.kept.clear()


def test_what_has_no_room_comes_once_there_is_room_and_what_need_not_wait_comes_meanwhile(caplog):
    world = World()
    here, there = world.pair()
    keeper = Keeper(there)
    for number in range(10):
        here.send(there, part(number), bytes(number), order=BULK)
    world.run(1)
    assert there.machine.numbers() == [0, 1, 2, 3, 5, 7, 9]
    assert there.endpoint.counters.get("messages_no_room") == 3
    assert "cannot keep a message from rank 0: 2248 bytes from it wait here for chunk 4" in caplog.text
    assert not here.endpoint.idle()
    keeper.let_go()
    world.run(5)
    assert there.machine.numbers() == [0, 1, 2, 3, 5, 7, 9, 4, 6]
    keeper.let_go()
    world.run(5)
    assert there.machine.numbers() == [0, 1, 2, 3, 5, 7, 9, 4, 6, 8]
    assert there.machine.payloads() == {number: bytes(number) for number in range(10)}
    assert here.endpoint.idle()


def test_what_need_not_wait_any_more_is_asked_for_although_there_is_no_room():
    world = World()
    here, there = world.pair()
    keeper = Keeper(there)
    for number in (0, 2, 4, 6):
        here.send(there, part(number), order=BULK)
    world.run(1)
    assert there.machine.numbers() == [0, 2]
    keeper.keeps = False
    keeper.waiting.ready(6)
    world.run(5)
    assert there.machine.numbers() == [0, 2, 6]


def test_nothing_is_lost_or_comes_twice_if_the_connection_breaks_meanwhile():
    world = World()
    here, there = world.pair()
    keeper = Keeper(there)
    for number in range(8):
        here.send(there, part(number), order=BULK)
    world.run(1)
    here.van.close(here.endpoint.connections()[Peer(1)])
    [session] = here.endpoint._sessions.opened.values()
    session.broken("the test broke it", world.now)
    here.endpoint._sessions.dirty[session] = None
    world.run(5)
    keeper.keeps = False
    keeper.let_go()
    world.run(5)
    assert sorted(there.machine.numbers()) == list(range(8))
    assert here.endpoint.idle()


def test_who_sends_more_than_any_process_has_under_way_loses_its_session(monkeypatch, caplog):
    monkeypatch.setattr(session, "_MOST_REFUSED", 2)
    world = World()
    here, there = world.pair()
    Keeper(there)
    for number in range(0, 12, 2):
        here.send(there, part(number), order=BULK)
    world.run(1)
    assert [peer for peer, _ in there.machine.lost] == [0]
    assert "rank 0 has sent a message 5, and 2 have no room here already" in there.machine.lost[0][1]
    assert "the session with it is ended" in caplog.text


@pytest.mark.parametrize("ordered", [True, False])
def test_a_machine_that_refuses_in_an_ordered_session_drops(ordered):
    world = World(ordered=ordered)
    here, there = world.pair()

    def refuse(message: m.Message) -> None:
        raise NoRoom("none", "anything")

    there.machine.on_receive = refuse
    here.send(there, part(0), order=BULK)
    world.run(1)
    assert there.endpoint.counters.get("dropped_refused") == ordered
    assert here.endpoint.idle() == ordered


# ----------------------------------------------------------------------------------------- ordered sessions


def early(world: World, here: RecordingProcess, there: RecordingProcess, sizes: list[int]) -> None:
    """Send messages of which the first one is missing."""
    here.send(there, part(0), order=BULK)
    world.run(1)
    [session] = here.endpoint._sessions.opened.values()
    session.sending._sequence += 1
    for number, size in enumerate(sizes, start=1):
        here.send(there, part(number), bytes(size), order=BULK)
    world.run(0.5)


def test_what_waits_for_a_missing_message_is_bounded_in_bytes(monkeypatch, caplog):
    monkeypatch.setattr(receiving, "_HELD_OF_ONE", 5000)
    world = World(ordered=True)
    here, there = world.pair()
    early(world, here, there, [1000, 1000])
    assert there.machine.numbers() == [0]
    assert not there.machine.lost
    here.send(there, part(9), bytes(1000), order=BULK)
    world.run(0.5)
    assert "rank 0 has sent a message 5 is too early" in there.machine.lost[0][1]
    assert "wait here for message 2" in caplog.text
    assert there.endpoint._sessions.held_bytes.room(Peer(0)) > 5000, "what has waited is dropped"


def test_values_where_no_message_has_any_are_refused_before_they_are_held(caplog):
    world = World(ordered=True)
    here, there = world.pair()
    there.endpoint._payloads = lambda _: False
    early(world, here, there, [1000])
    assert "Part with 1000 bytes of values, which no message between these two processes has" in caplog.text
    assert [peer for peer, _ in there.machine.lost] == [0]
    assert isinstance(there.endpoint, Endpoint)
