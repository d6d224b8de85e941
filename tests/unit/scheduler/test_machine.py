"""A job ends well when all have finished and left; or badly, and then everybody hears why, once."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import NodeLost, NotAuthorised, PeerError, ProtocolViolation
from netstorm.lab.testing.decoders import example, message_classes
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, may_send
from netstorm.protocol.frames import SCHEDULER, decode_body, encode_body
from netstorm.pslite.machine import Admit, Refuse
from netstorm.pslite.proofs import SchedulerSecret, proof_for_resume
from netstorm.scheduler.snapshot import JobPhase, Outcome
from tests.unit.scheduler.driving import RELEASE, Driven, begun, key, running, star


def finish(driven: Driven, *ranks: int) -> None:
    for rank in ranks:
        driven.say(rank, m.Finished(last_rounds={0: rank}))


def test_a_job_runs_no_line_of_what_it_does_not_use():
    lines: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        lines.add((Path(frame.f_code.co_filename).name, type(frame.f_locals.get("self")).__name__))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        driven = running(2)
        for rank in (0, 1):
            driven.say(rank, m.RegisterKeys(keys=(key("w"),)))
            driven.say(rank, m.TopologyRequest(begun=(begun(0, 0),)))
            driven.say(rank, m.Barrier(number=0))
        driven.run(5.0, beating=(0, 1))
        finish(driven, 0, 1)
        for rank in (0, 1):
            driven.say(rank, m.Leave())
        driven.tick()
    finally:
        sys.setprofile(before)
    assert driven.machine.outcome is not None
    assert ("job.py", "Job") in lines
    optional = {"views.py", "launched_ranks.py", "several_jobs.py", "standby.py", "policy_former.py"}
    assert not {file for file, _ in lines} & optional
    assert not {name for _, name in lines} & {"StateServer", "Awareness", "Collector"}


def test_the_others_are_told_who_has_finished_and_after_which_rounds():
    driven = running(3)
    driven.say(1, m.Finished(last_rounds={0: 8, 1: 3}))
    assert driven.heard(0) == driven.heard(2) == [m.PeerFinished(rank=1, last_rounds={0: 8, 1: 3})]
    assert driven.heard(1) == []


def test_when_all_have_finished_all_may_go_and_the_scheduler_ends_well_when_all_have_left():
    driven = running(2)
    ended: list[Outcome] = []
    driven.machine.on_over = ended.append
    finish(driven, 0, 1)
    for rank in (0, 1):
        assert driven.heard(rank, m.AllFinished) == [m.AllFinished()]
    driven.say(0, m.Leave())
    driven.tick()
    assert driven.machine.phase is JobPhase.FINISHED
    driven.say(1, m.Leave())
    assert driven.machine.next_tick() <= driven.now
    driven.tick()
    said = "2 nodes, 0 keys, so nobody has summed anything over NetStorm"
    assert ended == [Outcome(0, f"job 'alexnet' has ended well: {said}")]
    assert driven.machine.next_tick() == math.inf
    assert driven.disconnected == [driven.peers["n0"], driven.peers["n1"]]


@pytest.mark.parametrize(
    "last", [m.Failed(reason="interrupted by SIGTERM"), m.Leave(), "lost", "silent", "stop"]
)
def test_what_happens_after_all_have_finished_is_no_failure_of_the_job(last):
    driven = running(2, heartbeat_timeout_s=10.0)
    finish(driven, 0, 1)
    if last == "stop":
        driven.stop()
    else:
        driven.say(1, m.Leave())
        if last == "lost":
            driven.lose(0)
        elif last != "silent":
            driven.say(0, last)
        driven.run(10.1 if last == "silent" else 0.0)
    driven.tick()
    assert driven.exit_code() == 0


def test_a_failed_node_is_reported_to_all_others_and_the_scheduler_ends_with_1_once_all_have_left():
    driven = running(3)
    driven.say(2, m.Failed(reason="boom"))
    driven.say(0, m.Leave())
    driven.say(1, m.Failed(reason="boom too"))
    driven.tick()
    text = "rank 2 (n2:4000, site2) failed: boom"
    assert driven.machine.outcome == Outcome(1, f"job 'alexnet' has failed: {text}", rank=2)
    for rank in (0, 1):
        assert driven.gone(rank) == m.PeerGone(rank=2, kind="failed", reason=text), "the first reason alone"
    assert driven.heard(2) == []


def test_the_scheduler_of_a_failed_job_does_not_wait_for_ever():
    driven = running(3)
    driven.say(2, m.Failed(reason="boom"))
    driven.run(4.5)
    assert driven.machine.phase is JobPhase.FAILED
    driven.run(1)
    assert driven.machine.phase is JobPhase.OVER


@pytest.mark.parametrize("finished", [False, True])
def test_a_node_that_leaves_before_all_have_finished_is_lost(finished):
    driven = running(3)
    if finished:
        finish(driven, 1)
    driven.forget()
    driven.say(1, m.Leave())
    gone = driven.gone(0)
    assert (gone.rank, gone.kind) == (1, "lost")
    assert gone.reason == (
        "rank 1 (n1:4000, site1) is lost: it left before all had finished; last heard: "
        + ("it finished" if finished else "it joined")
        + ", 0.0 s ago"
    )


def test_after_a_failure_requests_are_not_answered():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(key("w"),)))
    driven.say(1, m.Failed(reason="boom"))
    driven.forget()
    driven.say(0, m.TopologyRequest(begun=(begun(0, 0),)))
    driven.say(0, m.Barrier(number=0))
    driven.say(0, m.Heartbeat())
    assert driven.sent == {}


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_a_stopped_scheduler_tells_all_nodes_that_are_here_and_ends_once_they_have_left(joined):
    driven = Driven(2)
    names = ["a", "b"][:joined]
    for name in names:
        driven.join(name)
    driven.stop("the scheduler was stopped by SIGTERM")
    for name in names:
        assert driven.gone(name) == m.PeerGone(
            rank=-1, kind="stopped", reason="the scheduler was stopped by SIGTERM"
        )
        driven.say(name, m.Leave())
    driven.tick()
    assert driven.machine.phase is JobPhase.OVER


def test_an_aborted_scheduler_says_what_has_happened_to_it():
    driven = running(2)
    driven.machine.abort(RuntimeError("socket gone"), driven.now)
    driven.take()
    assert driven.gone(0).reason == (
        "the scheduler has stopped: its I/O thread has died: RuntimeError('socket gone')"
    )
    other = running(2)
    other.machine.abort(NodeLost("plain words"), other.now)
    other.take()
    assert other.gone(0).reason == "the scheduler has stopped: plain words"


def test_a_rank_cannot_finish_twice():
    driven = running(2)
    finish(driven, 0)
    with pytest.raises(ProtocolViolation, match="rank 0 finishes a second time"):
        finish(driven, 0)


@pytest.mark.parametrize(
    "message", [m.Waiting(text=""), m.AllFinished(), m.PeerGone(rank=0, kind="lost", reason="")]
)
def test_what_only_the_scheduler_says_is_a_violation_when_a_rank_says_it(message):
    driven = running(2)
    with pytest.raises(ProtocolViolation, match=f"rank 1 sent a {type(message).__name__}"):
        driven.say(1, message)
    assert driven.machine.phase is JobPhase.RUNNING


SECRET = SchedulerSecret(b"s" * 32)


def keyed(ranks: int, **options: Any) -> Driven:
    """Return a scheduler of a job with a key, whose nodes have all joined."""
    driven = Driven(ranks, secret=SECRET, **options)
    for rank in range(ranks):
        hello = m.Hello(job="alexnet", sender=-1, incarnation=50 + rank, receiver=-1, session=1, received=0)
        admitted = driven.machine.admit(hello, f"key {rank}")
        assert isinstance(admitted, Admit)
        driven.peers[f"n{rank}"] = admitted.peer
    for rank in range(ranks):
        driven.join(f"n{rank}", rank)
    return driven


def resume(number: int) -> m.Resume:
    return m.Resume(keys=(), begun=(), barriers=(), number=number)


def test_each_node_of_a_job_with_a_key_can_tell_that_this_is_its_scheduler():
    driven = keyed(2)
    first, second = (driven.heard(rank, m.Joined)[0].proof_key.key for rank in (0, 1))
    assert len({first, second, b""}) == 3
    driven.say(1, resume(7))
    assert driven.heard(1, m.Resumed) == [m.Resumed(proof=proof_for_resume(second, 7))]


def test_a_node_that_comes_back_is_told_with_a_proof_that_the_job_is_over_or_has_failed():
    driven = keyed(2)
    key = driven.heard(1, m.Joined)[0].proof_key.key
    driven.say(0, m.Failed(reason="out of memory"))
    driven.forget()
    driven.say(1, resume(1))
    assert driven.gone(1).proof == proof_for_resume(key, 1)
    driven = keyed(2)
    key = driven.heard(1, m.Joined)[0].proof_key.key
    finish(driven, 0, 1)
    driven.forget()
    driven.say(1, resume(2))
    assert driven.heard(1) == [m.Resumed(proof=proof_for_resume(key, 2)), m.AllFinished()]


def test_a_process_that_is_out_of_the_job_is_told_so_with_a_proof():
    driven = keyed(3, elastic=(1, 3))
    key = driven.heard(2, m.Joined)[0].proof_key.key
    peer = driven.peers["n2"]
    driven.lose(2)
    driven.forget()
    hello = m.Hello(job="alexnet", sender=2, incarnation=52, receiver=-1, session=2, received=0)
    assert driven.machine.admit(hello, "key 2") == Admit(peer)
    driven.say("n2", resume(4))
    gone = driven.gone("n2")
    assert (gone.kind, gone.proof) == ("removed", proof_for_resume(key, 4))


def test_nodes_of_a_job_without_a_key_get_none_and_ask_for_none():
    driven = running(2, secret=SchedulerSecret())
    driven.say(0, resume(0))
    assert driven.heard(0, m.Resumed) == [m.Resumed()]


# --------------------------------------------------------- what the scheduler refuses for who its sender is


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


# ---------------------------------------------------------------------------------- whatever processes send


numbers = st.one_of(st.integers(-2, 4), st.sampled_from([2**31, 2**63 - 1, -(2**63), 1500]))
texts = st.one_of(st.sampled_from(["", "a", "b", "float32", "int8"]), st.text(max_size=5))
rounds = st.tuples(numbers, numbers, texts).map(lambda args: m.RoundBegun(*args))
shapes = st.lists(numbers, max_size=3).map(tuple)
keys = st.builds(m.KeySpec, numbers, texts, shapes, st.sampled_from(["float32", "int8", "float16", "x", ""]))

messages = st.one_of(
    st.builds(
        m.Join,
        asked_rank=numbers,
        num_workers=st.sampled_from([3, 3, 3, 0, 2**40]),
        host=st.sampled_from(["h0", "h1", "h2", "", "h\n"]),
        port=st.sampled_from([1, 4000, 0, -1, 2**40]),
        site=texts,
        release=st.sampled_from([RELEASE, RELEASE, ""]),
        pid=numbers,
        must_agree=st.dictionaries(st.sampled_from(["CHUNK_SIZE", "?"]), texts, max_size=2),
    ),
    st.builds(m.Heartbeat, busy=texts),
    st.builds(m.RegisterKeys, keys=st.lists(keys, max_size=4).map(tuple)),
    st.builds(m.TopologyRequest, begun=st.lists(rounds, max_size=4).map(tuple)),
    st.builds(m.Barrier, number=numbers),
    st.builds(m.Suspect, rank=numbers, reason=texts),
    st.builds(m.Finished, last_rounds=st.dictionaries(numbers, numbers, max_size=2)),
    st.builds(m.Failed, reason=texts),
    st.just(m.Leave()),
    st.just(m.AllFinished()),
    st.just(m.Waiting(text="")),
    st.just(m.BarrierReached(number=0)),
    st.builds(m.PeerGone, rank=numbers, kind=texts, reason=texts),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["h0", "h1", "h2", "h3"]), messages),
        st.tuples(st.just("time"), st.sampled_from([0.0, 0.5, 3.0, 11.0, 310.0])),
        st.tuples(st.just("lose"), st.sampled_from(["h0", "h1", "h2", "h3"])),
    ),
    max_size=30,
)


def take(driven: Driven, steps: list[Any]) -> None:
    for who, what in steps:
        if who == "time":
            driven.run(what)
        elif who == "lose":
            if what in driven.peers:
                driven.lose(what)
        else:
            if who not in driven.peers:
                assert isinstance(driven.hello(who, incarnation=hash(who) & 0xFFFF), Admit)
            try:
                driven.say(who, what)
            except PeerError as error:
                assert str(error)
        for told in driven.sent.values():
            for message in told:
                assert msgspec.msgpack.decode(encode_body(message)), "what it says can be sent"


@given(steps)
def test_strangers_can_do_nothing_but_join(steps):
    driven = Driven(3)
    take(driven, steps)
    driven.stop()
    driven.run(6.0)
    assert driven.machine.phase is JobPhase.OVER


@given(steps, st.integers(0, 99))
def test_members_can_end_the_job_but_not_the_scheduler(steps, seed):
    driven = running(3)
    driven.peers |= {f"h{rank}": driven.peer_of(rank) for rank in range(3)}
    chance = random.Random(seed)
    for version, step in enumerate(steps, start=2):
        take(driven, [step])
        if chance.random() < 0.2 and driven.machine.phase is JobPhase.RUNNING:
            driven.install(star(3, version=version))
    driven.run(30.0)
    assert driven.machine.phase is JobPhase.OVER, "silence ends every job"
    assert driven.machine.outcome is not None
