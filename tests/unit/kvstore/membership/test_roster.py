"""Who is in the job, as one node sees it, while nodes leave and join."""

from __future__ import annotations

from netstorm.kvstore.forms import Collective, Key
from netstorm.kvstore.membership import Roster
from netstorm.kvstore.operations import CollectiveCall, Operation
from netstorm.protocol.codecs import COLLECTIVE, Element, Reduction, Signature
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Hello, Member
from netstorm.pslite.machine import Admit, NotYet, Refuse


def member(rank, incarnation=None, port=4000):
    return Member(rank, f"n{rank}", port, "", 10 + rank if incarnation is None else incarnation)


def roster(*, elastic=True):
    return Roster(0, (member(0), member(1), member(2)), elastic=elastic)


def hello(sender, incarnation, receiver=0):
    return Hello(job="j", sender=sender, incarnation=incarnation, receiver=receiver, session=1, received=0)


def test_a_place_that_no_node_has_stays_in_the_list_without_a_port():
    one = roster()
    one.change((member(0), member(2)))
    assert [found.port for found in one.members] == [4000, 0, 4000]
    assert [found.rank for found in one.present()] == [0, 2]
    assert [found.rank for found in one.others()] == [2]


def test_what_was_known_of_a_rank_that_left_is_forgotten():
    one = roster()
    one.finished[1] = {0: 5}
    one.suspect(1, "no answer", 1.0)
    one.change((member(0), member(2)))
    assert one.finished == {}
    assert one.undecided_error(100.0, 1.0) is None


def test_a_process_that_has_left_is_refused_and_its_successor_is_admitted():
    one = roster()
    assert one.admit(hello(1, 11)) == Admit(Peer(1))
    one.change((member(0), member(2)))
    assert isinstance(one.admit(hello(1, 11)), Refuse)
    one.change((member(0), member(1, 99), member(2)))
    assert one.admit(hello(1, 99)) == Admit(Peer(1))
    assert isinstance(one.admit(hello(1, 11)), Refuse)


def test_a_process_that_comes_before_the_news_of_it_waits_in_an_elastic_job_alone():
    assert isinstance(roster().admit(hello(1, 99)), NotYet)
    assert isinstance(roster(elastic=False).admit(hello(1, 99)), Refuse)


def test_a_rank_that_joined_later_and_has_finished_is_not_missed_by_groups_of_some_ranks():
    key = Key(0, "g", (4,), "float32", form=COLLECTIVE, members=(0, 1))
    key.identity = 3
    call = CollectiveCall("some", 0, "all_reduce")
    form = Collective(Signature(Reduction.SUM, Element.FLOAT32, 1, 16))
    operation = Operation(
        key=key, round=0, source=None, destination=None, done=lambda _: None, call=call, form=form
    )
    one = roster()
    one.finished[1] = {}
    assert one.uneven_error([operation]) is not None
    one.change((member(0), member(1, 99), member(2)))
    one.finished[1] = {}
    assert one.uneven_error([operation]) is None
