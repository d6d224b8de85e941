"""Processes are numbered by incarnation: who is known, and who is forgotten."""

from __future__ import annotations

from netstorm.protocol import messages as m
from netstorm.pslite.machine import Admit
from tests.unit.scheduler.driving import Driven, refused, running


def test_the_same_incarnation_is_the_same_peer_and_another_one_is_somebody_else():
    driven = Driven(3)
    first = driven.hello("a", incarnation=5)
    assert driven.hello("a", incarnation=5) == first
    assert driven.hello("b", incarnation=6) != first


def test_a_hello_meant_for_a_rank_is_refused():
    driven = Driven(3)
    hello = m.Hello(job="alexnet", sender=0, incarnation=1, receiver=2, session=1, received=0)
    assert refused(driven.machine.admit(hello)) == "this is the scheduler of job 'alexnet', not rank 2"


def test_a_rank_of_an_earlier_scheduler_is_refused():
    driven = Driven(3)
    assert "does not know this rank 1" in refused(driven.hello("a", sender=1))


def test_a_member_that_reconnects_with_its_rank_is_known():
    driven = running(2)
    peer = driven.peer_of(1)
    incarnation = driven.machine.members[1].incarnation
    assert driven.hello("n1", incarnation=incarnation, sender=1) == Admit(peer)


def test_a_flood_of_unknown_processes_is_forgotten_but_members_are_not():
    driven = running(2)
    peer = driven.peer_of(0)
    for incarnation in range(20_000):
        driven.hello("unknown", incarnation=10**9 + incarnation)
    assert len(driven.machine._registry._processes) <= 10_002
    incarnation = driven.machine.members[0].incarnation
    assert driven.hello("n0", incarnation=incarnation, sender=0) == Admit(peer)
