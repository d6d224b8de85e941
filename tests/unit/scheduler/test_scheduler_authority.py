"""What the scheduler refuses for who its sender is, whatever the message says."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import NotAuthorised
from netstorm.lab.testing.decoders import example, message_classes
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, may_send
from netstorm.protocol.frames import SCHEDULER, decode_body
from netstorm.pslite.machine import Admit, Refuse
from tests.unit.scheduler.driving import Driven, running

KINDS = [kind for kind in message_classes() if not issubclass(kind, m.SessionMessage)]


def an(kind):
    return decode_body(msgspec.msgpack.encode(example(kind, 1)))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind not in may_send(Role.MEMBER, Role.SCHEDULER)],
    ids=lambda kind: kind.__name__,
)
def test_what_is_not_for_it_is_refused_of_a_member_and_does_nothing(kind):
    driven = running(3)
    before = {peer: len(sent) for peer, sent in driven.sent.items()}
    with pytest.raises(NotAuthorised, match=f"rank 1 sent a {kind.__name__}"):
        driven.say(1, an(kind))
    assert {peer: len(sent) for peer, sent in driven.sent.items()} == before


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind not in may_send(Role.APPLICANT, Role.SCHEDULER)],
    ids=lambda kind: kind.__name__,
)
def test_who_has_not_joined_can_ask_to_join_and_leave(kind):
    driven = Driven(2)
    driven.join("a")
    with pytest.raises(NotAuthorised, match=f"a process that has not joined sent a {kind.__name__}"):
        driven.machine.receive(driven.peers["a"], an(kind), None, None, driven.now)


def hello(incarnation):
    return m.Hello(
        job="alexnet", sender=-1, incarnation=incarnation, receiver=SCHEDULER, session=1, received=0
    )


def test_the_number_of_a_process_belongs_to_the_key_that_it_came_with():
    driven = Driven(2)
    first = driven.machine.admit(hello(7), "tokyo's")
    assert isinstance(first, Admit)
    assert driven.machine.admit(hello(7), "tokyo's") == first
    other = driven.machine.admit(hello(7), "paris's")
    assert isinstance(other, Refuse)
    assert "another key" in other.reason
    assert isinstance(driven.machine.admit(hello(8), "paris's"), Admit)


def test_members_are_told_with_which_key_each_of_them_connects():
    driven = Driven(1)
    admitted = driven.machine.admit(hello(7), "tokyo's")
    assert isinstance(admitted, Admit)
    driven.peers["a"] = admitted.peer
    driven.join("a")
    assert driven.machine.members[0].user == "tokyo's"
    refused = driven.machine.admit(hello(7), "paris's")
    assert isinstance(refused, Refuse)
    assert refused.reason.startswith("the process of this number has another key than this process: ")
