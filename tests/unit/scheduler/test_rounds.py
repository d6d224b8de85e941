"""All ranks run a round of a key under the same policy, whatever the order in which they ask."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from netstorm.errors import NotAuthorised, ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import COLLECTIVE, ChunkSizes, granted_by
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
from netstorm.scheduler.rounds import (
    ROUNDS_AHEAD,
    CallOrder,
    Consistency,
    Drift,
    KeyRegistry,
    ReplicaCheck,
    RoundAuthority,
)
from netstorm.scheduler.snapshot import JobPhase
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.scheduler.driving import Driven, begun, key, running, star

SPEC = m.KeySpec(namespace=0, name="w", shape=(3,), dtype="float32")


def with_key(ranks: int = 2, name: str = "w"):
    driven = running(ranks)
    for rank in range(ranks):
        driven.say(rank, m.RegisterKeys(keys=(key(name),)))
    driven.forget()
    return driven


def ask(driven, rank, *rounds, rule="", key=0):
    driven.say(rank, m.TopologyRequest(begun=tuple(begun(key, round, rule) for round in rounds)))
    answers = driven.heard(rank, m.TopologyAnswer)
    assert len(answers) == 1
    return answers[0].bindings


# ---------------------------------------------------------------------------------------- one rule each


def test_beginning_a_round_grants_the_next_one_and_asking_twice_gets_the_same_answer():
    driven = with_key()
    first = ask(driven, 0, 0)
    assert first == (m.Binding(key=0, from_round=0, version=1, granted=1),) == ask(driven, 0, 0)
    driven.install(star(2, version=7))
    driven.forget()
    assert ask(driven, 0, 0) == first
    driven.say(0, m.RegisterKeys(keys=(key("late"),)))
    assert driven.heard(0)[0].bindings == (m.Binding(1, 0, 7, 0),), "a new key begins under that in force"


def test_a_new_policy_starts_one_round_after_the_highest_granted():
    driven = with_key()
    ask(driven, 0, 0)
    ask(driven, 0, 1)
    driven.install(star(2, version=2))
    driven.forget()
    assert ask(driven, 1, 0) == (m.Binding(0, 0, 1, 2),)
    assert ask(driven, 0, 2) == (m.Binding(0, 0, 1, 3), m.Binding(0, 3, 2, 3))
    assert ask(driven, 1, 1) == (m.Binding(0, 0, 1, 3), m.Binding(0, 3, 2, 3))


def test_keys_move_to_a_new_policy_each_at_its_own_round():
    driven = with_key()
    driven.say(0, m.RegisterKeys(keys=(key("b"),)))
    for round in range(3):
        ask(driven, 0, round, key=0)
    driven.install(star(2, version=2))
    driven.forget()
    driven.say(0, m.TopologyRequest(begun=(begun(0, 3), begun(1, 0))))
    (answer,) = driven.heard(0)
    assert {one.key for one in answer.bindings} == {0, 1}, "a batch is answered in one message"
    assert ask(driven, 0, 1, key=1) == (m.Binding(1, 1, 2, 2),)
    assert ask(driven, 0, 4, key=0) == (m.Binding(0, 4, 2, 5),)


def test_a_policy_that_nobody_was_granted_is_skipped():
    driven = with_key()
    driven.install(star(2, version=2))
    driven.install(star(2, version=3))
    driven.forget()
    assert ask(driven, 0, 0) == (m.Binding(0, 0, 1, 1), m.Binding(0, 1, 3, 1))


def test_everybody_gets_a_new_policy_before_any_binding_names_it():
    driven = with_key(3)
    policy = star(3, version=2, hub=1)
    driven.install(policy)
    for rank in range(3):
        driven.say(rank, m.TopologyRequest(begun=(begun(0, 0),)))
        new, answer = driven.heard(rank)
        assert new == m.NewPolicy(policy=policy)
        assert answer.bindings[-1].version == 2


def test_a_policy_that_is_not_newer_or_does_not_fit_is_a_usage_error():
    driven = with_key()
    with pytest.raises(UsageError, match="version 1 is not newer than version 1"):
        driven.install(star(2, version=1))
    with pytest.raises(UsageError, match="a policy for 3 nodes in a job of 2"):
        driven.install(star(3, version=2))


def test_a_policy_before_all_are_here_is_the_one_that_they_join_with():
    driven = Driven(2)
    driven.install(star(2, version=4))
    driven.join("a")
    driven.join("b")
    assert driven.heard("a")[0].policy.version == 4
    assert driven.machine.policy.version == 4


def test_an_unknown_key_is_a_violation_and_grants_nothing():
    driven = with_key()
    with pytest.raises(ProtocolViolation, match="rank 0 asks about key 5"):
        driven.say(0, m.TopologyRequest(begun=(begun(0, 0), begun(5, 0))))
    driven.install(star(2, version=2))
    driven.forget()
    assert ask(driven, 0, 0) == (m.Binding(0, 0, 1, 1), m.Binding(0, 1, 2, 1))


@pytest.mark.parametrize("round", [-1, ROUNDS_AHEAD])
def test_a_round_out_of_all_bounds_is_a_violation(round):
    consistency = Consistency(2, 1)
    consistency.add_key(0, SPEC)
    with pytest.raises(ProtocolViolation, match=f"has begun round {round} of key 0"):
        consistency.check(0, begun(0, round))


def test_a_round_that_all_have_begun_takes_no_memory_nor_do_policies_that_nobody_can_need():
    consistency = Consistency(2, 1)
    consistency.add_key(0, SPEC)
    for round in range(50):
        consistency.install(2 + round)
        for rank in (0, 1):
            consistency.begun(rank, begun(0, round, "sgd"), 0.0)
    assert len(consistency.versions_in_use()) <= 2


# ---------------------------------------------------------------------------------------- update rules


def test_different_update_rules_for_one_round_end_the_job_and_name_both():
    driven = with_key(4, "fc1_weight")
    ask(driven, 2, 0, rule="SGD lr=0.1")
    ask(driven, 0, 0, rule="SGD lr=0.1")
    driven.say(3, m.TopologyRequest(begun=(begun(0, 0, "SGD lr=0.2"),)))
    for rank in range(4):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (-1, "disagreement")
        assert gone.reason == (
            "round 0 of key 'fc1_weight': rank 2 updates with 'SGD lr=0.1', rank 3 with 'SGD lr=0.2': every "
            "rank must use "
            "the same optimizer and hyper-parameters, and push the same kind of arrays"
        )
    assert driven.machine.phase is JobPhase.FAILED


def test_rules_may_change_from_round_to_round_if_all_ranks_change_them():
    driven = with_key(2)
    for round in range(5):
        for rank in (1, 0):
            ask(driven, rank, round, rule=f"lr={round}")
    assert driven.machine.phase is JobPhase.RUNNING


def test_a_rank_without_a_rule_disagrees_with_one_that_has_it():
    driven = with_key(2)
    ask(driven, 0, 0, rule="Adam")
    driven.say(1, m.TopologyRequest(begun=(begun(0, 0, ""),)))
    assert "rank 0 updates with 'Adam', rank 1 with 'no rule'" in driven.gone(0).reason


# ------------------------------------------------------------------------------------------- properties


class AnyOrder(RuleBasedStateMachine):
    """Ranks register, begin rounds and ask again in any order, while policies come.

    The model is what each rank was told: it runs a round of a key under the version that it was told.
    """

    ranks = 3

    @initialize()
    def start(self):
        self.consistency = Consistency(self.ranks, 1)
        self.version = 1
        self.sent: dict[tuple[int, int], int] = {}
        """(key, round) -> version, as the first rank to know was told."""
        self.known: dict[tuple[int, int], tuple[dict[int, int], int]] = {}
        """(rank, key) -> rows by first round, highest granted: what a node keeps."""
        self.next_round: dict[tuple[int, int], int] = {}

    @rule(rank=st.integers(0, 2), key=st.integers(0, 1))
    def register(self, rank, key):
        self.consistency.add_key(key, SPEC)
        self.learn(rank, key, self.consistency.bindings(key, 0))
        self.next_round.setdefault((rank, key), 0)

    @precondition(lambda self: self.next_round)
    @rule(data=st.data())
    def begin(self, data):
        rank, key = data.draw(st.sampled_from(sorted(self.next_round)))
        round = self.next_round[rank, key]
        slowest = min(self.next_round.get((other, key), 0) for other in range(self.ranks))
        if round > slowest + 3:
            return
        assert self.version_of(rank, key, round) is not None, "a round begins only when its binding is here"
        highest = max(granted for (_, one), (_, granted) in self.known.items() if one == key)
        event = m.RoundBegun(key, round, f"rule {round}")
        self.consistency.check(rank, event)
        assert self.consistency.begun(rank, event, 0.0) is None
        self.learn(rank, key, self.consistency.bindings(key, round))
        self.next_round[rank, key] = round + 1
        assert self.version_of(rank, key, round + 1) is not None
        if round + 1 > highest:
            assert self.version_of(rank, key, round + 1) == self.version, "a new policy applies at once"

    @precondition(lambda self: any(self.next_round.values()))
    @rule(data=st.data())
    def ask_again(self, data):
        rank, key = data.draw(
            st.sampled_from(sorted(pair for pair, round in self.next_round.items() if round))
        )
        round = data.draw(st.integers(max(0, self.next_round[rank, key] - 2), self.next_round[rank, key] - 1))
        event = m.RoundBegun(key, round, f"rule {round}")
        self.consistency.check(rank, event)
        assert self.consistency.begun(rank, event, 0.0) is None
        self.learn(rank, key, self.consistency.bindings(key, round))

    @rule(step=st.integers(1, 3))
    def install(self, step):
        self.version += step
        self.consistency.install(self.version)

    def learn(self, rank, key, bindings):
        rows, granted = self.known.get((rank, key), ({}, -1))
        for binding in bindings:
            assert rows.get(binding.from_round, binding.version) == binding.version, "a row never changes"
            rows[binding.from_round] = binding.version
            granted = max(granted, binding.granted)
        self.known[rank, key] = (rows, granted)
        for round in range(granted + 1):
            version = self.version_of(rank, key, round)
            if version is not None:
                assert self.sent.setdefault((key, round), version) == version, "all ranks are told the same"

    def version_of(self, rank, key, round):
        rows, granted = self.known[rank, key]
        starts = [start for start in rows if start <= round]
        return rows[max(starts)] if starts and round <= granted else None

    @invariant()
    def versions_in_use_cover_what_may_still_be_told(self):
        for (_, number), round in self.next_round.items():
            for binding in self.consistency.bindings(number, round):
                assert binding.version in self.consistency.versions_in_use()

    @invariant()
    def memory_is_bounded(self):
        for number, table in self.consistency.tables.items():
            behind = min(self.next_round.get((rank, number), 0) for rank in range(self.ranks))
            ahead = max(self.next_round.get((rank, number), 0) for rank in range(self.ranks))
            assert len(table.open) <= ahead - behind
            assert len(table.rows) <= ahead - behind + 3


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_every_rank_sees_one_version_for_each_round_in_whole_jobs_too(seed, ranks):
    """Through the whole machine: random interleavings of ranks that train three keys, and of new policies."""
    chance = random.Random(seed)
    driven = running(ranks)
    names = ["a", "b", "c"]
    for rank in range(ranks):
        driven.say(rank, m.RegisterKeys(keys=tuple(map(key, names))))
    driven.forget()
    rounds = {(rank, number): 0 for rank in range(ranks) for number in range(3)}
    seen: dict[tuple[int, int], set[int]] = {}
    have = {rank: {1} for rank in range(ranks)}
    version = 1
    for _ in range(120):
        if chance.random() < 0.1:
            version += 1
            driven.install(star(ranks, version=version, hub=chance.randrange(ranks)))
        rank, number = chance.choice(sorted(rounds))
        if rounds[rank, number] <= min(rounds[other, number] for other in range(ranks)) + 2:
            driven.say(rank, m.TopologyRequest(begun=(begun(number, rounds[rank, number]),)))
            rounds[rank, number] += 1
        for message in driven.heard(rank):
            if isinstance(message, m.NewPolicy):
                have[rank].add(message.policy.version)
                continue
            rows = sorted((one.from_round, one.version, one.granted) for one in message.bindings)
            for (start, bound, granted), following in zip(rows, [*rows[1:], None], strict=True):
                assert bound in have[rank], "a binding names a policy that this rank has"
                end = following[0] if following else granted + 1
                for round in range(start, end):
                    seen.setdefault((number, round), set()).add(bound)
    assert all(len(versions) == 1 for versions in seen.values())
    assert driven.machine.phase is JobPhase.RUNNING


@pytest.mark.parametrize(("round_s", "ahead"), [(0.001, 256), (0.1, 20), (0.5, 4), (3.0, 0)])
def test_the_rounds_of_the_lead_are_granted_in_advance(round_s, ahead):
    found = Consistency(2, 1, lead_s=2.001)
    found.add_key(0, SPEC)
    for round in range(4):
        for rank in (0, 1):
            found.begun(rank, begun(0, round), round * round_s)
    assert found.granted(0) == granted_by(3, found.tables[0].under_way) + ahead
    assert found.install(2) == {0: found.granted(0) + 1}, "what was granted stays as it is"


def test_a_first_round_that_is_reported_at_its_end_shows_no_pace():
    found = Consistency(1, 1, lead_s=1.0)
    found.add_key(0, SPEC)
    for round, at in ((0, 9.0), (1, 9.01), (2, 9.91), (3, 10.81)):
        found.begun(0, begun(0, round), at)
        assert found.granted(0) == granted_by(round, found.tables[0].under_way) + (round >= 2)


def test_reports_of_several_rounds_by_ranks_in_turn_show_the_pace_of_one():
    found = Consistency(2, 1, lead_s=1.0)
    found.add_key(0, SPEC)
    for first in range(0, 200, 10):
        for rank in (0, 1):
            for round in range(first + rank, first + rank + 10):
                found.begun(rank, begun(0, round), (first + 10) * 0.01 + rank * 0.001)
    ahead = found.granted(0) - granted_by(200, found.tables[0].under_way)
    assert 80 <= ahead <= 125, "a second has a hundred of these rounds"


def test_a_request_that_completes_rounds_of_two_policies_is_told_both():
    driven = with_key()
    for round in range(2):
        ask(driven, 0, round)
    driven.install(star(2, version=2))
    for round in (2, 3, 4):
        ask(driven, 0, round)
    driven.say(1, m.TopologyRequest(begun=tuple(begun(0, round) for round in range(5))))
    rows = {(one.from_round, one.version) for one in driven.heard(1, m.TopologyAnswer)[-1].bindings}
    assert rows == {(0, 1), (3, 2)}


def test_a_group_of_some_ranks_has_no_lead():
    found = Consistency(3, 1, lead_s=2.0)
    found.add_key(0, msgspec.structs.replace(SPEC, members=(0, 1)))
    for round in range(4):
        found.begun(0, begun(0, round), round * 0.1)
    assert found.granted(0) == granted_by(3, found.tables[0].under_way)


# ---------------------------------------------------------------------------- jobs that nodes leave and join


def test_who_goes_on_alone_may_have_the_results_of_rounds_that_others_began_and_never_said_so():
    """Rank 0 was granted a lead, and its last reports were lost with it. Rank 1 has its state."""
    found = Consistency(2, 1, lead_s=2.0)
    found.add_key(0, SPEC)
    found.without(1)
    for round in range(4):
        found.begun(0, begun(0, round), round * 0.1)
    last = found.granted(0)
    found.without(0)
    found.with_rank(1, found.install(2))
    found.forget_who_began()
    for round in range(last, last + 2 * ROUNDS_AHEAD):
        found.check(1, begun(0, round))
        found.begun(1, begun(0, round), round * 0.1)
    assert len(found.tables[0].open) <= found.tables[0].under_way


def table(ranks=3):
    """Return the bindings of one key."""
    found = Consistency(ranks, 1)
    found.add_key(0, SPEC)
    return found


def begin(consistency, rank, *rounds):
    for round in rounds:
        assert consistency.begun(rank, begun(0, round), 0.0) is None


def complete(consistency, key=0):
    """Return the last round that nobody has still to begin."""
    return consistency.tables[key].complete


def test_a_rank_that_has_left_is_waited_for_no_more():
    found = table()
    begin(found, 0, 0, 1)
    begin(found, 1, 0, 1)
    assert complete(found) == -1
    found.without(2)
    assert complete(found) == 1


def test_what_a_rank_would_have_done_that_has_left_is_no_conflict():
    found = table()
    found.begun(0, begun(0, 0, "average"), 0.0)
    found.begun(0, begun(0, 1, "average"), 0.0)
    found.begun(1, begun(0, 1, "average"), 0.0)
    found.without(0)
    assert found.begun(1, begun(0, 0, "values"), 0.0) is None, "its results say that rank 0 has left"
    assert "rank 1 updates with 'values'" in str(found.begun(2, begun(0, 0, "average"), 0.0))
    conflict = found.begun(2, begun(0, 1, "values"), 0.0)
    assert (conflict.first_rank, conflict.first_rule) == (1, "average"), "rank 1 has named it, too"


def test_a_rank_that_comes_later_is_waited_for_from_its_first_round_on():
    found = table()
    found.without(2)
    for rank in (0, 1):
        begin(found, rank, 0, 1, 2)
    starts = found.install(2)
    assert starts == {0: 4}
    found.with_rank(2, starts)
    for rank in (0, 1):
        begin(found, rank, 3, 4)
    assert complete(found) == 3
    begin(found, 2, 4)
    assert complete(found) == 4


def test_a_rank_that_leaves_again_before_its_first_round_is_forgotten():
    found = table()
    found.without(2)
    begin(found, 0, 0)
    found.with_rank(2, {0: 1})
    found.without(2)
    begin(found, 1, 0)
    for rank in (0, 1):
        begin(found, rank, 1)
    assert complete(found) == 1


def test_what_a_silent_rank_says_that_it_has_begun_keeps_nobody_waiting():
    found = table()
    found.without(2)
    begin(found, 2, 0)
    begin(found, 0, 0)
    assert complete(found) == -1
    begin(found, 1, 0)
    assert complete(found) == 0


def test_the_policy_of_the_present_view_is_in_use_as_long_as_that_lasts():
    found = table()
    found.install(5)
    found.begin_view(5)
    found.install(6)
    for round in range(10):
        for rank in range(3):
            begin(found, rank, round)
    assert 5 in found.versions_in_use()


def test_nobody_takes_the_place_of_a_rank_that_leaves_a_group_of_some():
    found = Consistency(4, 1)
    some = m.KeySpec(namespace=0, name="g", shape=(3,), dtype="float32", form=COLLECTIVE, members=(0, 1, 2))
    found.add_key(0, some)
    found.without(2)
    found.with_rank(2, {0: 0})
    for rank in (0, 1):
        begin(found, rank, 0)
    assert complete(found) == 0
    with pytest.raises(ProtocolViolation, match="of others"):
        found.check(2, begun(0, 1))
    found.add_key(1, msgspec.structs.replace(some, name="h"))
    for rank in (0, 1):
        found.begun(rank, begun(1, 0), 0.0)
    assert complete(found, key=1) == 0


# ---------------------------------------------------------------------- who may say what of keys and rounds


NODES = 4


def rooted(root, version, **fields):
    parents = tuple(-1 if rank == root else root for rank in range(NODES))
    return Policy(version=version, trees=(Tree.undirected(Rank(root), parents),), weights=(1,), **fields)


POLICIES = {
    1: rooted(0, 1),
    2: rooted(2, 2, takes_over=True),
    3: rooted(3, 3, takes_over=True),
    4: rooted(1, 4),
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


def test_a_node_that_is_back_hears_once_what_has_moved_of_rounds_that_are_not_complete():
    driven = running(2)
    for rank in range(2):
        driven.say(rank, m.RegisterKeys(keys=(key("w"),)))

    def moves(version: int, round: int) -> list[Moved]:
        """Move a chunk, twice; return what a node hears that is back."""
        driven.install(msgspec.structs.replace(star(2, version=version), takes_over=True))
        for _ in range(2):
            driven.say(0, Moved(key=0, round=round, version=version, chunks=(0,)))
        driven.forget()
        driven.say(1, m.Resume(keys=(), begun=(), barriers=()))
        return driven.heard(1, Moved)

    driven.say(0, m.TopologyRequest(begun=(begun(0, 0),)))
    driven.say(1, m.TopologyRequest(begun=(begun(0, 0),)))
    assert moves(2, 0) == [Moved(key=0, round=0, version=2, chunks=(0,))]
    for number in range(1, 8):
        for rank in range(2):
            driven.say(rank, m.TopologyRequest(begun=(begun(0, number),)))
    assert moves(3, 7) == [Moved(key=0, round=7, version=3, chunks=(0,))]


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


# -------------------------------------------------------------------- calls that wait at ranks are compared


def call(text: str, number: int = 4, group: str = "g") -> WaitingCall:
    return WaitingCall(group=group, number=number, text=text)


def test_equal_calls_are_no_conflict_nor_are_other_places_or_groups() -> None:
    order = CallOrder()
    assert order.record(0, call("barrier()")) is None
    assert order.record(1, call("barrier()")) is None
    assert order.record(1, call("all_reduce", number=5)) is None
    assert order.record(2, call("broadcast", group="h")) is None


def test_a_conflict_names_both_ranks_and_both_calls() -> None:
    order = CallOrder()
    order.record(2, call("barrier()"))
    text = str(order.record(0, call("all_reduce(SUM) of float32 (3,)")))
    assert text.startswith(
        "call 4 of group 'g' is barrier() at rank 2 and all_reduce(SUM) of float32 (3,) at rank 0"
    )


def test_what_a_rank_has_reported_that_has_left_is_no_conflict_and_takes_no_memory() -> None:
    order = CallOrder()
    order.record(0, call("average"))
    order.record(0, call("barrier()", number=5))
    order.record(2, call("barrier()", number=5))
    order.without(0)
    assert order.record(1, call("values")) is None
    assert "barrier() at rank 2" in str(order.record(1, call("average", number=5)))
    for rank in (1, 2):
        order.without(rank)
    assert order.record(3, call("values", number=5)) is None


def test_a_time_out_names_the_members_that_have_not_reported_the_call() -> None:
    order = CallOrder()
    order.record(0, call("barrier()"))
    order.record(5, call("barrier()"))
    message = CallTimedOut(call=call("barrier()"), members=(0, 2, 3, 5), seconds=7.5)
    text = order.timeout_text(0, message)
    assert text.endswith("within its timeout of 7.5 s at rank 0: ranks 2, 3 have not made it")
    order.record(2, call("barrier()"))
    assert order.timeout_text(0, message).endswith("rank 3 has not made it")
    order.record(3, call("barrier()"))
    assert "every member has made it" in order.timeout_text(0, message)


def test_a_call_with_a_text_that_no_call_has_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="describes a call in 1000001 characters"):
        CallOrder().record(0, call("x" * 1_000_000))


def test_long_texts_of_calls_are_forgotten_before_they_take_much_memory() -> None:
    order = CallOrder()
    first = "a" * 200_000
    order.record(0, call(first, number=0))
    assert order.record(1, call("b", number=0)) is not None
    for number in range(1, 100):
        order.record(0, call("x" * 200_000, number=number))
    assert order.record(1, call("b", number=0)) is None


@pytest.mark.parametrize("members", [(-1, 2), (2, 0), (0, 0)])
def test_a_time_out_of_members_that_no_group_has_is_refused(members: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation, match="expected ranks from 0 up, in order"):
        CallOrder().timed_out(0, CallTimedOut(call=call("x"), members=members, seconds=1.0), 0.0)


def test_a_time_out_of_ranks_beyond_any_job_costs_nothing() -> None:
    order = CallOrder()
    message = CallTimedOut(call=call("x"), members=(1, 2**62), seconds=1.0)
    order.timed_out(0, message, 0.0)
    assert str(order.decision(10.0)).endswith(f"ranks 1, {2**62} have not made it")


# ----------------------------------------------------------------------------------------------------


def test_a_difference_of_replicas_names_both_ranks_and_equal_ones_are_forgotten_once_all_have_reported():
    check = ReplicaCheck(3)
    assert [check.record(rank, key=7, round=100, digest=1) for rank in (2, 0, 1)] == [None] * 3
    assert check.record(2, key=7, round=100, digest=5) is None  # a new comparison begins
    assert check.record(2, key=7, round=200, digest=2) is None
    assert check.record(2, key=8, round=100, digest=3) is None
    assert check.record(0, key=7, round=100, digest=2) == Drift(key=7, round=100, first_rank=2, rank=0)


def test_memory_is_bounded_when_a_rank_never_reports():
    check = ReplicaCheck(2)
    for round in range(20_000):
        check.record(0, key=0, round=round, digest=round)
    assert check.record(1, key=0, round=0, digest=99) is None  # long forgotten
    assert check.record(1, key=0, round=19_999, digest=99) is not None
