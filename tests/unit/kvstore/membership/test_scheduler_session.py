"""A node's session with the scheduler: joining, heartbeats, and outages."""

import math

import pytest

from netstorm import errors
from netstorm.kvstore.membership import SchedulerSession, job_end_error
from netstorm.kvstore.operations import Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.protocol import messages as m
from netstorm.pslite.machine import Send
from netstorm.pslite.proofs import Mismatch, SchedulerSecret, proof_for_resume, reason_of_opener
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

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
        joined = m.Joined(
            rank=1, members=(), policy=STAR, heartbeat_interval_s=2, heartbeat_timeout_s=20, resume_s=resume_s
        )
        self.session.start(joined, now)
        self.sent()
        return self.session

    def sent(self):
        return [type(send.message) for send in self.outbox.take() if isinstance(send, Send)]


def resume():
    return m.Resume(keys=(), begun=(), barriers=(), last_rounds=None, suspected=())


def test_it_asks_to_join_until_the_join_timeout():
    driven = Session(join_timeout_s=5.0)
    assert driven.sent() == [m.Join]
    assert driven.session.connection_lost("refused", (), 1.0) is None
    assert driven.sent() == [m.Join]
    driven.session.last_report = "waiting for 2 of 4 nodes"
    assert driven.session.next_deadline() <= 5.0
    assert driven.session.join_error(4.9) is None
    assert "waiting for 2 of 4 nodes" in str(driven.session.join_error(5.0))
    assert isinstance(driven.session.connection_lost("refused", (), 5.0), errors.SchedulerLost)


def test_after_joining_the_timeout_is_off_and_heartbeats_follow_the_interval():
    session = Session(join_timeout_s=5.0).join(now=3.0)
    assert session.join_error(1e6) is None
    beats = [now for now in range(3, 12) if session.heartbeat_due(float(now))]
    assert beats == [3, 5, 7, 9, 11]
    assert session.next_deadline() == 13.0


def test_an_unreachable_scheduler_without_a_log_is_an_error():
    session = Session().join()
    assert isinstance(session.connection_lost("broken pipe", (), 1.0), errors.SchedulerLost)


def test_a_scheduler_with_a_log_is_reconnected_to_and_gets_a_resume():
    driven = Session()
    session = driven.join(resume_s=30.0)
    assert session.connection_lost("broken pipe", (), 10.0) is None
    assert session.is_away
    assert session.try_reconnect(resume, 10.0) is None
    assert driven.sent() == [m.Resume]
    assert "broken pipe" in session.waiting_text(12.0)
    session.resumed(13.0)
    assert not session.is_away
    assert session.waiting_text(13.0) == ""
    assert session.try_reconnect(resume, math.inf) is None


def test_an_outage_that_lasts_too_long_is_an_error_and_so_is_a_refusal_of_the_rank():
    session = Session().join(resume_s=30.0)
    assert session.connection_lost("broken pipe", (), 10.0) is None
    assert "NETSTORM_SCHEDULER_TIMEOUT" in str(session.try_reconnect(resume, 40.0))
    session = Session().join(resume_s=30.0)
    refusal = "the scheduler of job 'a' does not know this rank 1"
    assert isinstance(session.connection_lost(refusal, (), 10.0), errors.SchedulerLost)


@pytest.mark.parametrize(
    ("kind", "error"), [("lost", errors.NodeLost), ("key", errors.KeyMismatch), ("new", errors.Unavailable)]
)
def test_the_kind_of_a_job_s_end_decides_the_error_that_the_program_gets(kind, error):
    found = job_end_error(m.PeerGone(rank=-1, kind=kind, reason="it ended"))
    assert type(found) is error
    assert str(found) == "it ended"


def test_a_scheduler_with_another_key_is_not_asked_again():
    driven = Session()
    driven.sent()
    reason = reason_of_opener("10.0.0.9:9091", Mismatch.MECHANISM, has_key=False)
    error = driven.session.connection_lost(f"no connection for 10 s: {reason}", (), 1.0)
    assert isinstance(error, errors.JoinRefused)
    assert "cannot join the scheduler at 10.0.0.9:9091: " in str(error)
    assert "set NETSTORM_KEY_FILE" in str(error)
    assert driven.sent() == []


def test_a_node_that_is_out_of_an_elastic_job_is_told_so_and_what_to_do():
    departed = "rank 1 is out of the job since view 3: rank 1 is lost: no heartbeat for 20 s"
    refused = Session().join().connection_lost(f"10.0.0.9:9091 refused this process: {departed}", (), 50.0)
    announced = job_end_error(m.PeerGone(rank=-1, kind="removed", reason=departed))
    for error in (refused, announced):
        assert isinstance(error, errors.NodeRemoved)
        assert departed in str(error)
        assert "start it again" in str(error)


def test_in_an_elastic_job_a_node_asks_once_more_whether_it_is_out():
    driven = Session()
    joined = m.Joined(
        rank=1,
        members=(),
        policy=STAR,
        heartbeat_interval_s=2,
        heartbeat_timeout_s=20,
        elastic=(1, 2),
    )
    driven.session.start(joined, 0.0)
    assert driven.session.connection_lost("the connection takes no more messages", (), 50.0) is None
    driven.sent()
    assert driven.session.try_reconnect(resume, 55.0) is None
    assert driven.sent() == [m.Resume]
    error = driven.session.try_reconnect(resume, 71.0)
    assert isinstance(error, errors.SchedulerLost)


KEYED = m.Member(1, "10.0.0.1", 4001, "", 7, "key 1")


def keyed_session(*, elastic: tuple[int, int] | None = None):
    """Return a session of a job with a key, which has been lost; and the key of its node."""
    key = SchedulerSecret(b"s" * 32).key_for("j", KEYED)
    driven = Session()
    joined = m.Joined(
        rank=1,
        members=(KEYED,),
        policy=STAR,
        heartbeat_interval_s=2,
        heartbeat_timeout_s=20,
        resume_s=30.0,
        elastic=elastic,
        proof_key=m.HiddenKey(key),
    )
    driven.session.start(joined, 0.0)
    assert driven.session.connection_lost("broken pipe", (), 10.0) is None
    driven.outbox.take()
    return driven, key


def test_each_answer_to_resume_needs_a_proof_of_its_own():
    driven, key = keyed_session()
    session = driven.session
    numbers = []
    for now in (10.0, 12.0):
        assert session.try_reconnect(resume, now) is None
        numbers += [
            one.message.number
            for one in driven.outbox.take()
            if isinstance(one, Send) and isinstance(one.message, m.Resume)
        ]
        assert session.connection_lost("broken pipe", (), now) is None
    first, second = numbers
    for message in (
        m.Resumed(),
        m.Resumed(proof=proof_for_resume(key, first)),
        m.PeerGone(rank=0, kind="failed", reason="rank 0 has failed"),
        m.AllFinished(),
    ):
        with pytest.raises(errors.NotAuthorised, match="does not prove that it is a scheduler of this job"):
            session.check_proof(message)
    session.check_proof(m.Resumed(proof=proof_for_resume(key, second)))
    session.resumed(13.0)
    session.check_proof(m.AllFinished())


@pytest.mark.parametrize(
    "refusal",
    ["the scheduler of job 'a' does not know this rank 1", "rank 1 is out of the job since view 3: x"],
)
def test_a_refusal_which_nobody_has_proved_ends_no_node_of_a_job_with_a_key(refusal):
    session = keyed_session(elastic=(1, 2))[0].session
    assert session.connection_lost(refusal, (), 10.0) is None
    assert refusal in str(session.try_reconnect(resume, 40.0)), "but the error of the outage says it"


# ------------------------------------------------------------------------------- dead, busy, never there


def test_it_says_once_after_ten_seconds_where_it_looks_for_a_scheduler(caplog):
    driven = Session(join_timeout_s=300.0)
    for second in range(300):
        assert driven.session.refused("10.0.0.9:9091 refuses connections", float(second)) is None
        if second == 9:
            assert caplog.messages == []
        if second % 10 == 5:
            assert driven.session.connection_lost("no connection for 10 s", (), float(second)) is None
    (line,) = caplog.messages
    assert line.startswith(
        "no answer from the scheduler at 10.0.0.9:9091 (10.0.0.9:9091 refuses connections): is it running, "
        "and is that its address (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
    )
    assert line.endswith("trying for 300 s (NETSTORM_JOIN_TIMEOUT)")
    error = str(driven.session.join_error(300.0))
    assert "the scheduler at 10.0.0.9:9091" in error
    assert "DMLC_PS_ROOT_PORT" in error
    assert "300 s (NETSTORM_JOIN_TIMEOUT)" in error


def test_a_scheduler_at_whose_address_nobody_listens_any_more_has_ended():
    session = Session().join()
    assert session.refused("refused", 10.0) is None  # perhaps a firewall is just loading its rules
    assert session.refused("refused", 10.2) is None
    error = session.refused("refused", 10.6)
    assert isinstance(error, errors.SchedulerLost)
    assert "its process has ended" in str(error)


def test_refusals_far_apart_are_of_different_outages():
    session = Session().join()
    assert [session.refused("refused", float(now)) for now in (10, 20, 30)] == [None] * 3


def test_a_scheduler_that_may_come_back_is_waited_for():
    session = Session().join(resume_s=60.0)
    assert [session.refused("refused", float(now)) for now in (10, 11, 12)] == [None] * 3


def test_a_busy_scheduler_is_named_after_a_while_twice_as_long_and_so_on(caplog):
    session = Session().join()
    for seconds in (10.0, 15.0, 21.0, 30.0, 42.5, 11.0):
        session.busy(seconds)
    assert [line.rsplit("for ")[1] for line in caplog.messages] == ["10 s", "21 s", "42 s", "11 s"]
    assert caplog.messages[0] == ("the scheduler (10.0.0.9:9091): alive, but its Python has not run for 10 s")
