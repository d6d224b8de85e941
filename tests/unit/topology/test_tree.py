"""Trees: their delays, and what is left of them for the members of a group."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.topology import (
    Link,
    Network,
    Node,
    Routing,
    broadcast_delay,
    reduce_delay,
    subtree_delay,
    transfer_delays,
    tree_delay,
)
from netstorm.topology.network import Rank
from netstorm.topology.policy import Plan, Policy
from netstorm.topology.tree import OUTSIDE, MemberTree, Tree

# ---------------------------------------------------------------------------------------------------- metric
# The delay of trees, on the paper's worked example and on trees whose two directions differ.


# arXiv 2404.11352 §III-A: the balanced tree of Fig. 1c. The text gives the delays of the
# four edges to the root by their sums, and for each subtree the largest delay of an edge to a leaf; the
# other leaves are nearer.
PARENTS = {2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, 9: 3, 14: 3, 10: 4, 11: 4, 13: 4, 12: 5}
DELAYS = {
    (2, 1): 48 - 24,
    (3, 1): 35 - 20,
    (4, 1): 41 - 23,
    (5, 1): 57 - 7,
    (6, 2): 24,
    (7, 2): 11,
    (8, 2): 3,
    (9, 3): 20,
    (14, 3): 8,
    (10, 4): 9,
    (11, 4): 23,
    (13, 4): 22,
    (12, 5): 7,
}
# Our ranks begin at 0, the paper's nodes at 1.
PAPER_TREE = Tree.undirected(Rank(0), tuple(PARENTS.get(node, 0) - 1 for node in range(1, 15)))
PAPER_DELAYS = {(child - 1, parent - 1): float(delay) for (child, parent), delay in DELAYS.items()}


@pytest.mark.parametrize(("node", "delay"), [(2, 24), (3, 20), (4, 23), (5, 7), (1, 57), (6, 0)])
def test_the_papers_worked_example(node: int, delay: float):
    assert subtree_delay(PAPER_TREE, PAPER_DELAYS, Rank(node - 1)) == delay


def test_a_whole_trees_reduction_is_that_of_its_root():
    assert reduce_delay(PAPER_TREE, PAPER_DELAYS) == 57


def test_the_way_down_counts_the_other_direction_of_each_edge():
    tree = Tree(root=Rank(0), reduce_parent=(-1, 0, 1), broadcast_parent=(-1, 2, 0))
    delays = {(1, 0): 1.0, (2, 1): 2.0, (0, 2): 10.0, (2, 0): 500.0, (0, 1): 700.0, (1, 2): 900.0}

    with pytest.raises(UsageError, match=r"^the tree has an edge between ranks 1 and 2, which has no delay$"):
        broadcast_delay(tree, {(0, 2): 10.0, (1, 2): 3.0})
    delays[2, 1] = 20.0
    assert reduce_delay(tree, delays) == 21
    assert broadcast_delay(tree, delays) == 30
    assert tree_delay(tree, delays) == 51


def test_a_chunk_takes_its_size_over_the_rate_and_the_latency():
    network = Network(
        nodes=(Node(rank=Rank(0)), Node(rank=Rank(1), egress=1e6), Node(rank=Rank(2))),
        links=(
            Link(source=Rank(0), target=Rank(1), rate=8e6, latency=0.5),
            Link(source=Rank(1), target=Rank(2), rate=4e6, latency=0.25),
        ),
        routing=Routing.UNDERLAY,
    )

    assert transfer_delays(network, 1_000_000) == {
        (0, 1): 1.0 + 0.5,
        (1, 2): 8.0 + 0.25,  # the access cap is below the link's rate
        (0, 2): 2.0 + 0.75,
    }


def test_a_chunk_without_bytes_has_no_delay():
    with pytest.raises(UsageError, match=r"^chunk_bytes is 0: expected at least 1$"):
        transfer_delays(Network.uniform(2), 0)


# ----------------------------------------------------------------------------------------------- member tree
# Trees of a policy, contracted to the members of a group.


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Return a tree whose two directions may differ."""
    size = draw(st.integers(1, 9))
    root = draw(st.integers(0, size - 1))

    def parents() -> tuple[int, ...]:
        order = [root, *draw(st.permutations([rank for rank in range(size) if rank != root]))]
        found = [-1] * size
        for place, rank in enumerate(order[1:], start=1):
            found[rank] = order[draw(st.integers(0, place - 1))]
        return tuple(found)

    return Tree(root=Rank(root), reduce_parent=parents(), broadcast_parent=parents())


def way_up(parents: tuple[int, ...], rank: int) -> list[int]:
    walk = [rank]
    while parents[walk[-1]] >= 0:
        walk.append(parents[walk[-1]])
        assert len(walk) <= len(parents), "a circle"
    return walk


@given(trees(), st.data())
def test_a_contracted_tree_spans_the_members_and_nobody_else(tree: Tree, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, tree.size - 1), min_size=1)))
    found = MemberTree(tree, members)
    for parents in (found.reduce_parent, found.broadcast_parent):
        for rank in range(tree.size):
            if rank in members:
                walk = way_up(parents, rank)
                assert walk[-1] == found.root
                assert set(walk) <= set(members)
            else:
                assert parents[rank] == OUTSIDE
    everybody = sum(1 << rank for rank in members)
    assert found.subtree_mask[found.root] == found.broadcast_mask[found.root] == everybody


@given(trees(), st.data())
def test_a_members_parent_is_the_nearest_member_above_it(tree: Tree, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, tree.size - 1), min_size=1)))
    found = MemberTree(tree, members)
    for rank in members:
        above = [other for other in way_up(tree.reduce_parent, rank)[1:] if other in members]
        if rank != found.root:
            assert found.reduce_parent[rank] == (above[0] if above else found.root)


@given(trees())
def test_with_all_ranks_as_members_a_tree_is_itself(tree: Tree) -> None:
    found = MemberTree(tree, range(tree.size))
    assert found.root == tree.root
    assert found.reduce_parent == tree.reduce_parent
    assert found.broadcast_parent == tree.broadcast_parent
    assert found.broadcast_mask == tree.broadcast_mask


def test_a_groups_plan_expects_its_members_contributions() -> None:
    chain = Tree.undirected(Rank(0), (-1, 0, 1, 2))
    policy = Policy(version=1, trees=(chain,), weights=(1,))
    plan = Plan(policy, 1, (1, 3))
    assert plan.root == (1,)
    assert plan.everybody == 0b1010
    assert plan.expected == (0b1010,)
    assert plan.reduce_children == ((3,),)
    assert Plan(policy, 3, (1, 3)).reduce_parent == (1,)


@given(trees(), st.data())
def test_a_path_leads_over_members_alone_up_as_sums_go_and_down_as_results_do(
    tree: Tree, data: st.DataObject
) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, tree.size - 1), min_size=1)))
    contracted = MemberTree(tree, members)
    for source in members:
        for target in members:
            path = contracted.path(source, target)
            assert (path[0], path[-1]) == (source, target)
            assert set(path) <= set(members)
            for one, other in pairwise(path):
                assert contracted.reduce_parent[one] == other or contracted.broadcast_parent[other] == one
