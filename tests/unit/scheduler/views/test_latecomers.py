"""Which place a node gets that comes after its job has begun, and when."""

from __future__ import annotations

from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.scheduler.members import Members
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.rendezvous import Applicant, Refusal
from netstorm.scheduler.replay_log import LoggedOutbox
from netstorm.scheduler.views import Latecomers, RankPlace, with_free_places

OPTIONS = SchedulerOptions(
    num_workers=4, job="j", release="1", job_wide={}, elastic=(1, 4), heartbeat_timeout_s=5.0
)


def members(*ranks):
    """Return the members of a job of four places in which some are taken."""
    present = [(Peer(100 + rank), m.Member(rank, f"n{rank}", 4000, "", rank + 1)) for rank in ranks]
    return Members(with_free_places(present, 4), OPTIONS, LoggedOutbox(), 0.0)


def applicant(name="new", rank=-1, peer=7, port=4000):
    join = m.Join(asked_rank=rank, num_workers=4, host=name, port=port, site="", release="1", pid=1)
    return Applicant(peer=Peer(peer), incarnation=peer, join=join, heard_at=0.0)


def placed(latecomers, here, now=0.0):
    """Return who is placed or refused at a time, at which the waiting node shows that it is alive."""
    latecomers.heard(Peer(7), now)
    return list(latecomers.place(here, now))


def test_places_that_no_node_has_are_members_without_a_port():
    filled = with_free_places([(Peer(5), m.Member(1, "n1", 4000, "", 9))], 3)
    assert [(peer, member.rank, member.port) for peer, member in filled] == [
        (SCHEDULER, 0, 0),
        (Peer(5), 1, 4000),
        (SCHEDULER, 2, 0),
    ]


def test_a_node_gets_the_lowest_place_that_is_free():
    latecomers = Latecomers(OPTIONS)
    assert latecomers.add(applicant(), 0.0) is None
    (place,) = placed(latecomers, members(0, 2))
    assert isinstance(place, RankPlace)
    assert (place.rank, place.replaces) == (1, False)
    assert Peer(7) not in latecomers


def test_a_node_gets_the_place_that_it_asks_for_if_that_is_free():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(rank=3), 0.0)
    (place,) = placed(latecomers, members(0, 1))
    assert isinstance(place, RankPlace)
    assert place.rank == 3


def test_a_node_whose_place_is_taken_waits_until_it_is_free_or_the_one_who_has_it_proves_alive():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(rank=1), 0.0)
    assert placed(latecomers, members(0, 1), 9.0) == []
    assert Peer(7) in latecomers
    (place,) = placed(latecomers, members(0), 9.5)
    assert isinstance(place, RankPlace)
    latecomers.add(applicant(rank=1), 20.0)
    (refusal,) = placed(latecomers, members(0, 1), 35.0)
    assert isinstance(refusal, Refusal)
    assert "asks for rank 1, and rank 1 (n1:4000) is alive" in refusal.reason


def test_a_node_at_the_address_of_a_member_takes_its_place_since_no_two_can_listen_there():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant("n2"), 0.0)
    (place,) = placed(latecomers, members(0, 1, 2, 3))
    assert isinstance(place, RankPlace)
    assert (place.rank, place.replaces) == (2, True)


def test_one_node_too_many_is_told_so_after_a_while():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(), 0.0)
    assert placed(latecomers, members(0, 1, 2, 3), 14.9) == []
    (refusal,) = placed(latecomers, members(0, 1, 2, 3), 15.0)
    assert isinstance(refusal, Refusal)
    assert "NETSTORM_ELASTIC allows 4 nodes" in refusal.reason


def test_who_asks_again_waits_no_longer_and_who_leaves_is_forgotten():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(), 0.0)
    latecomers.add(applicant(), 8.0)
    assert isinstance(placed(latecomers, members(0, 1, 2, 3), 15.0)[0], Refusal)
    latecomers.add(applicant(), 20.0)
    latecomers.remove(Peer(7))
    assert placed(latecomers, members(0), 40.0) == []


def test_a_node_of_another_release_is_refused():
    refusal = Latecomers(OPTIONS).add(
        Applicant(
            peer=Peer(7),
            incarnation=1,
            join=m.Join(asked_rank=-1, num_workers=4, host="n", port=1, site="", release="2", pid=1),
            heard_at=0.0,
        ),
        0.0,
    )
    assert refusal is not None
    assert "release" in refusal.reason or "version" in refusal.reason


def test_a_node_that_has_gone_silent_while_it_waited_gets_no_place_and_is_forgotten():
    latecomers = Latecomers(OPTIONS)
    latecomers.add(applicant(rank=1), 0.0)
    assert list(latecomers.place(members(0), 4.0)) == []
    assert Peer(7) in latecomers
    assert list(latecomers.place(members(0), 5.1)) == []
    assert Peer(7) not in latecomers
