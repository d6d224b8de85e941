"""Policies as values, on the wire and as one node's tables, and their weights as a sequence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netstorm.errors import FrameError, UsageError
from netstorm.protocol.frames import encode_body, open_frames, printable, seal
from netstorm.protocol.messages import NewPolicy
from netstorm.topology import Plan, Policy, Rank, Tree
from netstorm.topology.policy import (
    MAX_EXPLORERS,
    PARTS,
    Detour,
    interleave,
    quantise,
    receivers,
    staggered,
)

# ---------------------------------------------------------------------------------------------------- policy
# Trees and policies as values, on the wire, and as one node's tables.


# 0 is the root; up: 1 and 2 to 0, 3 to 1, 4 to 3; down: 0 to 4, 4 to 1 and 2, 1 to 3.
LOPSIDED = Tree(root=Rank(0), reduce_parent=(-1, 0, 0, 1, 3), broadcast_parent=(-1, 4, 4, 1, 0))
CHAIN = Tree.undirected(Rank(4), (1, 2, 3, 4, -1))


def test_a_rank_sends_to_its_parents_and_to_its_children_in_all_trees():
    policy = Policy(version=0, trees=(LOPSIDED, CHAIN), weights=(1, 1))
    assert [set(receivers(policy, rank)) for rank in range(5)] == [
        {4, 1},
        {0, 3, 2},
        {0, 3, 1},
        {1, 4, 2},
        {3, 1, 2},
    ]


@st.composite
def parent_maps(draw: st.DrawFn, size: int, root: int) -> tuple[int, ...]:
    others = draw(st.permutations([rank for rank in range(size) if rank != root]))
    parents = [-1] * size
    for place, rank in enumerate(others):
        parents[rank] = draw(st.sampled_from([root, *others[:place]]))
    return tuple(parents)


@st.composite
def trees(draw: st.DrawFn, size: int) -> Tree:
    root = draw(st.integers(0, size - 1))
    up = draw(parent_maps(size, root))
    down = up if draw(st.booleans()) else draw(parent_maps(size, root))
    return Tree(root=Rank(root), reduce_parent=up, broadcast_parent=down)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    size = draw(st.integers(1, 9))
    chosen = draw(st.lists(trees(size), min_size=1, max_size=9))
    return Policy(
        version=draw(st.integers(0, 2**40)),
        trees=tuple(chosen),
        weights=tuple(draw(st.lists(st.integers(1, 300), min_size=len(chosen), max_size=len(chosen)))),
        reason=draw(st.text(max_size=20)),
    )


def above(parents: tuple[int, ...], rank: int) -> list[int]:
    """Return `rank` and everybody on its way to the root."""
    return [rank] if parents[rank] < 0 else [rank, *above(parents, parents[rank])]


@given(policies())
def test_a_subtree_is_everybody_whose_way_to_the_root_leads_through_its_top(policy: Policy):
    for tree in policy.trees:
        for top in range(tree.size):
            below = {rank for rank in range(tree.size) if top in above(tree.reduce_parent, rank)}
            assert tree.subtree_mask[top] == sum(1 << rank for rank in below)


@given(policies())
def test_children_are_those_who_call_it_parent(policy: Policy):
    for tree in policy.trees:
        for rank in range(tree.size):
            for parents, children in (
                (tree.reduce_parent, tree.reduce_children),
                (tree.broadcast_parent, tree.broadcast_children),
            ):
                assert children[rank] == tuple(child for child in range(tree.size) if parents[child] == rank)


@given(policies())
def test_plans_of_all_ranks_agree_with_the_policy_and_each_other(policy: Policy):
    plans = [Plan(policy, rank) for rank in range(policy.size)]

    for index, tree in enumerate(policy.trees):
        root = plans[tree.root]
        assert root.reduce_parent[index] == root.broadcast_parent[index] == -1
        assert root.expected[index] == root.everybody == 2**policy.size - 1
        for rank, plan in enumerate(plans):
            assert plan.root[index] == tree.root
            assert plan.expected[index] == plan.mask_of(index, rank)
            assert all(plans[child].reduce_parent[index] == rank for child in plan.reduce_children[index])
            assert all(
                plans[child].broadcast_parent[index] == rank for child in plan.broadcast_children[index]
            )
            parts = [1 << rank, *(plan.mask_of(index, child) for child in plan.reduce_children[index])]
            assert sum(parts) == plan.expected[index]


@given(policies(), st.integers(0, 2**60))
def test_every_node_maps_a_slot_to_the_same_tree(policy: Policy, slot: int):
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=Policy)

    found = {Plan(each, rank).tree_of(slot) for each in (policy, copy) for rank in range(policy.size)}
    assert found == {policy.tree_of(slot)}
    assert policy.tree_of(slot) == policy.tree_of(slot + sum(policy.weights))


def test_slots_follow_the_weights_as_evenly_as_they_can():
    policy = Policy(version=0, trees=(CHAIN, LOPSIDED), weights=(700, 300))

    assert [policy.tree_of(slot) for slot in range(12)] == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0]


@given(policies())
def test_a_policy_crosses_the_wire_unchanged(policy: Policy):
    policy = msgspec.structs.replace(
        policy, reason=printable(policy.reason)
    )  # as all texts are where they come in
    frame = seal(encode_body(NewPolicy(policy=policy)), sequence=1, sent_at=0, payload_crc=None)

    message = open_frames(frame, 1).message

    assert isinstance(message, NewPolicy)
    assert message.policy == policy
    assert hash(message.policy) == hash(policy)


# Plain data in the place of a policy: a peer may send anything that MessagePack can say.
small = st.integers(-2, 4)
junk_trees = st.tuples(small, st.lists(small, max_size=4), st.lists(small, max_size=4))
junk_policies = st.tuples(
    small, st.lists(junk_trees, max_size=3), st.lists(st.integers(-1, 2**33), max_size=3), st.text(max_size=3)
)


def is_tree(root: int, parents: list[int]) -> bool:
    """Return whether all ranks come to the root by as many steps as there are ranks."""
    if not 0 <= root < len(parents) or parents[root] != -1:
        return False
    for start in range(len(parents)):
        here = start
        for _ in parents:
            if here == root:
                break
            if not 0 <= parents[here] < len(parents):
                return False
            here = parents[here]
        if here != root:
            return False
    return True


@given(junk_policies)
def test_a_peers_policy_is_refused_exactly_if_it_is_none(junk):
    version, trees, weights, _ = junk
    sizes = {len(parents) for _, up, down in trees for parents in (up, down)}
    legal = (
        version >= 0
        and 1 <= len(trees) == len(weights)
        and len(sizes) == 1
        and all(is_tree(root, up) and is_tree(root, down) for root, up, down in trees)
        and min(weights) >= 1
        and sum(weights) <= 1_000_000
    )
    body = encode_body(NewPolicy(policy=junk))
    frame = seal(body, sequence=1, sent_at=0, payload_crc=None)

    if legal:
        open_frames(frame, 1)
    else:
        with pytest.raises(FrameError, match=r"^the body does not decode: "):
            open_frames(frame, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Tree(root=Rank(0), reduce_parent=(-1,), broadcast_parent=(-1, 0)),
            "a tree with reduce parents for 1 ranks and broadcast parents for 2: expected the same number",
        ),
        (
            lambda: Tree.undirected(Rank(2), (-1, 0)),
            "a tree of 2 ranks with root 2: expected one of its ranks, 0 to 1",
        ),
        (
            lambda: Tree.undirected(Rank(0), (-1, -1, 0)),
            "reduce parents with -1 at ranks 0, 1: expected it at the root, 0, alone",
        ),
        (
            lambda: Tree.undirected(Rank(0), (-1, 0, 3)),
            "reduce parent 3 of rank 2: expected another rank, from 0 to 2",
        ),
        (
            lambda: Tree(root=Rank(0), reduce_parent=(-1, 0, 1), broadcast_parent=(-1, 2, 1)),
            "broadcast parents of ranks 1, 2 do not lead to the root, 0: expected a tree",
        ),
        (
            lambda: Policy(version=-1, trees=(CHAIN,), weights=(1,)),
            "policy version -1: expected 0 or more",
        ),
        (
            lambda: Policy(version=3, trees=(CHAIN,), weights=(1, 2)),
            "policy 3 has 1 trees and 2 weights: expected as many weights as trees, and at least one",
        ),
        (
            lambda: Policy(version=3, trees=(CHAIN, Tree.undirected(Rank(0), (-1,))), weights=(1, 2)),
            "policy 3 has trees of [1, 5] ranks: expected the same in all",
        ),
        (
            lambda: Policy(version=3, trees=(CHAIN, CHAIN), weights=(0, 2)),
            "policy 3 has weights from 0 up, 2 in all: expected 1 or more each, 1000000 at most in all",
        ),
        (
            lambda: Plan(Policy(version=3, trees=(CHAIN,), weights=(1,)), 5),
            "policy 3 has no rank 5: it is for ranks 0 to 4",
        ),
    ],
)
def test_what_is_no_policy_is_refused_by_name(make, message: str):
    with pytest.raises(UsageError) as caught:
        make()

    assert str(caught.value) == message


def around(*path: int, explore: bool = False) -> Detour:
    return Detour(path=path, links=((1e6, 0.01),) * (len(path) - 1), explore=explore)


def test_detours_survive_the_wire_and_a_plan_has_those_that_begin_at_its_rank():
    detours = (around(3, 0, 4), around(3, 2, 0, 4), around(1, 3, 2), around(3, 2, 4, explore=True))
    policy = Policy(version=1, trees=(CHAIN,), weights=(1,), detours=detours)
    frame = seal(encode_body(NewPolicy(policy=policy)), sequence=1, sent_at=0, payload_crc=None)
    message = open_frames(frame, 1).message
    assert isinstance(message, NewPolicy)
    assert message.policy == policy
    assert Plan(policy, 3).detours == {4: (detours[0], detours[1], detours[3])}
    assert Plan(policy, 2).detours == {}


def test_slots_of_trees_with_a_lead_come_earlier_and_are_no_more():
    even = Policy(version=1, trees=(CHAIN, CHAIN), weights=(10, 10))
    led = Policy(version=1, trees=(CHAIN, CHAIN), weights=(10, 10), leads=(0, 6))
    assert sorted(led.schedule) == sorted(even.schedule * 10)
    assert (led.schedule[:3], led.schedule[-3:]) == ((1, 1, 1), (0, 0, 0))
    frame = seal(encode_body(NewPolicy(policy=led)), sequence=1, sent_at=0, payload_crc=None)
    message = open_frames(frame, 1).message
    assert isinstance(message, NewPolicy)
    assert message.policy.schedule == led.schedule


@pytest.mark.parametrize("leads", [(1,), (1, 2, 3), (0, -1), (0, 1_000_001)])
def test_each_tree_has_one_lead_of_a_sensible_size(leads: tuple[int, ...]):
    with pytest.raises(UsageError, match="leads"):
        Policy(version=1, trees=(CHAIN, CHAIN), weights=(1, 1), leads=leads)


@pytest.mark.parametrize("pair", [(0, 5), (-1, 0), (10**9, 0)])
def test_only_links_of_the_policys_ranks_can_be_slow(pair: tuple[int, int]):
    with pytest.raises(UsageError, match=f"{pair[0]}→{pair[1]} is slow: expected ranks of 0 to 4"):
        Policy(version=1, trees=(CHAIN,), weights=(1,), takes_over=True, slow=((0, 1), pair))


def test_a_policy_without_detours_is_what_it_was_before_there_were_any():
    """A peer that knows none sends the fields up to `look_ahead_s`."""
    policy = Policy(version=1, trees=(CHAIN,), weights=(1,))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(policy))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:6]), type=Policy) == policy


@pytest.mark.parametrize(
    "path",
    [(), (3,), (3, 4), (3, 0, 0, 4), (3, 4, 3), (-1, 0, 4), (3, 9, 4), (3, 2, 1), (3, 2, 0), (0, 1, 4)],
)
def test_a_detour_must_lead_around_a_hop_without_loops(path: tuple[int, ...]):
    with pytest.raises(UsageError, match="detour"):
        Policy(version=1, trees=(CHAIN,), weights=(1,), detours=(around(*path),))


@pytest.mark.parametrize(
    "links",
    [(), ((1e6, 0.0),), ((1e6, 0.0), (0.0, 0.0)), ((1e6, 0.0), (1e6, -1.0)), ((float("nan"), 0.0),) * 2],
)
def test_a_detour_must_say_what_its_links_are_like(links: tuple[tuple[float, float], ...]):
    with pytest.raises(UsageError, match="links"):
        Detour(path=(3, 0, 4), links=links)


@pytest.mark.parametrize("explore", [False, True])
def test_a_hop_has_no_more_detours_than_anybody_needs(*, explore: bool):
    detours = (around(3, 0, 4, explore=explore),) * MAX_EXPLORERS
    assert Policy(version=1, trees=(CHAIN,), weights=(1,), detours=detours).detours == detours
    with pytest.raises(UsageError, match="too many"):
        Policy(version=1, trees=(CHAIN,), weights=(1,), detours=(*detours, detours[0]))


# ---------------------------------------------------------------------------- jobs that nodes leave and join


def test_a_plan_of_some_members_is_that_of_the_trees_contracted_to_them():
    """Rank 3 is above 4 in the tree of sums, and is not in the job."""
    policy = Policy(version=1, trees=(LOPSIDED,), weights=(1,), members=(0, 1, 2, 4))
    plan = Plan(policy, 4)
    assert (plan.reduce_parent, plan.everybody) == ((1,), 0b10111)
    assert Plan(policy, 1).expected == (0b10010,)
    assert Plan(policy, 0).expected == (0b10111,)


def test_a_silent_member_passes_on_what_others_contribute_and_adds_nothing():
    policy = Policy(version=1, trees=(LOPSIDED,), weights=(1,), members=(0, 1, 2, 3, 4), silent=(1, 4))
    assert Plan(policy, 0).everybody == 0b01101
    assert Plan(policy, 1).expected == (0b01000,)
    assert Plan(policy, 4).expected == (0,)
    assert Plan(policy, 1).broadcast_children == ((3,),)


def test_a_group_of_ranks_of_which_some_are_not_in_the_job_has_the_others():
    policy = Policy(version=1, trees=(CHAIN,), weights=(1,), members=(0, 1, 3, 4))
    assert Plan(policy, 0, (0, 2, 3)).everybody == 0b01001


def test_a_path_to_another_rank_leads_over_members_alone():
    policy = Policy(version=1, trees=(CHAIN,), weights=(1,), members=(0, 2, 4))
    assert Plan(policy, 0).path_to(0, 4) == (0, 2, 4)
    assert Plan(policy, 4).path_to(0, 0) == (4, 2, 0)


def test_detours_over_ranks_that_are_not_in_the_job_are_not_used():
    policy = Policy(version=1, trees=(CHAIN,), weights=(1,), detours=(around(3, 0, 4), around(3, 1, 4)))
    assert len(Plan(policy, 3).detours[4]) == 2
    smaller = msgspec.structs.replace(policy, members=(1, 2, 3, 4))
    assert [one.path for one in Plan(smaller, 3).detours[4]] == [(3, 1, 4)]


@pytest.mark.parametrize(
    ("members", "silent"),
    [((1, 0), ()), ((0, 0), ()), ((0, 5), ()), ((-1, 0), ()), ((0, 1), (2,)), ((), (5,))],
)
def test_members_are_ascending_ranks_and_silent_ones_are_among_them(
    members: tuple[int, ...], silent: tuple[int, ...]
):
    with pytest.raises(UsageError, match="has members"):
        Policy(version=1, trees=(CHAIN,), weights=(1,), members=members, silent=silent)


def test_a_group_of_some_ranks_goes_on_without_those_that_joined_later():
    policy = Policy(version=1, trees=(CHAIN,), weights=(1,), members=(0, 1, 2, 3, 4), later=(1,))
    assert Plan(policy, 0, (0, 1, 3)).everybody == 0b01001
    assert Plan(policy, 0).everybody == 0b11111


# -------------------------------------------------------------------------------------------------- schedule
# Shares as whole weights, and weights as an even sequence.


shares = st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=40)
weights = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(shares)
def test_weights_are_1000_in_all_or_40_for_each_of_many_and_no_tree_is_left_out(shares: list[float]):
    found = quantise(shares)

    assert sum(found) == max(PARTS, 40 * len(shares))
    assert min(found) >= 1


@given(st.lists(st.integers(10, 1000), min_size=1, max_size=20))
def test_weights_are_within_one_of_their_exact_share(whole: list[int]):
    found = quantise([float(share) for share in whole])

    for weight, share in zip(found, whole, strict=True):
        exact = PARTS * share / sum(whole)
        # Each has one part before the rest is divided, which only a share below that part can notice.
        assert abs(weight - exact) < 1 or exact < 1 or min(whole) * PARTS < sum(whole)


@given(shares)
@example([9.999999999999998e299, 9.999999999999999e299, 9.999999999999993e299])
def test_a_larger_share_never_gets_less(shares: list[float]):
    found = quantise(shares)

    ordered = sorted(zip(shares, found, strict=True))
    assert [weight for _, weight in ordered] == sorted(found)


@given(shares, st.sampled_from([0.5, 2.0, 1024.0]))
def test_only_the_proportion_of_shares_counts(shares: list[float], factor: float):
    shares = [min(max(share, 1e-200), 1e200) for share in shares]

    assert quantise([share * factor for share in shares]) == quantise(shares)


def test_equal_shares_are_divided_from_the_first_on():
    assert quantise([1.0] * 3) == (334, 333, 333)
    assert quantise([0.5, 0.3, 0.2]) == (500, 300, 200)
    assert quantise([7.0]) == (1000,)


def test_hundreds_of_trees_get_finer_parts():
    found = quantise([1.0] * 512)

    assert set(found) == {40}


@pytest.mark.parametrize("shares", [[], [0.0], [1.0, -1.0], [float("inf")], [float("nan")]])
def test_shares_that_are_no_shares_are_refused(shares: list[float]):
    with pytest.raises(UsageError, match="expected at least one, all positive and finite"):
        quantise(shares)


@given(weights)
def test_one_period_has_each_index_as_often_as_its_weight(weights: list[int]):
    sequence = interleave(weights)

    assert [sequence.count(i) for i in range(len(weights))] == weights


@given(weights)
def test_from_the_start_every_count_is_within_one_of_its_exact_share(weights: list[int]):
    counts = [0] * len(weights)
    for slots, i in enumerate(interleave(weights), start=1):
        counts[i] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - slots * weight / sum(weights)) < 1


@given(weights, st.data())
def test_in_any_window_every_count_is_within_two_of_its_exact_share(weights: list[int], data: st.DataObject):
    sequence = interleave(weights) * 3
    start = data.draw(st.integers(0, len(sequence) - 1))
    end = data.draw(st.integers(start, len(sequence)))

    for i, weight in enumerate(weights):
        exact = (end - start) * weight / sum(weights)
        assert abs(sequence[start:end].count(i) - exact) < 2


@given(st.integers(1, 30), st.integers(1, 5))
def test_equal_weights_take_turns(count: int, weight: int):
    assert interleave([weight] * count) == tuple(range(count)) * weight


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=12))
def test_leads_change_the_order_of_a_period_and_not_its_counts(trees):
    weights, leads = zip(*trees, strict=True)
    sequence = staggered(weights, leads)
    assert [sequence.count(one) for one in range(len(weights))] == list(weights)


def test_what_takes_long_has_none_of_the_last_slots():
    sequence = staggered((50, 50), (20, 0))
    assert set(sequence[:10]) == {0}
    assert set(sequence[-10:]) == {1}


def test_without_a_lead_a_single_chunk_is_in_the_middle():
    assert staggered((10, 1), (0, 0)).index(1) == 5
