"""Who is lost, and what everybody is told about it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.scheduler.members import BarrierCount, EndedProcesses
from netstorm.scheduler.snapshot import JobPhase, Outcome
from tests.unit.scheduler.driving import Driven, begun, key, running


def test_a_silent_node_is_lost_after_the_timeout_and_all_others_hear_the_last_thing_it_said():
    driven = running(3, heartbeat_timeout_s=10.0)
    driven.say(2, m.RegisterKeys(keys=(key("fc1_weight"),)))
    driven.run(2, beating=(0, 1, 2))
    for round in range(13):
        driven.say(2, m.TopologyRequest(begun=(begun(0, round),)))
    driven.run(0.2)
    driven.say(2, m.Heartbeat())
    driven.forget()
    driven.run(9.9, beating=(0, 1))
    assert driven.machine.phase is JobPhase.RUNNING
    driven.run(0.2, beating=(0, 1))
    for rank in (0, 1):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (2, "lost")
        assert gone.reason == (
            "rank 2 (n2:4000, site2) is lost: no heartbeat for 10.0 s; last heard: round 12 of "
            "key 'fc1_weight', 10.2 s ago"
        )


def test_any_message_is_a_sign_of_life():
    driven = running(1, heartbeat_timeout_s=10.0)
    for number in range(5):
        driven.run(9)
        driven.say(0, m.Barrier(number=number))
    assert driven.machine.phase is JobPhase.RUNNING


def test_what_a_lost_node_waited_for_is_told():
    driven = running(2)
    driven.run(
        3, beating=(0, 1), busy="round 3 of key 'w': 4 of 4 chunks wait for contributions of ranks [0]"
    )
    driven.run(11, beating=(0,))
    assert driven.gone(0).reason.endswith(
        "; it was waiting: round 3 of key 'w': 4 of 4 chunks wait for contributions of ranks [0]"
    )


def test_several_that_fall_silent_together_are_all_named():
    driven = running(4)
    driven.run(11, beating=(3,))
    reason = driven.gone(3).reason
    assert reason.startswith("rank 0 (n0:4000, site0) is lost")
    assert reason.endswith("; also lost: rank 1 (n1:4000, site1), rank 2 (n2:4000, site2)")


def test_a_node_that_was_declared_lost_is_told_too_in_case_it_lives_and_nobody_waits_for_it():
    driven = running(2)
    driven.run(11, beating=(0,))
    assert driven.gone(1).rank == 1
    driven.say(0, m.Leave())
    driven.tick()
    assert driven.machine.outcome == Outcome(1, f"job 'alexnet' has failed: {driven.gone(0).reason}", rank=1)


def test_a_lost_session_is_a_lost_node():
    driven = running(2)
    driven.lose(1, "the connection was lost 10 s ago and has not come back")
    assert driven.gone(0).reason == (
        "rank 1 (n1:4000, site1) is lost: the connection was lost 10 s ago and has not come back; last "
        "heard: it "
        "joined, 0.0 s ago"
    )


# ------------------------------------------------------------------------------------- dead, cut off, busy


def test_a_process_that_has_ended_is_lost_at_once_in_every_job_but_not_one_that_comes_back_in_time():
    driven = running(2, last_word_s=0.3)
    driven.end_connection(1)
    driven.say(1, m.Heartbeat())
    driven.run(5, beating=(0, 1))
    assert driven.machine.phase is JobPhase.RUNNING
    driven.end_connection(1)
    assert driven.machine.phase is JobPhase.RUNNING  # its launcher may know why
    driven.run(0.4, beating=(0,))
    assert driven.gone(0).reason.startswith(
        "rank 1 (n1:4000, site1) is lost: its process has ended: its connections have ended, and n:1 refuses "
        "connections; last heard: it joined, "
    )
    driven.say(0, m.Leave())
    driven.tick()
    assert driven.machine.phase is JobPhase.OVER, "nobody waits for it to leave"


def test_others_that_cannot_connect_to_it_say_so_in_every_job():
    driven = running(3)
    driven.machine.connection_gone(driven.peer_of(2), "reset", driven.now, refused=False)
    driven.say(0, m.Suspect(rank=2, reason="n2:4000 refuses connections", refused=True))
    driven.run(0.4, beating=(0, 1))
    assert "and rank 0 says: n2:4000 refuses connections" in driven.gone(1).reason


def test_a_waiting_node_whose_process_has_ended_loses_its_place_at_once():
    driven = Driven(2)
    driven.join("a")
    driven.end_connection("a")
    assert driven.machine.status_text().endswith("nobody is here yet")


def test_a_busy_rank_is_warned_of_and_not_lost():
    driven = running(2, heartbeat_timeout_s=10.0)
    driven.busy = {1}
    driven.run(45, beating=(0,))
    assert driven.machine.phase is JobPhase.RUNNING
    said = [message.text for message in driven.heard(0, m.Waiting)]
    assert said[0] == "rank 1 (n1:4000, site1): alive, but its Python has not run for 10 s"
    assert len(said) == 3  # after 10, 20 and 40 s
    assert "alive, but its Python has not run for 45 s" in driven.machine.status_text(driven.now)
    snapshot = driven.machine.snapshot(driven.now)
    assert [node.busy_s for node in snapshot.nodes] == [0.0, 45.0]
    driven.say(1, m.Heartbeat())
    driven.busy = set()
    assert "alive, but" not in driven.machine.status_text(driven.now)
    driven.run(8, beating=(0,))
    assert driven.machine.phase is JobPhase.RUNNING
    driven.run(4, beating=(0,))
    assert "is lost: no heartbeat for" in driven.gone(0).reason


def test_a_rank_whose_heartbeats_may_wait_on_the_way_is_not_said_to_be_busy():
    driven = running(2, heartbeat_timeout_s=10.0, wait_timeout_s=60.0)
    driven.busy, driven.late = {1}, True
    driven.run(25, beating=(0,))
    said = [message.text for message in driven.heard(0, m.Waiting)]
    assert said[0].startswith("rank 1 (n1:4000, site1): alive, but nothing has come for 10 s: the link with ")
    assert len(driven.heard(1, m.Probe)) == 1  # which its machine acknowledges
    assert [node.busy_s for node in driven.machine.snapshot(driven.now).nodes] == [0.0, 0.0]
    driven.late = False
    driven.run(20, beating=(0,))
    assert "alive, but its Python has not run for 40 s" in driven.heard(0, m.Waiting)[-1].text
    driven.run(20, beating=(0,))
    assert "(NETSTORM_WAIT_TIMEOUT)" in driven.gone(0).reason


def test_a_scheduler_that_is_late_asks_before_it_takes_a_silent_rank_for_lost():
    driven = running(2, heartbeat_timeout_s=10.0)
    driven.busy = {1}
    for _ in range(3):
        driven.say(0, m.Heartbeat())
        driven.now += 11.0
        driven.tick()
    assert driven.machine.phase is JobPhase.RUNNING
    driven.busy = set()
    driven.say(0, m.Heartbeat())
    driven.now += 11.0
    driven.tick()
    assert driven.machine.phase is JobPhase.RUNNING  # nobody could have answered yet
    driven.run(2, beating=(0,))
    assert "rank 1 (n1:4000, site1) is lost: no heartbeat for" in driven.gone(0).reason


def test_a_busy_rank_is_lost_after_the_wait_time_out():
    driven = running(2, heartbeat_timeout_s=10.0, wait_timeout_s=60.0)
    driven.busy = {1}
    driven.run(62, beating=(0,))
    reason = driven.gone(0).reason
    assert (
        "rank 1 (n1:4000, site1): alive, but its Python has not run for 60 s (NETSTORM_WAIT_TIMEOUT)"
        in reason
    )


def test_a_busy_node_keeps_its_place_before_the_job_begins():
    driven = Driven(2, heartbeat_timeout_s=10.0)
    driven.join("a")
    for _ in range(40):
        driven.run(1)
        if driven.inquired:
            driven.machine.peer_busy(driven.peers["a"], 9.0, driven.now)
            driven.inquired.clear()
    driven.join("b")
    assert driven.machine.phase is JobPhase.RUNNING


def test_who_takes_a_running_rank_for_busy_is_told():
    driven = running(3)
    driven.run(5, beating=(0, 1))
    driven.forget()
    driven.say(0, m.Suspect(rank=1, reason="it has not answered", busy=True))
    driven.say(0, m.Suspect(rank=2, reason="it has not answered", busy=True))
    assert driven.heard(0, m.Alive) == [m.Alive(rank=1)]


def test_what_a_rank_says_after_it_was_busy_is_what_proves_its_links_broken():
    driven = running(3)
    driven.busy = {2}
    driven.run(12, beating=(0, 1))
    driven.say(0, m.Suspect(rank=2, reason="no connection for 10 s"))
    driven.run(10, beating=(0, 1))
    driven.busy = set()
    driven.say(2, m.Heartbeat())
    driven.run(1, beating=(0, 1, 2))
    assert driven.machine.failed_links == ()
    driven.say(0, m.LinkRestored(rank=2))
    driven.run(5, beating=(0, 1, 2))
    assert driven.machine.failed_links == ()


def test_a_rank_whose_heartbeats_are_overdue_is_not_called_busy_yet():
    driven = running(2, heartbeat_timeout_s=10.0)
    driven.busy = {1}
    driven.run(9.8, beating=(0,))
    assert driven.inquired
    assert "alive, but" not in driven.machine.status_text(driven.now)


def test_if_the_job_goes_on_without_a_silent_rank_the_next_one_is_found_at_once():
    driven = running(3, heartbeat_timeout_s=10.0)
    job: Any = driven.machine.job
    liveness, now = job.members.liveness, driven.now
    liveness.heard(2, now + 9.0)
    liveness.overdue(now + 9.5)
    assert liveness.check(now + 11.0).rank == 0
    liveness.stop_watching(0)
    assert liveness.check(now + 11.0).rank == 1
    liveness.stop_watching(1)
    assert liveness.check(now + 11.0) is None


def test_what_a_rank_has_said_of_a_link_is_forgotten_with_it():
    driven = running(3)
    job: Any = driven.machine.job
    liveness, now = job.members.liveness, driven.now
    liveness.suspect(0, 1, "no connection", now)
    liveness.suspect(2, 1, "no connection", now)
    liveness.stop_watching(0)
    for second in range(1, 9):
        liveness.heard(1, now + second)
    assert [suspicion.by for suspicion in liveness.pop_link_failures()] == [2]


# ---------------------------------------------------------------------------------------------- suspicions


def test_a_suspected_node_whose_heartbeats_go_on_means_a_failed_link_and_both_ends_are_named():
    driven = running(2)
    driven.run(1, beating=(0, 1))
    driven.say(0, m.Suspect(rank=1, reason="no connection for 10 s"))
    driven.forget()
    driven.run(3.5, beating=(0, 1))
    for rank in range(2):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (1, "lost")
        assert gone.reason.startswith(
            "the link from rank 0 (n0:4000, site0) to rank 1 (n1:4000, site1) cannot be re-established (no "
            "connection for 10 s); both nodes are alive (rank 1 was heard "
        )


def test_a_failed_link_that_others_can_go_around_is_told_with_the_way():
    driven = running(3)
    driven.say(0, m.Suspect(rank=2, reason="no connection for 10 s"))
    driven.forget()
    driven.run(3.5, beating=(0, 1, 2))
    way = m.FailedLink(source=0, target=2, way=(0, 1, 2))
    for rank in range(3):
        assert driven.heard(rank, m.FailedLinks) == [m.FailedLinks(links=(way,))]
    assert driven.machine.phase is JobPhase.RUNNING
    driven.say(0, m.LinkRestored(rank=2))
    assert driven.heard(1, m.FailedLinks) == [m.FailedLinks(links=())]


def test_policies_that_follow_measurements_are_formed_without_a_failed_link():
    driven = running(3, measures=True)
    driven.say(0, m.Suspect(rank=2, reason="no connection for 10 s"))
    for _ in range(4):
        driven.now += 1.0
        for rank in range(3):
            driven.say(rank, m.Heartbeat())
        driven.tick()
    job: Any = driven.machine.job
    links = job.awareness.collector.estimate(driven.now).network.links
    pairs = {(link.source, link.target) for link in links}
    assert (0, 2) not in pairs
    assert (2, 1) in pairs


def test_a_link_that_works_again_before_anything_is_decided_has_not_failed():
    driven = running(3)
    driven.say(0, m.Suspect(rank=2, reason="no connection for 10 s"))
    driven.say(0, m.LinkRestored(rank=2))
    driven.run(10, beating=(0, 1, 2))
    assert driven.machine.failed_links == ()
    assert driven.heard(1, m.FailedLinks) == []


def test_a_suspected_node_that_stays_silent_is_lost_after_its_remaining_time():
    driven = running(3, heartbeat_timeout_s=10.0)
    driven.run(4, beating=(0, 1))
    driven.say(0, m.Suspect(rank=2, reason="no connection"))
    driven.run(5.5, beating=(0, 1))
    assert driven.machine.phase is JobPhase.RUNNING
    driven.run(1, beating=(0, 1))
    reason = driven.gone(1).reason
    assert reason.startswith("rank 2 (n2:4000, site2) is lost: no heartbeat for 10.0 s")
    assert reason.endswith("rank 0 says: no connection")


def test_one_heartbeat_that_was_on_its_way_does_not_prove_a_suspected_node_alive():
    driven = running(2)
    driven.say(0, m.Suspect(rank=1, reason="no connection"))
    driven.run(0.1)
    driven.say(1, m.Heartbeat())
    driven.run(8, beating=(0,))
    assert driven.machine.phase is JobPhase.RUNNING


def test_repeating_a_suspicion_does_not_put_off_the_decision():
    driven = running(2)
    for _ in range(4):
        driven.say(0, m.Suspect(rank=1, reason="no connection"))
        driven.run(1, beating=(0, 1))
    assert driven.machine.phase is JobPhase.FAILED


@pytest.mark.parametrize("target", [0, 2, -1])
def test_a_suspicion_of_oneself_or_of_nobody_is_a_violation(target):
    driven = running(2)
    with pytest.raises(ProtocolViolation, match=f"rank 0 suspects rank {target}"):
        driven.say(0, m.Suspect(rank=target, reason=""))
    with pytest.raises(ProtocolViolation, match=f"rank 0 reaches rank {target} again"):
        driven.say(0, m.LinkRestored(rank=target))


# -------------------------------------------------------------------------------------------- status lines


def test_the_log_says_now_and_then_what_nodes_wait_for(caplog):
    caplog.set_level("INFO", "netstorm.scheduler")
    driven = running(2)
    driven.run(31, beating=(0, 1), busy="barrier 0")
    assert (
        "job 'alexnet': 2 nodes, 0 keys, policy version 1, 0 finished; waiting: rank 0: barrier 0, rank "
        "1: barrier 0"
    ) in caplog.messages


def test_heartbeats_of_strangers_are_ignored():
    driven = Driven(2)
    driven.hello("a")
    driven.say("a", m.Heartbeat(busy="x"))
    assert driven.sent == {}


# ----------------------------------------------------------- the n-th barrier of every rank is the same one


def test_a_barrier_is_reached_when_all_have_come_of_whom_some_may_be_several_ahead_or_have_finished():
    driven = running(3)
    for number in range(2):
        driven.say(0, m.Barrier(number=number))
    driven.say(0, m.Finished(last_rounds={}))
    driven.say(2, m.Barrier(number=0))
    driven.run(1, beating=(0, 1, 2))
    assert not any(driven.heard(rank, m.BarrierReached) for rank in range(3))
    driven.say(1, m.Barrier(number=0))
    assert [driven.heard(rank) for rank in range(3)] == [[m.BarrierReached(number=0)]] * 3, "and no noise"
    for rank in (1, 2):
        driven.say(rank, m.Barrier(number=1))
    assert driven.heard(0) == [m.BarrierReached(number=1)]


def test_who_has_just_come_to_a_barrier_is_told_nothing():
    driven = running(2)
    driven.run(2, beating=(0, 1))
    driven.say(0, m.Barrier(number=0))
    driven.run(2, beating=(0, 1))
    assert driven.heard(0, m.Waiting) == []


def test_nobody_waits_at_a_barrier_that_was_reached_before_the_last_one_came():
    barriers = BarrierCount(2)
    barriers.exclude(1)
    assert barriers.arrive(0, 0, 1.0) == [0]
    assert barriers.arrive(1, 0, 2.0) == []
    assert barriers.missing() == []


def test_those_who_wait_are_told_for_whom_and_nobody_else_is():
    driven = running(3)
    driven.say(0, m.Barrier(number=0))
    driven.run(10, beating=(0, 1, 2))
    said = driven.heard(0, m.Waiting)
    assert said[0].text == (
        "barrier 0: waiting for 2 of 3 nodes: rank 1 (n1:4000, site1), rank 2 (n2:4000, site2)"
    )
    assert len(said) == 3
    assert driven.heard(1) == driven.heard(2) == []


def test_the_wait_timeout_counts_from_the_first_at_each_barrier_ends_the_job_and_names_the_missing():
    driven = running(2, wait_timeout_s=60.0)
    for number in range(3):
        driven.say(0, m.Barrier(number=number))
        driven.run(59, beating=(0, 1))
        if number < 2:
            driven.say(1, m.Barrier(number=number))
    driven.forget()
    driven.run(5, beating=(0, 1))
    for rank in (0, 1):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (-1, "timeout")
        assert gone.reason == (
            "waited 60 s (NETSTORM_WAIT_TIMEOUT) at barrier 2: waiting for 1 of 2 nodes: "
            "rank 1 (n1:4000, site1)"
        )


@pytest.mark.parametrize("order", [("barrier", "finish"), ("finish", "barrier")])
def test_a_barrier_that_a_finished_rank_never_came_to_ends_the_job(order):
    driven = running(3)
    for what in order:
        if what == "barrier":
            driven.say(0, m.Barrier(number=0))
        else:
            driven.say(2, m.Finished(last_rounds={}))
    gone = driven.gone(1)
    assert gone.kind == "disagreement"
    assert gone.reason == (
        "rank 0 waits at barrier 0, but rank 2 has finished without coming to it: every rank must come "
        "to every barrier"
    )


@pytest.mark.parametrize("number", [1, -1, 10**9])
def test_a_barrier_out_of_order_is_a_violation_and_nobody_runs_ahead_without_bound(number):
    driven = running(2)
    with pytest.raises(ProtocolViolation, match=f"rank 1 comes to barrier {number}; its next one is 0"):
        driven.say(1, m.Barrier(number=number))
    for ahead in range(64):
        driven.say(0, m.Barrier(number=ahead))
    with pytest.raises(ProtocolViolation, match="at most 64 may be outstanding"):
        driven.say(0, m.Barrier(number=64))


# ---------------------------------------------------------------------------- jobs that nodes leave and join


def test_nobody_waits_for_places_that_no_node_has_nor_for_ranks_that_have_left():
    driven = running(3, elastic=(1, 3))
    driven.say(0, m.Barrier(number=0))
    driven.say(1, m.Barrier(number=0))
    assert driven.heard(0, m.BarrierReached) == []
    driven.say(2, m.Leave())
    assert [one.number for one in driven.heard(0, m.BarrierReached)] == [0]


def test_a_rank_that_is_not_waited_for_begins_with_any_barrier_and_may_be_behind():
    barriers = BarrierCount(3)
    barriers.exclude(2)
    for number in range(3):
        barriers.arrive(0, number, 1.0)
        barriers.arrive(1, number, 1.0)
    assert barriers.arrive(2, 1, 2.0) == []
    assert barriers.is_reached(1)
    assert barriers.arrive(2, 2, 2.0) == []
    assert barriers.arrive(2, 3, 2.0) == []
    assert barriers.waiting() == [2]
    barriers.arrive(0, 3, 3.0)
    assert barriers.arrive(1, 3, 3.0) == [3]
    assert barriers.has_arrived(2, 3)


def test_a_rank_that_is_included_is_waited_for_from_the_oldest_barrier_on_and_may_still_be_behind():
    barriers = BarrierCount(3)
    barriers.exclude(2)
    for number in range(3):
        barriers.arrive(0, number, 1.0)
        barriers.arrive(1, number, 1.0)
    barriers.include(2)
    assert barriers.arrive(2, 1, 2.0) == []
    barriers.arrive(0, 3, 3.0)
    assert barriers.arrive(1, 3, 3.0) == []
    assert barriers.missing() == [2]
    assert barriers.arrive(2, 3, 4.0) == [3]


def test_another_process_at_the_place_of_one_that_has_left_begins_anew():
    barriers = BarrierCount(3)
    barriers.arrive(0, 0, 1.0)
    barriers.arrive(2, 0, 1.0)
    barriers.remove(2)
    assert barriers.arrive(2, 0, 2.0) == []
    assert barriers.arrive(1, 0, 2.0) == [0]


def test_after_a_restart_newcomers_alone_go_on_behind_the_barriers_that_all_others_had_reached():
    """Rank 0 has left, and nothing tells how far rank 1 is, which has its state."""
    barriers = BarrierCount(2)
    for rank in range(2):
        barriers.exclude(rank)
    barriers.restore([0, 0], 1.0, reached=3)
    barriers.include(1)
    assert barriers.arrive(1, 2, 2.0) == [], "it is behind"
    assert barriers.is_reached(2)
    assert barriers.arrive(1, 3, 2.0) == [3]


def test_after_a_restart_a_rank_may_say_again_where_it_has_been():
    barriers = BarrierCount(2)
    barriers.restore([2, 1], 1.0)
    assert barriers.arrive(0, 1, 2.0) == []
    assert barriers.waiting() == [0]
    assert barriers.arrive(1, 1, 3.0) == [1]


# ---------------------------- a process has ended if its connection is gone and nobody listens where it was


TEXT = "its process has ended: its connections have ended, and rank 0 says: refused"


def test_both_signs_together_are_certain_in_either_order():
    one, other = EndedProcesses(0.0), EndedProcesses(0.0)
    one.disconnected(2, 5.0)
    assert one.take(5.0) is None
    one.refused(2, "rank 0 says: refused", 6.0)
    assert one.take(6.0) == (2, TEXT)
    other.refused(2, "rank 0 says: refused", 5.0)
    assert other.take(5.0) is None
    other.disconnected(2, 6.0)
    assert other.take(6.0) == (2, TEXT)


def test_whoever_knows_why_has_a_moment_to_say_so():
    ended = EndedProcesses(0.3)
    ended.disconnected(1, 5.0)
    assert ended.next_due() == math.inf
    ended.refused(1, "refused", 5.1)
    ended.refused(1, "refused again", 5.3)
    assert ended.next_due() == 5.1 + 0.3
    assert ended.take(5.3) is None
    assert ended.take(5.4) is not None
    assert ended.take(5.4) is None


def test_signs_of_different_ranks_mean_nothing_together():
    ended = EndedProcesses(0.0)
    ended.disconnected(1, 5.0)
    ended.refused(2, "refused", 5.0)
    assert ended.take(9.0) is None


def test_a_sign_of_life_makes_both_worthless():
    ended = EndedProcesses(0.3)
    ended.disconnected(1, 5.0)
    ended.heard(1)
    ended.refused(1, "refused", 5.0)
    assert ended.take(9.0) is None
    ended.heard(1)
    ended.disconnected(1, 9.0)
    assert ended.take(10.0) is None
    ended.refused(1, "refused", 10.0)
    ended.heard(1)
    assert ended.take(11.0) is None
