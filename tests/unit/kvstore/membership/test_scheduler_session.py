"""What a node says to the scheduler of itself, and how long it waits for one."""

import math

import pytest

from netstorm import errors
from netstorm.kvstore.membership.scheduler_session import SchedulerSession, job_end_error
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.protocol import messages as m
from netstorm.pslite.machine import Send
from netstorm.topology.networks.network import Rank
from netstorm.topology.policy import Policy, Tree

STAR = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0)),), weights=(1,))


class Session:
    """A session, and what it has sent."""

    def __init__(self, *, join_timeout_s=60.0):
        options = NodeOptions(
            scheduler_host="10.0.0.9",
            scheduler_port=9091,
            host="10.0.0.1",
            port=4001,
            join_timeout_s=join_timeout_s,
        )
        self.outbox = Outbox()
        self.session = SchedulerSession(options, self.outbox, now=0.0)

    def join(self, *, resume_s=0.0, now=0.0):
        word = m.Joined(
            rank=1, members=(), policy=STAR, heartbeat_interval_s=2, heartbeat_timeout_s=20, resume_s=resume_s
        )
        self.session.start(word, now)
        self.sent()
        return self.session

    def sent(self):
        return [type(one.message) for one in self.outbox.take() if isinstance(one, Send)]


def resume():
    return m.Resume(keys=(), begun=(), barriers=(), last_rounds=None, suspected=())


def test_it_asks_to_join_until_it_has_or_it_is_too_late():
    one = Session(join_timeout_s=5.0)
    assert one.sent() == [m.Join]
    assert one.session.connection_lost("refused", (), 1.0) is None
    assert one.sent() == [m.Join]
    one.session.last_report = "waiting for 2 of 4 nodes"
    assert one.session.next_deadline() <= 5.0
    assert one.session.join_error(4.9) is None
    assert "waiting for 2 of 4 nodes" in str(one.session.join_error(5.0))
    assert isinstance(one.session.connection_lost("refused", (), 5.0), errors.SchedulerLost)


def test_who_has_joined_is_never_too_late_and_beats_as_it_was_told():
    session = Session(join_timeout_s=5.0).join(now=3.0)
    assert session.join_error(1e6) is None
    beats = [now for now in range(3, 12) if session.beats(float(now))]
    assert beats == [3, 5, 7, 9, 11]
    assert session.next_deadline() == 13.0


def test_a_scheduler_without_a_log_that_cannot_be_reached_is_the_end():
    session = Session().join()
    assert isinstance(session.connection_lost("broken pipe", (), 1.0), errors.SchedulerLost)


def test_one_with_a_log_is_looked_for_and_told_where_this_node_is():
    one = Session()
    session = one.join(resume_s=30.0)
    assert session.connection_lost("broken pipe", (), 10.0) is None
    assert session.is_away
    assert session.look_for_it(resume, 10.0) is None
    assert one.sent() == [m.Resume]
    assert "broken pipe" in session.waits(12.0)
    session.resumed(13.0)
    assert not session.is_away
    assert session.waits(13.0) == ""
    assert session.look_for_it(resume, math.inf) is None


def test_one_that_does_not_come_back_is_the_end_and_so_is_one_that_does_not_know_the_job():
    session = Session().join(resume_s=30.0)
    assert session.connection_lost("broken pipe", (), 10.0) is None
    assert "NETSTORM_SCHEDULER_TIMEOUT" in str(session.look_for_it(resume, 40.0))
    session = Session().join(resume_s=30.0)
    refusal = "the scheduler of job 'a' does not know this rank 1"
    assert isinstance(session.connection_lost(refusal, (), 10.0), errors.SchedulerLost)


@pytest.mark.parametrize(
    ("kind", "error"), [("lost", errors.NodeLost), ("key", errors.KeyMismatch), ("new", errors.Unavailable)]
)
def test_its_word_of_the_end_is_the_error_that_the_program_gets(kind, error):
    found = job_end_error(m.PeerGone(rank=-1, kind=kind, reason="it ended"))
    assert type(found) is error
    assert str(found) == "it ended"
