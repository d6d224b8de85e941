"""A rank offers its state to newcomers that ask, and sends the pieces that they want."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.state_transfer import PIECE_BYTES, Providing, StateSnapshot
from netstorm.observe.log import Counters
from netstorm.protocol.frames import checksum
from netstorm.protocol.messages import StateAsked, StateOffered
from tests.unit.kvstore.state_transfer.routed import Sent

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


def test_a_program_that_has_ended_offers_its_last_state_to_all_who_come_later():
    provider = Provider()
    provider.offer(STATE)
    provider.want(6)
    assert [(rank, message.step) for rank, message, _ in provider.taken()] == [(6, 3)]
