"""All ranks run a round of a key under the same policy, whatever the order in which they ask."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import COLLECTIVE
from netstorm.scheduler.rounds import ROUNDS_AHEAD, Consistency
from netstorm.scheduler.snapshot import JobPhase
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


def test_beginning_a_round_grants_the_next_one():
    driven = with_key()
    assert ask(driven, 0, 0) == (m.Binding(key=0, from_round=0, version=1, granted=1),)


def test_asking_twice_gets_the_same_answer():
    driven = with_key()
    first = ask(driven, 0, 0)
    assert ask(driven, 0, 0) == first
    driven.install(star(2, version=2))
    driven.forget()
    assert ask(driven, 0, 0) == first


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
    ask(driven, 0, 3, key=0)
    ask(driven, 0, 0, key=1)
    assert ask(driven, 0, 1, key=1) == (m.Binding(1, 1, 2, 2),)
    assert ask(driven, 0, 4, key=0) == (m.Binding(0, 4, 2, 5),)


def test_a_policy_that_nobody_was_granted_is_skipped():
    driven = with_key()
    driven.install(star(2, version=2))
    driven.install(star(2, version=3))
    driven.forget()
    assert ask(driven, 0, 0) == (m.Binding(0, 0, 1, 1), m.Binding(0, 1, 3, 1))


def test_a_new_key_begins_under_the_policy_in_force():
    driven = with_key()
    driven.install(star(2, version=7))
    driven.forget()
    driven.say(0, m.RegisterKeys(keys=(key("late"),)))
    assert driven.heard(0)[0].bindings == (m.Binding(1, 0, 7, 0),)


def test_everybody_gets_a_new_policy_before_any_binding_names_it():
    driven = with_key(3)
    policy = star(3, version=2, hub=1)
    driven.install(policy)
    for rank in range(3):
        driven.say(rank, m.TopologyRequest(begun=(begun(0, 0),)))
        new, answer = driven.heard(rank)
        assert new == m.NewPolicy(policy=policy)
        assert answer.bindings[-1].version == 2


def test_a_batch_of_rounds_is_answered_in_one_message():
    driven = with_key()
    driven.say(0, m.RegisterKeys(keys=(key("b"),)))
    driven.forget()
    driven.say(0, m.TopologyRequest(begun=(begun(0, 0), begun(1, 0))))
    (answer,) = driven.heard(0)
    assert [one.key for one in answer.bindings] == [0, 1]


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
            consistency.begun(rank, begun(0, round, "sgd"))
    (table,) = consistency._tables.values()
    assert table.open == {}
    assert len(table.rows) <= 2
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
        assert self.consistency.begun(rank, event) is None
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
        assert self.consistency.begun(rank, event) is None
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
        for number, table in self.consistency._tables.items():
            behind = min(self.next_round.get((rank, number), 0) for rank in range(self.ranks))
            ahead = max(self.next_round.get((rank, number), 0) for rank in range(self.ranks))
            assert len(table.open) <= ahead - behind
            assert len(table.rows) <= ahead - behind + 3


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


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


# ---------------------------------------------------------------------------- jobs that nodes leave and join


def table(ranks=3):
    """Return the bindings of one key."""
    found = Consistency(ranks, 1)
    found.add_key(0, SPEC)
    return found


def begin(consistency, rank, *rounds):
    for round in rounds:
        assert consistency.begun(rank, begun(0, round)) is None


def complete(consistency):
    return consistency._tables[0].complete


def test_a_rank_that_has_left_is_waited_for_no_more():
    found = table()
    begin(found, 0, 0, 1)
    begin(found, 1, 0, 1)
    assert complete(found) == -1
    found.without(2)
    assert complete(found) == 1


def test_what_a_rank_would_have_done_that_has_left_is_no_conflict():
    found = table()
    found.begun(0, begun(0, 0, "average"))
    found.begun(0, begun(0, 1, "average"))
    found.begun(1, begun(0, 1, "average"))
    found.without(0)
    assert found.begun(1, begun(0, 0, "values")) is None, "its results say that rank 0 has left"
    assert "rank 1 updates with 'values'" in str(found.begun(2, begun(0, 0, "average")))
    conflict = found.begun(2, begun(0, 1, "values"))
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
        found.begun(rank, begun(1, 0))
    assert found._tables[1].complete == 0
