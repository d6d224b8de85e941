"""Sends and receives between ranks: matching, order, bounds, and messages that make no sense."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import Closed, NodeLost, ProtocolViolation, UnevenRounds, UsageError
from netstorm.kvstore.messages import (
    LARGE_BYTES,
    MOST_WAITING,
    PIECE_BYTES,
    WAITING_BYTES,
    WINDOW_BYTES,
    Arrivals,
    Arrived,
    Matching,
    PointToPoint,
)
from netstorm.kvstore.operations import ANY_PEER, Outbox, ReceiveOperation, SendOperation
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import URGENT, Call, Send
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

LARGE = 2 * PIECE_BYTES + 1
WINDOW_PIECES = WINDOW_BYTES // PIECE_BYTES


def policy_of(parents, version=0):
    """Return a policy of one tree."""
    tree = Tree(root=parents.index(-1), reduce_parent=tuple(parents), broadcast_parent=tuple(parents))
    return Policy(version=version, trees=(tree,), weights=(1,))


def values_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def new_receive(peer, size=1, *, tag=0, channel="world", peers=(), done=lambda _: None):
    return ReceiveOperation(
        peer=peer, channel=channel, tag=tag, destination=np.zeros(size, np.uint8), what=f"uint8 ({size},)",
        done=done, peers=peers,
    )  # fmt: skip


class Flight:
    """The nodes of a job, in a chain, and the messages between them, which a test delivers as it likes."""

    def __init__(self, size=2):
        policy = policy_of([-1, *range(size - 1)])
        self.outboxes = [Outbox() for _ in range(size)]
        self.counters = [Counters() for _ in range(size)]
        self.nodes = [
            PointToPoint(rank, policy, outbox=outbox, counters=counters)
            for rank, (outbox, counters) in enumerate(zip(self.outboxes, self.counters, strict=True))
        ]
        self.sent = []
        """(sender, instruction) of what is under way."""
        self.ended = {}
        """Errors, or None, by operation, and how often it has ended."""

    def send(self, source, target, values, *, tag=0, channel="world", refused=None):
        operation = SendOperation(
            peer=target, channel=channel, tag=tag, source=np.asarray(values, np.uint8),
            what=f"uint8 ({len(values)},)", done=lambda error: self._end(operation, error), refused=refused,
        )  # fmt: skip
        self.nodes[source].submit(operation, 0.0)
        self.collect()
        return operation

    def receive(self, target, source, size, *, now=0.0, **more):
        operation: ReceiveOperation = new_receive(
            source, size, done=lambda error: self._end(operation, error), **more
        )
        self.nodes[target].submit(operation, now)
        self.collect()
        return operation

    def collect(self):
        """Take all instructions of all nodes, and carry out the calls among them."""
        for rank, outbox in enumerate(self.outboxes):
            for instruction in outbox.take():
                if isinstance(instruction, Call):
                    instruction.function()
                else:
                    assert isinstance(instruction, Send)
                    self.sent.append((rank, instruction))

    def deliver(self, place=0, *, again=False):
        """Deliver one message of those under way; `again`: and keep it, so that it comes once more."""
        source, send = self.sent[place] if again else self.sent.pop(place)
        self.put(source, int(send.peer), send.message, send.payload)

    def put(self, source, target, message, payload=None):
        """Have a node receive a message."""
        copy = None if payload is None else bytes(payload)
        self.nodes[target].receive(Peer(source), message, copy, 0)
        self.collect()

    def deliver_all(self):
        while self.sent:
            self.deliver()

    def finish(self, node, rank):
        """Let a node hear that a rank has finished."""
        self.nodes[node].finished(rank)
        self.collect()

    def names(self):
        """Return what is under way."""
        return [type(send.message).__name__ for _, send in self.sent]

    def error(self, operation):
        """Return the error of an operation that has ended."""
        [error] = self.ended[operation]
        return error

    def ended_well(self, *operations):
        return all(self.ended.get(operation) == [None] for operation in operations)

    def _end(self, operation, error):
        self.ended.setdefault(operation, []).append(error)


# ------------------------------------------------------------------------------------------- what goes when


def test_a_small_message_goes_at_once_as_a_copy():
    flight = Flight()
    values = values_of(10)
    right = values.tobytes()
    send = flight.send(0, 1, values)
    assert flight.ended_well(send)
    values[:] = 0
    receive = flight.receive(1, 0, 10)
    flight.deliver_all()
    assert flight.ended_well(receive)
    assert (receive.destination.tobytes(), receive.source) == (right, 0)


def test_a_large_message_is_offered_and_goes_in_pieces_when_it_is_received():
    flight = Flight()
    values = values_of(LARGE)
    send = flight.send(0, 1, values)
    assert flight.names() == ["Offer"]
    flight.deliver()
    assert flight.names() == []
    receive = flight.receive(1, 0, LARGE)
    assert flight.names() == ["Accept"]
    flight.deliver()
    assert flight.names() == ["Piece"] * 3
    assert not flight.ended_well(send)
    flight.deliver_all()
    assert flight.ended_well(send, receive)
    assert receive.destination.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("size", "window"),
    [((3 * WINDOW_PIECES - 1) * PIECE_BYTES, WINDOW_PIECES), (LARGE_BYTES + 5, WINDOW_BYTES // 2**20)],
)
def test_a_window_of_pieces_is_under_way_at_most_and_it_moves(size, window):
    flight = Flight()
    values = values_of(size)
    receive, send = flight.receive(1, 0, size), flight.send(0, 1, values)
    most = 0
    while flight.sent:
        most = max(most, flight.names().count("Piece"))
        flight.deliver()
    assert most == window
    assert flight.ended_well(send, receive)
    assert receive.destination.tobytes() == values.tobytes()


def test_small_messages_beyond_the_bound_are_offered_until_some_have_been_received():
    flight = Flight()
    fitting = WAITING_BYTES // 100_000
    for _ in range(fitting + 1):
        flight.send(0, 1, values_of(100_000))
    assert flight.names() == ["SmallMessage"] * fitting + ["Offer"]
    flight.deliver_all()
    assert flight.nodes[1].stored_bytes(0) == fitting * 100_000
    for _ in range(fitting + 1):
        flight.receive(1, 0, 100_000)
    flight.deliver_all()
    assert flight.nodes[1].stored_bytes(0) == 0
    for _ in range(fitting):
        flight.send(0, 1, values_of(100_000))
    assert flight.names() == ["SmallMessage"] * fitting


def test_the_bound_holds_for_empty_messages_too():
    flight = Flight()
    for _ in range(1100):
        flight.send(0, 1, values_of(0))
    assert flight.names().count("SmallMessage") == WAITING_BYTES // 1024
    receives = [flight.receive(1, 0, 0) for _ in range(1100)]
    flight.deliver_all()
    assert flight.ended_well(*receives)


def test_a_message_follows_the_links_of_the_newest_policy():
    flight = Flight(4)
    flight.send(0, 3, values_of(3))
    flight.nodes[0].new_policy(policy_of([-1, 0, 0, 0], version=2))
    flight.nodes[0].new_policy(policy_of([-1, 3, 1, 0], version=1))
    flight.send(0, 3, values_of(3))
    assert [send.message.path for _, send in flight.sent] == [(0, 1, 2, 3), (0, 3)]


def test_nodes_between_forward_and_pieces_alone_wait_for_what_has_priority():
    flight = Flight(4)
    flight.receive(0, 3, LARGE)
    send = flight.send(3, 0, values_of(LARGE))
    seen = []
    while flight.sent:
        source, instruction = flight.sent[0]
        is_piece = isinstance(instruction.message, m.Piece)
        assert (instruction.order == URGENT) is not is_piece
        if is_piece and instruction.message.piece == 0:
            seen.append((source, int(instruction.peer)))
        flight.deliver()
    assert seen == [(3, 2), (2, 1), (1, 0)]
    assert flight.ended_well(send)
    assert flight.counters[1].snapshot() == flight.counters[2].snapshot() == {}


@given(st.data())
@settings(max_examples=20)
def test_messages_that_arrive_in_any_order_and_twice_have_the_effect_of_once_in_order(data):
    flight = Flight(3)
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 1000, PIECE_BYTES, LARGE]), min_size=1, max_size=6))
    tags = data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    sends: list[Any] = []
    receives: list[Any] = []
    todo = [*range(len(sizes))] * 2
    again = 0
    while todo or flight.sent:
        if todo and (not flight.sent or data.draw(st.booleans())):
            number = todo.pop(0)
            values = np.full(sizes[number], number + 1, np.uint8)
            if len(sends) < len(sizes):
                sends.append(flight.send(0, 2, values, tag=tags[number]))
            else:
                receives.append((number, flight.receive(2, 0, sizes[number], tag=tags[number])))
        else:
            repeat = again < 20 and data.draw(st.booleans())
            again += repeat
            flight.deliver(data.draw(st.integers(0, len(flight.sent) - 1)), again=repeat)
    assert flight.ended_well(*sends, *(receive for _, receive in receives))
    assert all((receive.destination == number + 1).all() for number, receive in receives)
    assert flight.nodes[2].stored_bytes(0) == 0
    assert not [*flight.nodes[0].outstanding(), *flight.nodes[2].outstanding()]


# ------------------------------------------------------------------------------------- mismatches and the end


def test_a_small_message_of_the_wrong_size_fails_the_receive_and_then_calls_refused_or_is_logged(caplog):
    flight = Flight()
    refused: list[Any] = []
    sends = [flight.send(0, 1, values_of(10), tag=7, refused=one) for one in (refused.append, None)]
    receives = [flight.receive(1, 0, 12, tag=7) for _ in sends]
    with caplog.at_level(logging.ERROR):
        flight.deliver_all()
    assert flight.ended_well(*sends)
    text = "rank 0 sends uint8 (10,), 10 bytes, to rank 1 with tag 7; rank 1 expects uint8 (12,), 12 bytes"
    for error in (*refused, *map(flight.error, receives)):
        assert isinstance(error, UsageError)
        assert str(error).startswith(text)
    assert len(refused) == 1
    assert caplog.text.count(text) == 1


def test_a_large_message_of_the_wrong_size_fails_both_and_what_follows_matches():
    flight = Flight()
    send, receive = flight.send(0, 1, values_of(LARGE)), flight.receive(1, 0, 1)
    after = flight.send(0, 1, values_of(5)), flight.receive(1, 0, 5)
    flight.deliver_all()
    assert str(flight.error(send)) == str(flight.error(receive))
    assert flight.ended_well(*after)


def test_a_receive_fails_once_all_that_a_finished_rank_has_sent_is_there():
    flight = Flight()
    flight.send(0, 1, values_of(3), tag=1)
    receive = flight.receive(1, 0, 3, tag=2)
    flight.finish(1, 0)
    assert flight.names() == ["SmallMessage", "CountRequest"]
    flight.deliver(1)
    flight.deliver(1)
    assert receive not in flight.ended, "a message is under way, which might match"
    flight.deliver_all()
    error = flight.error(receive)
    assert isinstance(error, UnevenRounds)
    assert str(error).startswith(
        "rank 1 waits for a message from rank 0 (tag 2, uint8 (3,)), but that rank has finished"
    )
    assert flight.ended_well(flight.receive(1, 0, 3, tag=1))
    late = [flight.receive(1, 0, 3), flight.receive(1, ANY_PEER, 3)]
    flight.deliver_all()
    assert all(isinstance(flight.error(one), UnevenRounds) for one in late)


def test_a_receive_from_any_rank_waits_for_those_that_have_not_finished():
    flight = Flight(4)
    some = flight.receive(1, ANY_PEER, 3, peers=(0, 1, 2))
    every = flight.receive(1, ANY_PEER, 3)
    for rank, ended in ((0, []), (2, [some]), (3, [some, every])):
        flight.finish(1, rank)
        flight.deliver_all()
        assert list(flight.ended) == ended
    assert "any of ranks [0, 1, 2] (tag 0, uint8 (3,)), but these ranks have finished" in str(
        flight.error(some)
    )


def test_a_rank_that_finishes_rejects_what_waits_and_what_comes():
    flight = Flight()
    refused: list[Any] = []
    sends = [flight.send(0, 1, values_of(LARGE)), flight.send(0, 1, values_of(3), refused=refused.append)]
    flight.deliver_all()
    flight.finish(1, 1)
    sends.append(flight.send(0, 1, values_of(LARGE)))
    flight.deliver_all()
    for error in (flight.error(sends[0]), flight.error(sends[2]), *refused):
        assert isinstance(error, UnevenRounds)
        assert "to rank 1 with tag 0, but rank 1 has finished without receiving it" in str(error)
    assert len(refused) == 1
    assert flight.nodes[1].stored_bytes(0) == 0


def test_a_rank_that_finishes_gets_what_it_has_asked_for_before():
    flight = Flight()
    receive = flight.receive(1, 0, LARGE)
    flight.finish(1, 1)
    send = flight.send(0, 1, values_of(LARGE))
    flight.deliver_all()
    assert flight.ended_well(send, receive)


def test_at_the_end_of_the_job_a_send_that_was_accepted_counts_as_received():
    flight = Flight()
    accepted, offered = flight.send(0, 1, values_of(LARGE)), flight.send(0, 1, values_of(LARGE), tag=1)
    flight.receive(1, 0, LARGE)
    for _ in range(3):
        flight.deliver()
    assert flight.names() == ["Piece"] * 3
    flight.nodes[0].end()
    flight.collect()
    assert flight.ended_well(accepted)
    assert isinstance(flight.error(offered), Closed)
    assert "rank 0 still waited for rank 1 to receive a message (tag 1, " in str(flight.error(offered))


def test_a_failure_fails_everything_now_and_later_once():
    flight = Flight()
    open_ones = [flight.send(0, 1, values_of(LARGE)), flight.receive(0, 1, 3)]
    failure = NodeLost("rank 1 is lost")
    flight.nodes[0].fail_all(failure)
    flight.collect()
    later = flight.receive(0, 1, 3)
    assert [flight.error(one) for one in (*open_ones, later)] == [failure] * 3
    flight.deliver_all()
    assert not [*flight.nodes[0].outstanding()]


# ------------------------------------------------------------------------------------- what no node may send

ROUTE: dict[str, Any] = {"path": (0, 1), "hop": 1}
BACK: dict[str, Any] = {"path": (1, 0), "hop": 1}


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (m.Piece(**ROUTE, number=0, piece=0), b"x" * PIECE_BYTES),
        (m.Piece(**ROUTE, number=9, piece=0), b"x"),
        (m.Piece(**ROUTE, number=-1, piece=0), b"x"),
        (m.Taken(**BACK, number=0), None),
        (m.Taken(**BACK, number=2), None),
        (m.Rejected(**BACK, number=-1, what="", nbytes=0), None),
        (m.Accept(**BACK, number=0, pieces=0), None),
        (m.Accept(**BACK, number=0, pieces=4), None),
        (m.Accept(**BACK, number=1, pieces=1), None),
        (m.Accept(**BACK, number=2, pieces=1), None),
        (m.MessageCount(**ROUTE, count=5), None),
        (m.SmallMessage(**ROUTE, number=2, channel="", tag=0, what="?"), b"x" * (PIECE_BYTES + 1)),
        (m.Offer(**ROUTE, number=2, channel="", tag=0, what="?", nbytes=-1), None),
        (m.CountRequest(path=(0, 1), hop=0), None),
        (m.CountRequest(path=(1, 1), hop=1), None),
        (m.CountRequest(path=(0, 5), hop=1), None),
        (m.CountRequest(path=(), hop=0), None),
    ],
)
def test_a_message_that_no_correct_node_sends_is_a_violation_and_changes_nothing(message, payload):
    """Rank 0 has offered message 0, which nobody receives, and sent message 1."""
    flight = Flight()
    flight.send(0, 1, values_of(LARGE))
    flight.send(0, 1, values_of(5))
    flight.deliver_all()
    source = message.path[0] if message.path else 0
    with pytest.raises(ProtocolViolation):
        flight.put(source, 1 - source, message, payload)
    receives = [flight.receive(1, 0, LARGE), flight.receive(1, 0, 5)]
    flight.deliver_all()
    assert flight.ended_well(*receives)
    assert receives[0].destination.tobytes() == values_of(LARGE).tobytes()


@pytest.mark.parametrize(("piece", "size"), [(-1, PIECE_BYTES), (3, 1), (0, PIECE_BYTES - 1), (2, 2), (2, 0)])
def test_a_piece_of_an_accepted_message_must_fit(piece, size):
    flight = Flight()
    receive = flight.receive(1, 0, LARGE)
    flight.send(0, 1, values_of(LARGE))
    flight.deliver()
    with pytest.raises(ProtocolViolation, match="expected one of the first 3, of a message of 524289 bytes"):
        flight.put(0, 1, m.Piece(**ROUTE, number=0, piece=piece), b"x" * size)
    flight.deliver_all()
    assert receive.destination.tobytes() == values_of(LARGE).tobytes()


def test_a_piece_beyond_the_window_is_a_violation():
    flight = Flight()
    size = 2 * WINDOW_PIECES * PIECE_BYTES
    flight.receive(1, 0, size)
    flight.send(0, 1, np.zeros(size, np.uint8))
    flight.deliver()
    with pytest.raises(ProtocolViolation, match=f"expected one of the first {WINDOW_PIECES}"):
        flight.put(0, 1, m.Piece(**ROUTE, number=0, piece=WINDOW_PIECES), b"x" * PIECE_BYTES)


def test_what_comes_again_after_the_end_of_a_message_is_counted_and_dropped():
    flight = Flight()
    receive, send = flight.receive(1, 0, LARGE), flight.send(0, 1, values_of(LARGE))
    seen = []
    while flight.sent:
        seen.append(flight.sent[0])
        flight.deliver()
    for source, instruction in seen:
        flight.put(source, int(instruction.peer), instruction.message, instruction.payload)
    assert not flight.sent
    assert flight.ended_well(receive, send)
    assert flight.counters[1].get("messages_known_before") == 4  # the offer, and three pieces
    assert flight.counters[0].get("messages_known_before") == 2


# ------------------------------------------------------------------------------------------------- for people


def test_the_text_says_what_the_program_waits_for_and_since_when():
    flight = Flight(4)
    assert (flight.nodes[0].waiting_text(math.inf), flight.nodes[0].oldest()) == ("", math.inf)
    receive = flight.receive(0, 3, 12, tag=7, now=5.0)
    assert flight.nodes[0].waiting_text(4.0) == ""
    assert flight.nodes[0].waiting_text(5.0) == "a message from rank 3 (tag 7, uint8 (12,))"
    assert flight.nodes[0].oldest() == 5.0
    assert list(flight.nodes[0].outstanding()) == [receive]
    assert receive.name == "receive from rank 3"
    send = flight.send(1, 0, values_of(LARGE), tag=2)
    assert flight.nodes[1].waiting_text(0.0) == f"rank 0 to receive a message (tag 2, uint8 ({LARGE},))"
    assert (send.name, send.round) == ("send to rank 0", 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": (0, 4)}, "rank 4 as the other end of a message: expected one of 0 to 1"),
        ({"source": -2}, "rank -2 as the other end"),
        ({"target": 2}, "rank 2 as the other end of a message: expected one of 0 to 1"),
        ({"target": -1}, "rank -1 as the other end"),
        ({"tag": -(2**63) - 1}, "expected a number of 64 bits"),
        ({"channel": "x" * 257}, "257 characters: expected 256 at most"),
    ],
)
def test_an_operation_that_makes_no_sense_fails(changes, words):
    flight = Flight()
    operations = []
    if "target" not in changes:
        operations.append(flight.receive(1, **{"source": ANY_PEER, "size": 3, **changes}))
    if not {"peers", "source"} & set(changes):
        operations.append(flight.send(0, **{"target": 1, "values": values_of(3), **changes}))
    for operation in operations:
        assert isinstance(flight.error(operation), UsageError)
        assert words in str(flight.error(operation))


def test_messages_are_the_same_after_encoding():
    for message in (m.Accept(**BACK, number=1, pieces=2), m.Rejected(**BACK, number=1, what="x", nbytes=3)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


# -------------------------------------------------------------------------- which receive takes which message


def arrived(sender, tag=0, channel="world", number=0):
    return Arrived(sender=sender, number=number, channel=channel, tag=tag, what="uint8 (1,)", nbytes=1)


def test_a_message_waits_for_a_receive_and_a_receive_for_a_message():
    matching = Matching()
    early, late = arrived(1), new_receive(2)
    assert matching.arrive(early) is None
    assert matching.post(late) is None
    assert matching.post(new_receive(1)) is early
    assert matching.arrive(arrived(2)) is late
    assert not [*matching.posted(), *matching.waiting()]
    assert matching.arrive(arrived(1), keep=False) is None, "where nothing will be received nothing is kept"
    assert matching.post(new_receive(1)) is None


def test_sender_tag_and_channel_must_agree():
    matching = Matching()
    matching.post(new_receive(1, tag=2, channel="a"))
    for other in (arrived(2, 2, "a"), arrived(1, 3, "a"), arrived(1, 2, "b")):
        assert matching.arrive(other) is None
    assert matching.arrive(arrived(1, 2, "a")) is not None


def test_the_first_receive_takes_a_message_even_if_a_later_one_names_its_sender():
    matching = Matching()
    first, second = new_receive(ANY_PEER), new_receive(1)
    matching.post(first)
    matching.post(second)
    assert matching.arrive(arrived(1)) is first
    assert matching.arrive(arrived(1)) is second


def test_a_receive_takes_the_first_message_of_the_ranks_it_names():
    matching = Matching()
    messages = [arrived(3), arrived(2, number=0), arrived(1), arrived(2, number=1)]
    for message in messages:
        matching.arrive(message)
    assert matching.post(new_receive(ANY_PEER, peers=(1, 2))) is messages[1]
    assert matching.post(new_receive(2)) is messages[3]
    assert matching.post(new_receive(ANY_PEER)) is messages[0]


def test_receives_are_withdrawn_one_by_one():
    matching = Matching()
    receives = [new_receive(1), new_receive(2), new_receive(1)]
    for one in receives:
        matching.post(one)
    assert matching.take_posted(lambda one: one.peer == 1) == [receives[0], receives[2]]
    assert list(matching.posted()) == [receives[1]]


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 2), st.integers(0, 1))))
def test_no_pair_is_left_that_would_match(events):
    matching = Matching()
    for is_receive, rank, tag in events:
        if is_receive:
            matching.post(new_receive(rank, tag=tag))
        else:
            matching.arrive(arrived(abs(rank), tag))
    assert not any(
        (one.channel, one.tag) == (other.channel, other.tag) and one.takes(other.sender)
        for one in matching.posted()
        for other in matching.waiting()
    )


# -------------------------------------------------------------------------------- the messages of one sender


def arrival(number, nbytes=10, *, is_offer=False, channel="world", what="uint8 (10,)"):
    return Arrived(
        sender=3, number=number, channel=channel, tag=0, what=what, nbytes=nbytes, is_offer=is_offer
    )


@given(st.permutations(range(6)), st.lists(st.integers(0, 5)))
def test_every_message_is_delivered_once_and_in_order(order, again):
    arrivals = Arrivals(3)
    delivered: list[int] = []
    known = set()
    for number in [*order, *again]:
        assert arrivals.add(arrival(number)) == (number not in known)
        known.add(number)
        delivered += [one.number for one in arrivals.take_ready()]
    assert delivered == list(range(6))


def test_small_messages_and_offers_wait_up_to_a_bound_and_matched_ones_make_room():
    arrivals = Arrivals(3)
    first, *others = (arrival(number, PIECE_BYTES) for number in range(4))
    for one in (first, *others):
        arrivals.add(one)
    with pytest.raises(
        ProtocolViolation, match="message 4 from rank 3 comes while 4 with 1048576 bytes wait"
    ):
        arrivals.add(arrival(4, 0))
    arrivals.add(arrival(4, PIECE_BYTES * 100, is_offer=True))
    arrivals.matched(first)
    arrivals.add(arrival(5, PIECE_BYTES))
    offers = Arrivals(3)
    for number in range(MOST_WAITING):
        offers.add(arrival(number, is_offer=True))
    with pytest.raises(ProtocolViolation, match="65536"):
        offers.add(arrival(MOST_WAITING, is_offer=True))


@pytest.mark.parametrize(
    "wrong",
    [
        arrival(-1),
        arrival(0, PIECE_BYTES + 1),
        arrival(0, -1, is_offer=True),
        arrival(0, channel="x" * 257),
        arrival(0, what=""),
        arrival(0, what="x" * 257),
    ],
)
def test_a_message_that_no_correct_node_sends_is_refused(wrong):
    with pytest.raises(ProtocolViolation, match="from rank 3"):
        Arrivals(3).add(wrong)


def test_they_have_ended_when_all_that_was_counted_has_been_delivered():
    arrivals = Arrivals(3)
    assert not arrivals.has_ended
    arrivals.add(arrival(1))
    with pytest.raises(ProtocolViolation, match="more than the 1 messages"):
        arrivals.end_after(1)
    arrivals.end_after(2)
    assert not arrivals.has_ended
    arrivals.add(arrival(0))
    list(arrivals.take_ready())
    ended: bool = arrivals.has_ended
    assert ended
    with pytest.raises(ProtocolViolation, match="no legal number"):
        arrivals.add(arrival(2))
