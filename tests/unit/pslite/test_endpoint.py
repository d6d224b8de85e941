"""All sessions of a process, and what others may throw at it."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import FrameError, NoRoom, Overloaded, ProtocolViolation
from netstorm.lab.testing.recorder import Recorder, RecordingProcess, part
from netstorm.protocol import messages as m
from netstorm.protocol.frames import (
    PROTOCOL_VERSION,
    SCHEDULER,
    Peer,
    check_size,
    encode_body,
    open_frames,
    seal,
)
from netstorm.protocol.messages import Failed, Finished, Leave, Message
from netstorm.pslite import endpoint, session
from netstorm.pslite.endpoint import Stack, WatchedConnections
from netstorm.pslite.link_meter import LinkMeter, MeterOptions
from netstorm.pslite.machine import (
    Become,
    Bounded,
    Call,
    Charge,
    Connect,
    Disconnect,
    ForwardedBytes,
    Inquire,
    NotYet,
    Send,
    WaitingBytes,
)
from netstorm.pslite.session import Limits, SessionState
from netstorm.pslite.van import Broken, Connection, Received
from tests.unit.pslite.world import WatchedVan, World, connected, give, hello_of, met, swallow

BULK = (0, 0, 0)
STRANGER = Connection(-777)


def frame(message, *, sequence=0, payload_crc=None):
    return seal(encode_body(message), sequence=sequence, sent_at=0, payload_crc=payload_crc)


def hello(*, sender=0, incarnation=1, session=1):
    return m.Hello(job="job", sender=sender, incarnation=incarnation, receiver=1, session=session, received=0)


def established():
    """Return a world, its two processes, and the connection of their session as the second one knows it."""
    world, here, there = connected()
    return world, here, there, hello_of(there, 0)[0]


class LinkEstimate(LinkMeter):
    """Keeps what an endpoint tells its observer."""

    def __init__(self):
        super().__init__(MeterOptions(), now=0.0)
        self.arrivals, self.signals, self.acknowledgements, self.contended = [], [], [], []

    may_contend = True

    def resumed(self, missed_s):
        pass

    def arrived(self, peer, size, sent_at, arrived_at, *, resent, contended):
        self.contended.append(contended)
        self.arrivals.append((peer, size, sent_at, arrived_at, resent))

    def control_arrived(self, peer, sent_at, arrived_at):
        self.signals.append((peer, sent_at, arrived_at))

    def acknowledged(self, peer, size, sent, heard, stamped_at, *, resent):
        self.acknowledgements.append((peer, size, sent, heard, stamped_at, resent))


# ---------------------------------------------------------------------------------------------- hostile input


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_garbage_before_a_hello_is_dropped_and_counted(frames):
    world = World(1)
    [process] = world.processes
    process.stack.handle(Received(STRANGER, tuple(frames)), 0.0)
    process.stack.flush(process.van, 0.0)
    assert process.endpoint.counters.get("dropped_frame") == 1
    assert process.machine.got == []


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_garbage_within_a_session_is_dropped_and_the_session_lives(frames):
    world, here, there, connection = established()
    there.stack.handle(Received(connection, tuple(frames)), world.now)
    here.send(there, part(1), b"x")
    world.run(1)
    assert there.machine.numbers() == [0, 1]
    assert there.endpoint.counters.get("dropped_frame") == 1


@pytest.mark.parametrize(
    "frames",
    [
        (frame(m.Barrier(number=1)),),  # a message that must be numbered, is not
        (frame(m.Barrier(number=1), sequence=2, payload_crc=0), b"payload of a control message"),
        (frame(m.Heartbeat(), sequence=2),),
        (frame(m.Ack(received=0), sequence=2),),
        (frame(m.Ack(received=0), payload_crc=0), b""),
        (frame(m.Ack(received=5)),),  # of messages that were never sent
        (frame(m.Ack(received=0, beyond=(1,))),),
        (frame(m.Ack(received=0, query=1)),),
        (frame(hello(session=9)),),  # a second greeting
        (frame(m.Welcome(incarnation=1, session=1, received=0)),),
        (frame(m.Refused(reason="")),),
    ],
)
def test_what_nobody_may_send_is_dropped_and_the_session_lives(frames):
    world, here, there, connection = established()
    there.stack.handle(Received(connection, frames), world.now)
    assert there.endpoint.counters.get("dropped_protocol") == 1
    here.send(there, part(1), b"x")
    there.send(here, part(2), b"y")
    world.run(1)
    assert there.machine.numbers() == [0, 1]
    assert here.machine.numbers() == [2]


@pytest.mark.parametrize(
    "kind", [m.Welcome(incarnation=1, session=1, received=0), m.Ack(received=0), part(0), m.Goodbye()]
)
def test_nothing_but_hello_begins_a_session(kind):
    world = World(1)
    [process] = world.processes
    process.stack.handle(Received(STRANGER, (frame(kind),)), 0.0)
    assert process.endpoint.counters.get("dropped_protocol") == 1


def test_dropped_messages_are_logged_with_their_sender_but_are_no_flood(caplog):
    world, _, there, connection = established()
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            there.stack.handle(Received(connection, (b"garbage",)), world.now + number / 1000)
        there.stack.handle(Received(connection, (b"garbage",)), world.now + 20)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "rank 0" in texts[0]
    assert "999 more" in texts[1]
    assert there.endpoint.counters.get("dropped_frame") == 1001
    assert there.endpoint.links()[Peer(0), False]["dropped_frame"] == 1001


def greet(process, number):
    """Let so many processes say Hello."""
    for sender in range(number):
        greeting = hello(session=sender, sender=sender, incarnation=sender)
        process.stack.handle(Received(Connection(-1 - sender), (frame(greeting),)), 0.0)


def test_hellos_that_wait_cannot_fill_the_memory():
    process = World(2, limits=Limits(pending_hellos=10)).processes[1]
    admitted, process.machine.admission = process.machine.admission, lambda _: NotYet()
    greet(process, 1000)
    assert not process.endpoint.links()
    process.machine.admission = admitted
    process.stack.tick(1.0)
    assert [peer for peer, _ in process.endpoint.links()] == [Peer(sender) for sender in range(990, 1000)]


def test_a_flood_of_new_sessions_waits_and_the_first_thousand_are_there_at_once():
    process = World(2).processes[1]
    greet(process, 1100)
    assert len(process.endpoint.links()) == 1024
    process.stack.tick(1.0)
    assert len(process.endpoint.links()) == 1100, "those that waited have their turn"


def test_sessions_that_others_begin_are_bounded():
    process = World(2, limits=Limits(sessions=3)).processes[1]
    greet(process, 10)
    assert len(process.endpoint.links()) == 3
    assert process.endpoint.counters.get("refused_hellos") == 7


def reserve(process, connection):
    process.stack.handle(Received(connection, (frame(m.Reserve()),)), 0.0)
    process.stack.flush(process.van, 0.0)


def shut_down_by(process, monkeypatch):
    """Return what a process shuts down from now on: connections, and why."""
    refused: dict[Connection, str] = {}
    monkeypatch.setattr(process.van, "refuse", refused.__setitem__)
    return refused


def test_a_connection_that_was_opened_ahead_waits_for_its_hello(monkeypatch):
    process = World(2, limits=Limits(reserved=1)).processes[1]
    admitted: list[Connection] = []
    monkeypatch.setattr(process.van, "admit", admitted.append)
    reserve(process, STRANGER)
    assert admitted == [STRANGER], "or it would be shut down, since no message comes"
    assert not process.endpoint.links()
    process.stack.handle(Received(STRANGER, (frame(hello()),)), 100.0)
    process.stack.flush(process.van, 100.0)
    assert list(process.endpoint.links()) == [(Peer(0), False)]
    assert admitted == [STRANGER] * 2


@pytest.mark.parametrize("reserved", [0, 1])
def test_a_connection_waits_only_where_some_may_and_says_so_once(reserved, monkeypatch):
    process = World(2, limits=Limits(reserved=reserved)).processes[1]
    refused = shut_down_by(process, monkeypatch)
    for _ in range(1 + reserved):
        reserve(process, STRANGER)
    assert process.endpoint.counters.get("dropped_protocol") == 1
    assert list(refused) == [STRANGER]


def test_nothing_but_hello_follows_on_a_connection_that_waits(monkeypatch):
    process = World(2, limits=Limits(reserved=1)).processes[1]
    refused = shut_down_by(process, monkeypatch)
    reserve(process, STRANGER)
    process.stack.handle(Received(STRANGER, (frame(part(0), sequence=1),)), 0.0)
    process.stack.flush(process.van, 0.0)
    assert list(refused) == [STRANGER]
    assert process.machine.got == []


def test_connections_that_wait_are_bounded_and_one_that_ends_makes_room(monkeypatch):
    process = World(2, limits=Limits(reserved=2)).processes[1]
    admitted: list[Connection] = []
    closed: list[Connection] = []
    monkeypatch.setattr(process.van, "admit", admitted.append)
    monkeypatch.setattr(process.van, "close", closed.append)
    one, two, three, four = (Connection(-number) for number in (1, 2, 3, 4))
    for each in (one, two, three):
        reserve(process, each)
    assert (admitted, closed) == ([one, two], [three])
    assert process.endpoint.counters.get("refused_reserved") == 1
    process.stack.handle(Broken(one, "it has ended"), 0.0)
    reserve(process, four)
    assert admitted == [one, two, four]


# ------------------------------------------------------------------------------------------------ the machine


def test_a_peer_error_of_the_machine_drops_the_message_for_good_and_any_other_error_is_the_drivers():
    world, here, there, _ = established()
    errors = [ProtocolViolation("what nonsense"), ZeroDivisionError()]

    def fail(message):
        raise errors.pop(0)

    there.machine.on_receive = fail
    here.send(there, part(1), b"x")
    world.run(10)
    assert there.endpoint.counters.get("dropped_refused") == 1
    assert here.endpoint.idle()
    assert here.endpoint.links()[Peer(1), True]["messages_resent"] == 0
    here.send(there, part(2), b"x")
    with pytest.raises(ZeroDivisionError):
        world.run(1)


def test_a_call_is_made_once_everything_before_it_was_carried_out():
    world, here, _, _ = established()
    order = []
    here.machine.instructions += [
        Become(rank=5),
        Call(function=lambda: order.append(here.endpoint.process.rank)),
        Call(function=lambda: here.machine.instructions.append(Call(function=lambda: order.append("later")))),
    ]
    world.run(0.1)
    assert order == [5, "later"]


def test_a_payload_is_delivered_as_memory_that_may_be_changed(monkeypatch):
    world, here, there = met()
    changed = []

    def receive(peer, message, payload, payload_crc, now):
        values = np.frombuffer(payload, np.float32)
        values += 1
        changed.append(values.tolist())

    monkeypatch.setattr(there.machine, "receive", receive)
    here.send(there, part(0), np.arange(3, dtype=np.float32))
    world.run(1)
    assert changed == [[1, 2, 3]]


def test_a_scheduler_that_tells_many_nodes_much_looks_for_messages_in_between(monkeypatch):
    monkeypatch.setattr(endpoint, "_MOST_AT_ONCE", 10_000)
    world = World(5)
    here, *others = world.processes
    for other in others:
        here.connect(other)
        here.send(other, part(0))
    world.run(1)
    here.endpoint.process.rank = -1
    long = m.PeerGone(rank=1, kind="lost", reason="x" * 6000)
    for other in others:
        here.send(other, long)
    here.turn()
    assert here.stack.next_tick() == -math.inf
    assert sum(link["bytes_sent"] > 6000 for link in here.endpoint.links().values()) == 2
    here.turn()
    assert here.stack.next_tick() > world.now
    world.run(1)
    assert all(other.machine.got[-1][1] == long for other in others)


def test_messages_to_nobody_are_counted_and_forgotten_and_the_window_of_a_link_can_be_asked_for():
    world = World()
    here, there = world.processes
    here.send(there, part(0))
    world.run(1)
    assert here.endpoint.counters.get("sends_without_session") == 1
    assert here.endpoint.idle()
    assert here.endpoint.link_state(Peer(1)).window == 0
    here.connect(there)
    world.run(1)
    assert here.endpoint.link_state(Peer(1)).window >= 2**20


def test_the_scheduler_and_those_who_come_to_it_have_names():
    [process] = World(1).processes
    assert process.endpoint.process.name_of(SCHEDULER) == "the scheduler"
    assert process.endpoint.process.name_of(Peer(3)) == "rank 3"
    process.endpoint.process.rank = -1
    assert process.endpoint.process.name_of(Peer(3)) == "process 3"


def test_to_connect_twice_changes_the_address_and_not_the_session():
    world = World(3)
    here, there, other = world.processes
    here.connect(there, port=1)
    here.send(there, part(0))
    world.run(1)
    here.connect(there)
    world.run(3)
    assert there.machine.numbers() == [0]
    assert here.machine.lost == []
    assert other.machine.got == []


@pytest.mark.parametrize(("at_once", "one_ways"), [(True, 1), (False, 5)])
def test_a_first_message_waits_for_no_greeting_if_its_sender_has_connected_at_once(at_once, one_ways):
    world = World(2, delay_s=0.1)
    here, there = world.processes
    here.machine.instructions.append(Connect(peer=Peer(1), host=there.host, port=there.port, at_once=at_once))
    world.run(1)
    assert (Peer(1), True) in here.endpoint.links()
    began = world.now
    here.send(there, part(0))
    assert world.run_until(lambda: there.machine.got, 1)
    assert world.now - began == pytest.approx(0.1 * one_ways, rel=0.01)


# -------------------------------------------------------------------------------------------------- datagrams


def test_datagrams_are_sent_once_and_get_lost_while_there_is_no_connection():
    world, here, there = met()
    here.send(there, m.Heartbeat(busy="opens no session"))
    world.run(1)
    assert world.network.connections() == 0
    here.send(there, part(0))
    world.run(1)
    here.send(there, m.Heartbeat(busy="first"))
    world.run(1)
    world.network.reset("host0", "host1")
    world.settle()
    here.send(there, m.Heartbeat(busy="lost"))
    world.run(5)
    here.send(there, m.Heartbeat(busy="last"))
    world.run(5)
    beats = [message.busy for _, message, _ in there.machine.got if isinstance(message, m.Heartbeat)]
    assert beats == ["first", "last"]
    assert here.endpoint.idle()


# ------------------------------------------------------------------------------------------- what is observed


def test_arrivals_and_acknowledgements_are_reported_for_measuring_with_times_of_the_cluster_clock():
    world, here, there = met(delay_s=0.1)
    seen, mine = LinkEstimate(), LinkEstimate()
    there.endpoint.observer, here.endpoint.observer = seen, mine
    here.send(there, part(0), bytes(1000))
    here.send(there, m.Barrier(number=0))
    world.run(2)
    [(peer, size, sent_at, arrived_at, resent)] = seen.arrivals
    assert peer == 0
    assert 1000 < size < 1100
    assert arrived_at - sent_at == pytest.approx(0.1e9, rel=0.01)
    assert not resent
    [(peer, size, sent, heard, stamped_at, resent)] = mine.acknowledgements
    assert peer == 1
    assert 1000 < size < 1100
    assert heard - sent == pytest.approx(0.2, rel=0.01)
    assert heard - stamped_at / 1e9 == pytest.approx(0.1, rel=0.01)
    assert not resent
    took = [arrived_at - sent_at for _, sent_at, arrived_at in mine.signals]
    assert took == [pytest.approx(0.1e9, rel=0.01)] * len(took) != []
    here.send(there, part(1), bytes(1000))
    world.settle()
    world.network.reset("host0", "host1")
    world.run(2)
    assert [resent for *_, resent in seen.arrivals] == [False, True]


@pytest.mark.parametrize("may_contend", [True, False])
def test_chunks_that_are_sent_while_other_links_are_busy_say_so(may_contend):
    world = World(3, delay_s=0.1)
    here, there, elsewhere = world.processes
    for process in (there, elsewhere):
        here.connect(process)
    estimate = here.endpoint.observer = LinkEstimate()
    estimate.may_contend = may_contend
    seen = there.endpoint.observer = LinkEstimate()
    here.send(there, part(0), bytes(100_000))
    world.run(2)
    here.send(elsewhere, part(0), bytes(100_000))
    here.send(elsewhere, part(1), bytes(100_000))
    world.run(0.5)
    here.send(elsewhere, part(2), bytes(100_000))
    here.send(there, part(1), bytes(100_000))
    world.run(2)
    assert seen.contended == [False, may_contend]


def test_what_went_over_a_link_is_counted_alike_on_both_sides():
    world, here, there, _ = established()
    for number in range(1, 20):
        here.send(there, part(number), bytes(1000), BULK)
    there.send(here, part(0), bytes(500))
    world.run(2)
    sent, received = here.endpoint.links()[Peer(1), True], there.endpoint.links()[Peer(0), False]
    assert sent["messages_sent"] == received["messages_received"] + 1  # the Hello was nobody's yet
    assert received["bytes_sent"] == sent["bytes_received"]
    assert received["messages_sent"] == sent["messages_received"]
    assert sent["bytes_sent"] > 19_000
    assert sent["connections"] == received["connections"] == 1


def test_a_control_message_overtakes_queued_bulk():
    world, here, there = met(limits=Limits(window_bytes=10_000))
    for number in range(30):
        here.send(there, part(number), bytes(5000), BULK)
    world.run(0.1)
    here.send(there, m.Barrier(number=7))
    world.run(100)
    assert [type(message) for _, message, _ in there.machine.got].index(m.Barrier) < 10
    assert len(there.machine.got) == 31


def test_never_more_than_the_window_is_in_flight(monkeypatch):
    world, here, there = met(delay_s=0.1, limits=Limits(window_bytes=20_000))
    assert isinstance(here.van, WatchedVan)
    received, transmit, sent, in_flight = here.van.received, here.van.transmit, set(), []

    def note(connection, header, payload, stream):
        sent.add(open_frames(header, 1 if payload is None else 2).sequence)
        acknowledged = [
            message.received
            for event in received
            if isinstance(message := open_frames(event.frames[0], len(event.frames)).message, m.Ack)
        ]
        in_flight.append(len([one for one in sent if one > max(acknowledged, default=0)]))
        return transmit(connection, header, payload, stream)

    monkeypatch.setattr(here.van, "transmit", note)
    for number in range(50):
        here.send(there, part(number), bytes(4900), BULK)
    world.run(30)
    assert len(there.machine.got) == 50
    assert max(in_flight) == 4


def test_sends_carry_the_checksum_that_is_known_already(monkeypatch):
    world, here, there = met()
    crcs = []
    monkeypatch.setattr(there.machine, "receive", lambda *arguments: crcs.append(arguments[3]))
    here.machine.instructions.append(
        Send(peer=Peer(1), message=part(0), payload=b"123456789", payload_crc=0xE3069283)
    )
    world.run(1)
    assert crcs == [0xE3069283]


def test_the_same_message_twice_is_delivered_once_and_acknowledged_again():
    world, here, there, connection = established()
    frames = (frame(part(1), sequence=2),)
    for _ in range(3):
        there.stack.handle(Received(connection, frames), world.now)
    there.stack.flush(there.van, world.now)
    assert there.machine.numbers() == [0, 1]
    link = there.endpoint.links()[Peer(0), False]
    assert link["duplicates"] == 2
    assert here.machine.lost == []


def test_a_hello_that_acknowledges_what_was_never_sent_is_refused_and_the_session_lives():
    world, here, there, _ = established()
    forged = msgspec.structs.replace(hello_of(there, 0)[1], received=99, resuming=True)
    there.stack.handle(Received(STRANGER, (frame(forged),)), world.now)
    assert there.endpoint.counters.get("dropped_protocol") == 1
    assert there.endpoint.counters.get("refused_hellos") == 1
    here.send(there, part(1))
    there.send(here, part(2))
    world.run(1)
    assert there.machine.numbers() == [0, 1]
    assert here.machine.numbers() == [2]


def test_a_peer_may_begin_a_new_session_and_what_was_under_way_in_the_old_one_is_gone(caplog):
    world, here, there, _ = established()
    world.network.cut("host0", "host1")
    there.send(here, part(7), b"lost")
    world.settle()
    here.disconnect(there, at_once=True)
    world.run(3.5)
    world.network.heal("host0", "host1")
    here.connect(there)
    here.send(there, part(1))
    world.run(5)
    assert there.machine.numbers() == [0, 1]
    assert here.machine.got == []
    assert there.machine.lost == []
    assert "has begun a new session; messages that it has not acknowledged are lost" in caplog.text


def test_a_session_that_the_accepting_side_ends_survives_a_break():
    world, here, there, _ = established()
    world.network.cut("host0", "host1")
    for number in range(5):
        there.send(here, part(number), b"x", BULK)
    there.disconnect(here)
    world.run(5)  # the heartbeats find out
    world.network.heal("host0", "host1")
    world.run(5)
    assert here.machine.numbers() == list(range(5))
    assert there.endpoint.idle()
    assert there.endpoint.counters.get("refused_hellos") == 0


def reconnecting():
    """Return a world, its two processes, a Hello of the first, which connects anew, and that connection."""
    world, here, there, _ = established()
    _, greeting = hello_of(there, 0)
    world.network.reset("host0", "host1")
    world.settle()
    world.run_until(lambda: len(here.van.opened) == 2)
    return world, here, there, greeting, here.van.opened[-1]


def test_another_process_that_answers_at_the_same_address_ends_the_session():
    world, here, there, greeting, connection = reconnecting()
    welcome = m.Welcome(incarnation=4242, session=greeting.session, received=0)
    here.stack.handle(Received(connection, (frame(welcome),)), world.now)
    [(_, reason)] = here.machine.lost
    assert "another process now" in reason
    assert there.machine.lost == []


def test_a_welcome_to_another_session_is_dropped():
    world, here, there, _, connection = reconnecting()
    welcome = m.Welcome(incarnation=there.endpoint.process.incarnation, session=1, received=0)
    here.stack.handle(Received(connection, (frame(welcome),)), world.now)
    assert here.endpoint.counters.get("dropped_protocol") == 1
    here.send(there, part(1))
    world.run(5)
    assert there.machine.numbers() == [0, 1]


def test_what_still_comes_over_a_connection_that_was_replaced_is_ignored_in_silence(caplog):
    world, _, there, connection = established()
    world.network.reset("host0", "host1")
    world.run(3)
    there.stack.handle(Received(connection, (frame(part(9), sequence=9),)), world.now)
    assert there.machine.numbers() == [0]
    assert there.endpoint.counters.get("dropped_protocol") == 0
    assert not caplog.records


def test_a_peer_that_hangs_is_lost_to_the_side_that_accepted_too():
    world, here, there, _ = established()
    here.dead = True  # its connection lives, nobody reads
    there.send(here, part(1))
    assert world.run_until(lambda: there.machine.lost, 100)
    assert 20 < world.now < 30
    assert "no answer" in there.machine.lost[0][1]


@pytest.mark.parametrize("pause", [0.0, 5.0])
def test_whoever_missed_the_goodbye_hears_it_again(pause):
    world, here, there, _ = established()
    world.network.cut("host0", "host1")
    there.disconnect(here)
    world.run(4)
    world.network.heal("host0", "host1")
    there.dead = True
    world.run(pause)
    there.dead = False
    world.run(5)
    assert here.machine.lost == there.machine.lost == []
    assert here.endpoint.idle()
    assert world.network.connections() == 0


def test_a_process_of_another_protocol_version_is_refused_in_that_version_so_that_it_can_read_why(
    monkeypatch,
):
    world = World()
    there = world.processes[1]
    other = seal(encode_body(hello()), sequence=0, sent_at=0, payload_crc=None, version=7)
    for greeting in (other, seal(encode_body(m.Query()), sequence=0, sent_at=0, payload_crc=None, version=7)):
        there.endpoint.handle(Received(STRANGER, (greeting,)), world.now)
    sent = []
    monkeypatch.setattr(there.van, "transmit", lambda _, header, *__: sent.append(header))
    there.endpoint.flush(there.van, world.now)
    [answer] = sent  # to the Hello alone
    assert answer[2] == 7
    refused = open_frames(answer[:2] + bytes([PROTOCOL_VERSION]) + answer[3:], 1).message
    assert isinstance(refused, m.Refused)
    assert "this process in version 7: install" in refused.reason
    assert there.endpoint.counters.snapshot()["dropped_frame"] == 2


# -------------------------------------------------------------------------- a process whose key was removed


def test_all_sessions_with_an_expelled_process_are_lost_at_once_and_the_machine_is_told():
    world = World(3)
    here, there, other = world.processes
    for one, to in ((here, there), (there, here), (other, here)):
        one.connect(to)
        one.send(to, part(0))
    world.run(1)
    connection, _ = hello_of(here, 1)
    here.stack.handle(Broken(connection, "the key of paris was removed", expelled=True), world.now)
    assert {peer for peer, _ in here.machine.lost} == {Peer(1)}
    assert {reason for _, reason in here.machine.lost} == {"the key of paris was removed"}
    assert len(here.machine.lost) == 2, "the session that each of the two has opened"
    assert [bool(here.endpoint.link_state(Peer(rank)).window) for rank in (1, 2)] == [False, True]


def test_a_connection_that_is_not_in_use_any_more_expels_nobody():
    world, here, there = met()
    there.connect(here)
    there.send(here, part(0))
    world.run(1)
    old, _ = hello_of(here, 1)
    world.network.reset("host0", "host1")
    there.send(here, part(0))
    world.run(5)
    assert hello_of(here, 1)[0] != old
    here.stack.handle(Broken(old, "the key of paris was removed", expelled=True), world.now)
    assert here.machine.lost == []


# --------------------------------------------------------------- nobody can have more decoded than he needs


HALF, SOME, MUCH = 500_000, 1_500_000, 5_000_000


def of_size(size: int, message: Message) -> bytes:
    return bytes(frame(message)).ljust(size, b"x")


LEAVE, FINISHED = Leave(), Finished(last_rounds={})


@pytest.mark.parametrize(
    ("most", "message", "sender", "own_rank"),
    [
        (HALF, hello(), None, -1),
        (0, FINISHED, None, -1),
        (0, LEAVE, Peer(2), -1),
        (HALF, FINISHED, Peer(2), 3),
        (SOME, FINISHED, Peer(2), -1),
        (MUCH, LEAVE, SCHEDULER, 3),
        (MUCH, LEAVE, SCHEDULER, -1),
    ],
)
def test_the_scheduler_may_say_much_and_be_told_some_and_all_else_is_small(
    most: int, message: Message, sender: Peer | None, own_rank: int
) -> None:
    for size in (HALF, SOME, MUCH):
        with nullcontext() if size <= most else pytest.raises(FrameError, match=f"{size} bytes before the"):
            check_size(of_size(size, message), sender, own_rank)


def test_a_hello_of_megabytes_begins_no_session() -> None:
    [process] = World(1).processes
    large = msgspec.structs.replace(hello(), job="x" * 2_000_000)
    process.stack.handle(Received(Connection(-1), (frame(large),)), 0.0)
    assert process.endpoint.counters.get("dropped_frame") == 1
    assert process.endpoint.links() == {}


def test_megabytes_from_a_node_are_dropped_and_the_session_lives() -> None:
    _, _, there, connection = established()
    there.stack.handle(Received(connection, (frame(Failed(reason="x" * 2_000_000), sequence=2),)), 0.0)
    assert there.endpoint.counters.get("dropped_frame") == 1
    assert len(there.machine.got) == 1
    there.stack.handle(Received(connection, (frame(Failed(reason="x"), sequence=2),)), 0.0)
    assert len(there.machine.got) == 2


# ----------------------------------------------------------------- messages for which a machine has no room


class Keeper(Recorder):
    """Keeps parts with even numbers until `let_go`; its room is for two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = WaitingBytes(of_one=3000)
        assert isinstance(self, Bounded)
        self.kept: list[Charge] = []
        self.keeps = True
        self.on_receive = self.keep

    def keep(self, message: m.Message) -> None:
        assert isinstance(message, m.Part)
        self.waiting.begin(Peer(0))
        if self.keeps and message.chunk % 2 == 0:
            self.kept.append(self.waiting.take(100, message.chunk, f"chunk {message.chunk}"))

    def let_go(self) -> None:
        for charge in self.kept:
            self.waiting.give_back(charge)
        self.kept.clear()


def met_keeper() -> tuple[World, RecordingProcess, RecordingProcess, Keeper]:
    world, here, there = met()
    give(there, Keeper(), ordered=lambda _: False)
    assert isinstance(there.machine, Keeper)
    return world, here, there, there.machine


def test_what_has_no_room_comes_once_there_is_room_and_what_need_not_wait_comes_meanwhile(caplog):
    world, here, there, keeper = met_keeper()
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
    world, here, there, keeper = met_keeper()
    for number in (0, 2, 4, 6):
        here.send(there, part(number), order=BULK)
    world.run(1)
    assert there.machine.numbers() == [0, 2]
    keeper.keeps = False
    keeper.waiting.ready(6)
    world.run(5)
    assert there.machine.numbers() == [0, 2, 6]


def test_nothing_is_lost_or_comes_twice_if_the_connection_breaks_meanwhile():
    world, here, there, keeper = met_keeper()
    for number in range(8):
        here.send(there, part(number), order=BULK)
    world.run(1)
    world.network.reset("host0", "host1")
    world.run(5)
    keeper.keeps = False
    keeper.let_go()
    world.run(5)
    assert sorted(there.machine.numbers()) == list(range(8))
    assert here.endpoint.idle()


def test_who_sends_more_than_any_process_has_under_way_loses_its_session(monkeypatch, caplog):
    monkeypatch.setattr(session, "_MOST_REFUSED", 2)
    world, here, there, _ = met_keeper()
    for number in range(0, 12, 2):
        here.send(there, part(number), order=BULK)
    world.run(1)
    assert [peer for peer, _ in there.machine.lost] == [0]
    assert "rank 0 has sent a message 5, and 2 have no room here already" in there.machine.lost[0][1]
    assert "the session with it is ended" in caplog.text


@pytest.mark.parametrize("ordered", [True, False])
def test_a_peer_of_which_a_machine_will_keep_no_more_loses_its_session(ordered, caplog):
    world, here, there = met(ordered=ordered)

    def refuse(message: m.Message) -> None:
        raise Overloaded("message to forward, and 7 bytes of it wait")

    there.machine.on_receive = refuse
    here.send(there, part(0), order=BULK)
    world.run(1)
    assert there.machine.lost == [(0, "rank 0 has sent a message to forward, and 7 bytes of it wait")]
    assert "7 bytes of it wait: the session with it is ended" in caplog.text
    ((peer, reason),) = here.machine.lost
    assert peer == 1
    assert reason.endswith("refused this process: it has sent a message to forward, and 7 bytes of it wait")


def test_a_message_gives_its_charge_back_once_it_is_acknowledged_or_dropped():
    world, here, there = met()
    counts = ForwardedBytes()

    def send(number: int) -> None:
        here.machine.instructions.append(
            Send(peer=Peer(1), message=part(number), payload=b"1", charge=counts.take(Peer(7), 1), order=BULK)
        )

    send(0)
    assert counts.bytes.room(Peer(7)) < math.inf
    world.run(1)
    assert there.machine.numbers() == [0]
    assert counts.bytes.room(Peer(7)) == math.inf
    world.kill(there, silent=True)
    send(1)
    world.run(0.01)
    assert counts.bytes.room(Peer(7)) < math.inf
    world.run(60)
    assert [peer for peer, _ in here.machine.lost] == [1]
    assert counts.bytes.room(Peer(7)) == math.inf


@pytest.mark.parametrize("ordered", [True, False])
def test_a_machine_that_refuses_in_an_ordered_session_drops(ordered):
    world, here, there = met(ordered=ordered)

    def refuse(message: m.Message) -> None:
        raise NoRoom("none", "anything")

    there.machine.on_receive = refuse
    here.send(there, part(0), order=BULK)
    world.run(1)
    assert there.endpoint.counters.get("dropped_refused") == ordered
    assert here.endpoint.idle() == ordered


# ------------------------------------------------------------------------------------- more than there may be


def test_sessions_without_connections_make_room_for_new_ones_first_those_over_which_least_came():
    world = World(0, limits=Limits(sessions=3, link_timeout_s=5.0))
    there = world.add(0)
    others = [world.add(rank) for rank in range(1, 4)]
    for other in others:
        other.connect(there)
        for number in range(other.rank):
            other.send(there, part(number), order=BULK)
    world.run(1)
    for other in others[:2]:
        world.kill(other, silent=False)
    world.run(6)
    late = world.add(4)

    def tries() -> None:
        late.connect(there)
        late.send(there, part(100), order=BULK)
        world.run(3)

    tries()
    assert there.machine.numbers().count(100) == 0
    assert "this process has 3 sessions already" in late.machine.lost[0][1]
    world.run(5)
    tries()
    assert there.machine.numbers().count(100) == 1
    assert there.machine.lost == [(1, "it has had no connection for long, and others want a session")]


# ----------------------------------------------------------------------------------------- ordered sessions


def early(world: World, here: RecordingProcess, there: RecordingProcess, sizes: list[int]) -> None:
    """Send messages of which the second one never arrives."""
    swallow(here, lambda header: header.sequence == 2)
    here.send(there, part(0), order=BULK)
    world.run(1)
    for number, size in enumerate([0, *sizes], start=1):
        here.send(there, part(number), bytes(size), order=BULK)
    world.run(0.5)


def test_what_waits_for_a_missing_message_is_bounded_in_bytes(monkeypatch, caplog):
    monkeypatch.setattr(session, "_HELD_OF_ONE", 5000)
    world, here, there = met(ordered=True)
    early(world, here, there, [1000, 1000])
    assert there.machine.numbers() == [0]
    assert not there.machine.lost
    here.send(there, part(9), bytes(1000), order=BULK)
    world.run(0.5)
    assert "rank 0 has sent a message 5 is too early" in there.machine.lost[0][1]
    assert "wait here for message 2" in caplog.text
    assert there.endpoint._sessions.held_bytes.room(Peer(0)) > 5000, "what has waited is dropped"


def test_values_where_no_message_has_any_are_refused_before_they_are_held(caplog):
    world, here, there = met(ordered=True)
    give(there, Recorder(), ordered=lambda _: True, payloads=lambda _: False)
    early(world, here, there, [1000])
    assert "Part with 1000 bytes of values, which no message between these two processes has" in caplog.text
    assert [peer for peer, _ in there.machine.lost] == [0]


# ------------------------------------------- a machine that watches connections hears which peers' are gone


class Watcher:
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def connection_gone(self, peer, reason, now, *, refused):
        self.heard.append((peer, reason, now, refused))

    def may_be_busy(self, peer, now):
        return peer == 3

    def peer_busy(self, peer, seconds, now, *, late):
        self.heard.append((peer, seconds, now, late))


def session_with_3(state=SessionState.DISCONNECTED, *, opened_here=False):
    return SimpleNamespace(peer=Peer(3), state=state, reason="reset", opened_here=opened_here)


def test_the_end_of_a_connection_that_the_peer_opened_is_told_once_and_other_changes_are_not():
    watcher = Watcher()
    watched = WatchedConnections(watcher)
    watched.changed(session_with_3(opened_here=True))
    watched.changed(session_with_3(SessionState.CLOSING))
    assert not watched.tell(4.0)
    watched.changed(session_with_3())
    assert watched.tell(5.0)
    assert not watched.tell(6.0)
    watched.refused(Peer(2), "connection refused", 7.0)  # told at once
    assert watcher.heard == [(Peer(3), "reset", 5.0, False), (Peer(2), "connection refused", 7.0, True)]
    blind = WatchedConnections(SimpleNamespace())
    blind.refused(Peer(2), "connection refused", 1.0)
    blind.changed(session_with_3())
    assert not blind.tell(5.0)


def test_that_a_peer_is_busy_is_asked_and_told():
    watcher = Watcher()
    watched = WatchedConnections(watcher)
    assert [watched.may_be_busy(Peer(peer), 1.0) for peer in (2, 3)] == [False, True]
    assert not WatchedConnections(SimpleNamespace()).may_be_busy(Peer(3), 1.0)
    watched.busy(Peer(3), 12.0, late=True)
    watched.busy(Peer(3), 11.0)
    assert watched.tell(5.0)
    assert not watched.tell(5.0)
    assert watcher.heard == [(Peer(3), 12.0, 5.0, True)]


class Transmitter:
    """Keeps the connections that it is told to open."""

    def __init__(self):
        self.opened = []
        self.closed = []

    def open(self, connection, host, port):
        self.opened.append((connection, host, port))

    def close(self, connection):
        self.closed.append(connection)


def test_a_process_that_ends_may_close_its_sockets_one_after_the_other():
    world, _, there = connected()
    van: Any = Transmitter()
    watcher = Watcher()
    endpoint: Any = there.endpoint
    endpoint.watched = WatchedConnections(watcher)
    endpoint.handle(Broken(hello_of(there, 0)[0], "reset"), world.now)
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
    world, _, there = connected()
    van: Any = Transmitter()
    endpoint = there.endpoint
    endpoint.handle(Broken(hello_of(there, 0)[0], "reset"), world.now)
    endpoint.inquire(Inquire(peer=Peer(0), host="there", port=9), world.now)
    for trials in (1, 2, 3, 4, 4):
        endpoint.flush(van, world.now)
        assert len(van.opened) == trials
        endpoint.handle(Broken(van.opened[-1][0], "reset"), world.now)


def test_a_peer_of_the_process_before_a_restart_is_asked_about_until_it_is_given_up():
    world, _, there = connected()
    van: Any = Transmitter()
    watcher = Watcher()
    endpoint: Any = there.endpoint
    endpoint.watched = WatchedConnections(watcher)
    for peer in (Peer(8), Peer(9)):
        endpoint.inquire(Inquire(peer=peer, host=f"there{peer}", port=9), world.now)
    endpoint.flush(van, world.now)
    assert [host for _, host, _ in van.opened] == ["there8", "there9"]
    endpoint.handle(Broken(van.opened[0][0], "connection refused", refused=True), world.now)
    assert watcher.heard == [(Peer(8), "connection refused", world.now, True)]
    assert van.closed == []
    endpoint.disconnect(Disconnect(peer=Peer(9)), world.now)
    endpoint.flush(van, world.now)
    assert van.closed == [van.opened[1][0]], "nobody waits for it any more"


# ---------------------------------------- the time of a process stands still while the process does not run


class TickingMachine:
    """Ticks whenever it can."""

    def __init__(self):
        self.ticks = []

    def next_tick(self):
        return 0.0

    def tick(self, now):
        self.ticks.append(now)


class IdleEndpoint:
    """Has nothing to do."""

    def __init__(self):
        self.resumed_after = []

    def resumed(self, now, missed_s):
        self.resumed_after.append(missed_s)

    def next_tick(self):
        return 0.0

    def tick(self, now):
        pass


def made():
    machine, endpoint = TickingMachine(), IdleEndpoint()
    return Stack(machine, endpoint), machine, endpoint  # type: ignore[type-var, arg-type]


def test_it_counts_what_a_process_waits_for_and_small_delays_and_not_what_comes_on_top(caplog):
    caplog.set_level(logging.WARNING, "netstorm")
    stack, _, endpoint = made()
    assert stack.running_time(10.0, 10.0) == 10.0
    assert stack.running_time(11.0, 11.0) == 11.0
    assert stack.running_time(11.4, 11.0) == 11.4
    assert endpoint.resumed_after == []
    assert stack.running_time(3611.4, 11.4) == pytest.approx(11.4)
    assert stack.running_time(3612.4, 3612.4) == pytest.approx(12.4)
    assert stack.missed_s == pytest.approx(3600.0)
    assert endpoint.resumed_after == pytest.approx([3600.0])
    (line,) = caplog.messages
    assert line.startswith("this process did not run for 3600.0 s: ")


def test_what_has_come_is_read_before_anybody_is_judged():
    stack, machine, _ = made()
    stack.tick(stack.running_time(10.0, 10.0))
    now = stack.running_time(60.0, 11.0)
    stack.tick(now)
    assert machine.ticks == [10.0]
    assert now < stack.next_tick() < now + 1.0
    stack.tick(stack.next_tick())
    assert len(machine.ticks) == 2
