"""The other nodes and the scheduler, as one node sees them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm import errors
from netstorm.errors import Closed, ProtocolViolation
from netstorm.kvstore.forms import Collective, Key
from netstorm.kvstore.membership import (
    DriverStatus,
    NodeLocalSteps,
    NodeStatusTracker,
    RecoveringSchedulers,
    Roster,
    SchedulerAddresses,
    SchedulerSession,
    StepsRequest,
    job_end_error,
    time_server_address,
    time_server_rank,
)
from netstorm.kvstore.operations import CollectiveCall, Operation, Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import COLLECTIVE, Element, Reduction, Signature
from netstorm.protocol.frames import UNKNOWN, Peer
from netstorm.protocol.messages import Hello, Member, StepsGranted, StepTimes
from netstorm.pslite.machine import Admit, Call, Connect, NotYet, Refuse, Send
from netstorm.pslite.proofs import Mismatch, SchedulerSecret, proof_for_resume, reason_of_opener
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.jobs import random_policy

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

    def join(self, *, now=0.0, members=(), **more):
        joined = m.Joined(1, members, STAR, heartbeat_interval_s=2, heartbeat_timeout_s=20, **more)
        self.session.start(joined, now)
        self.outbox.take()
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


def test_what_a_node_says_once_is_said_again_to_a_scheduler_that_is_back():
    driven = Session()
    session = driven.join(resume_s=60.0)
    said = [m.CaughtUp(), m.Heartbeat(), m.ReplicaDigest(key=1, round=2, digest=3)]
    undelivered = [Send(peer=Peer(-1), message=message) for message in said]
    assert session.connection_lost("broken pipe", undelivered, 10.0) is None
    driven.outbox.take()
    session.resumed(11.0)
    assert [send.message for send in driven.outbox.take() if isinstance(send, Send)] == [said[0], said[2]]


def test_an_outage_that_lasts_too_long_is_an_error_and_so_is_a_refusal_of_the_rank():
    session = Session().join(resume_s=30.0)
    assert session.connection_lost("broken pipe", (), 10.0) is None
    assert "NETSTORM_SCHEDULER_TIMEOUT" in str(session.try_reconnect(resume, 40.0))
    session = Session().join(resume_s=30.0)
    refusal = "the scheduler of job 'a' does not know this rank 1"
    assert isinstance(session.connection_lost(refusal, (), 10.0), errors.SchedulerLost)


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
    driven.join(elastic=(1, 2))
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
    driven.join(members=(KEYED,), resume_s=30.0, elastic=elastic, proof_key=m.HiddenKey(key))
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


@pytest.mark.parametrize(("resume_s", "times"), [(0.0, (10, 20, 30)), (60.0, (10, 11, 12))])
def test_refusals_far_apart_are_of_different_outages_and_who_may_come_back_is_waited_for(resume_s, times):
    session = Session().join(resume_s=resume_s)
    assert [session.refused("refused", float(now)) for now in times] == [None] * 3


def test_a_busy_scheduler_is_named_after_a_while_twice_as_long_and_so_on(caplog):
    session = Session().join()
    for seconds in (10.0, 15.0, 21.0, 30.0, 42.5, 11.0):
        session.busy(seconds)
    assert [line.rsplit("for ")[1] for line in caplog.messages] == ["10 s", "21 s", "42 s", "11 s"]
    assert caplog.messages[0] == ("the scheduler (10.0.0.9:9091): alive, but its Python has not run for 10 s")
    session.busy(22.0, late=True)
    assert caplog.messages[-1] == (
        "the scheduler (10.0.0.9:9091): alive, but nothing has come for 22 s: the link with it is full or "
        "loses much"
    )


# -------------------------------------------------------- the addresses at which a node looks for a scheduler

FIRST, STANDBY, NEW, OTHER = ("first", 1), ("standby", 1), ("new", 1), ("other", 1)


def tried(addresses, times):
    """Return which addresses are tried, one after the other."""
    found = []
    for _ in range(times):
        found.append(addresses.present)
        addresses.try_next()
    return found


def test_all_that_are_known_are_tried_in_turn():
    addresses = SchedulerAddresses(FIRST, (STANDBY,))
    addresses.remember(NEW)
    assert tried(addresses, 4) == [FIRST, STANDBY, NEW, FIRST]


def test_once_one_has_taken_over_nobody_goes_back_to_those_before_but_for_standbys():
    addresses = SchedulerAddresses(FIRST, (STANDBY,))
    addresses.remember(OTHER)
    addresses.go_over(NEW)
    assert addresses.is_recovering
    addresses.forget_earlier()
    assert tried(addresses, 3) == [NEW, STANDBY, NEW]


def test_in_a_job_that_nodes_may_not_leave_only_those_that_take_over_are_tried():
    addresses = SchedulerAddresses(FIRST, ())
    addresses.go_over(NEW)
    addresses.forget_all_but_recovering()
    assert not addresses.several
    addresses.remember(OTHER)
    assert tried(addresses, 3) == [NEW, OTHER, NEW]


def test_few_are_remembered_and_never_without_the_present_one():
    addresses = SchedulerAddresses(FIRST, ())
    addresses.go_over(NEW)
    for number in range(100):
        addresses.remember((f"host{number}", 1))
        assert addresses.present == NEW
    assert tried(addresses, 5) == [NEW, ("host97", 1), ("host98", 1), ("host99", 1), FIRST]


# -------------------------------------------------------------------- schedulers that would take the job over

MEMBERS = (m.Member(0, "a", 1, "", 10), m.Member(1, "b", 1, "", 11))


class Recovering:
    """Rank 1, which has joined."""

    def __init__(self, elastic=None):
        self.driven = Session()
        self.session = self.driven.join(members=MEMBERS, resume_s=300, elastic=elastic)
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


def scheduler_hello(incarnation=7, sender=-1, receiver=-2):
    return m.Hello(job="j", sender=sender, incarnation=incarnation, receiver=receiver, session=1, received=0)


def test_only_who_has_no_rank_and_asks_for_no_rank_is_such_a_scheduler():
    asks = RecoveringSchedulers.asks
    assert asks(scheduler_hello())
    assert asks(scheduler_hello(receiver=-5))
    assert not asks(scheduler_hello(sender=0))
    assert not asks(scheduler_hello(receiver=1))
    assert not asks(scheduler_hello(receiver=-1))


def test_each_gets_a_number_of_its_own_and_many_do_not_fill_memory():
    recovering = Recovering().recovering
    admitted = [recovering.admit(scheduler_hello(incarnation), 1) for incarnation in (1, 2, 1)]
    assert admitted == [Admit(Peer(-2)), Admit(Peer(-3)), Admit(Peer(-2))]
    assert len({recovering.admit(scheduler_hello(incarnation), 1) for incarnation in range(1000)}) == 8
    assert isinstance(recovering.admit(scheduler_hello(), -1), Refuse)


def test_a_node_does_not_leave_a_scheduler_that_it_has():
    asked = Recovering()
    assert asked.ask(1.0) == (False, "10.0.0.9:9091")
    assert asked.session.try_reconnect(resume, math.inf) is None


def test_a_node_that_has_lost_its_scheduler_comes_at_once():
    asked = Recovering()
    asked.lose(5.0)
    assert asked.ask(6.0) == (True, "new:9091")
    assert asked.connects(6.0) == ["new"]
    assert asked.session.tries_another
    assert asked.ask(7.0) == (True, "new:9091")
    assert asked.connects(7.0) == []
    asked.session.resumed(8.0)
    assert asked.ask(9.0, "other") == (False, "new:9091")


def test_of_two_all_nodes_prefer_the_same_one_and_try_the_other_if_that_does_not_take_over():
    asked = Recovering(elastic=(1, 2))
    asked.lose(5.0)
    assert asked.ask(6.0, "b") == (True, "b:9091")
    assert asked.connects(6.0) == ["b"]
    assert asked.ask(7.0, "c") == (False, "b:9091")
    assert asked.ask(7.0, "a") == (True, "a:9091")
    assert asked.connects(7.0) == ["a"]
    found = [asked.connects(7.0 + 40 * turn) for turn in range(1, 5)]
    assert [host for (host,) in found] == ["10.0.0.9", "b", "c", "a"]


def test_in_a_job_that_nodes_may_not_leave_it_does_not_go_back():
    asked = Recovering()
    asked.lose(5.0)
    asked.ask(6.0, "b")
    assert asked.connects(6.0) == ["b"]
    asked.ask(7.0, "c")
    found = [asked.connects(46.0 + 40 * turn) for turn in range(3)]
    assert [host for (host,) in found] == ["c", "b", "c"]


@pytest.mark.parametrize(("host", "port"), [("", 1), ("a" * 254, 1), ("a", 0), ("a", 65536), ("a", -1)])
def test_an_address_that_is_none_is_refused(host, port):
    asked = Recovering()
    asked.lose(5.0)
    with pytest.raises(ProtocolViolation, match="a scheduler at"):
        asked.ask(6.0, host, port)


# ------------------------------------------------------------------------------------------ who is in the job


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


def test_a_process_that_came_in_a_view_that_was_missed_has_just_come_for_this_node():
    one = roster()
    one.change((member(0), member(1)))
    policy = Policy(version=5, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))
    missed = m.NewView(view=7, policy=policy, members=(member(0), member(1, 99), member(2, 98)), arrivals=())
    assert one.with_all_arrivals(missed).arrivals == (1, 2)
    known = m.NewView(view=7, policy=policy, members=(member(0), member(1)), arrivals=(0,))
    assert one.with_all_arrivals(known).arrivals == (0,)


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


# -------------------------------------------------------------------------------- how a node says it is doing


def test_a_round_takes_from_the_begin_of_its_first_key_to_the_end_of_its_last():
    tracker = NodeStatusTracker(Counters())
    tracker.operation_begun(4, 10.0)
    tracker.operation_begun(4, 11.0)
    tracker.operation_ended(4, 12.0)
    assert tracker.report(12.0).last_round == -1
    tracker.operation_ended(4, 13.5)
    report = tracker.report(20.0)
    assert (report.last_round, report.round_s) == (4, 3.5)


def test_a_key_that_comes_late_in_a_round_makes_it_longer():
    tracker = NodeStatusTracker(Counters())
    for begin, end in ((10.0, 11.0), (12.0, 15.0)):
        tracker.operation_begun(0, begin)
        tracker.operation_ended(0, end)
    assert tracker.report(15.0).round_s == 5.0


def test_a_key_that_is_rounds_behind_does_not_hide_the_newest_round():
    tracker = NodeStatusTracker(Counters())
    for round, begin, end in ((30, 1.0, 2.0), (3, 1.0, 9.0)):
        tracker.operation_begun(round, begin)
        tracker.operation_ended(round, end)
    report = tracker.report(9.0)
    assert (report.last_round, report.round_s) == (30, 1.0)


def test_waiting_is_the_time_with_something_under_way_however_much_it_is():
    tracker = NodeStatusTracker(Counters())
    tracker.operation_begun(0, 1.0)
    tracker.operation_begun(1, 2.0)
    tracker.operation_ended(0, 3.0)
    assert tracker.report(4.0).waited_s == 3.0
    tracker.operation_ended(1, 5.0)
    assert tracker.report(50.0).waited_s == 4.0


def test_what_only_the_driver_knows_is_asked_of_it():
    counters = Counters()
    counters.add("rounds", 7)
    tracker = NodeStatusTracker(counters)
    tracker.sample_driver = lambda now: DriverStatus(
        bytes_sent=int(now), clock_offset=0.05, clock_drift=5e-5, clock_error=0.1
    )
    report = tracker.report(99.0)
    assert (report.rounds, report.bytes_sent) == (7, 99)
    assert (report.clock_offset, report.clock_drift, report.clock_error) == (0.05, 5e-5, 0.1)


# -------------------------------------------------------------------------------- reports to the state server


class StepReports:
    def __init__(self) -> None:
        self.outbox = Outbox()
        self.steps = NodeLocalSteps(self.outbox)
        self.ended: list[tuple[int, Exception | None]] = []

    def report(self, round: int) -> StepsRequest:
        report = StepTimes(training=0, round=round, step_s=1.0, least=1, most=8)
        request = StepsRequest(report=report, done=lambda error: self.ended.append((round, error)))
        self.steps.report(request)
        return request

    def sent(self) -> list[StepTimes]:
        taken = self.outbox.take()
        for instruction in taken:
            if isinstance(instruction, Call):
                instruction.function()
        messages = [instruction.message for instruction in taken if isinstance(instruction, Send)]
        return [message for message in messages if isinstance(message, StepTimes)]


def test_an_answer_completes_the_report_and_a_second_one_changes_nothing():
    asked = StepReports()
    request = asked.report(3)
    assert [report.round for report in asked.sent()] == [3]
    asked.steps.granted(StepsGranted(training=0, round=3, steps=4))
    asked.steps.granted(StepsGranted(training=0, round=3, steps=7))
    asked.steps.granted(StepsGranted(training=0, round=2, steps=7))
    asked.sent()
    assert (request.steps, asked.ended) == (4, [(3, None)])


def test_an_answer_beyond_the_bounds_is_cut():
    asked = StepReports()
    request = asked.report(0)
    asked.steps.granted(StepsGranted(training=0, round=0, steps=1000))
    assert request.steps == 8


def test_the_last_report_is_sent_again_even_if_it_was_answered():
    asked = StepReports()
    asked.report(0)
    asked.steps.granted(StepsGranted(training=0, round=0, steps=1))
    asked.sent()
    asked.steps.report_again()
    assert [report.round for report in asked.sent()] == [0]


def test_what_waits_fails_with_the_job():
    asked = StepReports()
    asked.report(0)
    error = Closed("over")
    asked.steps.fail_all(error)
    asked.sent()
    asked.report(1)
    asked.sent()
    assert asked.ended == [(0, error), (1, error)]


# ------------------------------------------------------------------------------ from whom a node has the time


def test_roots_ask_the_scheduler_and_others_their_parent_in_the_largest_tree():
    chain = Tree.undirected(Rank(0), (-1, 0, 1, 2))
    star = Tree.undirected(Rank(3), (3, 3, 3, -1))
    policy = Policy(version=0, trees=(star, chain), weights=(1, 2))
    assert [time_server_rank(policy, rank) for rank in range(4)] == [None, 0, 1, None]
    members = [Member(rank, f"h{rank}", 9000 + rank, "", rank) for rank in range(4)]
    assert time_server_address(policy, 2, members) == ("h1", 9001)
    assert time_server_address(policy, 3, members) is None
    assert time_server_address(None, -1, ()) is None


@given(st.integers(2, 9), st.integers(0, 2**32))
def test_everybody_has_the_time_from_the_scheduler_in_the_end(nodes, seed):
    policy = random_policy(random.Random(seed), nodes)
    for rank in range(nodes):
        asked, parent = [rank], time_server_rank(policy, rank)
        while parent is not None:
            assert parent not in asked
            asked.append(parent)
            parent = time_server_rank(policy, parent)
