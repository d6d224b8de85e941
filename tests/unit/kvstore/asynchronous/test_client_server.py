"""An owner's answers come from the owner alone; what ranks send to an owner early or far ahead is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import pytest

from netstorm.errors import NetStormError, NoRoom, NotAuthorised, ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import AsynchronousOutbox, Gradient, Owners, Staleness
from netstorm.kvstore.asynchronous.client import Requests
from netstorm.kvstore.asynchronous.server import Serving
from netstorm.kvstore.operations import Done, Outbox, PullOperation, PushOperation, StatesOperation
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import Applied, HeldClocks, Pull, States, Tick, Value
from netstorm.pslite.machine import Call, Send, WaitingBytes
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.asynchronous.test_blocks import key, push

OWNERS = Owners((1, 0, 1))
"""Rank 0 owns the first and third chunk of the key, rank 2 the second one."""

STAR = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))


class Asking:
    """Rank 1, which owns nothing, with an open push and an open pull of a key."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self.outbox: Final = Outbox()
        self.requests: Final = Requests(OWNERS, Counters(), AsynchronousOutbox(1, STAR, self.outbox))
        self.values: Final = np.zeros(10, np.float32)
        self.states: Final[dict[int, bytes]] = {}
        self.requests.begin(
            PushOperation(key=key(), number=0, done=self.notes("push"), source=self.values, rule="r")
        )
        self.requests.begin(
            PullOperation(key=key(), number=0, done=self.notes("pull"), pushed=0, destination=self.values)
        )

    def notes(self, name: str) -> Done:
        return lambda _: self._done.append(name)

    @property
    def done(self) -> list[str]:
        for instruction in self.outbox.take():
            if isinstance(instruction, Call):
                instruction.function()
        return self._done

    def ask_for_states(self) -> None:
        self.requests.begin(
            StatesOperation(key=key(), number=1, done=self.notes("states"), pushed=0, destination=self.states)
        )


def applied(block, behind=0):
    return Applied(path=(), hop=0, key=0, block=block, number=0, behind=behind)


def value(chunk):
    return Value(path=(), hop=0, key=0, chunk=chunk, number=0, others=0, dtype="float32")


def states(block, piece=0, pieces=1):
    return States(path=(), hop=0, key=0, block=block, number=1, piece=piece, pieces=pieces)


def test_a_push_is_done_once_its_owners_have_said_so():
    asking = Asking()
    for block, owner in ((0, 0), (1, 2), (2, 0)):
        assert "push" not in asking.done
        asking.requests.applied(owner, applied(block))
    assert asking.done == ["push"]


def test_nobody_else_says_that_a_push_is_applied():
    asking = Asking()
    with pytest.raises(NotAuthorised, match=r"rank 2 sends Applied about chunk 0 .* which rank 0 owns"):
        asking.requests.applied(2, applied(0))
    with pytest.raises(ProtocolViolation, match="counts -1 updates"):
        asking.requests.applied(0, applied(0, behind=-1))
    assert asking.done == []


def test_nobody_else_gives_values_or_states_of_a_block():
    asking = Asking()
    asking.ask_for_states()
    with pytest.raises(NotAuthorised, match="rank 0 sends Value about chunk 1"):
        asking.requests.value(0, value(1), np.ones(4, np.float32).tobytes())
    with pytest.raises(NotAuthorised, match="rank 0 sends States about chunk 1"):
        asking.requests.states(0, states(1), b"state")
    assert not asking.values.any()
    assert asking.states == {}


@pytest.mark.parametrize(("piece", "pieces"), [(1, 1), (-1, 1), (0, 0), (0, 1 << 40)])
def test_pieces_of_states_are_some_of_a_few(piece, pieces):
    asking = Asking()
    asking.ask_for_states()
    with pytest.raises(ProtocolViolation, match=f"piece {piece} of {pieces}"):
        asking.requests.states(2, states(1, piece, pieces), b"state")


def new_serving(rank=0, *, waiting=None, counters=None, outbox=None, end_job=lambda _: None, present=None):
    return Serving(
        rank,
        3,
        OWNERS,
        AsynchronousOutbox(rank, STAR, outbox or Outbox()),
        counters or Counters(),
        end_job=end_job,
        on_progress=lambda: None,
        waiting=waiting,
        present=present,
    )


class Store:
    """Never applies anything."""

    begins_with_states = whole = False
    rule = "r"

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: object,
        done: Callable[[Buffer | None], None],
        *,
        reads: bool = False,
    ) -> None: ...

    def read(self, block: int, done: Callable[[Buffer], None]) -> None: ...

    def pulled(self, block: int, rank: int, value: Buffer) -> None: ...

    def states(self, block: int, done: Callable[[bytes], None]) -> None: ...


def test_an_early_message_that_is_wrong_costs_no_other_one():
    counters = Counters()
    owner = new_serving(counters=counters)
    owner.push(1, push(chunk=1), b"\0" * 16)  # rank 2 owns it
    owner.push(1, push(chunk=0), b"\0" * 16)
    owner.serve(key(), Store())
    assert counters.get("protocol_violations") == 1
    owner.push(1, push(chunk=0), b"\0" * 16)
    assert counters.get("pushes_known_before") == 1, "the right one had arrived"


class AppliedAtOnce(Store):
    """Applies what it is given at once, and knows what was read with it."""

    def __init__(self):
        self.read_with = []

    def apply(self, block, rank, gradient, live, done, *, reads=False):
        self.read_with.append((rank, reads))
        done(bytes(16) if reads else None)


def test_the_value_that_a_pull_waits_for_is_read_with_the_push_that_it_waits_for():
    outbox, store = Outbox(), AppliedAtOnce()
    owner = new_serving(outbox=outbox)
    owner.serve(key(), store)
    owner.pull(1, Pull(path=(), hop=0, key=push().key, number=0, pushed=1), None)
    sent = []
    for rank in (2, 1):
        owner.push(rank, push(chunk=0), b"\0" * 16)
        for instruction in outbox.take():
            if isinstance(instruction, Call):
                instruction.function()
        sent.append([type(one.message) for one in outbox.take() if isinstance(one, Send)])
    assert store.read_with == [(2, False), (1, True)]
    assert sent == [[Applied], [Applied, Value]]


def test_who_owns_nothing_is_asked_for_nothing():
    with pytest.raises(ProtocolViolation, match="rank 1, which owns nothing"):
        new_serving(rank=1).push(2, push(), b"")


def test_what_waits_for_a_key_is_bounded_in_bytes():
    waiting = WaitingBytes(of_one=3000)
    owner = new_serving(waiting=waiting)
    waiting.begin(Peer(1))
    for number in range(2):
        owner.push(1, push(number), bytes(16))
    with pytest.raises(NoRoom, match="wait here for key 9, which is not served yet"):
        owner.pull(1, Pull(path=(), hop=0, key=9, number=0, pushed=0), None)
    owner.serve(key(), Store())
    owner.stop()
    assert waiting.room(Peer(1)) == math.inf


def test_of_pushes_that_wait_for_others_a_bounded_number_of_bytes_is_kept():
    waiting = WaitingBytes(of_one=3000)
    owner = new_serving(waiting=waiting)
    owner.serve(key(), Store())
    waiting.begin(Peer(1))
    owner.push(1, push(1), bytes(16))
    owner.push(1, push(2), bytes(16))
    with pytest.raises(NoRoom, match="wait here for pushes before it"):
        owner.push(1, push(3), bytes(16))
    assert not waiting.take_ready()
    owner.push(1, push(0), bytes(16))  # what the others wait for always has room
    owner.push(1, push(3), bytes(16))  # push 1 waits for the store alone


def test_pulls_that_wait_for_updates_are_bounded_in_bytes_and_others_always_have_room():
    waiting = WaitingBytes(of_one=3000)
    owner = new_serving(waiting=waiting)
    owner.serve(key(), Store())

    def pull(number: int, pushed: int = 1) -> None:
        waiting.begin(Peer(1))
        owner.pull(1, Pull(path=(), hop=0, key=0, number=number, pushed=pushed), None)

    pull(0)
    pull(1)
    with pytest.raises(NoRoom, match="wait here for updates that it has to contain"):
        pull(2)
    for number in range(3, 9):
        pull(number, pushed=0)
    assert not waiting.take_ready()
    owner.finished(2)
    assert waiting.take_ready(), "what a clock lets pass is asked for again"
    owner.stop()
    assert waiting.room(Peer(1)) == math.inf


@pytest.mark.parametrize(
    "wrong", [{"namespace": 5000}, {"namespace": -1}, {"clock": 1 << 40}, {"pushed": -1}]
)
def test_clocks_are_of_stores_that_there_can_be_and_near_the_last_one(wrong):
    tick = Tick(**{"path": (), "hop": 0, "namespace": 0, "clock": 1, "pushed": 0} | wrong)
    with pytest.raises(ProtocolViolation, match="rank 1 ends clock"):
        new_serving().tick(1, tick)


def test_clocks_and_pushes_are_counted_from_where_a_message_can_carry_their_sums():
    owner = new_serving()
    owner.serve(key(), Store())
    with pytest.raises(ProtocolViolation, match=r"push 0 .* counts pushes from 2305843009213693952"):
        owner.push(1, msgspec.structs.replace(push(), begin=1 << 61), b"\0" * 16)
    with pytest.raises(ProtocolViolation, match="a count of 2305843009213693952 pushes or clocks"):
        Staleness(2, present=(0, 1)).merge([HeldClocks(namespace=0, ended=(0, 1 << 61))])
    tick = Tick(path=(), hop=0, namespace=0, clock=1 << 61, pushed=0)
    with pytest.raises(ProtocolViolation, match="rank 1 ends clock 2305843009213693952"):
        Staleness(2, present=(0, 1)).tick(1, tick)
    with pytest.raises(ProtocolViolation, match="a count of 2305843009213693952"):
        Asking().requests.value(0, msgspec.structs.replace(value(0), slowest=1 << 61), b"\0" * 16)


def test_no_more_pushes_are_confirmed_than_were_made_before_one():
    owner = new_serving()
    owner.serve(key(), Store())
    with pytest.raises(ProtocolViolation, match="comes after 2 that were confirmed: expected 0 to 1"):
        owner.push(1, msgspec.structs.replace(push(1), confirmed=2), b"\0" * 16)


def test_a_push_is_near_the_last_one():
    owner = new_serving()
    owner.serve(key(), Store())
    with pytest.raises(ProtocolViolation, match="is more than"):
        owner.push(1, push(number=1 << 40), b"\0" * 16)


# ------------------------------------------------------------------------------------ a rank that joins later

SLOWEST = 7
"""Pushes of the slowest other rank when the newcomer pulls first."""


@pytest.mark.parametrize(
    ("least", "demanded"), [(None, 0), (-1, SLOWEST - 1), (0, SLOWEST), (2, SLOWEST + 2)]
)
def test_a_bound_counts_from_where_the_rank_began(least, demanded):
    routed = AsynchronousOutbox(0, STAR, Outbox())
    requests = Requests(Owners((1, 0, 0)), Counters(), routed, later=True)

    def pull(number, least):
        requests.begin(
            PullOperation(
                key=key(),
                number=number,
                done=lambda _: None,
                pushed=0,
                destination=np.zeros(10, np.float32),
                least=least,
            )
        )

    pull(0, None)
    for chunk in range(3):
        answer = Value(
            path=(), hop=0, key=0, chunk=chunk, number=0, others=0, dtype="float32", slowest=SLOWEST
        )
        requests.value(0, answer, np.zeros(4 if chunk < 2 else 2, np.float32))
    pull(1, least)
    (message,) = [one for one, _ in routed.local if isinstance(one, Pull) and one.number == 1]
    assert message.least == demanded


def test_a_value_that_lacks_updates_of_an_earlier_view_is_a_loss_and_is_not_written():
    losses: list[tuple[int, int, int]] = []
    routed = AsynchronousOutbox(0, STAR, Outbox())
    requests = Requests(Owners((1, 0, 0)), Counters(), routed, on_loss=lambda _, *loss: losses.append(loss))
    pulled = np.zeros(10, np.float32)

    def pull(number, others):
        requests.begin(
            PullOperation(key=key(), number=number, done=lambda _: None, pushed=0, destination=pulled)
        )
        answer = Value(path=(), hop=0, key=0, chunk=0, number=number, others=others, dtype="float32")
        requests.value(0, answer, np.full(4, others, np.float32))

    pull(0, 3)
    pull(1, 2)  # overtaken
    assert not losses
    requests.send_again()  # in a new view
    pull(2, 2)
    assert losses == [(0, 3, 2)]
    pull(3, 3)
    assert losses == [(0, 3, 2)]
    assert pulled[0] == 3


@pytest.mark.parametrize(("seen", "lost"), [(0, False), (1, True)])
def test_a_push_that_was_computed_on_updates_that_no_state_has_ends_an_elastic_job(seen, lost):
    errors: list[NetStormError] = []
    owner = new_serving(end_job=errors.append, present=(0, 1, 2))
    owner.serve(key(), Store())
    owner.push(1, msgspec.structs.replace(push(chunk=0), seen=seen), b"\0" * 16)
    assert ["rank 1 has pulled values with 1 pushes" in str(error) for error in errors] == [True] * lost
