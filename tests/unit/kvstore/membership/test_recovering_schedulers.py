"""What a node answers a scheduler that would take its job over."""

import math

import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.membership import RecoveringSchedulers, Roster
from netstorm.protocol import messages as m
from netstorm.protocol.frames import UNKNOWN, Peer
from netstorm.pslite.machine import Admit, Connect, Refuse, Send
from tests.unit.kvstore.membership.test_scheduler_session import STAR, Session, resume

MEMBERS = (m.Member(0, "a", 1, "", 10), m.Member(1, "b", 1, "", 11))


class Asked:
    """Rank 1, which has joined."""

    def __init__(self, elastic=None):
        self.driven = Session()
        self.session = self.driven.session
        joined = m.Joined(
            rank=1,
            members=MEMBERS,
            policy=STAR,
            heartbeat_interval_s=2,
            heartbeat_timeout_s=20,
            resume_s=300,
            elastic=elastic,
        )
        self.session.start(joined, 0.0)
        self.driven.sent()
        self.recovering = RecoveringSchedulers(self.session, self.driven.outbox)

    def lose(self, now):
        assert self.session.connection_lost("no answer", (), now) is None

    def ask(self, now, host="new", port=9091):
        """Ask, and return whether it comes, and the scheduler that it names."""
        self.recovering.receive(UNKNOWN, m.Recover(host=host, port=port), Roster(1, MEMBERS), None, now)
        (answer,) = (one.message for one in self.driven.outbox.take() if isinstance(one, Send))
        assert isinstance(answer, m.RecoverAnswer)
        assert (answer.rank, answer.members) == (1, MEMBERS)
        return answer.accepted, answer.scheduler

    def connects(self, now):
        """Let the node try to connect, and return the hosts to which it does."""
        assert self.session.try_reconnect(resume, now) is None
        return [one.host for one in self.driven.outbox.take() if isinstance(one, Connect)]


def hello(incarnation=7, sender=-1, receiver=-2):
    return m.Hello(job="j", sender=sender, incarnation=incarnation, receiver=receiver, session=1, received=0)


def test_only_who_has_no_rank_and_asks_for_no_rank_is_such_a_scheduler():
    asks = RecoveringSchedulers.asks
    assert asks(hello())
    assert asks(hello(receiver=-5))
    assert not asks(hello(sender=0))
    assert not asks(hello(receiver=1))
    assert not asks(hello(receiver=-1))


def test_each_gets_a_number_of_its_own_and_many_do_not_fill_memory():
    recovering = Asked().recovering
    admitted = [recovering.admit(hello(incarnation), 1) for incarnation in (1, 2, 1)]
    assert admitted == [Admit(Peer(-2)), Admit(Peer(-3)), Admit(Peer(-2))]
    for incarnation in range(1000):
        recovering.admit(hello(incarnation), 1)
    assert len(recovering._peers) == 8
    assert isinstance(recovering.admit(hello(), -1), Refuse)


def test_a_node_does_not_leave_a_scheduler_that_it_has():
    asked = Asked()
    assert asked.ask(1.0) == (False, "10.0.0.9:9091")
    assert asked.session.try_reconnect(resume, math.inf) is None


def test_a_node_that_has_lost_its_scheduler_comes_at_once():
    asked = Asked()
    asked.lose(5.0)
    assert asked.ask(6.0) == (True, "new:9091")
    assert asked.connects(6.0) == ["new"]
    assert asked.session.tries_another
    assert asked.ask(7.0) == (True, "new:9091")
    assert asked.connects(7.0) == []
    asked.session.resumed(8.0)
    assert asked.ask(9.0, "other") == (False, "new:9091")


def test_of_two_all_nodes_prefer_the_same_one_and_try_the_other_if_that_does_not_take_over():
    asked = Asked(elastic=(1, 2))
    asked.lose(5.0)
    assert asked.ask(6.0, "b") == (True, "b:9091")
    assert asked.connects(6.0) == ["b"]
    assert asked.ask(7.0, "c") == (False, "b:9091")
    assert asked.ask(7.0, "a") == (True, "a:9091")
    assert asked.connects(7.0) == ["a"]
    found = [asked.connects(7.0 + 40 * turn) for turn in range(1, 5)]
    assert [host for (host,) in found] == ["10.0.0.9", "b", "c", "a"]


def test_in_a_job_that_nodes_may_not_leave_it_does_not_go_back():
    asked = Asked()
    asked.lose(5.0)
    asked.ask(6.0, "b")
    assert asked.connects(6.0) == ["b"]
    asked.ask(7.0, "c")
    found = [asked.connects(46.0 + 40 * turn) for turn in range(3)]
    assert [host for (host,) in found] == ["c", "b", "c"]


@pytest.mark.parametrize(("host", "port"), [("", 1), ("a" * 254, 1), ("a", 0), ("a", 65536), ("a", -1)])
def test_an_address_that_is_none_is_refused(host, port):
    asked = Asked()
    asked.lose(5.0)
    with pytest.raises(ProtocolViolation, match="a scheduler at"):
        asked.ask(6.0, host, port)
