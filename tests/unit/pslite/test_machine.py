"""What waits of peers is bounded in bytes, of each and of all."""

from __future__ import annotations

import math

import pytest

from netstorm.errors import NoRoom, Overloaded
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import ForwardedBytes, WaitingBytes

ONE, TWO, THREE = Peer(1), Peer(2), Peer(3)
KIB = 1024


def waiting() -> WaitingBytes:
    return WaitingBytes(of_one=10 * KIB, of_all=15 * KIB)


def test_each_peer_has_a_bound_and_all_have_one():
    some = waiting()
    some.begin(ONE)
    charges = [some.take(4 * KIB, "a key", "a key") for _ in range(2)]
    with pytest.raises(NoRoom, match="10240 bytes from it wait here for a key, and 10240 in all"):
        some.take(1, "a key", "a key")
    some.begin(TWO)
    of_two = some.take(3 * KIB, "a key", "a key")
    with pytest.raises(NoRoom, match=r"4096 bytes from it .* and 14336 in all: at most 10240 and 15360 may"):
        some.take(KIB, "a key", "a key")
    some.begin(THREE)
    some.take(100 * KIB, "a key", "a key")  # a single message may always wait, however large
    for charge in [*charges, of_two] * 2:  # a second time does nothing
        some.give_back(charge)
    assert some.room(ONE) == math.inf


def test_what_has_waited_before_is_not_refused():
    some = waiting()
    some.begin(ONE, again=True)
    charges = [some.take(9 * KIB, "a key", "a key") for _ in range(5)]
    some.end()
    charges.append(some.take(9 * KIB, "a key", "a key"))
    some.begin(ONE)
    with pytest.raises(NoRoom):
        some.take(0, "a key", "a key")


def test_what_nothing_refers_to_any_more_counts_no_more():
    some = waiting()
    some.begin(ONE)
    charge = some.take(9 * KIB, "a key", "a key")
    assert some.room(ONE) == 0
    del charge
    assert some.room(ONE) == math.inf


def test_what_is_forwarded_has_a_bound_for_each_peer_and_for_all():
    some = ForwardedBytes(20 * KIB)
    charges = [some.take(ONE, 4 * KIB) for _ in range(2)]
    with pytest.raises(Overloaded, match="message to forward, and 10240 bytes from it wait here for links"):
        some.take(ONE, 0)
    charges += [some.take(TWO, 4 * KIB), some.take(THREE, KIB)]
    with pytest.raises(Overloaded, match=r"5120 bytes .* 17408 in all: at most 10240 and 20480 may"):
        some.take(TWO, 3 * KIB)
    charges.clear()
    some.take(ONE, 30 * KIB)  # a single message may always be forwarded, however large


def test_what_was_refused_is_ready_once_what_it_waits_for_is_here():
    some = waiting()
    some.begin(ONE)
    _ = some.take(9 * KIB, "a key", "a key")
    for place in ("a key", "another", "a third"):
        with pytest.raises(NoRoom):
            some.take(KIB, place, place)
    some.ready("a key")
    some.ready("nothing that was refused")
    assert some.take_ready() == {"a key"}
    assert some.take_ready() == set()
    some.all_ready()
    assert some.take_ready() == {"another", "a third"}
