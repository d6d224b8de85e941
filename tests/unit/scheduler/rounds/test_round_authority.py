"""Who may say what of keys and rounds, by what the scheduler has fixed."""

from __future__ import annotations

import math

import pytest

from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.protocol.codecs import COLLECTIVE, ChunkSizes
from netstorm.protocol.messages import (
    CallTimedOut,
    KeySpec,
    Moved,
    ReplicaDigest,
    RoundBegun,
    RoundResults,
    ViewReport,
    WaitingCall,
)
from netstorm.scheduler.rounds import Consistency, KeyRegistry, RoundAuthority
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

NODES = 4


def star(root, version, **fields):
    parents = tuple(-1 if rank == root else root for rank in range(NODES))
    return Policy(version=version, trees=(Tree.undirected(Rank(root), parents),), weights=(1,), **fields)


POLICIES = {
    1: star(0, 1),
    2: star(2, 2, takes_over=True),
    3: star(3, 3, takes_over=True),
    4: star(1, 4),
}


class Job:
    """Key 0 of all ranks in 4 chunks, key 1 of a group of ranks 1 and 2."""

    def __init__(self):
        self.keys = KeyRegistry(ChunkSizes(smallest=4, largest=4, enough=1))
        self.consistency = Consistency(NODES, 1)
        for spec in (
            KeySpec(0, "w", (16,), "float32"),
            KeySpec(0, "some/4096", (4096,), "uint8", COLLECTIVE, (1, 2)),
        ):
            self.keys.register(1, spec)
            self.consistency.add_key(len(self.keys) - 1, spec)
        self.checks = RoundAuthority(self.keys, self.consistency, NODES)

    def moved(self, rank, version=2, moves=(), **fields):
        message = Moved(**{"key": 0, "round": 0, "version": version, "chunks": (0, 1)} | fields)
        self.checks.check_moved(rank, message, moves, POLICIES)
        return message


def test_the_root_of_chunks_may_move_them_to_a_policy_that_takes_over():
    Job().moved(0)


def test_no_other_rank_may_move_them():
    with pytest.raises(NotAuthorised, match=r"rank 1 moves chunk 0 .* its root under policy 1 is rank 0"):
        Job().moved(1)


def test_what_has_moved_once_is_moved_again_by_its_new_root_alone():
    job = Job()
    first = job.moved(0)
    job.moved(2, 3, [first])
    with pytest.raises(NotAuthorised, match="its root under policy 2 is rank 2"):
        job.moved(0, 3, [first])


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 4},
        {"round": 5},
        {"chunks": (4,)},
        {"chunks": (-1,)},
        {"key": 1},
    ],
    ids=str,
)
def test_a_move_that_cannot_be_is_refused_of_the_root_too(wrong):
    with pytest.raises(ProtocolViolation, match="rank 0 moves chunk"):
        Job().moved(0, **wrong)


@pytest.mark.parametrize(("rank", "key", "round"), [(0, 1, 0), (1, 1, 999), (0, 0, -1), (0, 0, 1), (0, 9, 0)])
def test_a_digest_is_of_a_key_of_the_rank_and_of_a_round_that_was_granted(rank, key, round):
    with pytest.raises(ProtocolViolation, match=f"rank {rank} reports"):
        Job().checks.check_digest(rank, ReplicaDigest(key=key, round=round, digest=1))


def test_digests_of_ones_own_keys_are_taken():
    checks = Job().checks
    checks.check_digest(3, ReplicaDigest(key=0, round=0, digest=1))
    checks.check_digest(1, ReplicaDigest(key=1, round=0, digest=1))


def test_only_members_of_a_group_wait_for_its_calls():
    checks = Job().checks
    checks.check_call(2, WaitingCall("some", 0, "all_reduce"))
    checks.check_call(3, WaitingCall("of all", 0, "all_reduce"))
    with pytest.raises(NotAuthorised, match=r"rank 3 waits for call 0 of group 'some', of ranks \[1, 2\]"):
        checks.check_call(3, WaitingCall("some", 0, "all_reduce"))


@pytest.mark.parametrize(
    ("members", "seconds"), [((1, 3), 9.0), ((2, 4), 9.0), ((1, 2), math.nan), ((1, 2), -1.0), ((), 9.0)]
)
def test_only_a_member_of_a_group_of_ranks_says_that_a_call_has_timed_out(members, seconds):
    call = WaitingCall("of all", 0, "all_reduce")
    with pytest.raises(ProtocolViolation, match="rank 2 says"):
        Job().checks.check_timed_out(2, CallTimedOut(call=call, members=members, seconds=seconds))


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (ViewReport(view=1, complete={0: 0, 1: -1}, results=(RoundResults(0, 0, b"\x0f", b"", 4),)), ""),
        (ViewReport(view=1, complete={7: 0}, results=()), "round 0 of key 7"),
        (ViewReport(view=1, complete={0: -9}, results=()), "round -9 of key 0"),
        (ViewReport(view=1, complete={}, results=(), begins={0: 1 << 60}), f"round {1 << 60} of key 0"),
        (
            ViewReport(view=1, complete={}, results=(RoundResults(0, 9999, b"", b"", 4),)),
            "results of round 9999",
        ),
        (ViewReport(view=1, complete={}, results=(RoundResults(0, 0, b"\x1f", b"", 4),)), "results of round"),
    ],
)
def test_a_report_names_known_keys_granted_rounds_and_chunks_that_there_are(report, problem):
    found = Job().checks.report_problem(report)
    assert found.startswith(problem) if problem else not found


def test_a_round_that_nobody_was_granted_has_not_begun():
    job = Job()
    job.consistency.check(3, RoundBegun(0, 0, "sgd"))
    with pytest.raises(ProtocolViolation, match="round 5 of key 0, which no rank was granted"):
        job.consistency.check(3, RoundBegun(0, 5, "sgd"))
