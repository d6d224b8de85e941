"""A job ends well when all have finished and left; or badly, and then everybody hears why, once."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from netstorm.errors import NodeLost, ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.pslite.machine import Admit
from netstorm.pslite.proofs import SchedulerSecret, proof_for_resume
from netstorm.scheduler.snapshot import JobPhase, Outcome
from tests.unit.scheduler.driving import Driven, begun, key, running


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


def test_a_session_that_ends_after_all_have_finished_counts_as_left():
    driven = running(2)
    finish(driven, 0, 1)
    driven.lose(0)
    driven.lose(1)
    driven.tick()
    assert driven.machine.outcome is not None
    assert driven.machine.outcome.exit_code == 0


def test_a_node_that_vanishes_after_all_have_finished_does_not_keep_the_scheduler():
    driven = running(2, heartbeat_timeout_s=10.0)
    finish(driven, 0, 1)
    driven.say(0, m.Leave())
    driven.run(10.1)
    assert driven.machine.outcome is not None
    assert driven.machine.outcome.exit_code == 0


@pytest.mark.parametrize("last_word", [m.Failed(reason="interrupted by SIGTERM"), m.Leave()])
def test_what_goes_wrong_after_all_have_finished_is_no_failure_of_the_job(last_word):
    driven = running(2)
    finish(driven, 0, 1)
    driven.say(0, last_word)
    driven.say(1, m.Leave())
    driven.tick()
    assert driven.machine.outcome is not None
    assert driven.machine.outcome.exit_code == 0


def test_a_failed_node_is_reported_to_all_others_with_its_reason():
    driven = running(3)
    driven.say(2, m.Failed(reason="ValueError: no data in shard 2"))
    for rank in (0, 1):
        assert driven.gone(rank) == m.PeerGone(
            rank=2, kind="failed", reason="rank 2 (n2:4000, site2) failed: ValueError: no data in shard 2"
        )
    assert driven.heard(2) == []


def test_the_scheduler_of_a_failed_job_ends_with_1_as_soon_as_all_have_left():
    driven = running(3)
    driven.say(2, m.Failed(reason="boom"))
    driven.say(0, m.Leave())
    driven.say(1, m.Failed(reason="boom too"))
    driven.tick()
    assert driven.machine.outcome == Outcome(
        1, "job 'alexnet' has failed: rank 2 (n2:4000, site2) failed: boom", rank=2
    )


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


def test_only_the_first_reason_is_told():
    driven = running(3)
    driven.say(2, m.Failed(reason="first"))
    driven.say(1, m.Failed(reason="second"))
    driven.run(11)
    assert driven.gone(0).reason.endswith("first")


def test_after_a_failure_requests_are_not_answered():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(key("w"),)))
    driven.say(1, m.Failed(reason="boom"))
    driven.forget()
    driven.say(0, m.TopologyRequest(begun=(begun(0, 0),)))
    driven.say(0, m.Barrier(number=0))
    driven.say(0, m.Heartbeat())
    assert driven.sent == {}


def test_a_stopped_scheduler_tells_all_nodes():
    driven = running(2)
    driven.stop("the scheduler was stopped by SIGTERM")
    for rank in (0, 1):
        assert driven.gone(rank) == m.PeerGone(
            rank=-1, kind="stopped", reason="the scheduler was stopped by SIGTERM"
        )


def test_a_scheduler_stopped_before_all_are_here_tells_those_who_wait():
    driven = Driven(3)
    driven.join("a")
    driven.stop("the scheduler was stopped by SIGINT")
    assert driven.gone("a").kind == "stopped"
    driven.say("a", m.Leave())
    driven.tick()
    assert driven.machine.phase is JobPhase.OVER


def test_a_scheduler_stopped_while_it_is_alone_ends_at_once():
    driven = Driven(3)
    driven.stop()
    driven.tick()
    assert driven.machine.phase is JobPhase.OVER


def test_a_scheduler_stopped_while_nodes_leave_a_finished_job_ends_well():
    driven = running(2)
    finish(driven, 0, 1)
    driven.stop()
    driven.tick()
    assert driven.machine.outcome is not None
    assert driven.machine.outcome.exit_code == 0


def test_an_aborted_scheduler_says_what_has_happened_to_it():
    driven = running(2)
    driven.machine.abort(RuntimeError("socket gone"), driven.now)
    driven._take()
    assert driven.gone(0).reason == (
        "the scheduler has stopped: its I/O thread has died: RuntimeError('socket gone')"
    )
    other = running(2)
    other.machine.abort(NodeLost("plain words"), other.now)
    other._take()
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
