"""A session's life: connections come and go, the stream stays."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from netstorm.errors import ProtocolViolation
from netstorm.lab.testing.conformance import FaultyVan
from netstorm.lab.testing.recorder import RecordingProcess, part
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer, encode_body, open_frames, seal
from netstorm.pslite.machine import OF_MESSAGE, Admit, NotYet, Send
from netstorm.pslite.sending import SendingHalf, SendQueueItem, Window
from netstorm.pslite.session import TRANSITIONS, Event, Limits, ReceivingHalf, SessionState
from netstorm.pslite.van import Received, Widened
from tests.unit.pslite.world import World, connected, met

BULK = (0, 0, 0)


def wire_tap(world):
    """Return the list to which everything that is delivered from now on is written: (source, header)."""
    seen = []
    world.network.watch = lambda source, _, header, payload: seen.append(
        (source, open_frames(header, 1 if payload is None else 2))
    )
    return seen


def sequences(seen, source="host0"):
    return [header.sequence for sender, header in seen if sender == source and header.sequence]


def kinds(seen, source="host0"):
    return [type(header.message).__name__ for sender, header in seen if sender == source]


# -------------------------------------------------------------------------------------------------- the table


def following(*states):
    """Return the states that can come after these, and these."""
    found, left = set(states), list(states)
    while left:
        new = set(TRANSITIONS[left.pop()].values()) - found
        found |= new
        left += new
    return found


def test_every_state_can_be_reached_and_can_end_for_good_and_every_event_is_of_use_somewhere():
    ended = {SessionState.CLOSED, SessionState.LOST}
    assert following(SessionState.IDLE, SessionState.DISCONNECTED) == set(SessionState) == set(TRANSITIONS)
    assert all(following(state) & ended for state in SessionState)
    assert not any(TRANSITIONS[state] for state in ended)
    assert {event for events in TRANSITIONS.values() for event in events} == set(Event)


# -------------------------------------------------------------------------------------------------- beginning


def test_a_connection_is_made_for_the_first_message_and_data_flows_after_hello_and_welcome():
    world, here, there = met(delay_s=0.1)
    world.run(60)
    assert world.network.connections() == 0
    seen = wire_tap(world)
    here.send(there, part(0), b"payload")
    world.run(2)
    assert [(source, type(header.message).__name__) for source, header in seen] == [
        ("host0", "Hello"),
        ("host1", "Welcome"),
        ("host0", "Part"),
        ("host1", "Ack"),
    ]
    assert there.machine.payloads() == {0: b"payload"}
    hello = seen[0][1].message
    assert (hello.job, hello.sender, hello.incarnation, hello.receiver) == ("job", 0, 1000, 1)
    assert (hello.received, hello.beyond, hello.resuming) == (0, (), False)


def test_acknowledgements_are_gathered():
    world, here, there = met()
    seen = wire_tap(world)
    here.send(there, part(0), b"x", BULK)
    world.run(1)
    seen.clear()
    there.dead = True  # busy for a while, so that they all come in one batch
    for number in range(1, 20):
        here.send(there, part(number), b"x", BULK)
    world.run(0.1)
    there.dead = False
    world.run(1)
    assert kinds(seen).count("Part") == 19
    assert kinds(seen, "host1").count("Ack") == 1


def test_a_process_that_is_not_there_yet_is_tried_again_until_it_is():
    world = World(1)
    here = world.processes[0]
    late = world.add(1, port=7777)
    world.kill(late)
    here.connect(late)
    here.send(late, part(0))
    world.run(5)
    there = world.add(1, port=7777)
    assert world.run_until(lambda: there.machine.numbers() == [0], 5)
    assert here.machine.lost == []


def test_a_peer_that_is_far_away_has_as_many_round_trips_as_a_connection_takes():
    world, here, there = met(delay_s=1.5)  # two round trips of 3 s until the Welcome
    seen = wire_tap(world)
    here.send(there, part(0))
    assert world.run_until(lambda: there.machine.numbers() == [0], 10)
    world.run(30)
    assert here.machine.lost == []
    assert kinds(seen).count("Hello") == 1


def test_a_peer_that_is_far_away_and_does_not_answer_is_lost_in_the_end():
    world, here, there = met(delay_s=1.5, limits=Limits(link_timeout_s=10))
    there.dead = True  # its kernel accepts the connection
    here.send(there, part(0))
    assert world.run_until(lambda: here.machine.lost, 30)
    assert 19.5 < world.now < 20.5


def test_a_hello_that_nobody_can_decide_on_yet_waits_without_being_sent_again():
    world, here, there = met()
    seen = wire_tap(world)
    there.machine.admission = lambda _: NotYet()
    here.send(there, part(0))
    world.run(3)
    assert there.machine.got == []
    there.machine.admission = lambda hello: Admit(Peer(hello.sender))
    world.run(1)
    assert there.machine.numbers() == [0]
    assert kinds(seen) == ["Hello", "Part"]


def test_a_refusal_reaches_the_machine_with_its_reason():
    world = World(3)
    here, there, other = world.processes
    here.connect(other, host=there.host, port=there.port)  # where another process listens by now
    here.send(other, part(0))
    world.run(1)
    [(peer, reason)] = here.machine.lost
    assert peer == 2
    assert f"host1:{there.port}" in reason
    assert "this is rank 1, not rank 2" in reason
    assert there.endpoint.counters.get("refused_hellos") == 1


# -------------------------------------------------------------------------------- connections that break


def test_after_a_break_exactly_what_was_not_acknowledged_goes_again_in_order():
    world, here, there = connected(delay_s=0.1)
    for number in range(1, 10):
        here.send(there, part(number), b"x", BULK)
    world.settle()
    world.run(0.15)  # they have arrived; their acknowledgement has not
    for number in range(10, 15):
        here.send(there, part(number), b"x", BULK)
    world.settle()
    seen = wire_tap(world)
    world.network.reset("host0", "host1")
    world.run(5)
    assert there.machine.numbers() == list(range(15))
    assert sequences(seen) == [11, 12, 13, 14, 15]
    hello = seen[0][1].message
    assert hello.resuming
    [link] = here.endpoint.links().values()
    assert link["connections"] == 2
    assert link["messages_resent"] == 5


def test_a_link_that_cannot_be_re_established_in_time_is_lost_with_a_reason():
    world, here, there = connected(limits=Limits(link_timeout_s=10))
    world.kill(there)
    world.run(0.1)
    began = world.now
    assert world.run_until(lambda: here.machine.lost, 60)
    assert 9.5 < world.now - began < 10.5
    [(peer, reason)] = here.machine.lost
    assert peer == 1
    assert reason.startswith(
        f"no connection to host1:{there.port} for 10.0 s (NETSTORM_LINK_TIMEOUT): connection refused"
    )


def test_attempts_to_connect_come_less_and_less_often(monkeypatch):
    world, here, there = met(limits=Limits(link_timeout_s=30))
    opened = []
    original = here.van.open

    def note_and_open(connection, host, port):
        opened.append(world.now)
        original(connection, host, port)

    monkeypatch.setattr(here.van, "open", note_and_open)
    world.kill(there)
    here.send(there, part(0))
    assert world.run_until(lambda: here.machine.lost, 60)
    waits = [later - sooner for sooner, later in itertools.pairwise(opened)]
    assert waits[0] < 0.1
    assert 20 < len(opened) < 70
    assert 0.5 < max(waits) < 1.1


def test_a_process_that_was_restarted_is_not_taken_for_the_one_before():
    world, here, there = connected()
    world.kill(there)
    again = world.add(1, incarnation=4242, port=there.port)
    here.send(there, part(1))
    world.run(5)
    assert again.machine.got == []
    [(_, reason)] = here.machine.lost
    assert "not known here" in reason


def test_no_process_goes_on_with_a_session_that_it_has_not_begun(monkeypatch):
    """One that listens where the other did, says that it is that process, and takes all for new sessions."""
    world, here, there = connected()
    world.kill(there)
    posing = world.add(1, incarnation=there.endpoint.process.incarnation, port=there.port)
    third = world.add(2)
    poll, resuming = posing.van.poll, {}

    def as_new(event):
        if not isinstance(event, Received):
            return event
        message = open_frames(event.frames[0], len(event.frames)).message
        if not isinstance(message, m.Hello):
            return event
        resuming[message.sender] = message.resuming
        new = encode_body(msgspec.structs.replace(message, resuming=False))
        return replace(event, frames=(seal(new, sequence=0, sent_at=0, payload_crc=None),))

    monkeypatch.setattr(posing.van, "poll", lambda timeout_s: [as_new(event) for event in poll(timeout_s)])
    third.connect(posing)
    third.send(posing, part(9))  # it gets the number of a session that the process before gave to `here`
    here.send(there, part(1))
    world.run(5)
    assert resuming == {0: True, 2: False}
    assert posing.machine.numbers() == [9]
    [(_, reason)] = here.machine.lost
    assert "is another process now, which says that it is the one before" in reason


def test_a_hello_of_a_restarted_process_ends_the_session_of_the_one_before():
    world, here, there = connected()
    world.kill(here)
    again = world.add(0, incarnation=4242)
    again.connect(there)
    again.send(there, part(1))
    world.run(1)
    assert [reason for _, reason in there.machine.lost] == ["rank 0 came back as another process"]
    assert there.machine.numbers() == [0, 1]


def test_the_side_that_accepted_loses_a_peer_that_it_has_something_for_and_that_does_not_come_back():
    world, here, there = connected(limits=Limits(link_timeout_s=10))
    world.kill(here)
    world.run(100)
    assert there.machine.lost == []  # nothing to say to it
    there.send(here, part(1))
    began = world.now
    assert world.run_until(lambda: there.machine.lost, 60)
    assert 9.9 < world.now - began < 25
    assert there.machine.lost[0][0] == 0


def test_further_messages_do_not_put_off_the_end_of_a_link_that_does_not_come_back():
    world, here, there = connected(limits=Limits(link_timeout_s=10))
    world.kill(there)
    for number in range(1, 5):
        here.send(there, part(number))
        world.run(3)
    assert [peer for peer, _ in here.machine.lost] == [1]


def came(process: RecordingProcess, number: int) -> bool:
    return number in process.machine.numbers()


def test_after_each_break_the_first_attempts_come_soon():
    world, here, there = connected()
    for number in range(1, 9):
        world.network.reset("host0", "host1")
        here.send(there, part(number))
        assert world.run_until(partial(came, there, number), 0.3)


def test_a_peer_whose_machine_acknowledges_may_be_busy_for_so_long():
    world, here, there = connected(limits=Limits(link_timeout_s=10, busy_timeout_s=60))
    sessions: Any = here.endpoint._sessions
    sessions.acknowledges = lambda _: True
    sessions.may_be_busy = lambda *_: True
    session = sessions.opened[Peer(1)]
    there.dead = True
    here.send(there, part(1))
    for _ in range(5):
        world.run(10)
        assert session.state is SessionState.UP
    world.run(300)
    assert [peer for peer, _ in here.machine.lost] == [1]


def test_payloads_go_without_checksums_only_if_both_ends_say_that_they_are_on_one_machine():
    _, here, there = met()
    here.send(there, part(0))
    here.turn()
    session = here.endpoint._sessions.opened[Peer(1)]
    welcome = m.Welcome(
        incarnation=5, session=session.identity, received=0, beyond=(), unchecked=True, token=1
    )
    session.welcome(welcome, 0.0)
    assert session.state is SessionState.UP
    assert not session.unchecked


def test_as_many_messages_are_asked_for_as_there_is_room_and_over_a_new_connection_none():
    world, here, there = connected()
    session = there.endpoint._sessions.accepted[Peer(0)]
    for sequence in (100, 101, 102):
        session.refuse_for_now(sequence, 1000, "a key")
    session.request_refused(2 * (1000 + OF_MESSAGE) - 1, ())
    assert list(session.without_room) == [101, 102]
    world.network.reset("host0", "host1")
    here.send(there, part(1))
    world.run(2)
    assert not session.without_room


# ----------------------------------------------------------------------------------------- lost and corrupted


def corrupt_headers(process, wanted):
    """Flip a bit in frame 0 of each message that `wanted` holds for, once."""
    original = process.van.transmit

    def transmit(connection, header, payload, stream=0):
        if wanted(open_frames(header, 1 if payload is None else 2)):
            header = header[:20] + bytes([header[20] ^ 1]) + header[21:]
        return original(connection, header, payload, stream)

    process.van.transmit = transmit


def once(condition):
    """Make a condition hold only the first time."""
    state = {"left": 1}

    def wrapped(header):
        if state["left"] and condition(header):
            state["left"] = 0
            return True
        return False

    return wrapped


def test_only_the_chunk_whose_payload_was_corrupted_goes_again():
    world, here, there = met()
    here.send(there, part(99), b"x")
    world.run(1)
    seen = wire_tap(world)
    world.network.corrupt_probability = 1.0
    here.send(there, part(0), bytes(1000), BULK)
    world.settle()
    world.run(0.015)
    world.network.corrupt_probability = 0.0
    for number in range(1, 5):
        here.send(there, part(number), bytes(1000), BULK)
    world.run(2)
    assert sorted(there.machine.numbers()) == [0, 1, 2, 3, 4, 99]
    assert sequences(seen) == [2, 3, 4, 5, 6, 2]
    assert there.endpoint.links()[Peer(0), False]["dropped_checksum"] == 1
    assert kinds(seen, "host1").count("Nack") == 1
    assert there.machine.payloads()[0] == bytes(1000)


def test_a_message_whose_header_was_corrupted_goes_again_as_soon_as_a_later_one_arrives():
    world, here, there = met()
    corrupt_headers(here, once(lambda header: header.sequence == 2))
    for number in range(5):
        here.send(there, part(number), b"x", BULK)
    world.run(0.5)
    assert sorted(there.machine.numbers()) == [0, 1, 2, 3, 4]
    assert there.endpoint.counters.get("dropped_frame") == 1


def test_the_last_message_is_asked_after_if_it_never_arrived():
    world, here, there = met(limits=Limits(query_after_s=2))
    corrupt_headers(here, once(lambda header: header.sequence == 1))
    here.send(there, part(0), b"x", BULK)
    world.run(1.9)
    assert there.machine.got == []
    world.run(0.5)
    assert there.machine.numbers() == [0]
    assert here.endpoint.links()[Peer(1), True]["connections"] == 1


@pytest.mark.parametrize("lost", [m.Hello, m.Welcome])
def test_a_greeting_that_is_lost_is_repeated_over_a_new_connection(lost):
    world, here, there = met(limits=Limits(link_timeout_s=10))
    for process in (here, there):
        corrupt_headers(process, once(lambda header: isinstance(header.message, lost)))
    here.send(there, part(0))
    assert world.run_until(lambda: there.machine.numbers() == [0], 9)
    assert here.machine.lost == []


@pytest.mark.parametrize("lost", [m.Ack, m.Nack])
def test_a_lost_acknowledgement_costs_a_query_and_nothing_else(lost):
    world, here, there = met()
    corrupt_headers(there, once(lambda header: isinstance(header.message, lost)))
    for number in range(3):
        here.send(there, part(number), bytes(100), BULK)
    world.run(10)
    assert sorted(there.machine.numbers()) == [0, 1, 2]
    assert here.endpoint.idle()
    assert here.endpoint.links()[Peer(1), True]["messages_resent"] == 0


def test_a_slow_link_never_makes_anything_go_again():
    world, here, there = met(delay_s=4.0, limits=Limits(link_timeout_s=60, query_after_s=2))
    for number in range(10):
        here.send(there, part(number), bytes(1000), BULK)
    world.run(100)
    assert there.machine.numbers() == list(range(10))
    assert here.endpoint.links()[Peer(1), True]["messages_resent"] == 0
    assert here.endpoint.links()[Peer(1), True]["connections"] == 1


def test_a_peer_that_does_not_answer_although_its_connection_lives_is_given_up():
    world, here, there = connected(limits=Limits(link_timeout_s=10, query_after_s=2))
    there.dead = True  # hangs: its sockets are open, nobody reads them
    here.send(there, part(1))
    assert world.run_until(lambda: here.machine.lost, 100)
    assert 15 < world.now < 25
    assert "no answer" in here.machine.lost[0][1]


# ----------------------------------------------------------------------------------------------------- ending


def test_an_orderly_end_delivers_what_is_queued_and_leaves_nothing():
    world, here, there = met()
    for number in range(30):
        here.send(there, part(number), bytes(200_000), BULK)
    here.disconnect(there)
    world.run(5)
    assert there.machine.numbers() == list(range(30))
    assert world.network.connections() == 0
    for process in (here, there):
        assert process.machine.lost == []
        assert process.endpoint.idle()
        assert process.stack.next_tick() > 1e9


def test_an_end_at_once_drops_what_is_queued():
    world, here, there = connected()
    for number in range(1, 30):
        here.send(there, part(number), bytes(200_000), BULK)
    here.disconnect(there, at_once=True)
    world.run(5)
    assert len(there.machine.numbers()) < 30
    assert world.network.connections() == 0
    assert here.machine.lost == there.machine.lost == []
    assert here.endpoint.idle()


def test_both_may_end_at_the_same_time():
    world, here, there = met()
    there.connect(here)
    here.send(there, part(0))
    there.send(here, part(0))
    world.run(1)
    here.disconnect(there)
    there.disconnect(here)
    world.run(5)
    assert world.network.connections() == 0
    assert here.endpoint.idle()
    assert there.endpoint.idle()
    assert here.machine.lost == there.machine.lost == []


def test_an_orderly_end_survives_a_break():
    world, here, there = met(delay_s=0.1)
    there.connect(here)
    here.send(there, part(0))
    world.run(1)
    for number in range(1, 5):
        here.send(there, part(number), bytes(1000), BULK)
        there.send(here, part(number), bytes(1000), BULK)
    here.disconnect(there)
    world.settle()
    world.run(0.05)
    world.network.reset("host0", "host1")
    world.run(10)
    assert there.machine.numbers() == list(range(5))
    assert here.endpoint.idle()


def test_before_and_after_a_session_an_end_does_nothing_and_another_one_can_begin():
    world, here, there = met()
    here.disconnect(there)
    world.run(1)
    assert here.endpoint.idle()
    assert world.network.connections() == 0
    for number in range(2):
        here.connect(there)
        here.send(there, part(number))
        world.run(3)
        here.disconnect(there, at_once=True)
    assert there.machine.numbers() == [0, 1]


def test_whoever_ends_while_the_other_is_away_does_not_wait_for_ever():
    world, here, there = connected(limits=Limits(link_timeout_s=10))
    world.kill(there)
    here.send(there, part(1))
    here.disconnect(there)
    world.run(15)
    assert here.endpoint.idle()
    assert here.machine.lost == []


# --------------------------------------------------------------------- a connection of several streams


def widen(process, streams, stuck):
    """Give a process's connection more streams, of which one carries nothing from now on."""
    [connection] = [one for one in process.endpoint._sessions.by_connection if one > 0]
    process.endpoint.handle(Widened(connection, streams), 0.0)
    original = process.van.transmit

    def transmit(to, header, payload, stream=0):
        return (to == connection and stream == stuck) or original(to, header, payload)

    process.van.transmit = transmit


@pytest.mark.parametrize("stuck", range(3))
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_stream_that_carries_nothing_is_noticed_though_others_do(stuck, goes_on):
    world, here, there = connected(limits=Limits(link_timeout_s=10))
    widen(here, 3, stuck)
    for number in range(1, 7):
        here.send(there, part(number), bytes(1000))
    for number in range(7, 37):
        world.run(1)
        if goes_on:
            here.send(there, part(number), bytes(10))
    world.run(10)
    assert sorted(there.machine.numbers()) == list(range(37 if goes_on else 7))
    assert here.machine.lost == there.machine.lost == []
    [link] = here.endpoint.links().values()
    assert link["connections"] == 2


def test_streams_that_work_are_left_alone():
    world, here, there = connected(limits=Limits(link_timeout_s=10))
    widen(here, 3, stuck=None)
    for number in range(1, 61):
        here.send(there, part(number), bytes(1000))
        world.run(1)
    [link] = here.endpoint.links().values()
    assert there.machine.numbers() == list(range(61))
    assert (link["connections"], link["messages_resent"]) == (1, 0)


# ---------------------------------------------------------------- whatever happens to connections and bytes


WINDOW = 40


class TwoHalves(RuleBasedStateMachine):
    """A sending and a receiving half with a connection between them that loses what it likes. Each of its
    streams keeps its order.
    """

    def __init__(self):
        super().__init__()
        self.sender = SendingHalf(Window(WINDOW))
        self.receiver = ReceivingHalf(ordered=False)
        self.submitted = 0
        self.delivered = []
        self.on_the_way = {}
        self.acknowledgements = []
        self.queries = 0

    @rule(size=st.integers(4, 30), urgent=st.booleans())
    def submit(self, size, urgent):
        self.sender.submit(
            SendQueueItem(
                b"%04d" % self.submitted,
                None if urgent else bytes(size - 4),
                order=() if urgent else (0, 0, self.submitted),
            )
        )
        self.submitted += 1

    @rule(most=st.integers(1, 10))
    def transmit(self, most):
        for _ in range(most):
            message = self.sender.next(0.0)
            if message is None:
                return
            self.on_the_way.setdefault(message.stream, []).append(message)

    @rule(streams=st.integers(2, 4))
    def widen(self, streams):
        self.sender.window.widen(streams)

    @precondition(lambda self: any(self.on_the_way.values()))
    @rule(
        turn=st.integers(0, 3),
        fate=st.sampled_from(["arrives", "arrives", "arrives", "payload corrupted", "header corrupted"]),
    )
    def deliver(self, turn, fate):
        busy = [stream for stream in sorted(self.on_the_way) if self.on_the_way[stream]]
        message = self.on_the_way[busy[turn % len(busy)]].pop(0)
        if fate == "payload corrupted":
            self.acknowledgements.append(("nack", message.sequence))
        elif fate == "arrives" and not self.receiver.has(message.sequence):
            number = int(message.body[:4])
            taken = self.receiver.receive(message.sequence, (part(number), None, 0))
            assert [arrived for arrived, _, _ in taken] == [part(number)]
            self.delivered.append(number)

    @rule()
    def acknowledge(self):
        self.acknowledgements.append(("ack", *self.receiver.received_numbers()))

    @precondition(lambda self: self.acknowledgements)
    @rule(lost=st.booleans())
    def hear(self, lost):
        kind, *what = self.acknowledgements.pop(0)
        if lost:
            return
        if kind == "nack":
            self.sender.resend(*what)
        else:
            received, beyond = what
            self.sender.acknowledge(received, beyond, 0.0)

    @rule()
    def reconnect(self):
        self.on_the_way.clear()
        self.acknowledgements.clear()
        self.sender.disconnected()
        self.sender.acknowledge(*self.receiver.received_numbers(), 0.0)

    @invariant()
    def nothing_twice(self):
        assert len(set(self.delivered)) == len(self.delivered)

    @invariant()
    def the_window_holds(self):
        window = self.sender.window
        assert window.in_flight >= 0
        assert window.messages_in_flight >= 0
        waiting = sum(message.size for message in self.sender.unacknowledged.values() if not message.resend)
        assert window.in_flight == sum(window.streams) == waiting
        bulk = [one.size for one in self.sender.unacknowledged.values() if not one.resend and one.order]
        assert sum(bulk) <= WINDOW or len(bulk) <= 1

    def teardown(self):
        """However it was treated before: on a sound connection everything that is left arrives."""
        for _ in range(10 * self.submitted + 10):
            while (message := self.sender.next(0.0)) is not None:
                self.on_the_way.setdefault(message.stream, []).append(message)
            while any(self.on_the_way.values()):
                self.deliver(0, "arrives")
            # a query and its answer: whatever was transmitted before on its stream is here or lost
            mark = self.sender.mark(self.queries)
            self.queries += 1
            self.acknowledgements.clear()
            self.sender.acknowledge(*self.receiver.received_numbers(), 0.0, mark=mark)
        assert sorted(self.delivered) == list(range(self.submitted))
        assert not self.sender.has_work()
        assert self.sender.window.in_flight == 0


TestTwoHalves = TwoHalves.TestCase


@given(
    seed=st.integers(0, 2**32),
    ordered=st.booleans(),
    breaks=st.sampled_from([0.0, 0.01, 0.1]),
    headers=st.sampled_from([0.0, 0.01, 0.1]),
    payloads=st.sampled_from([0.0, 0.1, 0.5]),
    window=st.sampled_from([0, 1, 3000, 100_000]),
    both_connect=st.booleans(),
)
def test_two_processes_exchange_everything_once_over_connections_that_fail(
    *, seed, ordered, breaks, headers, payloads, window, both_connect
):
    limits = Limits(
        link_timeout_s=1000,
        query_after_s=1.0,
        handshake_s=1.0,
        first_retry_s=0.01,
        longest_retry_s=0.2,
        window_bytes=window,
    )
    world = World(ordered=ordered, limits=limits, delay_s=0.02, seed=seed, break_probability=breaks / 4)
    rng = random.Random(seed)
    here, there = world.pair()
    for process in (here, there):
        faulty = FaultyVan(process.van, rng)
        faulty.broken_probability = breaks
        faulty.header_probability = headers
        faulty.payload_probability = payloads
        process.van = faulty
    if both_connect:
        there.connect(here)
    sent = {here: 0, there: 0}
    here.send(there, part(0), b"first")
    sent[here] = 1
    assert world.run_until(lambda: there.machine.got)
    for _ in range(rng.randrange(1, 40)):
        process, other = rng.choice([(here, there), (there, here)])
        order = rng.choice([(), (0, 0, sent[process]), (-1, 0, 0)])
        process.send(other, part(sent[process]), rng.randbytes(rng.choice([0, 1, 2000])), order)
        sent[process] += 1
        world.run(rng.random() * 0.05)
    done = world.run_until(
        lambda: (
            len(there.machine.got) >= sent[here]
            and len(here.machine.got) >= sent[there]
            and here.endpoint.idle()
            and there.endpoint.idle()
        ),
        5000,
    )
    assert here.machine.lost == there.machine.lost == []
    assert sorted(there.machine.numbers()) == list(range(sent[here]))
    assert sorted(here.machine.numbers()) == list(range(sent[there]))
    assert done


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 2**32), kill_at=st.floats(0, 3), silent=st.booleans())
def test_when_a_process_dies_the_other_has_delivered_a_part_or_is_told(seed, kill_at, silent):
    world, here, there = met(limits=Limits(link_timeout_s=10, query_after_s=2), delay_s=0.05, seed=seed)
    for number in range(200):
        here.send(there, part(number), bytes(50_000), (0, 0, number))
    world.run(kill_at)
    world.kill(there, silent=silent)
    finished = here.endpoint.idle()
    world.run(60)
    assert finished != bool(here.machine.lost) or here.endpoint.idle()
    if not finished:
        [(peer, reason)] = here.machine.lost
        assert peer == 1
        assert "host1" in reason
    assert there.machine.numbers() == list(range(len(there.machine.got)))


# ----------------------------------------------------------------------------------------------------


deliveries = st.integers(1, 12).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.integers(1, count), max_size=40))
)


def arrival(number):
    return part(number), None, 0


@given(deliveries, st.booleans())
def test_each_message_is_delivered_once_in_an_ordered_session_after_those_before_it(case, ordered):
    count, sequences = case
    half = ReceivingHalf(ordered=ordered)
    delivered, seen = [], []
    for sequence in sequences:
        assert half.has(sequence) == (sequence in seen)
        if sequence not in seen:
            seen.append(sequence)
            arrived = half.receive(sequence, arrival(sequence))
            delivered += [message.chunk for message, _, _ in arrived if isinstance(message, m.Part)]
        prefix = next(number for number in range(1, 99) if number not in seen) - 1
        assert delivered == (list(range(1, prefix + 1)) if ordered else seen)
    received, beyond = half.received_numbers()
    assert set(range(1, received + 1)) | set(beyond) == set(sequences)
    assert received + 1 not in sequences
    assert list(beyond) == sorted(set(beyond))
    assert all(half.has(sequence) == (sequence in sequences) for sequence in range(1, count + 1))


def test_a_sender_that_leaves_out_a_message_for_ever_cannot_fill_the_memory():
    half = ReceivingHalf(ordered=True)
    for sequence in range(2, 16_386):
        assert half.receive(sequence, arrival(sequence)) == []
    with pytest.raises(ProtocolViolation, match="1 is missing"):
        half.receive(16_386, arrival(16_386))
    assert len(half.receive(1, arrival(1))) == 16_385


# ---------------------------------------------------------------------------------- payloads have checksums


LOOPBACK = "127.0.0.{rank}"


def world_of(*boots, hosts=LOOPBACK):
    world = World(hosts=hosts)
    for process, boot in zip(world.processes, boots, strict=True):
        process.endpoint.process.boot = boot
    return world, *world.pair()


def checksums_of_payloads(world):
    """Return the list to which the checksum of each payload that arrives from now on is written."""
    found = []

    def watch(_source, _target, header, payload):
        if payload is not None:
            found.append(open_frames(header, 2).payload_crc)

    world.network.watch = watch
    return found


def test_payloads_within_one_machine_go_without_checksums_both_ways():
    world, here, there = world_of(7, 7)
    found = checksums_of_payloads(world)
    here.send(there, part(0), b"123456789")
    world.run(1)
    there.machine.instructions.append(Send(peer=Peer(0), message=part(1), payload=b"1", back=True))
    world.run(1)
    assert found == [None, None]
    assert there.machine.payloads() == {0: b"123456789"}
    assert here.machine.payloads() == {1: b"1"}


@pytest.mark.parametrize(
    ("boots", "hosts"),
    [
        ((7, 8), LOOPBACK),  # a tunnel to another machine
        ((7, 7), "10.0.0.{rank}"),  # an emulated network
        ((7, 7), "host{rank}"),
        ((0, 0), LOOPBACK),
        ((0, 7), LOOPBACK),  # one side wants them always
        ((7, 0), LOOPBACK),
    ],
)
def test_all_other_payloads_have_checksums(boots, hosts):
    world, here, there = world_of(*boots, hosts=hosts)
    found = checksums_of_payloads(world)
    here.send(there, part(0), b"123456789")
    world.run(1)
    assert found == [0xE3069283]


@pytest.mark.parametrize(
    ("boots", "sizes", "acknowledgements"),
    [
        ((7, 7), [100] * 5, 1),
        ((7, 7), [100] * 130, 3),
        ((7, 7), [100, 70_000, 100], 2),
        ((7, 8), [100] * 5, 5),
    ],
    ids=["few", "many", "a large one", "on two machines"],
)
def test_little_within_one_machine_is_acknowledged_together_and_soon(boots, sizes, acknowledgements):
    world, here, there = world_of(*boots)
    seen = wire_tap(world)
    here.send(there, part(999), b"x", BULK)
    world.run(1)
    seen.clear()
    for number, size in enumerate(sizes):
        here.send(there, part(number), b"x" * size, BULK)
        world.run(0.0001)
    world.run(0.05)
    assert kinds(seen, "127.0.0.1").count("Ack") == acknowledgements
    assert here.endpoint.idle()


def test_a_payload_without_a_checksum_is_asked_for_again_where_it_must_have_one():
    world, here, there = world_of(0, 0)
    transmit = here.van.transmit
    forged: list[bytes] = []

    def without_checksum(connection, header, payload, stream):
        if payload is not None and not forged:  # the flags are covered by no checksum
            forged.append(header)
            header = header[:3] + bytes([header[3] | 8]) + header[4:]
        return transmit(connection, header, payload, stream)

    here.van.transmit = without_checksum
    here.send(there, part(0), b"123456789")
    world.run(1)
    assert there.machine.payloads() == {0: b"123456789"}
    assert there.endpoint.links()[Peer(0), False]["dropped_checksum"] == 1


def test_what_came_without_a_checksum_has_one_on_a_link_that_needs_it():
    world, here, there = world_of(7, 7)
    found = checksums_of_payloads(world)
    third = world.add(2)
    here.connect(third)
    there.connect(third)
    received = []
    there.machine.receive = lambda *arguments: received.append(arguments)
    here.send(there, part(0), b"123456789")
    world.run(1)
    [(_, message, payload, crc, _)] = received
    there.machine.instructions.append(Send(peer=Peer(2), message=message, payload=payload, payload_crc=crc))
    world.run(1)
    assert found == [None, 0xE3069283]
    assert third.machine.payloads() == {0: b"123456789"}
