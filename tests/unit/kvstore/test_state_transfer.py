"""A newcomer gets the state from several ranks at once, complete and right, whoever of them leaves."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.kvstore import state_transfer as fetching
from netstorm.kvstore.paths.routes import RoutedOutbox
from netstorm.kvstore.state_transfer import PIECE_BYTES, Fetching, Providing, StateSnapshot, pieces_in
from netstorm.observe.log import Counters
from netstorm.protocol.frames import checksum
from netstorm.protocol.messages import StateAsked, StateMessage, StateOffered, StatePiece, StateWanted


class Sent(RoutedOutbox[StateMessage]):
    """Gives what is sent to `take`: target, message, payload."""

    def __init__(self, take):
        self.take = take

    def send(self, target, message, payload=None):
        self.take(target, message, payload)


def snapshot(step=4, size=3 * PIECE_BYTES + 17, *, seed=1):
    content = random.Random(seed).randbytes(size)
    return StateSnapshot(step=step, content=content, crc=checksum(content), rounds={0: step}, barriers=2)


def offer(state, **changed):
    fields = {
        "path": (),
        "hop": 0,
        "step": state.step,
        "nbytes": state.nbytes,
        "crc": state.crc,
        "rounds": dict(state.rounds),
        "barriers": state.barriers,
    }
    return StateOffered(**{**fields, **changed})


class Newcomer:
    """A newcomer, what it has sent, and the state that it got."""

    def __init__(self, *ranks):
        self.sent: list[Any] = []
        self.got: list[Any] = []
        self.counters = Counters()
        routed = Sent(lambda rank, message, _: self.sent.append((rank, message)))
        self.fetching = Fetching(routed, self.got.append, self.counters)
        self.fetching.ask(set(ranks))

    def asked(self):
        """Return what was asked for since the last call, as (rank, piece)."""
        found = [(rank, one.first) for rank, one in self.sent if isinstance(one, StateAsked)]
        self.sent.clear()
        return found

    def give(self, rank, state, piece, *, step=None):
        message = StatePiece(path=(), hop=0, step=state.step if step is None else step, piece=piece)
        self.fetching.piece(rank, message, bytearray(state.piece(piece)))


def test_it_asks_all_ranks_that_have_the_state():
    newcomer = Newcomer(2, 5)
    assert [(rank, type(message)) for rank, message in newcomer.sent] == [(2, StateWanted), (5, StateWanted)]


def test_ranks_that_offer_the_same_share_the_work():
    newcomer, state = Newcomer(0, 1), snapshot(size=20 * PIECE_BYTES)
    newcomer.fetching.offered(0, offer(state))
    newcomer.fetching.offered(1, offer(state))
    todo = newcomer.asked()
    while todo:
        assert len({piece for _, piece in todo}) == len(todo)
        rank, piece = todo.pop(0)
        newcomer.give(rank, state, piece)
        todo += newcomer.asked()
    (got,) = newcomer.got
    assert (bytes(got.content), got.step, got.rounds, got.barriers) == (state.content, 4, {0: 4}, 2)
    assert newcomer.counters.snapshot()["state_bytes_fetched"] == state.nbytes


def test_the_ranks_that_were_asked_are_told_that_it_has_the_state():
    newcomer, state = Newcomer(0, 1), snapshot(size=10)
    newcomer.fetching.offered(0, offer(state))
    newcomer.sent.clear()
    newcomer.give(0, state, 0)
    assert [(rank, message.done) for rank, message in newcomer.sent] == [(0, True), (1, True)]


def test_a_state_of_no_bytes_is_there_at_once():
    newcomer, state = Newcomer(0), snapshot(size=0)
    newcomer.fetching.offered(0, offer(state))
    assert [got.nbytes for got in newcomer.got] == [0]


def test_what_a_lost_rank_owes_is_asked_of_the_others():
    newcomer, state = Newcomer(0, 1), snapshot()
    newcomer.fetching.offered(0, offer(state))
    assert newcomer.asked() == [(0, 0), (0, 1), (0, 2), (0, 3)]
    newcomer.give(0, state, 1)
    newcomer.fetching.offered(1, offer(state))
    newcomer.fetching.ask({1})
    assert sorted(newcomer.asked()) == [(1, 0), (1, 2), (1, 3)]


def test_if_all_who_offered_a_step_are_lost_the_newest_other_one_is_fetched():
    newcomer, old, new = Newcomer(0, 1, 2), snapshot(4), snapshot(6, seed=2)
    newcomer.fetching.offered(0, offer(old))
    newcomer.fetching.offered(1, offer(new))
    newcomer.asked()
    newcomer.fetching.ask({1, 2})
    assert newcomer.asked() == [(1, piece) for piece in range(pieces_in(new.nbytes))]
    assert "from ranks [1]" in newcomer.fetching.waiting_text()


def test_pieces_of_another_step_or_that_were_not_asked_for_count_for_nothing():
    newcomer, state = Newcomer(0, 1), snapshot()
    newcomer.give(0, state, 0)
    newcomer.fetching.offered(0, offer(state))
    newcomer.give(0, state, 0, step=9)
    newcomer.give(1, state, 0)
    newcomer.give(0, state, 0)
    newcomer.give(0, state, 0)
    assert newcomer.counters.snapshot()["state_pieces_too_late"] == 4
    assert newcomer.got == []


def test_a_state_that_fails_its_checksum_is_fetched_once_more():
    newcomer, state = Newcomer(0), snapshot(size=10)
    newcomer.fetching.offered(0, offer(state))
    message = StatePiece(path=(), hop=0, step=state.step, piece=0)
    newcomer.fetching.piece(0, message, bytearray(10))
    assert (newcomer.got, newcomer.counters.snapshot()["state_checksum_errors"]) == ([], 1)
    newcomer.give(0, state, 0)
    assert [bytes(got.content) for got in newcomer.got] == [state.content]


@pytest.mark.parametrize("payload", [None, bytearray(9)])
def test_a_piece_of_another_size_is_a_violation(payload):
    newcomer, state = Newcomer(0), snapshot(size=10)
    newcomer.fetching.offered(0, offer(state))
    with pytest.raises(ProtocolViolation, match="sends piece 0 of the state, which has 10 bytes"):
        newcomer.fetching.piece(0, StatePiece(path=(), hop=0, step=state.step, piece=0), payload)


@pytest.mark.parametrize(("rank", "nbytes"), [(7, 10), (0, -1), (0, 1 << 41)])
def test_an_offer_that_nobody_asked_for_or_of_an_impossible_size_is_a_violation(rank, nbytes):
    with pytest.raises(ProtocolViolation, match=f"rank {rank} offers {nbytes} bytes of state"):
        Newcomer(0).fetching.offered(rank, offer(snapshot(size=10), nbytes=nbytes))


def test_an_offer_for_which_there_is_no_memory_is_a_violation(monkeypatch):
    monkeypatch.setattr(fetching, "_fits", lambda nbytes: nbytes < 1 << 39)
    newcomer = Newcomer(0, 1)
    with pytest.raises(ProtocolViolation, match="more than this machine has memory for"):
        newcomer.fetching.offered(0, offer(snapshot(size=10), nbytes=1 << 39))
    newcomer.fetching.offered(1, offer(snapshot(size=10)))
    newcomer.fetching.ask({0, 1})
    newcomer.give(1, snapshot(size=10), 0)
    assert [got.nbytes for got in newcomer.got] == [10]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=25)
def test_whatever_order_things_come_in_and_whoever_is_lost_the_state_is_right(seed, ranks, pieces):
    """Ranks answer in any order; all but one may leave at any moment."""
    chance = random.Random(seed)
    state = snapshot(size=pieces * PIECE_BYTES + chance.randrange(100), seed=seed)
    newcomer = Newcomer(*range(ranks))
    providers = {
        rank: Providing(Sent(lambda *sent, rank=rank: answers.append((rank, *sent))), Counters())
        for rank in range(ranks)
    }
    answers: list[Any] = []
    here = set(range(ranks))
    for _ in range(1000):
        if newcomer.got:
            break
        if len(here) > 1 and chance.random() < 0.05:
            here.discard(chance.choice(sorted(here)))
            newcomer.fetching.ask(set(here))
        for target, message in newcomer.sent:
            if isinstance(message, StateWanted):
                providers[target].want(9)
                providers[target].offer(state)
            elif target in here:
                providers[target].asked(9, message)
        newcomer.sent.clear()
        if answers:
            rank, _, message, payload = answers.pop(chance.randrange(len(answers)))
            if rank not in here:
                continue
            if isinstance(message, StateOffered):
                newcomer.fetching.offered(rank, message)
            else:
                newcomer.fetching.piece(rank, message, payload)
    assert [bytes(got.content) for got in newcomer.got] == [state.content]


def test_a_rank_with_a_fast_link_is_left_alone_for_a_while_and_one_with_a_slow_link_is_not():
    for took, rest in ((0.05, 0.3), (0.5, 0.0)):
        newcomer, state = Newcomer(0), snapshot(size=20 * PIECE_BYTES)
        newcomer.fetching.tick(1.0)
        newcomer.fetching.offered(0, offer(state))
        first = [piece for _, piece in newcomer.asked()]
        newcomer.fetching.tick(1.0 + took)
        for piece in first:
            newcomer.give(0, state, piece)
        if rest:
            assert newcomer.asked() == []
            assert newcomer.fetching.next_tick() == pytest.approx(1.0 + took + rest)
            newcomer.fetching.tick(1.0 + took + rest - 0.01)
            assert newcomer.asked() == []
            newcomer.fetching.tick(1.0 + took + rest + 0.01)
        assert len(newcomer.asked()) == len(first)


# ---------------------------------------------------------------------------------------------- who offers it

CONTENT = bytes(range(256)) * (PIECE_BYTES // 256) + b"the rest"
STATE = StateSnapshot(step=3, content=CONTENT, crc=checksum(CONTENT), rounds={0: 3})


class Provider(Providing):
    """Keeps what it has sent."""

    def __init__(self):
        self.sent: list[Any] = []
        super().__init__(Sent(lambda *sent: self.sent.append(sent)), Counters())

    def taken(self):
        found, self.sent = self.sent, []
        return found


def asked(step=3, first=0, count=1):
    return StateAsked(path=(), hop=0, step=step, first=first, count=count)


def test_an_offer_goes_to_all_who_have_asked_once():
    provider = Provider()
    provider.want(4)
    provider.want(2)
    assert len(provider.requests) == 2
    provider.offer(STATE)
    assert [(rank, type(message)) for rank, message, _ in provider.taken()] == [
        (2, StateOffered),
        (4, StateOffered),
    ]
    assert not provider.requests


def test_a_state_answers_the_requests_that_there_were_before_it_was_made():
    provider = Provider()
    provider.want(2)
    provider.want(4)
    before = provider.requests
    provider.want(2)  # asked again, in another view
    assert provider.requests == before
    provider.forget(4)
    provider.want(4)  # another process, which lacks the results of some rounds after that state
    provider.offer(dataclasses.replace(STATE, requests=before))
    assert [rank for rank, _, _ in provider.taken()] == [2]
    provider.offer(dataclasses.replace(STATE, step=4, requests=provider.requests))
    assert [(rank, message.step) for rank, message, _ in provider.taken()] == [(4, 4)]
    assert not provider.requests


def test_who_asks_again_is_offered_the_same_again():
    provider = Provider()
    provider.want(4)
    provider.offer(STATE)
    provider.taken()
    provider.want(4)
    ((rank, message, _),) = provider.taken()
    assert (rank, message.step, message.nbytes) == (4, 3, len(CONTENT))


def test_pieces_are_sent_as_asked():
    provider = Provider()
    provider.want(4)
    provider.offer(STATE)
    provider.taken()
    provider.asked(4, asked(first=0, count=2))
    sent = provider.taken()
    assert [(rank, message.piece) for rank, message, _ in sent] == [(4, 0), (4, 1)]
    assert b"".join(bytes(payload) for _, _, payload in sent) == CONTENT


def test_who_has_the_state_or_is_gone_gets_nothing_more():
    provider = Provider()
    provider.want(4)
    provider.offer(STATE)
    provider.taken()
    provider.forget(4)
    provider.asked(4, asked())
    provider.asked(5, asked())
    assert provider.taken() == []


@pytest.mark.parametrize(("first", "count"), [(0, 3), (-1, 1), (2, 1), (0, 0)])
def test_pieces_that_there_are_not_are_a_violation(first, count):
    provider = Provider()
    provider.want(4)
    provider.offer(STATE)
    with pytest.raises(
        ProtocolViolation, match=f"asks for {count} pieces from {first} of a state that has 2"
    ):
        provider.asked(4, asked(first=first, count=count))


def test_one_request_is_for_a_few_pieces():
    large = bytes(6 * PIECE_BYTES)
    provider = Provider()
    provider.want(4)
    provider.offer(StateSnapshot(step=3, content=large, crc=checksum(large)))
    provider.taken()
    with pytest.raises(ProtocolViolation, match=r"asks for 5 pieces .* has 6: expected at most 4"):
        provider.asked(4, asked(count=5))
    assert provider.taken() == []
    provider.asked(4, asked(count=4))
    assert len(provider.taken()) == 4


def test_a_program_that_has_ended_offers_its_last_state_to_all_who_come_later():
    provider = Provider()
    provider.offer(STATE)
    provider.want(6)
    assert [(rank, message.step) for rank, message, _ in provider.taken()] == [(6, 3)]
